# Copyright 2026 The transformers_dflash2 authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""One slot of a DSpark block: bias, sum and choice; [`functional_dspark.markov_step`] is the reference.

The slots of a block follow one another, and each reads the whole successor table, whose bytes are the price of a slot.
One launch scores a tile of the vocabulary per program and keeps the best entry of the tile; a second one, of one
program per row, takes the best of those. Noise, temperature and flags are tensors, so that a captured graph serves
greedy and sampled rows.
"""

import torch
import triton
import triton.language as tl

from ..functional_dflash2 import MIN_TEMPERATURE
from .dispatch import FLOAT_DTYPES, device_reason, next_power_of_2, out_reason, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = [
    "markov_step_ineligible_reason",
    "markov_step_op",
    "markov_step_triton",
]

_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
# The smallest normal number: a variate that was rounded to zero must not lift an excluded token.
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# Candidates per program, and entries of the successor table that it holds at a time.
_BLOCK_CANDIDATES = 64
_TILE = 16384


@triton.jit
def _first_maximum(scores, lanes, in_range, BLOCK: tl.constexpr):
    """Lane and value that `argmax` would take: the first NaN, else the first maximum."""
    is_nan = (scores != scores) & in_range
    first_nan = tl.min(tl.where(is_nan, lanes, BLOCK), axis=0)
    best = tl.max(tl.where(is_nan | (in_range == 0), float("-inf"), scores), axis=0)
    first_best = tl.min(tl.where(in_range & (scores == best), lanes, BLOCK), axis=0)
    lane = tl.where(first_nan < BLOCK, first_nan, first_best)
    return lane, tl.where(first_nan < BLOCK, float("nan"), best)


@triton.jit
def _markov_step_kernel(
    base_ptr,
    code_ptr,
    successor_ptr,
    noise_ptr,
    temperature_ptr,
    greedy_ptr,
    rows_ptr,
    logit_ptr,
    tile_value_ptr,
    tile_index_ptr,
    candidates,
    successor_rows,
    tiles,
    base_stride,
    code_stride,
    successor_stride,
    noise_stride,
    rows_stride,
    RANK: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, BLOCK_C)
    entries = tile.to(tl.int64) * BLOCK_C + lanes
    in_range = entries < candidates
    if HAS_ROWS:
        table_rows = tl.load(rows_ptr + row * rows_stride + entries, mask=in_range, other=0).to(tl.int64)
    else:
        table_rows = entries
    # Also keeps ids that the table does not have from becoming addresses.
    has_row = in_range & (table_rows >= 0) & (table_rows < successor_rows)
    ranks = tl.arange(0, BLOCK_RANK)
    bias = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(0, RANK, BLOCK_RANK):
        columns = start + ranks
        in_rank = columns < RANK
        code = tl.load(code_ptr + row * code_stride + columns, mask=in_rank, other=0.0).to(tl.float32)
        weights = tl.load(
            successor_ptr + table_rows[:, None] * successor_stride + columns[None, :],
            mask=has_row[:, None] & in_rank[None, :],
            other=0.0,
        ).to(tl.float32)
        bias += tl.sum(weights * code[None, :], axis=1)
    base = tl.load(base_ptr + row * base_stride + entries, mask=in_range, other=0.0).to(tl.float32)
    logits = base + bias
    tl.store(logit_ptr + row * candidates + entries, logits, mask=in_range)

    scores = logits
    if HAS_NOISE:
        greedy = tl.load(greedy_ptr + row) != 0
        temperature = tl.maximum(tl.load(temperature_ptr + row).to(tl.float32), _MIN_TEMPERATURE)
        noise = tl.load(noise_ptr + row * noise_stride + entries, mask=in_range, other=1.0).to(tl.float32)
        drawn = logits / temperature - tl.log(tl.maximum(noise, _TINY))
        scores = tl.where(greedy, logits, drawn)
    lane, value = _first_maximum(scores, lanes, in_range, BLOCK_C)
    tl.store(tile_value_ptr + row * tiles + tile, value)
    tl.store(tile_index_ptr + row * tiles + tile, tile.to(tl.int64) * BLOCK_C + lane)


@triton.jit
def _best_tile_kernel(
    tile_value_ptr, tile_index_ptr, index_ptr, tiles, BLOCK_TILES: tl.constexpr, OVERLAPS: tl.constexpr
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_TILES)
    in_range = lanes < tiles
    values = tl.load(tile_value_ptr + row * tiles + lanes, mask=in_range, other=float("-inf"))
    lane, _ = _first_maximum(values, lanes, in_range, BLOCK_TILES)
    tl.store(index_ptr + row, tl.load(tile_index_ptr + row * tiles + lane))


def markov_step_ineligible_reason(
    base: torch.Tensor,
    code: torch.Tensor,
    successor: torch.Tensor,
    noise: torch.Tensor | None,
    temperatures: torch.Tensor,
    greedy_mask: torch.Tensor,
    *,
    successor_rows: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> str | None:
    """Why [`markov_step_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(
        base=base,
        code=code,
        successor=successor,
        noise=noise,
        temperatures=temperatures,
        greedy_mask=greedy_mask,
        successor_rows=successor_rows,
    ) or tensor_reason("base", base, shape=(None, None), dtypes=FLOAT_DTYPES)
    if reason is not None:
        return reason
    batch, candidates = base.shape
    if candidates < 1:
        return "base has no candidates; there must be at least 1"
    reason = tensor_reason("code", code, shape=(batch, None), dtypes=FLOAT_DTYPES)
    if reason is not None:
        return reason
    reason = (
        tensor_reason("successor", successor, shape=(None, code.shape[1]), dtypes=FLOAT_DTYPES)
        or tensor_reason("temperatures", temperatures, shape=(batch,), dtypes=(torch.float32,))
        or tensor_reason("greedy_mask", greedy_mask, shape=(batch,), dtypes=(torch.bool,))
    )
    if reason is None and noise is not None:
        reason = tensor_reason("noise", noise, shape=(batch, candidates), dtypes=(torch.float32,))
    if reason is None and successor_rows is not None:
        reason = tensor_reason("successor_rows", successor_rows, shape=(batch, candidates), dtypes=(torch.int64,))
    if reason is None and successor_rows is None and successor.shape[0] < candidates:
        return f"successor has {successor.shape[0]} rows for {candidates} candidates; pass successor_rows"
    if reason is None and out is not None:
        logits, index = out
        reason = out_reason("out[0]", logits, base, shape=(batch, candidates), dtype=torch.float32) or out_reason(
            "out[1]", index, base, shape=(batch,), dtype=torch.int64
        )
    return reason


def markov_step_triton(
    base: torch.Tensor,
    code: torch.Tensor,
    successor: torch.Tensor,
    noise: torch.Tensor | None,
    temperatures: torch.Tensor,
    greedy_mask: torch.Tensor,
    *,
    successor_rows: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Corrects the logits of one slot and picks its token.

    Args:
        base (`torch.Tensor` of shape `(batch, candidates)`):
            Base logits of the slot.
        code (`torch.Tensor` of shape `(batch, rank)`):
            What the Markov head makes of the token before.
        successor (`torch.Tensor` of shape `(rows, rank)`):
            `W2`; a candidate without a row gets no bias.
        noise (`torch.Tensor` of shape `(batch, candidates)`, *optional*):
            Exponential variates, fp32; `None` where every row is greedy.
        temperatures (`torch.Tensor` of shape `(batch,)`):
            fp32; values under 1e-5 count as 1e-5.
        greedy_mask (`torch.BoolTensor` of shape `(batch,)`):
            Rows that take the maximum.
        successor_rows (`torch.LongTensor` of shape `(batch, candidates)`, *optional*):
            The row of `W2` that belongs to each candidate; by default candidate `c` has row `c`.
        out (`tuple` of `torch.Tensor`, *optional*):
            Buffers for `(logits, index)`.

    Returns:
        `(logits, index)`: fp32 `(batch, candidates)` and int64 `(batch,)`, as of [`functional_dspark.markov_step`].
    """
    inputs = (base, code, successor, noise, temperatures, greedy_mask)
    reason = markov_step_ineligible_reason(*inputs, successor_rows=successor_rows, out=out)
    if reason is not None:
        raise ValueError(f"markov_step_triton: {reason}")
    (batch, candidates), rank = base.shape, code.shape[1]
    if out is None:
        out = (
            torch.empty((batch, candidates), dtype=torch.float32, device=base.device),
            torch.empty(batch, dtype=torch.int64, device=base.device),
        )
    logits, index = out
    if batch == 0:
        return out
    block = min(next_power_of_2(candidates), _BLOCK_CANDIDATES)
    tiles = triton.cdiv(candidates, block)
    tile_values = torch.empty((batch, tiles), dtype=torch.float32, device=base.device)
    tile_indices = torch.empty((batch, tiles), dtype=torch.int64, device=base.device)
    with torch.cuda.device_of(base):
        _markov_step_kernel[(tiles, batch)](
            base,
            code,
            successor,
            base if noise is None else noise,
            temperatures,
            greedy_mask.view(torch.uint8),
            base if successor_rows is None else successor_rows,
            logits,
            tile_values,
            tile_indices,
            candidates,
            successor.shape[0],
            tiles,
            base.stride(0),
            code.stride(0),
            successor.stride(0),
            0 if noise is None else noise.stride(0),
            0 if successor_rows is None else successor_rows.stride(0),
            RANK=rank,
            HAS_NOISE=noise is not None,
            HAS_ROWS=successor_rows is not None,
            BLOCK_C=block,
            BLOCK_RANK=min(next_power_of_2(rank), max(_TILE // block, 16)),
            num_warps=4,
            **overlap_options(base.device),
        )
        _best_tile_kernel[(batch,)](
            tile_values, tile_indices, index, tiles, BLOCK_TILES=next_power_of_2(tiles), **overlap_options(base.device)
        )
    return out


@torch.library.custom_op("transformers_dflash2::markov_step", mutates_args=())
def markov_step_op(
    base: torch.Tensor,
    code: torch.Tensor,
    successor: torch.Tensor,
    noise: torch.Tensor | None,
    temperatures: torch.Tensor,
    greedy_mask: torch.Tensor,
    successor_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`markov_step_triton`] for `torch.compile`."""
    return markov_step_triton(base, code, successor, noise, temperatures, greedy_mask, successor_rows=successor_rows)


@markov_step_op.register_fake
def _(base, *others, **options):
    return (
        torch.empty(base.shape, dtype=torch.float32, device=base.device),
        torch.empty(base.shape[:1], dtype=torch.int64, device=base.device),
    )

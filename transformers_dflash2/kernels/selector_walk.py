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
"""The candidate selector in one launch; [`functional_dflash2.selector_path`] is the reference.

One program walks one batch row. A walk needs one row of each slot's lattice, that of the predecessor really taken, so
the kernel computes no other: `top_k` scores per slot instead of `top_k ** 2`.
"""

import torch
import triton
import triton.language as tl

from ..functional_dflash2 import MIN_TEMPERATURE
from .dispatch import FLOAT_DTYPES, device_reason, next_power_of_2, out_reason, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = [
    "selector_walk_ineligible_reason",
    "selector_walk_op",
    "selector_walk_triton",
]

_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
# Codebook entries of all candidates that one program holds at a time.
_TILE = 4096


@triton.jit
def _selector_walk_kernel(
    unary_ptr,
    candidate_ptr,
    projected_ptr,
    predecessor_ptr,
    successor_ptr,
    anchor_ptr,
    uniform_ptr,
    temperature_ptr,
    greedy_ptr,
    token_ptr,
    q_ptr,
    predecessor_rows,
    successor_rows,
    unary_batch_stride,
    unary_slot_stride,
    candidate_batch_stride,
    candidate_slot_stride,
    projected_batch_stride,
    projected_slot_stride,
    predecessor_row_stride,
    successor_row_stride,
    uniform_batch_stride,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_K)
    in_k = lanes < TOP_K
    ranks = tl.arange(0, BLOCK_RANK)
    greedy = tl.load(greedy_ptr + row) != 0
    temperature = tl.maximum(tl.load(temperature_ptr + row).to(tl.float32), _MIN_TEMPERATURE)
    previous = tl.load(anchor_ptr + row).to(tl.int64)
    for slot in range(SLOTS):
        ids = tl.load(
            candidate_ptr + row * candidate_batch_stride + slot * candidate_slot_stride + lanes, mask=in_k, other=0
        ).to(tl.int64)
        unary = tl.load(
            unary_ptr + row * unary_batch_stride + slot * unary_slot_stride + lanes, mask=in_k, other=0.0
        ).to(tl.float32)
        # Both masks also keep ids that no table has from becoming addresses.
        has_left = (previous >= 0) & (previous < predecessor_rows)
        has_right = in_k & (ids >= 0) & (ids < successor_rows)
        pair = tl.zeros([BLOCK_K], dtype=tl.float32)
        for start in range(0, RANK, BLOCK_RANK):
            columns = start + ranks
            in_rank = columns < RANK
            # `!= 0`: triton 3.9's interpreter refuses the integer mask that a scalar condition makes of it.
            in_left = (in_rank & has_left) != 0
            left = tl.load(predecessor_ptr + previous * predecessor_row_stride + columns, mask=in_left, other=0.0).to(
                tl.float32
            )
            hidden = tl.load(
                projected_ptr + row * projected_batch_stride + slot * projected_slot_stride + columns,
                mask=in_rank,
                other=0.0,
            ).to(tl.float32)
            right = tl.load(
                successor_ptr + ids[:, None] * successor_row_stride + columns[None, :],
                mask=has_right[:, None] & in_rank[None, :],
                other=0.0,
            ).to(tl.float32)
            pair += tl.sum((left * hidden)[None, :] * right, axis=1)
        # Lanes past `TOP_K` are set last, for a pair score that is not finite must not reach them.
        scores = tl.where(in_k, unary + pair, float("-inf"))

        scaled = scores / temperature
        weights = tl.exp(scaled - tl.max(scaled, axis=0))
        law = weights / tl.sum(weights, axis=0)
        # All of `law` is NaN if any score is, or none is finite.
        is_nan = law != law
        broken = tl.max(is_nan.to(tl.int32), axis=0) > 0

        # Like `argmax`: the first NaN, else the first maximum.
        score_is_nan = scores != scores
        first_nan = tl.min(tl.where(score_is_nan, lanes, BLOCK_K), axis=0)
        best = tl.max(tl.where(score_is_nan, float("-inf"), scores), axis=0)
        first_best = tl.min(tl.where(in_k & (scores == best), lanes, BLOCK_K), axis=0)
        maximum = tl.where(first_nan < BLOCK_K, first_nan, first_best)

        uniform = tl.load(uniform_ptr + row * uniform_batch_stride + slot).to(tl.float32)
        passed = in_k & (uniform >= tl.cumsum(law, axis=0))
        drawn = tl.minimum(tl.sum(passed.to(tl.int32), axis=0), TOP_K - 1)

        index = tl.where(greedy, maximum, drawn)
        one_hot = tl.where(broken, float("nan"), tl.where(lanes == index, 1.0, 0.0))
        previous = tl.sum(tl.where(lanes == index, ids, 0), axis=0)
        entry = row * SLOTS + slot
        tl.store(token_ptr + entry, previous)
        tl.store(q_ptr + entry * TOP_K + lanes, tl.where(greedy, one_hot, law), mask=in_k)


def selector_walk_ineligible_reason(
    unary: torch.Tensor,
    candidate_ids: torch.Tensor,
    projected_hidden: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    anchor_ids: torch.Tensor,
    uniforms: torch.Tensor,
    temperatures: torch.Tensor,
    greedy_mask: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> str | None:
    """Why [`selector_walk_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(
        unary=unary,
        candidate_ids=candidate_ids,
        projected_hidden=projected_hidden,
        predecessor_codebook=predecessor_codebook,
        successor_codebook=successor_codebook,
        anchor_ids=anchor_ids,
        uniforms=uniforms,
        temperatures=temperatures,
        greedy_mask=greedy_mask,
    ) or tensor_reason("unary", unary, shape=(None, None, None), dtypes=FLOAT_DTYPES)
    if reason is not None:
        return reason
    batch, slots, top_k = unary.shape
    if top_k < 1:
        return "unary has no candidates; top_k must be at least 1"
    reason = tensor_reason("projected_hidden", projected_hidden, shape=(batch, slots, None), dtypes=FLOAT_DTYPES)
    if reason is not None:
        return reason
    rank = projected_hidden.shape[-1]
    reason = (
        tensor_reason("candidate_ids", candidate_ids, shape=(batch, slots, top_k), dtypes=(torch.int64,))
        or tensor_reason("predecessor_codebook", predecessor_codebook, shape=(None, rank), dtypes=FLOAT_DTYPES)
        or tensor_reason("successor_codebook", successor_codebook, shape=(None, rank), dtypes=FLOAT_DTYPES)
        or tensor_reason("anchor_ids", anchor_ids, shape=(batch,), dtypes=(torch.int64,))
        or tensor_reason("uniforms", uniforms, shape=(batch, slots), dtypes=(torch.float32,))
        or tensor_reason("temperatures", temperatures, shape=(batch,), dtypes=(torch.float32,))
        or tensor_reason("greedy_mask", greedy_mask, shape=(batch,), dtypes=(torch.bool,))
    )
    if reason is None and out is not None:
        tokens, q = out
        reason = out_reason("out[0]", tokens, unary, shape=(batch, slots), dtype=torch.int64) or out_reason(
            "out[1]", q, unary, shape=(batch, slots, top_k), dtype=torch.float32
        )
    return reason


def selector_walk_triton(
    unary: torch.Tensor,
    candidate_ids: torch.Tensor,
    projected_hidden: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    anchor_ids: torch.Tensor,
    uniforms: torch.Tensor,
    temperatures: torch.Tensor,
    greedy_mask: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Scores the transitions and walks one path per row in one launch.

    Args:
        unary (`torch.Tensor` of shape `(batch, slots, top_k)`):
            Transformed head logits of the candidates.
        candidate_ids (`torch.LongTensor` of shape `(batch, slots, top_k)`):
            Their token ids. An id without a row in `successor_codebook` scores its unary value.
        projected_hidden (`torch.Tensor` of shape `(batch, slots, rank)`):
            `W h` of each slot.
        predecessor_codebook (`torch.Tensor` of shape `(rows, rank)`):
            `A`; a predecessor without a row contributes nothing.
        successor_codebook (`torch.Tensor` of shape `(rows, rank)`):
            `B`.
        anchor_ids (`torch.LongTensor` of shape `(batch,)`):
            The token before slot 0.
        uniforms (`torch.Tensor` of shape `(batch, slots)`):
            Numbers in `[0, 1)`, fp32.
        temperatures (`torch.Tensor` of shape `(batch,)`):
            fp32; values under 1e-5 count as 1e-5.
        greedy_mask (`torch.BoolTensor` of shape `(batch,)`):
            Rows that take the maximum.
        out (`tuple` of `torch.Tensor`, *optional*):
            Buffers for `(tokens, q)`.

    Returns:
        `(tokens, q)`: int64 `(batch, slots)` and fp32 `(batch, slots, top_k)`, as of
        [`functional_dflash2.selector_walk`].
    """
    inputs = (
        unary,
        candidate_ids,
        projected_hidden,
        predecessor_codebook,
        successor_codebook,
        anchor_ids,
        uniforms,
        temperatures,
        greedy_mask,
    )
    reason = selector_walk_ineligible_reason(*inputs, out=out)
    if reason is not None:
        raise ValueError(f"selector_walk_triton: {reason}")
    batch, slots, top_k = unary.shape
    rank = projected_hidden.shape[-1]
    if out is None:
        out = (
            torch.empty((batch, slots), dtype=torch.int64, device=unary.device),
            torch.empty((batch, slots, top_k), dtype=torch.float32, device=unary.device),
        )
    tokens, q = out
    if tokens.numel() == 0:
        return out
    block_k = next_power_of_2(top_k)
    block_rank = min(next_power_of_2(rank), max(_TILE // block_k, 16))
    with torch.cuda.device_of(unary):
        _selector_walk_kernel[(batch,)](
            *inputs[:-1],
            greedy_mask.view(torch.uint8),
            tokens,
            q,
            predecessor_codebook.shape[0],
            successor_codebook.shape[0],
            unary.stride(0),
            unary.stride(1),
            candidate_ids.stride(0),
            candidate_ids.stride(1),
            projected_hidden.stride(0),
            projected_hidden.stride(1),
            predecessor_codebook.stride(0),
            successor_codebook.stride(0),
            uniforms.stride(0),
            SLOTS=slots,
            TOP_K=top_k,
            RANK=rank,
            BLOCK_K=block_k,
            BLOCK_RANK=block_rank,
            num_warps=4,
            **overlap_options(unary.device),
        )
    return out


@torch.library.custom_op("transformers_dflash2::selector_walk", mutates_args=())
def selector_walk_op(
    unary: torch.Tensor,
    candidate_ids: torch.Tensor,
    projected_hidden: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    anchor_ids: torch.Tensor,
    uniforms: torch.Tensor,
    temperatures: torch.Tensor,
    greedy_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`selector_walk_triton`] for `torch.compile`."""
    return selector_walk_triton(
        unary,
        candidate_ids,
        projected_hidden,
        predecessor_codebook,
        successor_codebook,
        anchor_ids,
        uniforms,
        temperatures,
        greedy_mask,
    )


@selector_walk_op.register_fake
def _(unary, candidate_ids, *others):
    return (
        torch.empty(candidate_ids.shape[:2], dtype=torch.int64, device=unary.device),
        torch.empty(candidate_ids.shape, dtype=torch.float32, device=unary.device),
    )

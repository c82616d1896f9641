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
"""Rejection sampling of a whole draft over the full vocabulary, from the target's processed scores.

Three launches, each split over the vocabulary as far as it can be:

1. *normalise*: maximum and sum of exponentials of every part of every position's scores;
2. *accept*: each program repeats the row's decisions (they read `slots * top_k` numbers), then sums `p` and
   `max(p - q, 0)` over one part of the vocabulary, at the position where the draft ends;
3. *draw*: per row, inverse CDF over the parts' masses, then over the tokens of the part found.

Neither `p` nor a dense `q` is written to memory. Only tokens with mass of their own can be drawn, however the sums
round.
"""

import torch
import triton
import triton.language as tl

from .dispatch import FLOAT_DTYPES, device_reason, next_power_of_2, out_reason, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = [
    "accept_sampled_ineligible_reason",
    "accept_sampled_op",
    "accept_sampled_triton",
]

# Vocabulary entries that one program handles; the number of parts stays under 64 for a vocabulary of 262,144.
_PART = 4096
# Residual sums up to the smallest normal fp32 number count as none, as in `residual_distribution`.
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _accept_sampled_normalise_kernel(
    score_ptr,
    maximum_ptr,
    sum_ptr,
    positions,
    vocab,
    score_batch_stride,
    score_position_stride,
    PART: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    entry = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    row = entry // positions
    position = entry % positions
    columns = part * PART + tl.arange(0, PART)
    scores = tl.load(
        score_ptr + row * score_batch_stride + position * score_position_stride + columns,
        mask=columns < vocab,
        other=float("-inf"),
    ).to(tl.float32)
    maximum = tl.max(scores, axis=0)
    # A part in which everything is excluded has the sum 0.
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    target = entry * tl.num_programs(1) + part
    tl.store(maximum_ptr + target, maximum)
    tl.store(sum_ptr + target, tl.sum(tl.exp(scores - shift), axis=0))


@triton.jit
def _target_probabilities(scores, maximum, total):
    return tl.exp(scores - maximum) / total


@triton.jit
def _leftover(probabilities, columns, candidate_ptr, q_ptr, refused, TOP_K: tl.constexpr):
    """`max(p - q, 0)` of some columns, or `p` where nothing was refused. `q` is read only where something was."""
    leftover = probabilities
    for index in range(TOP_K):
        candidate = tl.load(candidate_ptr + index, mask=refused, other=-1).to(tl.int64)
        drawn = tl.load(q_ptr + index, mask=refused, other=0.0).to(tl.float32)
        # False for NaN too.
        is_finite = tl.abs(drawn) < float("inf")
        leftover = tl.where(columns == candidate, leftover - tl.where(is_finite, drawn, 0.0), leftover)
    return tl.where(leftover > 0.0, leftover, 0.0)


@triton.jit
def _accept_sampled_kernel(
    score_ptr,
    token_ptr,
    candidate_ptr,
    q_ptr,
    usable_ptr,
    uniform_ptr,
    maximum_ptr,
    sum_ptr,
    mass_ptr,
    normaliser_ptr,
    accepted_ptr,
    vocab,
    parts,
    score_batch_stride,
    score_position_stride,
    token_batch_stride,
    candidate_batch_stride,
    candidate_slot_stride,
    q_batch_stride,
    q_slot_stride,
    uniform_batch_stride,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PART: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    positions = tl.arange(0, BLOCK_POSITIONS)
    is_slot = positions < SLOTS
    lanes = tl.arange(0, BLOCK_K)
    part_lanes = tl.arange(0, BLOCK_PARTS)
    row_scores = score_ptr + row * score_batch_stride

    entries = (row * (SLOTS + 1) + positions[:, None]) * parts + part_lanes[None, :]
    known = (positions <= SLOTS)[:, None] & (part_lanes < parts)[None, :]
    maxima = tl.load(maximum_ptr + entries, mask=known, other=float("-inf"))
    sums = tl.load(sum_ptr + entries, mask=known, other=0.0)
    maximum = tl.max(maxima, axis=1)
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(sums * tl.exp(maxima - maximum[:, None]), axis=1)

    tokens = tl.load(token_ptr + row * token_batch_stride + positions, mask=is_slot, other=-1).to(tl.int64)
    in_vocab = is_slot & (tokens >= 0) & (tokens < vocab)
    chosen = tl.load(row_scores + positions * score_position_stride + tokens, mask=in_vocab, other=float("-inf"))
    target = _target_probabilities(chosen.to(tl.float32), maximum, total)
    in_table = is_slot[:, None] & (lanes < TOP_K)[None, :]
    candidates = tl.load(
        candidate_ptr + row * candidate_batch_stride + positions[:, None] * candidate_slot_stride + lanes[None, :],
        mask=in_table,
        other=-1,
    ).to(tl.int64)
    q = tl.load(
        q_ptr + row * q_batch_stride + positions[:, None] * q_slot_stride + lanes[None, :], mask=in_table, other=0.0
    ).to(tl.float32)
    drawn = tl.sum(tl.where(candidates == tokens[:, None], q, 0.0), axis=1)
    uniform = tl.load(uniform_ptr + row * uniform_batch_stride + positions, mask=is_slot, other=0.0).to(tl.float32)
    usable = tl.load(usable_ptr + row) != 0
    passed = in_vocab & (drawn > 0.0) & (uniform * drawn < target) & usable
    accepted = tl.min(tl.where(is_slot & (passed == 0), positions, SLOTS), axis=0)
    refused = usable & (accepted < SLOTS)

    here = positions == accepted
    row_maximum = tl.sum(tl.where(here, maximum, 0.0), axis=0)
    row_total = tl.sum(tl.where(here, total, 0.0), axis=0)
    columns = part * PART + tl.arange(0, PART)
    scores = tl.load(
        row_scores + accepted * score_position_stride + columns, mask=columns < vocab, other=float("-inf")
    ).to(tl.float32)
    probabilities = _target_probabilities(scores, row_maximum, row_total)
    leftover = _leftover(
        probabilities,
        columns,
        candidate_ptr + row * candidate_batch_stride + accepted * candidate_slot_stride,
        q_ptr + row * q_batch_stride + accepted * q_slot_stride,
        refused,
        TOP_K,
    )
    tl.store(mass_ptr + (row * 2) * parts + part, tl.sum(probabilities, axis=0))
    tl.store(mass_ptr + (row * 2 + 1) * parts + part, tl.sum(leftover, axis=0))
    if part == 0:
        tl.store(accepted_ptr + row, accepted.to(tl.int64))
        tl.store(normaliser_ptr + row * 2, row_maximum)
        tl.store(normaliser_ptr + row * 2 + 1, row_total)


@triton.jit
def _accept_sampled_draw_kernel(
    score_ptr,
    candidate_ptr,
    q_ptr,
    usable_ptr,
    uniform_ptr,
    mass_ptr,
    normaliser_ptr,
    accepted_ptr,
    following_ptr,
    vocab,
    parts,
    score_batch_stride,
    score_position_stride,
    candidate_batch_stride,
    candidate_slot_stride,
    q_batch_stride,
    q_slot_stride,
    SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PART: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    part_lanes = tl.arange(0, BLOCK_PARTS)
    accepted = tl.load(accepted_ptr + row)
    refused = (tl.load(usable_ptr + row) != 0) & (accepted < SLOTS)
    full = tl.load(mass_ptr + (row * 2) * parts + part_lanes, mask=part_lanes < parts, other=0.0)
    left = tl.load(mass_ptr + (row * 2 + 1) * parts + part_lanes, mask=part_lanes < parts, other=0.0)
    # Without a residual worth the name the draw is from `p`.
    refused = refused & (tl.sum(left, axis=0) > _TINY)
    masses = tl.where(refused, left, full)
    uniform = tl.load(uniform_ptr + row).to(tl.float32)
    threshold = uniform * tl.sum(masses, axis=0)
    reached = (masses > 0.0) & (tl.cumsum(masses, axis=0) > threshold)
    part = tl.min(tl.where(reached, part_lanes, BLOCK_PARTS), axis=0)
    # Rounding can leave the last sum at or under the threshold; the last part with mass is meant then.
    last_part = tl.max(tl.where(masses > 0.0, part_lanes, -1), axis=0)
    part = tl.where(part < BLOCK_PARTS, part, last_part)
    before = tl.sum(tl.where(part_lanes < part, masses, 0.0), axis=0)

    offsets = tl.arange(0, PART)
    columns = part.to(tl.int64) * PART + offsets
    scores = tl.load(
        score_ptr + row * score_batch_stride + accepted * score_position_stride + columns,
        mask=(columns >= 0) & (columns < vocab),
        other=float("-inf"),
    ).to(tl.float32)
    maximum = tl.load(normaliser_ptr + row * 2)
    total = tl.load(normaliser_ptr + row * 2 + 1)
    law = _leftover(
        _target_probabilities(scores, maximum, total),
        columns,
        candidate_ptr + row * candidate_batch_stride + accepted * candidate_slot_stride,
        q_ptr + row * q_batch_stride + accepted * q_slot_stride,
        refused,
        TOP_K,
    )
    reached = (law > 0.0) & (before + tl.cumsum(law, axis=0) > threshold)
    offset = tl.min(tl.where(reached, offsets, PART), axis=0)
    last_offset = tl.max(tl.where(law > 0.0, offsets, -1), axis=0)
    offset = tl.where(offset < PART, offset, last_offset)
    token = tl.where((part >= 0) & (offset >= 0), part.to(tl.int64) * PART + offset, -1)
    tl.store(following_ptr + row, token)


def accept_sampled_ineligible_reason(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    candidate_ids: torch.Tensor,
    q: torch.Tensor,
    usable: torch.Tensor,
    uniforms: torch.Tensor,
    draw_uniforms: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> str | None:
    """Why [`accept_sampled_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(
        scores=scores,
        tokens=tokens,
        candidate_ids=candidate_ids,
        q=q,
        usable=usable,
        uniforms=uniforms,
        draw_uniforms=draw_uniforms,
    ) or tensor_reason("candidate_ids", candidate_ids, shape=(None, None, None), dtypes=(torch.int64,))
    if reason is not None:
        return reason
    batch, slots, top_k = candidate_ids.shape
    if top_k < 1:
        return "candidate_ids has no candidates; top_k must be at least 1"
    reason = (
        tensor_reason("scores", scores, shape=(batch, slots + 1, None), dtypes=FLOAT_DTYPES)
        or tensor_reason("tokens", tokens, shape=(batch, slots), dtypes=(torch.int64,))
        or tensor_reason("q", q, shape=(batch, slots, top_k), dtypes=(torch.float32,))
        or tensor_reason("usable", usable, shape=(batch,), dtypes=(torch.bool,))
        or tensor_reason("uniforms", uniforms, shape=(batch, slots), dtypes=(torch.float32,))
        or tensor_reason("draw_uniforms", draw_uniforms, shape=(batch,), dtypes=(torch.float32,))
    )
    if reason is None and scores.shape[-1] < 1:
        reason = "scores has an empty vocabulary; it needs one column per token"
    if reason is None and out is not None:
        for index, buffer in enumerate(out):
            reason = reason or out_reason(f"out[{index}]", buffer, scores, shape=(batch,), dtype=torch.int64)
    return reason


def accept_sampled_triton(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    candidate_ids: torch.Tensor,
    q: torch.Tensor,
    usable: torch.Tensor,
    uniforms: torch.Tensor,
    draw_uniforms: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The accepted length of each sampled draft and the token that follows it.

    The token comes from `max(p - q, 0)`, normalised, after a refusal, and from `p` itself after a draft that was
    accepted whole, or was not usable, or where no residual mass is left.

    Args:
        scores (`torch.Tensor` of shape `(batch, slots + 1, vocab)`):
            The target's processed scores after the anchor and after each drafted token; excluded tokens hold `-inf`.
        tokens (`torch.LongTensor` of shape `(batch, slots)`):
            Drafted tokens; one outside the vocabulary, such as -1, is always refused.
        candidate_ids (`torch.LongTensor` of shape `(batch, slots, top_k)`):
            Support of `q`, distinct within a slot.
        q (`torch.Tensor` of shape `(batch, slots, top_k)`):
            The distribution each token was drawn from, fp32. A token with a zero or non-finite `q` is refused.
        usable (`torch.BoolTensor` of shape `(batch,)`):
            `False` for rows whose draft must be ignored.
        uniforms (`torch.Tensor` of shape `(batch, slots)`):
            Numbers in `[0, 1)` for the tests, fp32, independent of those that drew `tokens`.
        draw_uniforms (`torch.Tensor` of shape `(batch,)`):
            Numbers in `[0, 1)` for the token that follows, fp32, independent of both.
        out (`tuple` of `torch.Tensor`, *optional*):
            int64 buffers of shape `(batch,)` for `(accepted, following)`.

    Returns:
        `(accepted, following)`: int64 tensors of shape `(batch,)`. `following` is -1 where the target's scores give no
        distribution: a NaN, or no finite score.
    """
    reason = accept_sampled_ineligible_reason(
        scores, tokens, candidate_ids, q, usable, uniforms, draw_uniforms, out=out
    )
    if reason is not None:
        raise ValueError(f"accept_sampled_triton: {reason}")
    batch, slots, top_k = candidate_ids.shape
    vocab = scores.shape[-1]
    device = scores.device
    if out is None:
        out = tuple(torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    if batch == 0:
        return out
    accepted, following = out
    parts = triton.cdiv(vocab, _PART)
    maxima, sums = torch.empty((2, batch, slots + 1, parts), dtype=torch.float32, device=device)
    masses = torch.empty((batch, 2, parts), dtype=torch.float32, device=device)
    normalisers = torch.empty((batch, 2), dtype=torch.float32, device=device)
    usable = usable.view(torch.uint8)
    score_strides = scores.stride(0), scores.stride(1)
    table_strides = candidate_ids.stride(0), candidate_ids.stride(1), q.stride(0), q.stride(1)
    sizes = {"SLOTS": slots, "TOP_K": top_k, "BLOCK_PARTS": next_power_of_2(parts), "PART": _PART, "num_warps": 8}
    with torch.cuda.device_of(scores):
        _accept_sampled_normalise_kernel[(batch * (slots + 1), parts)](
            scores,
            maxima,
            sums,
            slots + 1,
            vocab,
            *score_strides,
            PART=_PART,
            num_warps=8,
            **overlap_options(scores.device),
        )
        _accept_sampled_kernel[(batch, parts)](
            scores,
            tokens,
            candidate_ids,
            q,
            usable,
            uniforms,
            maxima,
            sums,
            masses,
            normalisers,
            accepted,
            vocab,
            parts,
            *score_strides,
            tokens.stride(0),
            *table_strides,
            uniforms.stride(0),
            BLOCK_POSITIONS=next_power_of_2(slots + 1),
            BLOCK_K=next_power_of_2(top_k),
            **sizes,
            **overlap_options(scores.device),
        )
        _accept_sampled_draw_kernel[(batch,)](
            scores,
            candidate_ids,
            q,
            usable,
            draw_uniforms,
            masses,
            normalisers,
            accepted,
            following,
            vocab,
            parts,
            *score_strides,
            *table_strides,
            **sizes,
            **overlap_options(scores.device),
        )
    return out


@torch.library.custom_op("transformers_dflash2::accept_sampled", mutates_args=())
def accept_sampled_op(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    candidate_ids: torch.Tensor,
    q: torch.Tensor,
    usable: torch.Tensor,
    uniforms: torch.Tensor,
    draw_uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`accept_sampled_triton`] for `torch.compile`."""
    return accept_sampled_triton(scores, tokens, candidate_ids, q, usable, uniforms, draw_uniforms)


@accept_sampled_op.register_fake
def _(scores, *others):
    shape = scores.shape[:1]
    return tuple(torch.empty(shape, dtype=torch.int64, device=scores.device) for _ in range(2))

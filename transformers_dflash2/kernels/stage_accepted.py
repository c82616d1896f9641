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
"""What follows from a block's accepted length, in one launch; [`static_round.stage_accepted`] is the reference."""

import torch
import triton
import triton.language as tl

from .dispatch import device_reason, next_power_of_2, out_reason, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = ["stage_accepted_ineligible_reason", "stage_accepted_op", "stage_accepted_triton"]


@triton.jit
def _stage_accepted_kernel(
    token_ptr,
    usable_ptr,
    accepted_ptr,
    following_ptr,
    active_ptr,
    pad_token_ptr,
    decision_ptr,
    committed_ptr,
    count_ptr,
    anchor_ptr,
    token_row_stride,
    SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_SIZE)
    in_draft = lanes < SLOTS
    tokens = tl.load(token_ptr + row * token_row_stride + lanes, mask=in_draft, other=0)
    accepted = tl.load(accepted_ptr + row)
    following = tl.load(following_ptr + row)

    decision = decision_ptr + row * (SLOTS + 3)
    tl.store(decision, accepted)
    tl.store(decision + 1, following)
    tl.store(decision + 2, (tl.load(usable_ptr + row) != 0).to(tl.int64))
    tl.store(decision + 3 + lanes, tokens, mask=in_draft)

    committed = tl.where(lanes < accepted, tokens, tl.where(lanes == accepted, following, tl.load(pad_token_ptr)))
    tl.store(committed_ptr + row * (SLOTS + 1) + lanes, committed, mask=lanes <= SLOTS)

    active = tl.load(active_ptr + row) != 0
    tl.store(count_ptr + row, tl.where(active, accepted + 1, 0))
    tl.store(anchor_ptr + row, tl.where(active, following, tl.load(anchor_ptr + row)))


def stage_accepted_ineligible_reason(
    tokens: torch.Tensor,
    usable: torch.Tensor,
    accepted: torch.Tensor,
    following: torch.Tensor,
    active: torch.Tensor,
    pad_token_id: torch.Tensor,
    decision: torch.Tensor,
    committed: torch.Tensor,
    counts: torch.Tensor,
    anchors: torch.Tensor,
) -> str | None:
    """Why [`stage_accepted_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(
        tokens=tokens,
        usable=usable,
        accepted=accepted,
        following=following,
        active=active,
        pad_token_id=pad_token_id,
    ) or tensor_reason("tokens", tokens, shape=(None, None), dtypes=(torch.int64,))
    if reason is not None:
        return reason
    rows, slots = tokens.shape
    reason = (
        tensor_reason("usable", usable, shape=(rows,), dtypes=(torch.bool,))
        or tensor_reason("accepted", accepted, shape=(rows,), dtypes=(torch.int64,))
        or tensor_reason("following", following, shape=(rows,), dtypes=(torch.int64,))
        or tensor_reason("active", active, shape=(rows,), dtypes=(torch.bool,))
        or tensor_reason("pad_token_id", pad_token_id, shape=(), dtypes=(torch.int64,))
    )
    written = {
        "decision": (decision, (rows, slots + 3)),
        "committed": (committed, (rows, slots + 1)),
        "counts": (counts, (rows,)),
        "anchors": (anchors, (rows,)),
    }
    for name, (tensor, shape) in written.items():
        reason = reason or out_reason(name, tensor, tokens, shape=shape, dtype=torch.int64)
    return reason


def stage_accepted_triton(
    tokens: torch.Tensor,
    usable: torch.Tensor,
    accepted: torch.Tensor,
    following: torch.Tensor,
    active: torch.Tensor,
    pad_token_id: torch.Tensor,
    decision: torch.Tensor,
    committed: torch.Tensor,
    counts: torch.Tensor,
    anchors: torch.Tensor,
) -> None:
    """
    Write down what a round decided, and stage the next one, in one launch.

    Args:
        tokens (`torch.LongTensor` of shape `(rows, slots)`):
            Drafted tokens, any stride between rows.
        usable (`torch.BoolTensor` of shape `(rows,)`):
            Rows whose draft could be used.
        accepted (`torch.LongTensor` of shape `(rows,)`):
            How many tokens of each draft are kept.
        following (`torch.LongTensor` of shape `(rows,)`):
            The target's own token behind them.
        active (`torch.BoolTensor` of shape `(rows,)`):
            Rows that are still going.
        pad_token_id (`torch.LongTensor` of shape `()`):
            What the rest of a committed block is filled with.
        decision (`torch.LongTensor` of shape `(rows, 3 + slots)`):
            Written: accepted, following, usable as 0 or 1, and the drafted tokens.
        committed (`torch.LongTensor` of shape `(rows, slots + 1)`):
            Written: see [`functional_dflash2.committed_block`].
        counts (`torch.LongTensor` of shape `(rows,)`):
            Written: tokens that the round adds; 0 in rows that are not active.
        anchors (`torch.LongTensor` of shape `(rows,)`):
            Written in active rows: the token that the next block is drafted behind. The rest keep theirs.
    """
    arguments = (tokens, usable, accepted, following, active, pad_token_id, decision, committed, counts, anchors)
    reason = stage_accepted_ineligible_reason(*arguments)
    if reason is not None:
        raise ValueError(f"stage_accepted_triton: {reason}")
    rows, slots = tokens.shape
    if rows == 0:
        return
    with torch.cuda.device_of(tokens):
        _stage_accepted_kernel[(rows,)](
            tokens,
            usable.view(torch.uint8),
            accepted,
            following,
            active.view(torch.uint8),
            pad_token_id,
            decision,
            committed,
            counts,
            anchors,
            tokens.stride(0),
            SLOTS=slots,
            BLOCK_SIZE=next_power_of_2(slots + 1),
            num_warps=1,
            **overlap_options(tokens.device),
        )


@torch.library.custom_op(
    "transformers_dflash2::stage_accepted", mutates_args=("decision", "committed", "counts", "anchors")
)
def stage_accepted_op(
    tokens: torch.Tensor,
    usable: torch.Tensor,
    accepted: torch.Tensor,
    following: torch.Tensor,
    active: torch.Tensor,
    pad_token_id: torch.Tensor,
    decision: torch.Tensor,
    committed: torch.Tensor,
    counts: torch.Tensor,
    anchors: torch.Tensor,
) -> None:
    """[`stage_accepted_triton`] for `torch.compile`."""
    stage_accepted_triton(
        tokens, usable, accepted, following, active, pad_token_id, decision, committed, counts, anchors
    )


@stage_accepted_op.register_fake
def _(*arguments):
    return None

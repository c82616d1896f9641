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
"""The longest agreed prefix of a draft and the token after it, see [`functional_dflash2.accept_greedy`]."""

import torch
import triton
import triton.language as tl

from .dispatch import INTEGER_DTYPES, device_reason, next_power_of_2, out_reason, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = ["accept_greedy_ineligible_reason", "accept_greedy_op", "accept_greedy_triton"]


@triton.jit
def _accept_greedy_kernel(
    token_ptr,
    prediction_ptr,
    usable_ptr,
    accepted_ptr,
    bonus_ptr,
    token_batch_stride,
    prediction_batch_stride,
    SLOTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    HAS_USABLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_SLOTS)
    inside = lanes < SLOTS
    tokens = tl.load(token_ptr + row * token_batch_stride + lanes, mask=inside, other=0).to(tl.int64)
    predictions = prediction_ptr + row * prediction_batch_stride
    wanted = tl.load(predictions + lanes, mask=inside, other=0).to(tl.int64)
    accepted = tl.min(tl.where(inside & (tokens != wanted), lanes, SLOTS), axis=0).to(tl.int64)
    if HAS_USABLE:
        accepted = tl.where(tl.load(usable_ptr + row) != 0, accepted, 0)
    tl.store(accepted_ptr + row, accepted)
    tl.store(bonus_ptr + row, tl.load(predictions + accepted).to(tl.int64))


def accept_greedy_ineligible_reason(
    tokens: torch.Tensor,
    predictions: torch.Tensor,
    *,
    usable: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> str | None:
    """Why [`accept_greedy_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(tokens=tokens, predictions=predictions, usable=usable) or tensor_reason(
        "tokens", tokens, shape=(None, None), dtypes=INTEGER_DTYPES
    )
    if reason is not None:
        return reason
    batch, slots = tokens.shape
    reason = tensor_reason("predictions", predictions, shape=(batch, slots + 1), dtypes=INTEGER_DTYPES)
    if reason is None and usable is not None:
        reason = tensor_reason("usable", usable, shape=(batch,), dtypes=(torch.bool,))
    if reason is None and out is not None:
        for index, buffer in enumerate(out):
            reason = reason or out_reason(f"out[{index}]", buffer, tokens, shape=(batch,), dtype=torch.int64)
    return reason


def accept_greedy_triton(
    tokens: torch.Tensor,
    predictions: torch.Tensor,
    *,
    usable: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The longest prefix of each draft that the target agrees with, and the token that follows it, in one launch.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, slots)`):
            Drafted tokens. An id that no prediction can have, such as -1, is always refused.
        predictions (`torch.LongTensor` of shape `(batch, slots + 1)`):
            The target's choice after the anchor and after each drafted token.
        usable (`torch.BoolTensor` of shape `(batch,)`, *optional*):
            `False` for rows whose draft must be ignored: they accept nothing.
        out (`tuple` of `torch.Tensor`, *optional*):
            int64 buffers of shape `(batch,)` for `(accepted, bonus)`.

    Returns:
        `(accepted, bonus)`: int64 tensors of shape `(batch,)`.
    """
    reason = accept_greedy_ineligible_reason(tokens, predictions, usable=usable, out=out)
    if reason is not None:
        raise ValueError(f"accept_greedy_triton: {reason}")
    batch, slots = tokens.shape
    if out is None:
        out = tuple(torch.empty(batch, dtype=torch.int64, device=tokens.device) for _ in range(2))
    if batch == 0:
        return out
    with torch.cuda.device_of(tokens):
        _accept_greedy_kernel[(batch,)](
            tokens,
            predictions,
            None if usable is None else usable.view(torch.uint8),
            *out,
            tokens.stride(0),
            predictions.stride(0),
            SLOTS=slots,
            BLOCK_SLOTS=next_power_of_2(slots),
            HAS_USABLE=usable is not None,
            num_warps=1,
            **overlap_options(tokens.device),
        )
    return out


@torch.library.custom_op("transformers_dflash2::accept_greedy", mutates_args=())
def accept_greedy_op(
    tokens: torch.Tensor, predictions: torch.Tensor, usable: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`accept_greedy_triton`] for `torch.compile`."""
    return accept_greedy_triton(tokens, predictions, usable=usable)


@accept_greedy_op.register_fake
def _(tokens, predictions, usable=None):
    shape = tokens.shape[:1]
    return tuple(torch.empty(shape, dtype=torch.int64, device=tokens.device) for _ in range(2))

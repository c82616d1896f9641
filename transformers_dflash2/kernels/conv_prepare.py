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
"""The input side of a grouped dynamic convolution: its projection and its mix in one launch.

The projection's product with a few rows is a stream of weights, as in `skinny_linear`. A program owns some groups of
channels, computes the coefficients of both sides for them, mixes these channels of its rows with those of the first
side, and leaves those of the second to the output side. See [`modeling_dflash2.DFlash2GroupedConv`].

Products are summed in fp32 and rounded to the dtype of `hidden`, as the projection's own forward rounds; the mix is
rounded once.
"""

import torch
import triton
import triton.language as tl

from ..functional_dflash2 import grouped_conv
from .dispatch import device_reason, is_interpreting, next_power_of_2, tensor_reason


__all__ = ["conv_prepare_ineligible_reason", "conv_prepare_reference", "conv_prepare_triton"]

# Rows of a tile of the matrix units.
_MAX_ROWS = 16
_DTYPES = (torch.float16, torch.bfloat16)
# Inputs per step, and steps in flight.
_BLOCK_IN = 256
_NUM_STAGES = 5
# Coefficients of a program: columns of a tile of the matrix units.
_COEFFICIENTS = 16


@triton.jit
def _conv_prepare_kernel(
    hidden_ptr,
    weight_ptr,
    base_ptr,
    mixed_ptr,
    dynamic_ptr,
    rows,
    block,
    hidden_stride,
    base_tap_stride,
    HIDDEN_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    GROUPS: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    all_groups = HIDDEN_SIZE // GROUP_SIZE
    first = tl.program_id(0) * GROUPS
    row = tl.arange(0, ROWS)
    is_row = row < rows
    # Coefficient `(side, tap, group)` of these groups, by its place in the projection.
    place = tl.arange(0, COEFFICIENTS)
    side_and_tap, group = place // GROUPS, first + place % GROUPS
    is_place = (side_and_tap < 2 * TAPS) & (group < all_groups)
    step = tl.arange(0, BLOCK_IN)
    weights = weight_ptr + (side_and_tap * all_groups + group).to(tl.int64)[None, :] * HIDDEN_SIZE + step[:, None]
    inputs = hidden_ptr + row[:, None] * hidden_stride + step[None, :]
    sums = tl.zeros((ROWS, COEFFICIENTS), tl.float32)
    for start in range(0, HIDDEN_SIZE, BLOCK_IN):
        if HIDDEN_SIZE % BLOCK_IN == 0:
            # A mask along adjacent numbers would have them loaded one by one.
            hidden = tl.load(inputs + start, mask=is_row[:, None], other=0.0)
            weight = tl.load(weights + start, mask=is_place[None, :], other=0.0, eviction_policy="evict_first")
        else:
            inside = start + step < HIDDEN_SIZE
            hidden = tl.load(inputs + start, mask=is_row[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weights + start, mask=inside[:, None] & is_place[None, :], other=0.0)
        if IN_FP32:
            hidden = hidden.to(tl.float32)
        sums = tl.dot(hidden, weight.to(hidden.dtype), sums, input_precision="ieee")
    dtype = mixed_ptr.dtype.element_ty
    coefficients = sums.to(dtype)
    tl.store(
        dynamic_ptr + row[:, None] * (TAPS * all_groups) + ((side_and_tap - TAPS) * all_groups + group)[None, :],
        coefficients,
        mask=is_row[:, None] & (is_place & (side_and_tap >= TAPS))[None, :],
    )
    coefficients = coefficients.to(tl.float32)
    channel = tl.arange(0, BLOCK_CHANNELS)
    column = first * GROUP_SIZE + channel
    has_channel = (channel < GROUPS * GROUP_SIZE) & (column < HIDDEN_SIZE)
    total = tl.zeros((ROWS, BLOCK_CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        fires = is_row & (row % block >= tap)
        values = tl.load(
            hidden_ptr + (row - tap)[:, None] * hidden_stride + column[None, :],
            mask=fires[:, None] & has_channel[None, :],
            other=0.0,
        ).to(tl.float32)
        base = tl.load(base_ptr + tap * base_tap_stride + column, mask=has_channel, other=0.0).to(tl.float32)
        for index in tl.static_range(GROUPS):
            # A selection and no product: what is not finite in one coefficient does not reach another.
            own = tl.sum(tl.where(place[None, :] == tap * GROUPS + index, coefficients, 0.0), axis=1)
            mixes = fires[:, None] & (channel // GROUP_SIZE == index)[None, :]
            total += tl.where(mixes, (base[None, :] + own[:, None]) * values, 0.0)
    tl.store(
        mixed_ptr + row[:, None] * HIDDEN_SIZE + column[None, :],
        total.to(dtype),
        mask=is_row[:, None] & has_channel[None, :],
    )


def conv_prepare_ineligible_reason(
    hidden: torch.Tensor, weight: torch.Tensor, base_kernel: torch.Tensor, *, group_size: int
) -> str | None:
    """Why [`conv_prepare_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(hidden=hidden, weight=weight, base_kernel=base_kernel) or tensor_reason(
        "hidden", hidden, shape=(None, None, None), dtypes=_DTYPES
    )
    if reason is not None:
        return reason
    batch, block, hidden_size = hidden.shape
    if not 1 <= batch * block <= _MAX_ROWS:
        return f"hidden has {batch * block} rows; 1 to {_MAX_ROWS} are supported"
    if not hidden.is_contiguous():
        return f"hidden has strides {hidden.stride()}; make it contiguous"
    if group_size < 1 or hidden_size % group_size:
        return f"group_size={group_size} does not divide hidden_size={hidden_size}; choose a divisor"
    reason = tensor_reason("base_kernel", base_kernel, shape=(None, hidden_size), dtypes=_DTYPES)
    if reason is not None:
        return reason
    taps = base_kernel.shape[0]
    if not 1 <= 2 * taps <= _COEFFICIENTS:
        return f"base_kernel has {taps} taps; 1 to {_COEFFICIENTS // 2} are supported"
    shape = (2 * taps * (hidden_size // group_size), hidden_size)
    reason = tensor_reason("weight", weight, shape=shape, dtypes=(hidden.dtype,))
    if reason is None and not weight.is_contiguous():
        reason = f"weight has strides {weight.stride()}; make it contiguous"
    return reason


def conv_prepare_triton(
    hidden: torch.Tensor, weight: torch.Tensor, base_kernel: torch.Tensor, *, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Coefficients of both sides, and the mixed input.

    Args:
        hidden (`torch.Tensor` of shape `(batch, block, hidden_size)`):
            Contiguous fp16 or bf16 rows, 16 at most.
        weight (`torch.Tensor` of shape `(2 * taps * groups, hidden_size)`):
            The projection's weight, in the dtype of `hidden`; `groups` is `hidden_size // group_size`.
        base_kernel (`torch.Tensor` of shape `(taps, hidden_size)`):
            Learned coefficients of the input side.
        group_size (`int`):
            Channels per group.

    Returns:
        The mixed input, of the shape of `hidden`, and the output side's coefficients, `(batch, block, taps, groups)`.
    """
    reason = conv_prepare_ineligible_reason(hidden, weight, base_kernel, group_size=group_size)
    if reason is not None:
        raise ValueError(f"conv_prepare_triton: {reason}")
    batch, block, hidden_size = hidden.shape
    taps, all_groups = base_kernel.shape[0], hidden_size // group_size
    # Two groups with two taps: as many programs as a large chip has multiprocessors.
    groups = max(1, min(2, _COEFFICIENTS // (2 * taps)))
    mixed = torch.empty_like(hidden)
    dynamic = hidden.new_empty(batch, block, taps, all_groups)
    with torch.cuda.device_of(hidden):
        _conv_prepare_kernel[(triton.cdiv(all_groups, groups),)](
            hidden,
            weight,
            base_kernel,
            mixed,
            dynamic,
            batch * block,
            block,
            hidden_size,
            base_kernel.stride(0),
            HIDDEN_SIZE=hidden_size,
            GROUP_SIZE=group_size,
            TAPS=taps,
            GROUPS=groups,
            COEFFICIENTS=_COEFFICIENTS,
            ROWS=_MAX_ROWS,
            BLOCK_IN=_BLOCK_IN,
            BLOCK_CHANNELS=next_power_of_2(groups * group_size),
            IN_FP32=is_interpreting(),
            num_warps=4,
            num_stages=_NUM_STAGES,
        )
    return mixed, dynamic


def conv_prepare_reference(
    hidden: torch.Tensor, weight: torch.Tensor, base_kernel: torch.Tensor, *, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain PyTorch; arguments of [`conv_prepare_triton`]."""
    taps, groups = base_kernel.shape[0], hidden.shape[-1] // group_size
    projected = torch.nn.functional.linear(hidden, weight)
    dynamic = projected.view(*hidden.shape[:-1], 2, taps, groups)
    return grouped_conv(hidden, base_kernel, dynamic[:, :, 0], group_size=group_size), dynamic[:, :, 1]

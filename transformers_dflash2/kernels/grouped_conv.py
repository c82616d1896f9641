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
"""Grouped dynamic causal convolution, see [`functional_dflash2.grouped_conv`].

One program computes up to 1024 channels of one output row. Every coefficient and value is read under the mask "this
tap stays inside the block", so what lies before a block's start is never touched, finite or not.
"""

import torch
import triton
import triton.language as tl

from .dispatch import FLOAT_DTYPES, device_reason, next_power_of_2, out_reason, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = ["grouped_conv_ineligible_reason", "grouped_conv_op", "grouped_conv_triton"]

_MAX_BLOCK_CHANNELS = 1024
# A thread that adds up parts takes fewer channels where there are few rows.
_MAX_BLOCK_CHANNELS_OF_PARTS = 128
_FEW_ROWS = 16


@triton.jit
def _grouped_conv_kernel(
    hidden_ptr,
    base_ptr,
    dynamic_ptr,
    residual_ptr,
    out_ptr,
    block,
    hidden_size,
    group_size,
    hidden_batch_stride,
    hidden_row_stride,
    base_tap_stride,
    dynamic_part_stride,
    dynamic_batch_stride,
    dynamic_row_stride,
    dynamic_tap_stride,
    dynamic_group_stride,
    residual_batch_stride,
    residual_row_stride,
    HAS_RESIDUAL: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    batch = row // block
    position = row % block
    channels = tl.program_id(1).to(tl.int64) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = channels < hidden_size
    groups = channels // group_size
    hidden_row = hidden_ptr + batch * hidden_batch_stride + position * hidden_row_stride + channels
    dynamic_row = (
        dynamic_ptr + batch * dynamic_batch_stride + position * dynamic_row_stride + groups * dynamic_group_stride
    )
    total = tl.zeros([BLOCK_CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        # `!= 0`: triton 3.9's interpreter refuses the integer mask that a scalar condition makes of it.
        fires = (inside & (position >= tap)) != 0
        values = tl.load(hidden_row - tap * hidden_row_stride, mask=fires, other=0.0).to(tl.float32)
        base = tl.load(base_ptr + tap * base_tap_stride + channels, mask=fires, other=0.0).to(tl.float32)
        dynamic = tl.load(dynamic_row + tap * dynamic_tap_stride, mask=fires, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            share = dynamic_row + part * dynamic_part_stride + tap * dynamic_tap_stride
            dynamic += tl.load(share, mask=fires, other=0.0)
        if HAS_PARTS:
            dynamic = dynamic.to(out_ptr.dtype.element_ty).to(tl.float32)
        total += (base + dynamic) * values
    result = total.to(out_ptr.dtype.element_ty)
    if HAS_RESIDUAL:
        residual = residual_ptr + batch * residual_batch_stride + position * residual_row_stride + channels
        result = (tl.load(residual, mask=inside, other=0.0).to(tl.float32) + result.to(tl.float32)).to(result.dtype)
    tl.store(out_ptr + row * hidden_size + channels, result, mask=inside)


def grouped_conv_ineligible_reason(
    hidden: torch.Tensor,
    base_kernel: torch.Tensor,
    dynamic_kernel: torch.Tensor,
    *,
    group_size: int,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> str | None:
    """Why [`grouped_conv_triton`] cannot take these arguments, or `None`."""
    reason = (
        device_reason(hidden=hidden, base_kernel=base_kernel, dynamic_kernel=dynamic_kernel, residual=residual)
        or tensor_reason("hidden", hidden, shape=(None, None, None), dtypes=FLOAT_DTYPES)
        or tensor_reason("base_kernel", base_kernel, shape=(None, hidden.shape[2]), dtypes=FLOAT_DTYPES)
    )
    if reason is not None:
        return reason
    batch, block, hidden_size = hidden.shape
    taps = base_kernel.shape[0]
    if taps < 1:
        return "base_kernel has no taps; the convolution needs one at least"
    if group_size < 1 or hidden_size % group_size:
        return f"group_size={group_size} does not divide hidden_size={hidden_size}; choose a divisor"
    shape, dtypes = (batch, block, taps, hidden_size // group_size), FLOAT_DTYPES
    if dynamic_kernel.dim() == 5:
        shape, dtypes = (None, *shape), (torch.float32,)
    reason = tensor_reason("dynamic_kernel", dynamic_kernel, shape=shape, dtypes=dtypes, unit_stride=False)
    if reason is None and residual is not None:
        reason = tensor_reason("residual", residual, shape=(batch, block, hidden_size), dtypes=(hidden.dtype,))
    if reason is None and out is not None:
        reason = out_reason("out", out, hidden, shape=(batch, block, hidden_size), dtype=hidden.dtype)
    return reason


def grouped_conv_triton(
    hidden: torch.Tensor,
    base_kernel: torch.Tensor,
    dynamic_kernel: torch.Tensor,
    *,
    group_size: int,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Grouped dynamic causal convolution in one launch; arguments of [`functional_dflash2.grouped_conv`].

    Args:
        hidden (`torch.Tensor` of shape `(batch, block, hidden_size)`):
            Rows to mix; adjacent channels, otherwise any strides.
        base_kernel (`torch.Tensor` of shape `(taps, hidden_size)`):
            Learned coefficients.
        dynamic_kernel (`torch.Tensor` of shape `(batch, block, taps, hidden_size // group_size)`):
            Coefficients of each output row and group; any strides. With a dimension of parts before all others: fp32
            sums whose total, rounded to the dtype of `hidden`, are the coefficients.
        group_size (`int`):
            Channels per group.
        residual (`torch.Tensor` of shape `(batch, block, hidden_size)`, *optional*):
            Added to the rounded result, in the dtype of `hidden`; adjacent channels, otherwise any strides.
        out (`torch.Tensor` of shape `(batch, block, hidden_size)`, *optional*):
            Buffer for the result; must not overlap `hidden`, may be `residual` itself.

    Returns:
        `torch.Tensor` of shape `(batch, block, hidden_size)` in the dtype of `hidden`, rounded once from fp32.
    """
    reason = grouped_conv_ineligible_reason(
        hidden, base_kernel, dynamic_kernel, group_size=group_size, residual=residual, out=out
    )
    if reason is not None:
        raise ValueError(f"grouped_conv_triton: {reason}")
    batch, block, hidden_size = hidden.shape
    if out is None:
        out = torch.empty((batch, block, hidden_size), dtype=hidden.dtype, device=hidden.device)
    if out.numel() == 0:
        return out
    parts = dynamic_kernel.shape[0] if dynamic_kernel.dim() == 5 else 1
    if parts == 1:
        widest = _MAX_BLOCK_CHANNELS
    else:
        widest = _MAX_BLOCK_CHANNELS_OF_PARTS * (1 if batch * block <= _FEW_ROWS else 4)
    block_channels = min(next_power_of_2(hidden_size), widest)
    with torch.cuda.device_of(hidden):
        _grouped_conv_kernel[(batch * block, triton.cdiv(hidden_size, block_channels))](
            hidden,
            base_kernel,
            dynamic_kernel,
            out if residual is None else residual,
            out,
            block,
            hidden_size,
            group_size,
            hidden.stride(0),
            hidden.stride(1),
            base_kernel.stride(0),
            *((0,) if dynamic_kernel.dim() == 4 else ()),
            *dynamic_kernel.stride(),
            *((0, 0) if residual is None else residual.stride()[:2]),
            HAS_RESIDUAL=residual is not None,
            HAS_PARTS=dynamic_kernel.dim() == 5,
            PARTS=parts,
            TAPS=base_kernel.shape[0],
            BLOCK_CHANNELS=block_channels,
            num_warps=4,
            **overlap_options(hidden.device),
        )
    return out


@torch.library.custom_op("transformers_dflash2::grouped_conv", mutates_args=())
def grouped_conv_op(
    hidden: torch.Tensor,
    base_kernel: torch.Tensor,
    dynamic_kernel: torch.Tensor,
    group_size: int,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """[`grouped_conv_triton`] for `torch.compile`."""
    return grouped_conv_triton(hidden, base_kernel, dynamic_kernel, group_size=group_size, residual=residual)


@grouped_conv_op.register_fake
def _(hidden, base_kernel, dynamic_kernel, group_size, residual=None):
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)

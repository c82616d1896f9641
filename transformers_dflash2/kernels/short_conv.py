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
"""Depthwise causal convolution over a few tokens, with its activation, in one launch.

    out[:, :, t] = round(silu(round(bias + sum over k of weight[:, k] * hidden[:, :, t - taps + 1 + k])))

with `round` to the dtype of `hidden`, everything else in fp32 and zeros before the first column. One program computes
a tile of channels and columns of one row. Channels of one column are neighbours in the result's memory, so that what
follows it in a layer, which wants tokens in front of channels, reads a plain view.
"""

import torch
import triton
import triton.language as tl

from .dispatch import FLOAT_DTYPES, device_reason, next_power_of_2, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = ["short_conv_ineligible_reason", "short_conv_op", "short_conv_reference", "short_conv_triton"]

_BLOCK_CHANNELS = 64
_MAX_BLOCK_COLUMNS = 16
# The loop over taps is unrolled.
_MAX_TAPS = 16


@triton.jit
def _short_conv_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    channels,
    width,
    hidden_row_stride,
    hidden_channel_stride,
    hidden_column_stride,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1).to(tl.int64) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    column = tl.program_id(2).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    has_channel = channel < channels
    inside = (column < width)[:, None] & has_channel[None, :]
    dtype = out_ptr.dtype.element_ty
    base = hidden_ptr + row * hidden_row_stride + channel[None, :] * hidden_channel_stride
    total = tl.zeros([BLOCK_COLUMNS, BLOCK_CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = column - (TAPS - 1) + tap
        values = tl.load(
            base + source[:, None] * hidden_column_stride, mask=inside & (source >= 0)[:, None], other=0.0
        ).to(tl.float32)
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=has_channel, other=0.0).to(tl.float32)
        total += weight[None, :] * values
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=has_channel, other=0.0).to(tl.float32)[None, :]
    result = total.to(dtype)
    if HAS_SILU:
        values = result.to(tl.float32)
        result = (values / (1.0 + tl.exp(-values))).to(dtype)
    tl.store(out_ptr + (row * width + column[:, None]) * channels + channel[None, :], result, mask=inside)


def short_conv_ineligible_reason(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None
) -> str | None:
    """Why [`short_conv_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(hidden=hidden, weight=weight, bias=bias) or tensor_reason(
        "hidden", hidden, shape=(None, None, None), dtypes=FLOAT_DTYPES, unit_stride=False
    )
    if reason is None:
        reason = tensor_reason("weight", weight, shape=(hidden.shape[1], None), dtypes=(hidden.dtype,))
    if reason is None and not weight.is_contiguous():
        reason = f"weight has strides {weight.stride()}; make it contiguous"
    if reason is None and not 1 <= weight.shape[1] <= _MAX_TAPS:
        reason = f"weight has {weight.shape[1]} taps; 1 to {_MAX_TAPS} are supported"
    if reason is None and bias is not None:
        reason = tensor_reason("bias", bias, shape=(hidden.shape[1],), dtypes=(hidden.dtype,))
    if reason is None and activation not in (None, "silu", "swish"):
        reason = f"activation={activation!r}; the kernel has None and 'silu'"
    return reason


def short_conv_triton(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None
) -> torch.Tensor:
    """
    Every channel convolved over its columns with a kernel of its own.

    Args:
        hidden (`torch.Tensor` of shape `(rows, channels, width)`):
            Columns of tokens, in any layout.
        weight (`torch.Tensor` of shape `(channels, taps)`):
            Contiguous, in the dtype of `hidden`; the last tap meets the column itself.
        bias (`torch.Tensor` of shape `(channels,)`, *optional*):
            In the dtype of `hidden`.
        activation (`str`, *optional*):
            `"silu"`, which is also called `"swish"`.

    Returns:
        `torch.Tensor` of the shape and dtype of `hidden`, whose `transpose(1, 2)` is contiguous.
    """
    reason = short_conv_ineligible_reason(hidden, weight, bias, activation=activation)
    if reason is not None:
        raise ValueError(f"short_conv_triton: {reason}")
    rows, channels, width = hidden.shape
    out = torch.empty(rows, width, channels, dtype=hidden.dtype, device=hidden.device)
    if out.numel():
        columns = min(next_power_of_2(width), _MAX_BLOCK_COLUMNS)
        grid = (rows, triton.cdiv(channels, _BLOCK_CHANNELS), triton.cdiv(width, columns))
        with torch.cuda.device_of(hidden):
            _short_conv_kernel[grid](
                hidden,
                weight,
                hidden if bias is None else bias,
                out,
                channels,
                width,
                *hidden.stride(),
                HAS_BIAS=bias is not None,
                HAS_SILU=activation is not None,
                TAPS=weight.shape[1],
                BLOCK_CHANNELS=_BLOCK_CHANNELS,
                BLOCK_COLUMNS=columns,
                num_warps=4,
                **overlap_options(hidden.device),
            )
    return out.transpose(1, 2)


def short_conv_reference(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None
) -> torch.Tensor:
    """The same in plain PyTorch; arguments of [`short_conv_triton`]."""
    channels, taps = weight.shape
    out = torch.nn.functional.conv1d(hidden, weight[:, None], bias, padding=taps - 1, groups=channels)
    out = out[:, :, : hidden.shape[2]]
    return out if activation is None else torch.nn.functional.silu(out)


@torch.library.custom_op("transformers_dflash2::short_conv", mutates_args=())
def short_conv_op(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """[`short_conv_triton`] for `torch.compile`."""
    return short_conv_triton(hidden, weight, bias, activation=activation)


@short_conv_op.register_fake
def _(hidden, weight, bias=None, activation=None):
    rows, channels, width = hidden.shape
    return hidden.new_empty(rows, width, channels).transpose(1, 2)

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
"""Residual addition and RMS norm in one launch, rounding where the host's own modules round.

    summed = round(hidden + residual)
    normed = round(weight * round(summed * rsqrt(mean(summed ** 2) + eps)))

or, for norms whose weight is what is added to one,

    normed = round((1 + weight) * summed * rsqrt(mean(summed ** 2) + eps))

with `round` to the dtype of `hidden` and everything else in fp32. One program handles one row.
"""

import torch
import triton
import triton.language as tl

from .dispatch import FLOAT_DTYPES, device_reason, next_power_of_2, out_reason, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = ["add_rms_norm_op", "rms_norm_ineligible_reason", "rms_norm_op", "rms_norm_reference", "rms_norm_triton"]

# A row is held in registers.
_MAX_HIDDEN_SIZE = 65536


@triton.jit
def _rms_norm_kernel(
    hidden_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    summed_ptr,
    hidden_size,
    eps,
    hidden_row_stride,
    residual_row_stride,
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    dtype = normed_ptr.dtype.element_ty
    values = tl.load(hidden_ptr + row * hidden_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        summed = (values + residual).to(dtype)
        tl.store(summed_ptr + row * hidden_size + columns, summed, mask=inside)
        values = summed.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / hidden_size
    scaled = values * tl.rsqrt(mean + tl.cast(eps, tl.float32))
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        normed = (1.0 + weight) * scaled
    else:
        normed = weight * scaled.to(dtype).to(tl.float32)
    tl.store(normed_ptr + row * hidden_size + columns, normed.to(dtype), mask=inside)


def rms_norm_ineligible_reason(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    unit_offset: bool = False,
    residual: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> str | None:
    """Why [`rms_norm_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(hidden=hidden, weight=weight, residual=residual)
    if reason is not None:
        return reason
    if hidden.dim() < 1 or not 1 <= hidden.shape[-1] <= _MAX_HIDDEN_SIZE:
        return f"hidden has shape {tuple(hidden.shape)}; rows of 1 to {_MAX_HIDDEN_SIZE} values are supported"
    same = (hidden.dtype,)
    reason = tensor_reason("hidden", hidden, shape=hidden.shape, dtypes=FLOAT_DTYPES) or tensor_reason(
        "weight", weight, shape=hidden.shape[-1:], dtypes=same
    )
    if reason is None and residual is not None:
        reason = tensor_reason("residual", residual, shape=hidden.shape, dtypes=same)
    for name, tensor in (("hidden", hidden), ("residual", residual)):
        if reason is None and tensor is not None and _row_stride(tensor) is None:
            reason = f"{name} has strides {tensor.stride()}, which are no sequence of rows; make it contiguous"
    if reason is None and out is not None:
        for index, buffer in enumerate(out[: 1 if residual is None else 2]):
            reason = reason or out_reason(
                f"out[{index}]", buffer, hidden, shape=tuple(hidden.shape), dtype=hidden.dtype
            )
    return reason


def rms_norm_triton(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    unit_offset: bool = False,
    residual: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    RMS norm over the last dimension, after an optional residual addition.

    Args:
        hidden (`torch.Tensor` of shape `(..., hidden_size)`):
            Rows at one common distance.
        weight (`torch.Tensor` of shape `(hidden_size,)`):
            The norm's weight, in the dtype of `hidden`.
        eps (`float`):
            Added to the mean square.
        unit_offset (`bool`, *optional*, defaults to `False`):
            Whether rows are scaled by `1 + weight`, with one rounding at the end.
        residual (`torch.Tensor` of shape `(..., hidden_size)`, *optional*):
            Added to `hidden` first.
        out (`tuple` of `torch.Tensor`, *optional*):
            Buffers for `(normed, summed)`, each of the shape of `hidden`. Either may be `hidden` or `residual` itself.
            Without a residual only the first is used.

    Returns:
        `(normed, summed)`; without a residual the second is `hidden` itself.
    """
    reason = rms_norm_ineligible_reason(hidden, weight, eps=eps, residual=residual, out=out)
    if reason is not None:
        raise ValueError(f"rms_norm_triton: {reason}")
    if out is None:
        normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        summed = hidden if residual is None else torch.empty_like(normed)
    else:
        normed, summed = out[0], hidden if residual is None else out[1]
    if normed.numel() == 0:
        return normed, summed
    hidden_size = hidden.shape[-1]
    block = next_power_of_2(hidden_size)
    with torch.cuda.device_of(hidden):
        _rms_norm_kernel[(hidden.numel() // hidden_size,)](
            hidden,
            hidden if residual is None else residual,
            weight,
            normed,
            summed,
            hidden_size,
            eps,
            _row_stride(hidden),
            _row_stride(hidden if residual is None else residual),
            HAS_RESIDUAL=residual is not None,
            UNIT_OFFSET=unit_offset,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **overlap_options(hidden.device),
        )
    return normed, summed


def rms_norm_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    unit_offset: bool = False,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain PyTorch; arguments of [`rms_norm_triton`]."""
    summed = hidden if residual is None else hidden + residual
    values = summed.float()
    scaled = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    if unit_offset:
        return (scaled * (1.0 + weight.float())).to(hidden.dtype), summed
    return weight * scaled.to(hidden.dtype), summed


def _row_stride(tensor: torch.Tensor) -> int | None:
    """The distance of consecutive rows when all leading dimensions are one sequence of them, else `None`."""
    stride = None
    expected = None
    for size, step in reversed(list(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))):
        if size == 1:
            continue
        if stride is None:
            stride = expected = step
        elif step != expected:
            return None
        expected *= size
    return tensor.shape[-1] if stride is None else stride


@torch.library.custom_op("transformers_dflash2::rms_norm", mutates_args=())
def rms_norm_op(hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """[`rms_norm_triton`] without a residual, for `torch.compile`."""
    return rms_norm_triton(hidden, weight, eps=eps, unit_offset=unit_offset)[0]


@rms_norm_op.register_fake
def _(hidden, weight, eps, unit_offset=False):
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)


@torch.library.custom_op("transformers_dflash2::add_rms_norm", mutates_args=())
def add_rms_norm_op(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`rms_norm_triton`] with a residual, for `torch.compile`."""
    return rms_norm_triton(hidden, weight, eps=eps, unit_offset=unit_offset, residual=residual)


@add_rms_norm_op.register_fake
def _(hidden, residual, weight, eps, unit_offset=False):
    return tuple(torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) for _ in range(2))

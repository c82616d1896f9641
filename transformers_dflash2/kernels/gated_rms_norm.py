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
"""RMS norm of a recurrence's output and the gate behind it, in one launch instead of nine.

    normed = round(weight * round(hidden * rsqrt(mean(hidden ** 2) + eps)))
    out = round(normed * gate / (1 + exp(-gate)))

with `round` to the dtype of `hidden` and everything else in fp32, as the gated norm of Qwen3-Next and its relatives
rounds. One program handles one row, which is one head of one token.
"""

import torch
import triton
import triton.language as tl

from .dispatch import FLOAT_DTYPES, device_reason, next_power_of_2, out_reason, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = [
    "gated_rms_norm_ineligible_reason",
    "gated_rms_norm_op",
    "gated_rms_norm_reference",
    "gated_rms_norm_triton",
]

# A row is held in registers.
_MAX_HIDDEN_SIZE = 16384


@triton.jit
def _gated_rms_norm_kernel(
    hidden_ptr, gate_ptr, weight_ptr, out_ptr, hidden_size, eps, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    wait_for_inputs(OVERLAPS)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    offsets = tl.program_id(0).to(tl.int64) * hidden_size + columns
    dtype = out_ptr.dtype.element_ty
    hidden = tl.load(hidden_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(hidden * hidden, axis=0) / hidden_size
    scaled = (hidden * tl.rsqrt(mean + tl.cast(eps, tl.float32))).to(dtype).to(tl.float32)
    normed = (weight * scaled).to(dtype).to(tl.float32)
    tl.store(out_ptr + offsets, (normed * (gate / (1.0 + tl.exp(-gate)))).to(dtype), mask=inside)


def gated_rms_norm_ineligible_reason(
    hidden: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> str | None:
    """Why [`gated_rms_norm_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(hidden=hidden, gate=gate, weight=weight)
    if reason is not None:
        return reason
    if hidden.dim() < 1 or not 1 <= hidden.shape[-1] <= _MAX_HIDDEN_SIZE:
        return f"hidden has shape {tuple(hidden.shape)}; rows of 1 to {_MAX_HIDDEN_SIZE} values are supported"
    same = (hidden.dtype,)
    reason = (
        tensor_reason("hidden", hidden, shape=hidden.shape, dtypes=FLOAT_DTYPES)
        or tensor_reason("gate", gate, shape=hidden.shape, dtypes=same)
        or tensor_reason("weight", weight, shape=hidden.shape[-1:], dtypes=same)
    )
    for name, tensor in (("hidden", hidden), ("gate", gate)):
        if reason is None and not tensor.is_contiguous():
            reason = f"{name} has strides {tensor.stride()}; make it contiguous"
    if reason is None and out is not None:
        reason = out_reason("out", out, hidden, shape=tuple(hidden.shape), dtype=hidden.dtype)
    return reason


def gated_rms_norm_triton(
    hidden: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """
    RMS norm over the last dimension, times the activated gate.

    Args:
        hidden (`torch.Tensor` of shape `(..., hidden_size)`):
            Contiguous rows to normalise.
        gate (`torch.Tensor` of shape `(..., hidden_size)`):
            Contiguous values before the activation, in the dtype of `hidden`.
        weight (`torch.Tensor` of shape `(hidden_size,)`):
            The norm's weight, in the dtype of `hidden`.
        eps (`float`):
            Added to the mean square.
        out (`torch.Tensor` of shape `(..., hidden_size)`, *optional*):
            Buffer for the result; may be `hidden` or `gate` itself.

    Returns:
        `torch.Tensor` of the shape and dtype of `hidden`.
    """
    reason = gated_rms_norm_ineligible_reason(hidden, gate, weight, eps=eps, out=out)
    if reason is not None:
        raise ValueError(f"gated_rms_norm_triton: {reason}")
    out = torch.empty_like(hidden) if out is None else out
    if out.numel() == 0:
        return out
    hidden_size = hidden.shape[-1]
    block = next_power_of_2(hidden_size)
    with torch.cuda.device_of(hidden):
        _gated_rms_norm_kernel[(hidden.numel() // hidden_size,)](
            hidden,
            gate,
            weight,
            out,
            hidden_size,
            eps,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 8),
            **overlap_options(hidden.device),
        )
    return out


def gated_rms_norm_reference(
    hidden: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """The same in plain PyTorch; arguments of [`gated_rms_norm_triton`]."""
    values = hidden.float()
    scaled = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (weight * scaled.to(hidden.dtype) * torch.nn.functional.silu(gate.float())).to(hidden.dtype)


@torch.library.custom_op("transformers_dflash2::gated_rms_norm", mutates_args=())
def gated_rms_norm_op(hidden: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[`gated_rms_norm_triton`] for `torch.compile`."""
    return gated_rms_norm_triton(hidden, gate, weight, eps=eps)


@gated_rms_norm_op.register_fake
def _(hidden, gate, weight, eps):
    return torch.empty_like(hidden)

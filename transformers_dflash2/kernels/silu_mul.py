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
"""`silu(gate) * up`, the middle of a gated feed-forward, in one launch instead of two.

    out = round(round(gate / (1 + exp(-gate))) * up)

with `round` to the dtype of `gate` and everything else in fp32, as the host's two operations round.
"""

import torch
import triton
import triton.language as tl

from .dispatch import FLOAT_DTYPES, device_reason, out_reason, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = ["silu_mul_ineligible_reason", "silu_mul_op", "silu_mul_reference", "silu_mul_triton"]

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, size, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_inputs(OVERLAPS)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + offsets, (activated * up).to(dtype), mask=inside)


def silu_mul_ineligible_reason(gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None) -> str | None:
    """Why [`silu_mul_triton`] cannot take these arguments, or `None`."""
    reason = (
        device_reason(gate=gate, up=up)
        or tensor_reason("gate", gate, shape=gate.shape, dtypes=FLOAT_DTYPES)
        or tensor_reason("up", up, shape=gate.shape, dtypes=(gate.dtype,))
    )
    for name, tensor in (("gate", gate), ("up", up)):
        if reason is None and not tensor.is_contiguous():
            reason = f"{name} has strides {tensor.stride()}; make it contiguous"
    if reason is None and out is not None:
        reason = out_reason("out", out, gate, shape=tuple(gate.shape), dtype=gate.dtype)
    return reason


def silu_mul_triton(gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """
    The activated gate times `up`.

    Args:
        gate (`torch.Tensor` of any shape):
            Contiguous values before the activation.
        up (`torch.Tensor` of the same shape):
            What they gate, contiguous, in the dtype of `gate`.
        out (`torch.Tensor` of the same shape, *optional*):
            Buffer for the result; may be `gate` or `up` itself.

    Returns:
        `torch.Tensor` of the shape and dtype of `gate`.
    """
    reason = silu_mul_ineligible_reason(gate, up, out=out)
    if reason is not None:
        raise ValueError(f"silu_mul_triton: {reason}")
    out = torch.empty_like(gate) if out is None else out
    size = gate.numel()
    if size:
        with torch.cuda.device_of(gate):
            _silu_mul_kernel[(triton.cdiv(size, _BLOCK),)](
                gate, up, out, size, BLOCK=_BLOCK, num_warps=4, **overlap_options(gate.device)
            )
    return out


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch; arguments of [`silu_mul_triton`]."""
    return torch.nn.functional.silu(gate) * up


@torch.library.custom_op("transformers_dflash2::silu_mul", mutates_args=())
def silu_mul_op(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[`silu_mul_triton`] for `torch.compile`."""
    return silu_mul_triton(gate, up)


@silu_mul_op.register_fake
def _(gate, up):
    return torch.empty_like(gate)

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
"""Cosines and sines of rotary positions, in one launch instead of a dozen.

    angle = float(position) * float(inv_freq)
    row = [cos | cos | sin | sin],    cos = round(cos(angle) * scaling),    sin = round(sin(angle) * scaling)

in fp32, with `round` to the dtype asked for, as Llama's rotary module computes them. Each of the four parts has an
angle per pair of channels: the first two parts are the host's `cos` and the last two its `sin`, which repeat for both
halves of a head, and the two in the middle are the row of a table that [`qk_norm_rope`] and [`context_kv`] read. One
program handles one position.
"""

import torch
import triton
import triton.language as tl

from .dispatch import FLOAT_DTYPES, INTEGER_DTYPES, device_reason, next_power_of_2, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = [
    "cos_sin_table",
    "rotary_embedding_ineligible_reason",
    "rotary_embedding_op",
    "rotary_embedding_reference",
    "rotary_embedding_triton",
]


@triton.jit
def _rotary_embedding_kernel(
    position_ptr,
    inv_freq_ptr,
    out_ptr,
    block,
    scaling,
    position_row_stride,
    position_stride,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    place = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + place // block * position_row_stride + place % block * position_stride)
    columns = tl.arange(0, BLOCK_HALF)
    inside = columns < HALF
    inv_freq = tl.load(inv_freq_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    # Positions in the hundred thousands make angles that large: both functions reduce them exactly.
    angle = position.to(tl.float32) * inv_freq
    dtype = out_ptr.dtype.element_ty
    cos = (tl.cos(angle) * tl.cast(scaling, tl.float32)).to(dtype)
    sin = (tl.sin(angle) * tl.cast(scaling, tl.float32)).to(dtype)
    row_ptr = out_ptr + place * (4 * HALF) + columns
    tl.store(row_ptr, cos, mask=inside)
    tl.store(row_ptr + HALF, cos, mask=inside)
    tl.store(row_ptr + 2 * HALF, sin, mask=inside)
    tl.store(row_ptr + 3 * HALF, sin, mask=inside)


def rotary_embedding_ineligible_reason(
    positions: torch.Tensor, inv_freq: torch.Tensor, *, scaling: float, dtype: torch.dtype
) -> str | None:
    """Why [`rotary_embedding_triton`] cannot take these arguments, or `None`."""
    reason = (
        device_reason(positions=positions, inv_freq=inv_freq)
        or tensor_reason("positions", positions, shape=(None, None), dtypes=INTEGER_DTYPES, unit_stride=False)
        or tensor_reason("inv_freq", inv_freq, shape=(None,), dtypes=FLOAT_DTYPES)
    )
    if reason is None and inv_freq.numel() == 0:
        reason = "inv_freq is empty; a rotation needs at least one frequency"
    if reason is None and dtype not in FLOAT_DTYPES:
        accepted = ", ".join(str(accepted).removeprefix("torch.") for accepted in FLOAT_DTYPES)
        reason = f"dtype is {str(dtype).removeprefix('torch.')}; ask for one of: {accepted}"
    return reason


def rotary_embedding_triton(
    positions: torch.Tensor, inv_freq: torch.Tensor, *, scaling: float, dtype: torch.dtype
) -> torch.Tensor:
    """
    Cosines and sines of the angles of each position.

    Args:
        positions (`torch.Tensor` of shape `(batch, block)`):
            int32 or int64: absolute positions; any strides.
        inv_freq (`torch.Tensor` of shape `(half,)`):
            Angle per position of each pair of channels.
        scaling (`float`):
            Factor of cosines and sines.
        dtype (`torch.dtype`):
            What the result is rounded to: float32, float16 or bfloat16.

    Returns:
        `torch.Tensor` of shape `(batch, block, 4 * half)` and `dtype`, contiguous: `cos` of `2 * half` channels, then
        `sin` of as many; see [`cos_sin_table`] for what lies in the middle.
    """
    reason = rotary_embedding_ineligible_reason(positions, inv_freq, scaling=scaling, dtype=dtype)
    if reason is not None:
        raise ValueError(f"rotary_embedding_triton: {reason}")
    half = inv_freq.shape[0]
    out = torch.empty((*positions.shape, 4 * half), dtype=dtype, device=positions.device)
    if positions.numel() == 0:
        return out
    block_half = next_power_of_2(half)
    with torch.cuda.device_of(positions):
        _rotary_embedding_kernel[(positions.numel(),)](
            positions,
            inv_freq,
            out,
            positions.shape[1],
            float(scaling),
            *positions.stride(),
            HALF=half,
            BLOCK_HALF=block_half,
            num_warps=min(max(block_half // 32, 1), 4),
            **overlap_options(positions.device),
        )
    return out


def rotary_embedding_reference(
    positions: torch.Tensor, inv_freq: torch.Tensor, *, scaling: float, dtype: torch.dtype
) -> torch.Tensor:
    """The same in plain PyTorch; arguments of [`rotary_embedding_triton`]."""
    angles = positions[..., None].float() * inv_freq.float()
    cos, sin = ((function(angles) * scaling).to(dtype) for function in (torch.cos, torch.sin))
    return torch.cat([cos, cos, sin, sin], dim=-1)


def cos_sin_table(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """
    Cosines of half a head, then its sines, for position embeddings that repeat for both halves.

    Args:
        cos (`torch.Tensor` of shape `(batch, block, head_dim)`): Cosines.
        sin (`torch.Tensor` of shape `(batch, block, head_dim)`): Sines.

    Returns:
        `torch.Tensor` of shape `(batch, block, head_dim)`: a view of memory in which `sin` lies right behind `cos`, as
        [`rotary_embedding_triton`] leaves them; else a copy.
    """
    half, step = cos.shape[-1] // 2, cos.stride(-1)
    if (
        cos.untyped_storage().data_ptr() == sin.untyped_storage().data_ptr()
        and sin.storage_offset() == cos.storage_offset() + 2 * half * step
        and (sin.shape, sin.stride()) == (cos.shape, cos.stride())
    ):
        return cos.as_strided(cos.shape, cos.stride(), cos.storage_offset() + half * step)
    return torch.cat([cos[..., :half], sin[..., :half]], dim=-1)


@torch.library.custom_op("transformers_dflash2::rotary_embedding", mutates_args=())
def rotary_embedding_op(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> torch.Tensor:
    """[`rotary_embedding_triton`] for `torch.compile`."""
    return rotary_embedding_triton(positions, inv_freq, scaling=scaling, dtype=dtype)


@rotary_embedding_op.register_fake
def _(positions, inv_freq, scaling, dtype):
    return positions.new_empty((*positions.shape, 4 * inv_freq.shape[0]), dtype=dtype)

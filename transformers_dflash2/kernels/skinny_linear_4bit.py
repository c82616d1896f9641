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
"""Products of a few rows with 4-bit weights as bitsandbytes stores them, at the rate of memory.

    scale   = absmax[i]                                              one for `block_size` consecutive entries
            = nested_code[absmax[i]] * nested_absmax[i // 256] + nested_offset      where absmax is quantised as well
    weight  = round(code[index] * scale)
    out     = round(x weight^T), and then round(out + residual)

For more than a few rows, the library writes the whole weight out in the dtype of `x` and multiplies with that: four
times the packed bytes, written and read again. Here a program owns a few output features, streams their packed entries
through shared memory and decodes them step by step. As in [`skinny_linear`], nothing is added up across programs.

Decoding is most of the work, so entries are read as words of eight, and looked up with `tl.gather`: its table lies in
shared memory, where 16 entries have a bank each. A table that is read with `tl.load` would be taken for one more
operand to stream.

Weights are decoded in fp32 and rounded to the dtype of `x`, as the library's are; sums are in fp32.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .dispatch import device_reason, is_interpreting, next_power_of_2, tensor_reason
from .overlap import overlap_options, wait_for_inputs
from .skinny_linear import MAX_ROWS, device_limits


__all__ = ["skinny_linear_4bit_ineligible_reason", "skinny_linear_4bit_reference", "skinny_linear_4bit_triton"]

# Every program's share of the output features divides by it.
_FEATURES_MULTIPLE = 32
_DTYPES = (torch.float16, torch.bfloat16)
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
# Entries of a quantised absmax that share a scale; the library has no other.
_NESTED_BLOCK_SIZE = 256


@triton.jit
def _skinny_linear_4bit_kernel(
    x_ptr,
    packed_ptr,
    absmax_ptr,
    code_ptr,
    nested_code_ptr,
    nested_absmax_ptr,
    nested_offset_ptr,
    residual_ptr,
    out_ptr,
    rows,
    x_stride,
    residual_stride,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NESTED_BLOCK_SIZE: tl.constexpr,
    IS_NESTED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IN_FP32: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    # Entries of a step that share a scale.
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    feature = (tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)).to(tl.int64)
    row = tl.arange(0, ROWS)
    step = tl.arange(0, BLOCK_IN)
    word = tl.arange(0, BLOCK_IN // 8)
    group = tl.arange(0, BLOCK_IN // GROUP)
    is_row = row < rows
    x_ptrs = x_ptr + row[:, None] * x_stride + step[None, :]
    packed_ptrs = packed_ptr + feature[:, None] * (IN_FEATURES // 8) + word[None, :]
    code = tl.load(code_ptr + tl.arange(0, 16))
    if IS_NESTED:
        nested_code = tl.load(nested_code_ptr + tl.arange(0, 256))
        nested_offset = tl.load(nested_offset_ptr)
    sums = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_IN):
        blocks = feature[:, None] * (IN_FEATURES // BLOCK_SIZE) + (start // BLOCK_SIZE + group)[None, :]
        if IN_FEATURES % BLOCK_IN == 0:
            x = tl.load(x_ptrs + start, mask=is_row[:, None], other=0.0)
            words = tl.load(packed_ptrs + start // 8, eviction_policy="evict_first")
            absmax = tl.load(absmax_ptr + blocks)
        else:
            x = tl.load(x_ptrs + start, mask=is_row[:, None] & (start + step < IN_FEATURES)[None, :], other=0.0)
            words = tl.load(packed_ptrs + start // 8, mask=(start + word * 8 < IN_FEATURES)[None, :], other=0)
            is_block = (start + group * GROUP < IN_FEATURES)[None, :]
            absmax = tl.load(absmax_ptr + blocks, mask=is_block, other=0)
        if IS_NESTED:
            scales = nested_absmax_ptr + blocks // NESTED_BLOCK_SIZE
            if IN_FEATURES % BLOCK_IN == 0:
                scale = tl.load(scales)
            else:
                scale = tl.load(scales, mask=is_block, other=0.0)
            index = absmax.to(tl.int32).reshape(BLOCK_OUT * (BLOCK_IN // GROUP))
            absmax = tl.gather(nested_code, index, 0).reshape(BLOCK_OUT, BLOCK_IN // GROUP) * scale + nested_offset
        # Bytes in the order of memory, and of each its high half before its low one.
        halves = tl.join(tl.join(words, words >> 16), tl.join(words >> 8, words >> 24))
        index = tl.join(halves >> 4, halves).reshape(BLOCK_OUT * BLOCK_IN) & 15
        weight = tl.gather(code, index, 0).reshape(BLOCK_OUT, BLOCK_IN // GROUP, GROUP) * absmax[:, :, None]
        weight = weight.to(x.dtype).reshape(BLOCK_OUT, BLOCK_IN)
        if IN_FP32:
            x = x.to(tl.float32)
        sums = tl.dot(x, weight.to(x.dtype).trans(), sums, input_precision="ieee")
    dtype = out_ptr.dtype.element_ty
    result = sums.to(dtype)
    if HAS_RESIDUAL:
        residual = tl.load(
            residual_ptr + row[:, None] * residual_stride + feature[None, :], mask=is_row[:, None], other=0.0
        )
        result = (result.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(out_ptr + row[:, None] * OUT_FEATURES + feature[None, :], result, mask=is_row[:, None])


def skinny_linear_4bit_ineligible_reason(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    *,
    block_size: int,
    out_features: int,
    nested: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    residual: torch.Tensor | None = None,
) -> str | None:
    """Why [`skinny_linear_4bit_triton`] cannot take these arguments, or `None`."""
    names = ("nested_code", "nested_absmax", "nested_offset")
    tables = {"absmax": absmax, "code": code, **dict(zip(names, nested or (), strict=False))}
    reason = device_reason(x=x, packed=packed, **tables, residual=residual) or tensor_reason(
        "x", x, shape=(None, None), dtypes=_DTYPES
    )
    if reason is not None:
        return reason
    rows, in_features = x.shape
    if not 1 <= rows <= MAX_ROWS:
        return f"x has {rows} rows; 1 to {MAX_ROWS} are supported"
    if block_size not in _BLOCK_SIZES:
        return f"block_size is {block_size}; one of {_BLOCK_SIZES} is supported"
    if in_features % block_size:
        return f"x has {in_features} input features, which blocks of {block_size} do not divide"
    if out_features % _FEATURES_MULTIPLE:
        return f"there are {out_features} output features, which {_FEATURES_MULTIPLE} does not divide"
    blocks = out_features * in_features // block_size
    shapes = {
        "absmax": (blocks,),
        "code": (16,),
        "nested_code": (256,),
        "nested_absmax": (-(-blocks // _NESTED_BLOCK_SIZE),),
        "nested_offset": (),
    }
    reason = tensor_reason("packed", packed, shape=(out_features * in_features // 2, 1), dtypes=(torch.uint8,))
    if reason is None and (not packed.is_contiguous() or packed.storage_offset() % 4):
        reason = "packed is not read in words of four bytes where it lies; make it contiguous with clone()"
    for name, tensor in tables.items():
        is_index = name == "absmax" and nested is not None
        dtypes = (torch.uint8,) if is_index else (torch.float32,)
        reason = reason or tensor_reason(name, tensor, shape=shapes[name], dtypes=dtypes)
    if reason is None and residual is not None:
        reason = tensor_reason("residual", residual, shape=(rows, out_features), dtypes=(x.dtype,))
    return reason


@lru_cache(maxsize=256)
def _launch(device: torch.device, rows: int, out_features: int):
    """
    Output features of a program, inputs per step, steps in flight, and warps.

    Measured on an H200, with weights of an 8B model. Decoding sets the pace, so narrow layers are spread over more
    programs, and wide ones share a step's inputs among more features.
    """
    multiprocessors, shared_memory = device_limits(device)
    if out_features // 32 < multiprocessors // 2:
        block_out, block_in = 16, 256
    else:
        is_wide = rows <= 16 and out_features % 64 == 0 and out_features // 64 > 8 * multiprocessors
        block_out, block_in = 64 if is_wide else 32, 128
    # Of the inputs, of packed entries and of their scales, next to one decoded step.
    stage = block_in * (2 * rows + block_out)
    free = shared_memory - 2048 - 2 * block_in * block_out
    return block_out, block_in, max(1, min(5, free // stage)), 4


def skinny_linear_4bit_triton(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    *,
    block_size: int,
    out_features: int,
    nested: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    A few rows times a weight of 4-bit entries.

    Args:
        x (`torch.Tensor` of shape `(rows, in_features)`):
            fp16 or bf16 inputs, up to 64 rows.
        packed (`torch.Tensor` of shape `(out_features * in_features // 2, 1)`):
            uint8; two indices into `code` each, the first one in the high half.
        absmax (`torch.Tensor` of shape `(out_features * in_features // block_size,)`):
            fp32 scales of `block_size` consecutive entries each; with `nested`, uint8 indices into its code.
        code (`torch.Tensor` of shape `(16,)`):
            fp32 values that indices stand for.
        block_size (`int`):
            A power of two from 32 to 4096 that divides `in_features`.
        out_features (`int`):
            Rows of the weight.
        nested (`tuple` of `torch.Tensor`, *optional*):
            How `absmax` is quantised: its code of shape `(256,)`, scales of 256 consecutive entries each, and a scalar
            that is added to all; fp32.
        residual (`torch.Tensor` of shape `(rows, out_features)`, *optional*):
            Added to the product.

    Returns:
        `torch.Tensor` of shape `(rows, out_features)` in the dtype of `x`.
    """
    options = {"block_size": block_size, "out_features": out_features, "nested": nested, "residual": residual}
    reason = skinny_linear_4bit_ineligible_reason(x, packed, absmax, code, **options)
    if reason is not None:
        raise ValueError(f"skinny_linear_4bit_triton: {reason}")
    out = x.new_empty(x.shape[0], out_features)
    rows = max(16, next_power_of_2(x.shape[0]))
    block_out, block_in, num_stages, num_warps = _launch(x.device, rows, out_features)
    with torch.cuda.device_of(x):
        _skinny_linear_4bit_kernel[(out_features // block_out,)](
            x,
            packed.view(-1).view(torch.int32),
            absmax,
            code,
            # Tables that there are not still need a pointer.
            *((code,) * 3 if nested is None else nested),
            x if residual is None else residual,
            out,
            x.shape[0],
            x.stride(0),
            0 if residual is None else residual.stride(0),
            OUT_FEATURES=out_features,
            IN_FEATURES=x.shape[1],
            BLOCK_SIZE=block_size,
            NESTED_BLOCK_SIZE=_NESTED_BLOCK_SIZE,
            IS_NESTED=nested is not None,
            HAS_RESIDUAL=residual is not None,
            IN_FP32=is_interpreting(),
            ROWS=rows,
            BLOCK_OUT=block_out,
            BLOCK_IN=block_in,
            GROUP=min(block_size, block_in),
            num_warps=num_warps,
            num_stages=num_stages,
            # The library rounds a scale before it adds the offset.
            enable_fp_fusion=False,
            **overlap_options(x.device),
        )
    return out


def skinny_linear_4bit_reference(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    *,
    block_size: int,
    out_features: int,
    nested: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain PyTorch; arguments of [`skinny_linear_4bit_triton`]."""
    if nested is not None:
        nested_code, nested_absmax, nested_offset = nested
        scales = nested_absmax.repeat_interleave(_NESTED_BLOCK_SIZE)[: absmax.numel()]
        absmax = nested_code[absmax.int()] * scales + nested_offset
    index = torch.cat([packed >> 4, packed & 15], dim=1).int()
    weight = code[index].view(-1, block_size) * absmax[:, None]
    product = torch.nn.functional.linear(x, weight.view(out_features, -1).to(x.dtype))
    return product if residual is None else product + residual

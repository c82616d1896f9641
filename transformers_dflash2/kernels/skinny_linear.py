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
"""Products of a few rows with the weights of linear layers, at the rate of memory.

    plain       out = [x W_0^T, x W_1^T, ...]              weights side by side, e.g. queries, keys and values
    gated       out = round(silu(x W_0^T) * x W_1^T)       the first half of a gated feed-forward
    residual    out = round(x W_0^T + residual)
    mixed       out = round(conv(x W_0^T) + residual)      the output side of a grouped dynamic convolution

A block of a few tokens reads every weight once and does next to no arithmetic with it, and general matrix products are
tuned for more rows: theirs split the inner dimension of narrow layers over a second kernel, and cost a launch each.
Here one launch takes up to three weights of one input. A program owns a few output features and streams their weights
through shared memory; nothing is added up across programs, so results do not depend on the order in which they run.

A program has every row of its features, so it can mix rows as [`functional_dflash2.grouped_conv`] does.

Sums are in fp32. A product is rounded to the dtype of `x` before anything is done to it, as the host's modules round.
"""

from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl

from ..functional_dflash2 import grouped_conv
from .dispatch import (
    FLOAT_DTYPES,
    device_reason,
    dispatch,
    is_interpreting,
    next_power_of_2,
    out_reason,
    tensor_reason,
)
from .overlap import overlap_options, prefetch_lines, wait_for_inputs


__all__ = [
    "MAX_ROWS",
    "skinny_linear_ineligible_reason",
    "skinny_linear_op",
    "skinny_linear_parts",
    "skinny_linear_pays",
    "skinny_linear_reference",
    "skinny_linear_triton",
]

# With more rows, general products are as good.
MAX_ROWS = 64
# But they multiply weights side by side one by one, and the narrow ones of keys and values leave a device idle.
_MAX_ROWS_SIDE_BY_SIDE = 128
# Every weight's output features divide by it.
_FEATURES_MULTIPLE = 32
# And every part of the inputs by this.
_PART_MULTIPLE = 64
# Weights of half types in a cache line.
_LINE = 64
# What all programs together ask for while they wait for their inputs. Measured on an H200; more of it gets in the way
# of the kernel that still runs.
_PREFETCH_BYTES = 2 << 20
# Whoever reads a product in parts pays for each.
_MAX_PARTS = 8
_DTYPES = (torch.float16, torch.bfloat16)


@triton.jit
def _skinny_linear_kernel(
    x_ptr,
    weight_0_ptr,
    weight_1_ptr,
    weight_2_ptr,
    residual_ptr,
    base_ptr,
    dynamic_ptr,
    out_ptr,
    rows,
    x_stride,
    residual_stride,
    base_tap_stride,
    dynamic_part_stride,
    dynamic_row_stride,
    dynamic_tap_stride,
    block,
    OUT_FEATURES: tl.constexpr,
    FEATURES_0: tl.constexpr,
    FEATURES_1: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    # Inputs that a program adds up.
    SHARE: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    # Of the convolution: rows that are mixed into one (0 for none), channels of a group, parts of the coefficients.
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    COEFFICIENT_PARTS: tl.constexpr,
    IN_FP32: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    # Cache lines of each feature's weights to ask for ahead.
    PREFETCH_LINES: tl.constexpr,
    LINE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_OUT
    weight_ptr = weight_0_ptr
    feature = first
    if not IS_GATED:
        # No program's features belong to two weights.
        if first >= FEATURES_0 + FEATURES_1:
            weight_ptr = weight_2_ptr
            feature = first - (FEATURES_0 + FEATURES_1)
        elif first >= FEATURES_0:
            weight_ptr = weight_1_ptr
            feature = first - FEATURES_0
    if OVERLAPS:
        # The first weights come while the kernel that makes the inputs still runs.
        line = tl.program_id(1) * SHARE + tl.arange(0, PREFETCH_LINES) * LINE
        lines = (feature + tl.arange(0, BLOCK_OUT)).to(tl.int64)[:, None] * IN_FEATURES + line[None, :]
        prefetch_lines(weight_ptr + lines)
        if IS_GATED:
            prefetch_lines(weight_1_ptr + lines)
    wait_for_inputs(OVERLAPS)
    row = tl.arange(0, ROWS)
    share = tl.program_id(1)
    step = share * SHARE + tl.arange(0, BLOCK_IN)
    is_row = row < rows
    x_ptrs = x_ptr + row[:, None] * x_stride + step[None, :]
    offsets = (feature + tl.arange(0, BLOCK_OUT)).to(tl.int64)[None, :] * IN_FEATURES + step[:, None]
    sums = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    gated = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
    for start in range(0, SHARE, BLOCK_IN):
        if SHARE % BLOCK_IN == 0:
            x = tl.load(x_ptrs + start, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_ptr + offsets + start, eviction_policy="evict_first")
        else:
            inside = start + step < (share + 1) * SHARE
            x = tl.load(x_ptrs + start, mask=is_row[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_ptr + offsets + start, mask=inside[:, None], other=0.0)
        if IN_FP32:
            x = x.to(tl.float32)
        sums = tl.dot(x, weight.to(x.dtype), sums, input_precision="ieee")
        if IS_GATED:
            if SHARE % BLOCK_IN == 0:
                weight = tl.load(weight_1_ptr + offsets + start, eviction_policy="evict_first")
            else:
                weight = tl.load(weight_1_ptr + offsets + start, mask=inside[:, None], other=0.0)
            gated = tl.dot(x, weight.to(x.dtype), gated, input_precision="ieee")
    dtype = out_ptr.dtype.element_ty
    result = sums.to(dtype).to(tl.float32)
    if IS_GATED:
        activated = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32)
        result = activated * gated.to(dtype).to(tl.float32)
    column = first + tl.arange(0, BLOCK_OUT)
    if TAPS > 0:
        group = first // GROUP + tl.arange(0, BLOCK_OUT // GROUP)
        product = result
        result = tl.zeros((ROWS, BLOCK_OUT), tl.float32)
        for tap in tl.static_range(TAPS):
            # Rows before a block's start, and rows that are not there, are left out instead of multiplied by zero.
            fires = is_row & (row % block >= tap)
            coefficients = dynamic_ptr + row[:, None] * dynamic_row_stride + tap * dynamic_tap_stride + group[None, :]
            dynamic = tl.load(coefficients, mask=fires[:, None], other=0.0).to(tl.float32)
            for part in tl.static_range(1, COEFFICIENT_PARTS):
                dynamic += tl.load(coefficients + part * dynamic_part_stride, mask=fires[:, None], other=0.0)
            # Changes nothing for coefficients that come as they are.
            dynamic = dynamic.to(dtype).to(tl.float32)
            dynamic = tl.broadcast_to(dynamic[:, :, None], (ROWS, BLOCK_OUT // GROUP, GROUP))
            base = tl.load(base_ptr + tap * base_tap_stride + column).to(tl.float32)
            source = tl.broadcast_to(tl.where(fires, row - tap, 0)[:, None], (ROWS, BLOCK_OUT))
            values = tl.gather(product, source, 0)
            mixed = (base[None, :] + dynamic.reshape(ROWS, BLOCK_OUT)) * values
            result += tl.where(fires[:, None], mixed, 0.0)
        result = result.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(
            residual_ptr + row[:, None] * residual_stride + column[None, :], mask=is_row[:, None], other=0.0
        )
        result += residual.to(tl.float32)
    places = (share * rows + row)[:, None] * OUT_FEATURES + column[None, :]
    tl.store(out_ptr + places, result.to(dtype), mask=is_row[:, None])


def skinny_linear_ineligible_reason(
    x: torch.Tensor,
    *weights: torch.Tensor,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
    convolution: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    parts: int = 1,
    out: torch.Tensor | None = None,
) -> str | None:
    """Why [`skinny_linear_triton`] cannot take these arguments, or `None`."""
    if not 1 <= len(weights) <= 3:
        return f"there are {len(weights)} weights; pass 1 to 3"
    names = {f"weights[{index}]": weight for index, weight in enumerate(weights)}
    base, dynamic, block = (None, None, 1) if convolution is None else convolution
    reason = device_reason(x=x, **names, residual=residual, base=base, dynamic=dynamic) or tensor_reason(
        "x", x, shape=(None, None), dtypes=_DTYPES
    )
    if reason is not None:
        return reason
    max_rows = _MAX_ROWS_SIDE_BY_SIDE if len(weights) > 1 and not is_gated else MAX_ROWS
    if not 1 <= x.shape[0] <= max_rows:
        return f"x has {x.shape[0]} rows; 1 to {max_rows} are supported"
    if is_gated and (len(weights) != 2 or weights[0].shape != weights[1].shape):
        return f"a gated product takes two weights of one shape, got {[tuple(w.shape) for w in weights]}"
    for name, weight in names.items():
        reason = tensor_reason(name, weight, shape=(None, x.shape[1]), dtypes=(x.dtype,))
        if reason is None and not weight.is_contiguous():
            reason = f"{name} has strides {weight.stride()}; make it contiguous"
        if reason is None and weight.shape[0] % _FEATURES_MULTIPLE:
            reason = f"{name} has {weight.shape[0]} output features, which {_FEATURES_MULTIPLE} does not divide"
        if reason is not None:
            return reason
    shape, dtype = (
        (x.shape[0], weights[0].shape[0] if is_gated else sum(weight.shape[0] for weight in weights)),
        x.dtype,
    )
    if parts != 1:
        if len(weights) != 1 or residual is not None or convolution is not None:
            return f"parts={parts} goes with one weight and nothing behind it"
        if parts < 1:
            return f"parts={parts}; pass 1, or what skinny_linear_parts gives"
        if x.shape[1] % (parts * _PART_MULTIPLE):
            return (
                f"{x.shape[1]} inputs are no multiple of parts={parts} times {_PART_MULTIPLE}; pass what "
                "skinny_linear_parts gives"
            )
        shape, dtype = (parts, *shape), torch.float32
    if residual is not None:
        if is_gated or len(weights) != 1:
            return "a residual goes with one weight"
        reason = tensor_reason("residual", residual, shape=shape, dtypes=(x.dtype,))
    if reason is None and convolution is not None:
        reason = _convolution_reason(base, dynamic, block, shape, x.dtype)
        if reason is None and (is_gated or len(weights) != 1):
            reason = "a convolution goes with one weight"
    if reason is None and out is not None:
        reason = out_reason("out", out, x, shape=shape, dtype=dtype)
    return reason


def _convolution_reason(
    base: torch.Tensor, dynamic: torch.Tensor, block: int, shape: tuple[int, int], dtype: torch.dtype
) -> str | None:
    rows, out_features = shape
    if block < 1 or rows % block:
        return f"{rows} rows are no multiple of block={block}"
    reason = tensor_reason("base", base, shape=(None, out_features), dtypes=FLOAT_DTYPES)
    if reason is not None:
        return reason
    taps = base.shape[0]
    if dynamic.dim() == 4:
        reason = tensor_reason("dynamic", dynamic, shape=(None, rows, taps, None), dtypes=(torch.float32,))
    else:
        reason = tensor_reason("dynamic", dynamic, shape=(rows, taps, None), dtypes=(dtype,))
    if reason is not None:
        return reason
    groups = dynamic.shape[-1]
    group = out_features // groups if groups and out_features % groups == 0 else 0
    # Programs with a convolution have 16 or 32 features.
    if group not in (1, 2, 4, 8, 16):
        return f"dynamic has {groups} groups for {out_features} features; groups of 1, 2, 4, 8 or 16 are supported"
    return None


@lru_cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 1, 1 << 16
    properties = torch.cuda.get_device_properties(device)
    # Not every build of torch tells.
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 1 << 16)


def skinny_linear_pays(device: torch.device, out_features: int) -> bool:
    """
    Whether a product of this width has work for most of a device.

    1,024 features of 4,096 inputs take 19 µs on an H200, and 7 µs in the library's product, which splits the inputs
    among programs.

    Args:
        device (`torch.device`): Where it runs.
        out_features (`int`): Of all weights together.
    """
    return out_features // 16 >= device_limits(device)[0]


def skinny_linear_parts(device: torch.device, rows: int, in_features: int, out_features: int) -> int:
    """
    Into how many parts a product that is too narrow for a device is cut, so that its weights arrive from all of it.

    Args:
        device (`torch.device`): Where it runs.
        rows (`int`): Rows of the input.
        in_features (`int`): Inputs of the weight.
        out_features (`int`): Outputs of the weight.
    """
    block_out = gcd(_parts_launch(device, rows)[0], out_features)
    parts, programs = 1, max(1, out_features // block_out)
    # About a program for every multiprocessor at least, each with enough to read.
    while (
        parts < _MAX_PARTS
        and programs * parts <= device_limits(device)[0]
        and in_features % (2 * parts * _PART_MULTIPLE) == 0
    ):
        parts *= 2
    return parts


def _tile_rows(rows: int) -> int:
    """
    Rows of a program's tile.

    Hopper multiplies 64 rows in one instruction; tiles of 32 rows take slower ones, and a round of four rows took
    longer than one of eight.
    """
    return 16 if rows <= 16 else max(64, next_power_of_2(rows))


def _with_stages(device: torch.device, rows: int, launch: tuple[int, int, int, int], weights: int = 1):
    """A launch with no more steps in flight than shared memory has room for."""
    block_out, block_in, num_stages, num_warps = launch
    stage = 2 * block_in * (block_out * weights + rows)
    return block_out, block_in, max(1, min(num_stages, (device_limits(device)[1] - 2048) // stage)), num_warps


@lru_cache(maxsize=256)
def _launch(device: torch.device, rows: int, in_features: int, out_features: int, is_gated: bool):
    """
    Output features of a program, inputs per step, steps in flight, and warps.

    Measured on an H200, with weights of an 8B model. Where there is no second program for a multiprocessor, one has to
    have more bytes on their way.
    """
    is_single_wave = out_features // 32 <= device_limits(device)[0]
    if rows <= 16:
        deep, wide, gated = (32, 256, 6, 4), (16, 128, 6, 2), (32, 128, 3, 4)
        is_single_wave = is_single_wave and in_features >= 8192
    elif rows <= MAX_ROWS:
        deep, wide, gated = (32, 256, 4, 4), (32, 128, 4, 4), (32, 64, 4, 4)
    else:
        deep = wide = gated = (64, 64, 5, 8)
    launch = gated if is_gated else deep if is_single_wave else wide
    return _with_stages(device, rows, launch, 2 if is_gated else 1)


@lru_cache(maxsize=256)
def _parts_launch(device: torch.device, rows: int):
    """As [`_launch`], for a product in parts."""
    rows = _tile_rows(rows)
    return _with_stages(device, rows, (16, 128, 4, 2) if rows <= 16 else (64, 64, 6, 4))


def _prefetched_lines(in_features: int, out_features: int) -> int:
    """Cache lines of each feature's weights, a power of two, that make up about `_PREFETCH_BYTES`."""
    lines = min(in_features // _LINE, _PREFETCH_BYTES // (2 * _LINE * out_features))
    return max(1, next_power_of_2(lines + 1) // 2)


def skinny_linear_triton(
    x: torch.Tensor,
    *weights: torch.Tensor,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
    convolution: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    parts: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    A few rows times one weight, or several.

    Args:
        x (`torch.Tensor` of shape `(rows, in_features)`):
            fp16 or bf16 inputs: up to 64 rows, and up to 128 for several weights side by side.
        *weights (`torch.Tensor` of shape `(out_features, in_features)`):
            One to three contiguous weights in the dtype of `x`.
        is_gated (`bool`, *optional*, defaults to `False`):
            Whether the product with the second of two weights is multiplied with the SiLU of the product with the
            first.
        residual (`torch.Tensor` of shape `(rows, out_features)`, *optional*):
            Added to the product with a single weight, or to what the convolution makes of it.
        convolution (`tuple`, *optional*):
            `(base, dynamic, block)` of a grouped convolution of the product with a single weight: learned
            coefficients of shape `(taps, out_features)`; those of each row and group, of shape `(rows, taps, groups)`
            in the dtype of `x`, or fp32 sums of shape `(parts, rows, taps, groups)` whose total is rounded to it; and
            the length of the blocks that the rows are made of. See [`functional_dflash2.grouped_conv`].
        parts (`int`, *optional*, defaults to 1):
            How many programs share the inputs of a feature of a single weight, see [`skinny_linear_parts`]. Whoever
            reads the result adds up what they found.
        out (`torch.Tensor`, *optional*):
            Contiguous buffer for the result; may be `residual` itself.

    Returns:
        `torch.Tensor` of shape `(rows, out_features)`, the features of several weights side by side; of more than one
        part, fp32 sums of shape `(parts, rows, out_features)`.
    """
    reason = skinny_linear_ineligible_reason(
        x, *weights, is_gated=is_gated, residual=residual, convolution=convolution, parts=parts, out=out
    )
    if reason is not None:
        raise ValueError(f"skinny_linear_triton: {reason}")
    features = [weight.shape[0] for weight in weights]
    out_features = features[0] if is_gated else sum(features)
    if out is None and parts == 1:
        out = x.new_empty(x.shape[0], out_features)
    elif out is None:
        out = x.new_empty(parts, x.shape[0], out_features, dtype=torch.float32)
    tile_rows = _tile_rows(x.shape[0])
    share = x.shape[1] // parts
    if parts == 1:
        launch = _launch(x.device, tile_rows, share, out_features, is_gated)
    else:
        launch = _parts_launch(x.device, tile_rows)
    block_out, block_in, num_stages, num_warps = launch
    # No program's features belong to two weights.
    block_out = gcd(block_out, *features)
    base, dynamic, block = (x, x, 1) if convolution is None else convolution
    strides = (0, 0, 0, 0)
    if convolution is not None:
        strides = (base.stride(0), dynamic.stride(0) if dynamic.dim() == 4 else 0, *dynamic.stride()[-3:-1])
    # Weights that there are not still need a pointer.
    pointers = [*weights, *weights[:1] * 2][:3]
    with torch.cuda.device_of(x):
        _skinny_linear_kernel[(out_features // block_out, parts)](
            x,
            *pointers,
            x if residual is None else residual,
            base,
            dynamic,
            out,
            x.shape[0],
            x.stride(0),
            0 if residual is None else residual.stride(0),
            *strides,
            block,
            OUT_FEATURES=out_features,
            FEATURES_0=features[0],
            FEATURES_1=features[1] if len(features) > 1 else 0,
            IN_FEATURES=x.shape[1],
            SHARE=share,
            IS_GATED=is_gated,
            HAS_RESIDUAL=residual is not None,
            TAPS=0 if convolution is None else base.shape[0],
            GROUP=1 if convolution is None else out_features // dynamic.shape[-1],
            COEFFICIENT_PARTS=dynamic.shape[0] if convolution is not None and dynamic.dim() == 4 else 1,
            IN_FP32=is_interpreting(),
            ROWS=tile_rows,
            BLOCK_OUT=block_out,
            BLOCK_IN=block_in,
            LINE=_LINE,
            PREFETCH_LINES=_prefetched_lines(share, sum(features) * parts),
            num_warps=num_warps,
            num_stages=num_stages,
            **overlap_options(x.device),
        )
    return out


def skinny_linear_reference(
    x: torch.Tensor,
    *weights: torch.Tensor,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
    convolution: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    parts: int = 1,
) -> torch.Tensor:
    """The same in plain PyTorch; arguments of [`skinny_linear_triton`]."""
    if parts > 1:
        x, weight = (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in (x, weights[0]))
        pairs = zip(x.chunk(parts, dim=1), weight.chunk(parts, dim=1), strict=True)
        return torch.stack([torch.nn.functional.linear(*pair) for pair in pairs])
    products = [torch.nn.functional.linear(x, weight) for weight in weights]
    if is_gated:
        return torch.nn.functional.silu(products[0]) * products[1]
    product = torch.cat(products, dim=-1)
    if convolution is not None:
        base, dynamic, block = convolution
        size = product.shape[-1] // dynamic.shape[-1]
        blocks, dynamic = product.unflatten(0, (-1, block)), dynamic.unflatten(-3, (-1, block))
        product = grouped_conv(blocks, base, dynamic, group_size=size).flatten(0, 1)
    return product if residual is None else product + residual


@torch.library.custom_op("transformers_dflash2::skinny_linear", mutates_args=())
def skinny_linear_op(x: torch.Tensor, weights: list[torch.Tensor], is_gated: bool = False) -> torch.Tensor:
    """[`skinny_linear_triton`] for `torch.compile`: rows of any shape; the reference where the kernel cannot run."""
    rows = x.reshape(-1, x.shape[-1])
    product = dispatch("skinny_linear", skinny_linear_reference, rows, *weights, is_gated=is_gated)
    return product.view(*x.shape[:-1], -1)


@skinny_linear_op.register_fake
def _(x, weights, is_gated=False):
    features = weights[0].shape[0] if is_gated else sum(weight.shape[0] for weight in weights)
    return x.new_empty((*x.shape[:-1], features))

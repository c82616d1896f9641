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
"""Context keys and values of all drafter layers, written from one stacked projection.

The features of a committed token feed every layer, so one product with the stacked rows `[K | V]` of all layers gives
all keys and values at once. This operation norms and rotates the keys and puts both into the layers' buffers:

    normed = round(k * rsqrt(mean(k ** 2) + eps) * weight)
    key = round(x1 * cos - x2 * sin), round(x2 * cos + x1 * sin)        value = v

in fp32, with `x1` and `x2` the halves of the first `rotary_dim` channels; channels behind them are normed only. Values
are copied as they are: a drafter with an attention value scale must have it folded into the projection.

An entry is skipped when its slot is negative or when its place in the row is not below the row's commit length, so a
round can hand over all its rows before the host knows how many were accepted. Entries of one call must not share a
slot.
"""

import torch

from ..import_utils import unavailable_reason
from .dispatch import FLOAT_DTYPES, INTEGER_DTYPES, device_reason, dispatch, next_power_of_2, tensor_reason


try:
    import triton
    import triton.language as tl
except ImportError:
    # The reference below serves without it.
    triton = None

if triton is not None:
    from .overlap import overlap_options, wait_for_inputs


__all__ = [
    "context_kv_ineligible_reason",
    "context_kv_op",
    "context_kv_pointers",
    "context_kv_reference",
    "context_kv_triton",
]

MAX_HEAD_DIM = 256


def context_kv_reference(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor | None,
    slots: torch.Tensor,
    key_buffers: list[torch.Tensor],
    value_buffers: list[torch.Tensor],
    *,
    eps: float,
    commit_lengths: torch.Tensor | None = None,
    pointers: torch.Tensor | None = None,
) -> None:
    """
    Plain PyTorch version of [`context_kv_triton`], with the same arguments; `pointers` is ignored.

    It selects the entries to keep, which waits for the device.
    """
    layers = len(key_buffers)
    batch, entries = slots.shape
    kv_heads, columns, head_dim = key_buffers[0].shape[1:]
    kv = kv.reshape(batch, entries, layers, 2, kv_heads, head_dim)
    keys, values = kv[:, :, :, 0], kv[:, :, :, 1]  # [batch, entries, layers, kv_heads, head_dim]
    half = cos_sin.shape[1] // 2
    if positions is None:
        positions = torch.arange(slots.numel(), device=slots.device).view(slots.shape)
    in_table = (positions >= 0) & (positions < cos_sin.shape[0])
    angles = cos_sin[positions.clamp(0, cos_sin.shape[0] - 1).long()].float()
    angles = angles.masked_fill(~in_table.unsqueeze(-1), torch.nan)[:, :, None, None]
    cos, sin = angles[..., :half], angles[..., half:]

    normed = keys.float()
    normed = normed * torch.rsqrt(normed.square().mean(dim=-1, keepdim=True) + eps)
    normed = (normed * k_norm_weight.float()[:, None]).to(keys.dtype).float()
    first, second, rest = normed[..., :half], normed[..., half : 2 * half], normed[..., 2 * half :]
    keys = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(keys.dtype)

    keep = (slots >= 0) & (slots < columns)
    if commit_lengths is not None:
        keep = keep & (torch.arange(entries, device=slots.device) < commit_lengths[:, None])
    rows, places = keep.nonzero(as_tuple=True)
    kept = slots[rows, places].long()
    for layer, (key_buffer, value_buffer) in enumerate(zip(key_buffers, value_buffers, strict=True)):
        key_buffer[rows, :, kept] = keys[rows, places, layer].to(key_buffer.dtype)
        value_buffer[rows, :, kept] = values[rows, places, layer].to(value_buffer.dtype)


if triton is not None:

    @triton.jit(do_not_specialize=["entries", "columns", "table_rows"])
    def _context_kv_kernel(
        kv_ptr,
        weight_ptr,
        table_ptr,
        positions_ptr,
        slots_ptr,
        commit_lengths_ptr,
        pointers_ptr,
        # Carries the buffers' element type, which the integers of the pointer table lack.
        buffer_ptr,
        eps,
        entries,
        columns,
        table_rows,
        kv_stride_row,
        weight_stride_layer,
        table_stride_row,
        buffer_stride_batch,
        buffer_stride_head,
        buffer_stride_column,
        KV_HEADS: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        HALF: tl.constexpr,
        BLOCK_HEADS: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
        BLOCK_HALF: tl.constexpr,
        BLOCK_REST: tl.constexpr,
        HAS_POSITIONS: tl.constexpr,
        HAS_COMMIT_LENGTHS: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        wait_for_inputs(OVERLAPS)
        row = tl.program_id(0)
        layer = tl.program_id(1)
        batch_row = row // entries
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if (slot < 0) | (slot >= columns):
            return
        if HAS_COMMIT_LENGTHS:
            if row % entries >= tl.load(commit_lengths_ptr + batch_row):
                return

        dtype = buffer_ptr.dtype.element_ty
        address_type = tl.pointer_type(dtype)
        key_buffer = tl.multiple_of(tl.load(pointers_ptr + layer * 2).to(address_type), 16)
        value_buffer = tl.multiple_of(tl.load(pointers_ptr + layer * 2 + 1).to(address_type), 16)
        head = tl.arange(0, BLOCK_HEADS)[:, None]
        in_heads = head < KV_HEADS
        target = batch_row.to(tl.int64) * buffer_stride_batch + slot * buffer_stride_column
        target_heads = target + head.to(tl.int64) * buffer_stride_head
        layer_size: tl.constexpr = 2 * KV_HEADS * HEAD_DIM
        key_ptr = kv_ptr + row.to(tl.int64) * kv_stride_row + layer.to(tl.int64) * layer_size + head * HEAD_DIM
        value_ptr = key_ptr + KV_HEADS * HEAD_DIM
        weight_ptr += layer.to(tl.int64) * weight_stride_layer

        dim = tl.arange(0, BLOCK_DIM)[None, :]
        in_dims = in_heads & (dim < HEAD_DIM)
        value = tl.load(value_ptr + dim, mask=in_dims, other=0.0)
        tl.store(value_buffer + target_heads + dim, value.to(dtype), mask=in_dims)

        turn = tl.arange(0, BLOCK_HALF)[None, :]
        in_turn = turn < HALF
        in_half = in_heads & in_turn
        first = tl.load(key_ptr + turn, mask=in_half, other=0.0).to(tl.float32)
        second = tl.load(key_ptr + HALF + turn, mask=in_half, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1)
        if HEAD_DIM > 2 * HALF:
            rest_dim = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            in_rest = in_heads & (rest_dim < HEAD_DIM)
            rest = tl.load(key_ptr + rest_dim, mask=in_rest, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + tl.cast(eps, tl.float32))[:, None]
        source_type = kv_ptr.dtype.element_ty
        if HEAD_DIM > 2 * HALF:
            rest_weight = tl.load(weight_ptr + rest_dim, mask=rest_dim < HEAD_DIM, other=0.0).to(tl.float32)
            rest = (rest * factor * rest_weight).to(source_type)
            tl.store(key_buffer + target_heads + rest_dim, rest.to(dtype), mask=in_rest)
        first_weight = tl.load(weight_ptr + turn, mask=in_turn, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + HALF + turn, mask=in_turn, other=0.0).to(tl.float32)
        first = (first * factor * first_weight).to(source_type).to(tl.float32)
        second = (second * factor * second_weight).to(source_type).to(tl.float32)
        position = row.to(tl.int64)
        if HAS_POSITIONS:
            position = tl.load(positions_ptr + row).to(tl.int64)
        # A position that the table does not reach gives NaN, not the memory behind it.
        # `!= 0`: triton 3.9's interpreter refuses the integer mask that a scalar condition makes of it.
        in_table = (in_turn & (position >= 0) & (position < table_rows)) != 0
        table_ptr += position * table_stride_row
        cos = tl.load(table_ptr + turn, mask=in_table, other=float("nan")).to(tl.float32)
        sin = tl.load(table_ptr + HALF + turn, mask=in_table, other=float("nan")).to(tl.float32)
        key_target = key_buffer + target_heads + turn
        tl.store(key_target, (first * cos - second * sin).to(source_type).to(dtype), mask=in_half)
        tl.store(key_target + HALF, (second * cos + first * sin).to(source_type).to(dtype), mask=in_half)


def context_kv_pointers(key_buffers: list[torch.Tensor], value_buffers: list[torch.Tensor]) -> torch.Tensor:
    """
    The pointer table of [`context_kv_triton`].

    Building it copies from the host, which a CUDA graph cannot: build it once per set of buffers and drop it with
    them, as addresses of freed buffers are reused.

    Args:
        key_buffers (`list[torch.Tensor]` of length `layers`): Key buffers.
        value_buffers (`list[torch.Tensor]` of length `layers`): Value buffers.

    Returns:
        int64 `torch.Tensor` of shape `(layers, 2)` on the buffers' device.
    """
    addresses = [[key.data_ptr(), value.data_ptr()] for key, value in zip(key_buffers, value_buffers, strict=True)]
    return torch.tensor(addresses, dtype=torch.int64, device=key_buffers[0].device)


def context_kv_ineligible_reason(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor | None,
    slots: torch.Tensor,
    key_buffers: list[torch.Tensor],
    value_buffers: list[torch.Tensor],
    *,
    eps: float,
    commit_lengths: torch.Tensor | None = None,
    pointers: torch.Tensor | None = None,
) -> str | None:
    """Why [`context_kv_triton`] cannot take these arguments, or `None` when it can."""
    if triton is None:
        return unavailable_reason("triton") or "triton cannot be imported; repair its installation"
    layers = len(key_buffers)
    if layers == 0 or len(value_buffers) != layers:
        return f"there are {layers} key buffers and {len(value_buffers)} value buffers; pass one of each per layer"
    first = key_buffers[0]
    reason = (
        device_reason(
            kv=kv,
            k_norm_weight=k_norm_weight,
            cos_sin=cos_sin,
            positions=positions,
            slots=slots,
            commit_lengths=commit_lengths,
            pointers=pointers,
        )
        or tensor_reason("key_buffers[0]", first, shape=(None, None, None, None), dtypes=FLOAT_DTYPES)
        or tensor_reason("cos_sin", cos_sin, shape=(None, None), dtypes=FLOAT_DTYPES)
        or tensor_reason("slots", slots, shape=(None, None), dtypes=INTEGER_DTYPES)
    )
    if reason is not None:
        return reason
    batch, kv_heads, _, head_dim = first.shape
    rotary_dim = cos_sin.shape[1]
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim={head_dim}; the kernel takes up to {MAX_HEAD_DIM}"
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        return f"cos_sin has {rotary_dim} columns; it needs an even number up to head_dim={head_dim}"
    rows = slots.numel()
    reason = (
        tensor_reason("slots", slots, shape=(batch, None), dtypes=INTEGER_DTYPES)
        or tensor_reason("kv", kv, shape=(rows, layers * 2 * kv_heads * head_dim), dtypes=FLOAT_DTYPES)
        or tensor_reason("k_norm_weight", k_norm_weight, shape=(layers, head_dim), dtypes=FLOAT_DTYPES)
        or (
            tensor_reason("cos_sin", cos_sin, shape=(rows, None), dtypes=FLOAT_DTYPES)
            if positions is None
            else tensor_reason("positions", positions, shape=tuple(slots.shape), dtypes=INTEGER_DTYPES)
        )
    )
    if reason is not None:
        return reason
    if not (slots.is_contiguous() and (positions is None or positions.is_contiguous())):
        return "slots and positions are not both contiguous; make them contiguous"
    for name, buffers in (("key_buffers", key_buffers), ("value_buffers", value_buffers)):
        for layer, buffer in enumerate(buffers):
            if buffer.shape != first.shape or buffer.stride() != first.stride() or buffer.dtype != first.dtype:
                return f"{name}[{layer}] differs from key_buffers[0] in shape, strides or dtype; allocate them alike"
            if buffer.device != kv.device:
                return f"{name}[{layer}] is on {buffer.device} and kv on {kv.device}; move them to one device"
            if buffer.data_ptr() % 16:
                return f"{name}[{layer}] does not start at a multiple of 16 bytes; allocate it on its own"
    if commit_lengths is not None:
        reason = tensor_reason("commit_lengths", commit_lengths, shape=(batch,), dtypes=INTEGER_DTYPES)
        if reason is not None:
            return reason
    if pointers is not None:
        return tensor_reason("pointers", pointers, shape=(layers, 2), dtypes=(torch.int64,))
    return None


def context_kv_triton(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor | None,
    slots: torch.Tensor,
    key_buffers: list[torch.Tensor],
    value_buffers: list[torch.Tensor],
    *,
    eps: float,
    commit_lengths: torch.Tensor | None = None,
    pointers: torch.Tensor | None = None,
) -> None:
    """
    Writes the context keys and values of all layers in one launch.

    Args:
        kv (`torch.Tensor` of shape `(batch * entries, layers * 2 * kv_heads * head_dim)`):
            Stacked projection: for each layer its keys, then its values. Any row stride.
        k_norm_weight (`torch.Tensor` of shape `(layers, head_dim)`):
            Weight of each layer's key norm.
        cos_sin (`torch.Tensor` of shape `(max_positions, rotary_dim)`):
            Cosines of the `rotary_dim // 2` angles of each position, then their sines; `rotary_dim <= head_dim`.
        positions (`torch.Tensor` of shape `(batch, entries)`, *optional*):
            int32 or int64: absolute position of each entry. A position outside the table makes NaN keys. With `None`
            the table has a row for each entry.
        slots (`torch.Tensor` of shape `(batch, entries)`):
            int32 or int64: column of the row's buffer that each entry goes to; negative or too large: skipped.
        key_buffers (`list[torch.Tensor]` of length `layers`, each of shape `(batch, kv_heads, columns, head_dim)`):
            Key buffers, written in place; all of the same shape, strides and dtype, with a contiguous last dimension.
        value_buffers (`list[torch.Tensor]` of length `layers`):
            Value buffers, of the same shape, strides and dtype.
        eps (`float`):
            Epsilon of the key norm.
        commit_lengths (`torch.Tensor` of shape `(batch,)`, *optional*):
            int32 or int64: entries of each row to write; all by default.
        pointers (`torch.Tensor` of shape `(layers, 2)`, *optional*):
            [`context_kv_pointers`] of these very buffers; needed inside a CUDA graph, built per call by default.
    """
    reason = context_kv_ineligible_reason(
        kv,
        k_norm_weight,
        cos_sin,
        positions,
        slots,
        key_buffers,
        value_buffers,
        eps=eps,
        commit_lengths=commit_lengths,
        pointers=pointers,
    )
    if reason is not None:
        raise ValueError(f"context_kv_triton: {reason}")
    if slots.numel() == 0:
        return
    if pointers is None:
        pointers = context_kv_pointers(key_buffers, value_buffers)
    buffer = key_buffers[0]
    kv_heads, columns, head_dim = buffer.shape[1:]
    half = cos_sin.shape[1] // 2
    with torch.cuda.device_of(kv):
        _context_kv_kernel[(slots.numel(), len(key_buffers))](
            kv,
            k_norm_weight,
            cos_sin,
            slots if positions is None else positions,
            slots,
            slots if commit_lengths is None else commit_lengths,
            pointers,
            buffer,
            float(eps),
            slots.shape[1],
            columns,
            cos_sin.shape[0],
            kv.stride(0),
            k_norm_weight.stride(0),
            cos_sin.stride(0),
            *buffer.stride()[:3],
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF=half,
            BLOCK_HEADS=next_power_of_2(kv_heads),
            BLOCK_DIM=next_power_of_2(head_dim),
            BLOCK_HALF=next_power_of_2(half),
            BLOCK_REST=next_power_of_2(max(head_dim - 2 * half, 1)),
            HAS_POSITIONS=positions is not None,
            HAS_COMMIT_LENGTHS=commit_lengths is not None,
            num_warps=4,
            **overlap_options(kv.device),
        )


@torch.library.custom_op(
    "transformers_dflash2::context_kv",
    mutates_args=("key_buffers", "value_buffers"),
    schema="(Tensor kv, Tensor k_norm_weight, Tensor cos_sin, Tensor positions, Tensor slots, "
    "Tensor(a!)[] key_buffers, Tensor(b!)[] value_buffers, float eps, Tensor? commit_lengths=None, "
    "Tensor? pointers=None) -> ()",
)
def context_kv_op(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_buffers: list[torch.Tensor],
    value_buffers: list[torch.Tensor],
    eps: float,
    commit_lengths: torch.Tensor | None = None,
    pointers: torch.Tensor | None = None,
) -> None:
    """The context write for `torch.compile`: the kernel where it can run, else the reference."""
    dispatch(
        "context_kv",
        context_kv_reference,
        kv,
        k_norm_weight,
        cos_sin,
        positions,
        slots,
        key_buffers,
        value_buffers,
        eps=eps,
        commit_lengths=commit_lengths,
        pointers=pointers,
    )


@context_kv_op.register_fake
def _(*args, **kwargs):
    return None

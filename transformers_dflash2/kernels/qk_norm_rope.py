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
"""RMS norm of query and key heads and their rotation from a cos/sin table, in place on rows of `[q | k | v]`.

    normed = round(x * rsqrt(mean(x ** 2) + eps) * weight)
    out = round(x1 * cos - x2 * sin), round(x2 * cos + x1 * sin)

in fp32, with `x1` and `x2` the halves of a normed head; without norm weights `normed` is `x`. The host's modules round
more often (before the weight, every product), so half types agree with them within rounding, not bit for bit. A
program handles up to eight heads of one row. The rows keep their value heads as they are.

With `write_to`, keys and values also go where [`write_columns`] would copy them, which saves its launch: a program
that has rotated keys stores them twice, and further programs copy the value heads.
"""

import torch
import triton
import triton.language as tl

from .dispatch import FLOAT_DTYPES, INTEGER_DTYPES, device_reason, next_power_of_2, tensor_reason
from .overlap import overlap_options, wait_for_inputs
from .write_columns import write_columns_ineligible_reason


__all__ = ["qk_norm_rope_ineligible_reason", "qk_norm_rope_op", "qk_norm_rope_reference", "qk_norm_rope_triton"]

# Programs of a single head take longer to start than to run.
_MAX_HEADS = 8


@triton.jit
def _qk_norm_rope_kernel(
    qkv_ptr,
    position_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_ptr,
    key_buffer_ptr,
    value_buffer_ptr,
    column_ptr,
    table_rows,
    eps,
    qkv_row_stride,
    table_row_stride,
    entries,
    buffer_row_stride,
    buffer_head_stride,
    buffer_column_stride,
    column_row_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_VALUE_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    WRITES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    # All of one kind: HEADS divides the number of query heads and that of key heads.
    first_head = tl.program_id(1) * HEADS
    head = first_head + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK_HALF)
    inside = (dim < HALF)[None, :]
    head_ptrs = qkv_ptr + row * qkv_row_stride + (head * (2 * HALF))[:, None] + dim[None, :]
    is_query = first_head < NUM_HEADS
    if WRITES:
        column = tl.load(column_ptr + row // entries * column_row_stride + row % entries).to(tl.int64)
        # Of a key head and of a value head; query heads have none and store nothing there.
        buffer_head = ((head - NUM_HEADS) % NUM_KEY_VALUE_HEADS).to(tl.int64)
        targets = row // entries * buffer_row_stride + column * buffer_column_stride
        targets = targets + (buffer_head * buffer_head_stride)[:, None] + dim[None, :]
        if first_head >= NUM_HEADS + NUM_KEY_VALUE_HEADS:
            tl.store(value_buffer_ptr + targets, tl.load(head_ptrs, mask=inside), mask=inside)
            tl.store(value_buffer_ptr + targets + HALF, tl.load(head_ptrs + HALF, mask=inside), mask=inside)
            return
    dtype = qkv_ptr.dtype.element_ty
    first = tl.load(head_ptrs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(head_ptrs + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
        scale = tl.rsqrt(mean + tl.cast(eps, tl.float32))[:, None]
        # `!= 0`: triton 3.9's interpreter refuses the integer mask that a scalar condition makes of it.
        is_q = (inside & is_query) != 0
        is_k = (inside & (first_head >= NUM_HEADS)) != 0
        q_weight_ptrs, k_weight_ptrs = q_weight_ptr + dim[None, :], k_weight_ptr + dim[None, :]
        first_weight = tl.load(q_weight_ptrs, mask=is_q, other=0.0).to(tl.float32) + tl.load(
            k_weight_ptrs, mask=is_k, other=0.0
        ).to(tl.float32)
        second_weight = tl.load(q_weight_ptrs + HALF, mask=is_q, other=0.0).to(tl.float32) + tl.load(
            k_weight_ptrs + HALF, mask=is_k, other=0.0
        ).to(tl.float32)
        first = (first * scale * first_weight).to(dtype).to(tl.float32)
        second = (second * scale * second_weight).to(dtype).to(tl.float32)
    position = row
    if HAS_POSITIONS:
        position = tl.load(position_ptr + row).to(tl.int64)
    in_table = (inside & (position >= 0) & (position < table_rows)) != 0
    # A position that the table does not reach gives NaN, not the memory behind it.
    table_ptrs = table_ptr + position * table_row_stride + dim[None, :]
    cos = tl.load(table_ptrs, mask=in_table, other=float("nan")).to(tl.float32)
    sin = tl.load(table_ptrs + HALF, mask=in_table, other=float("nan")).to(tl.float32)
    turned_first = (first * cos - second * sin).to(dtype)
    turned_second = (second * cos + first * sin).to(dtype)
    tl.store(head_ptrs, turned_first, mask=inside)
    tl.store(head_ptrs + HALF, turned_second, mask=inside)
    if WRITES:
        is_key = (inside & (first_head >= NUM_HEADS)) != 0
        tl.store(key_buffer_ptr + targets, turned_first, mask=is_key)
        tl.store(key_buffer_ptr + targets + HALF, turned_second, mask=is_key)


def _heads_of_a_program(num_heads: int, num_key_value_heads: int) -> int:
    heads = 1
    while heads < _MAX_HEADS and num_heads % (2 * heads) == 0 and num_key_value_heads % (2 * heads) == 0:
        heads *= 2
    return heads


def qk_norm_rope_ineligible_reason(
    qkv: torch.Tensor,
    positions: torch.Tensor | None,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    *,
    num_heads: int,
    num_key_value_heads: int,
    eps: float,
    write_to: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> str | None:
    """Why [`qk_norm_rope_triton`] cannot take these arguments, or `None`."""
    reason = (
        device_reason(
            qkv=qkv, positions=positions, q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, cos_sin=cos_sin
        )
        or tensor_reason("cos_sin", cos_sin, shape=(None, None), dtypes=FLOAT_DTYPES)
        or tensor_reason("qkv", qkv, shape=(None, None), dtypes=FLOAT_DTYPES)
    )
    if reason is not None:
        return reason
    head_dim = cos_sin.shape[-1]
    if head_dim < 2 or head_dim % 2:
        return f"cos_sin has {head_dim} columns; a full rotation needs an even head_dim, cos and sin of half of it"
    if num_heads < 1 or num_key_value_heads < 1:
        return f"num_heads={num_heads} and num_key_value_heads={num_key_value_heads}; both must be at least 1"
    width = (num_heads + 2 * num_key_value_heads) * head_dim
    if positions is None:
        positions_reason = tensor_reason("cos_sin", cos_sin, shape=(len(qkv), None), dtypes=FLOAT_DTYPES)
    else:
        positions_reason = tensor_reason("positions", positions, shape=qkv.shape[:1], dtypes=INTEGER_DTYPES)
    return (
        tensor_reason("qkv", qkv, shape=(None, width), dtypes=FLOAT_DTYPES)
        or positions_reason
        or _norm_weights_reason(q_norm_weight, k_norm_weight, head_dim)
        or (None if write_to is None else _write_reason(qkv, *write_to, num_key_value_heads, head_dim))
    )


def _keys_and_values(
    qkv: torch.Tensor, shape: tuple[int, int], num_key_value_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the key and the value heads of `shape = (batch, entries)` rows: `(batch, heads, entries, head_dim)`."""
    states = qkv[:, -2 * num_key_value_heads * head_dim :]
    states = states.unflatten(-1, (2 * num_key_value_heads, head_dim)).unflatten(0, shape)
    return states.transpose(1, 2).chunk(2, dim=1)


def _write_reason(
    qkv: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    columns: torch.Tensor,
    num_key_value_heads: int,
    head_dim: int,
) -> str | None:
    if columns.dim() != 2 or columns.numel() != qkv.shape[0]:
        return f"columns has shape {tuple(columns.shape)}; it should be (batch, entries) of the {len(qkv)} rows of qkv"
    states = _keys_and_values(qkv, columns.shape, num_key_value_heads, head_dim)
    return write_columns_ineligible_reason(key_buffer, value_buffer, columns, *states)


def _norm_weights_reason(
    q_norm_weight: torch.Tensor | None, k_norm_weight: torch.Tensor | None, head_dim: int
) -> str | None:
    if (q_norm_weight is None) != (k_norm_weight is None):
        given = "k_norm_weight" if q_norm_weight is None else "q_norm_weight"
        return f"only {given} is given; pass both norm weights, or neither for heads without norms"
    if q_norm_weight is None:
        return None
    return tensor_reason("q_norm_weight", q_norm_weight, shape=(head_dim,), dtypes=FLOAT_DTYPES) or tensor_reason(
        "k_norm_weight", k_norm_weight, shape=(head_dim,), dtypes=FLOAT_DTYPES
    )


def qk_norm_rope_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor | None,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    *,
    num_heads: int,
    num_key_value_heads: int,
    eps: float,
    write_to: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """
    Norms and rotates query and key heads in place, in one launch.

    Args:
        qkv (`torch.Tensor` of shape `(rows, (num_heads + 2 * num_key_value_heads) * head_dim)`):
            Projected rows, changed in place; any row stride.
        positions (`torch.LongTensor` of shape `(rows,)`, *optional*):
            Absolute position of each row. Heads of a position outside the table become NaN. Without it the table has
            a row for each row of `qkv`.
        q_norm_weight (`torch.Tensor` of shape `(head_dim,)`, *optional*):
            Weight of the query heads' norm; without it and `k_norm_weight` heads are only rotated.
        k_norm_weight (`torch.Tensor` of shape `(head_dim,)`, *optional*):
            Weight of the key heads' norm.
        cos_sin (`torch.Tensor` of shape `(max_positions, head_dim)`):
            Cosines of the `head_dim // 2` angles of each position, then their sines.
        num_heads (`int`):
            Query heads.
        num_key_value_heads (`int`):
            Key heads, and as many value heads.
        eps (`float`):
            Added to the mean square.
        write_to (`tuple` of three `torch.Tensor`, *optional*):
            Where keys, as they are afterwards, and values go as well: key buffer, value buffer and columns of
            [`write_columns_triton`]. The columns, of shape `(batch, entries)`, are those of the rows in their order.

    Returns:
        `qkv` itself.
    """
    options = {"num_heads": num_heads, "num_key_value_heads": num_key_value_heads, "eps": eps, "write_to": write_to}
    reason = qk_norm_rope_ineligible_reason(qkv, positions, q_norm_weight, k_norm_weight, cos_sin, **options)
    if reason is not None:
        raise ValueError(f"qk_norm_rope_triton: {reason}")
    if qkv.shape[0] == 0:
        return qkv
    half = cos_sin.shape[-1] // 2
    writes = write_to is not None
    key_buffer, value_buffer, columns = write_to if writes else (qkv, qkv, qkv)
    heads = _heads_of_a_program(num_heads, num_key_value_heads)
    with torch.cuda.device_of(qkv):
        _qk_norm_rope_kernel[(qkv.shape[0], (num_heads + (2 if writes else 1) * num_key_value_heads) // heads)](
            qkv,
            qkv if positions is None else positions,
            qkv if q_norm_weight is None else q_norm_weight,
            qkv if k_norm_weight is None else k_norm_weight,
            cos_sin,
            key_buffer,
            value_buffer,
            columns,
            cos_sin.shape[0],
            eps,
            qkv.stride(0),
            cos_sin.stride(0),
            columns.shape[1],
            *(key_buffer.stride()[:3] if writes else (0, 0, 0)),
            columns.stride(0),
            NUM_HEADS=num_heads,
            NUM_KEY_VALUE_HEADS=num_key_value_heads,
            HEADS=heads,
            HALF=half,
            BLOCK_HALF=next_power_of_2(half),
            HAS_POSITIONS=positions is not None,
            HAS_NORM=q_norm_weight is not None,
            WRITES=writes,
            num_warps=max(1, heads // 2),
            **overlap_options(qkv.device),
        )
    return qkv


def qk_norm_rope_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor | None,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    *,
    num_heads: int,
    num_key_value_heads: int,
    eps: float,
    write_to: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The same in plain PyTorch, in place too; arguments of [`qk_norm_rope_triton`]."""
    rows, head_dim = qkv.shape[0], cos_sin.shape[-1]
    rotated_heads = num_heads + num_key_value_heads
    heads = qkv[:, : rotated_heads * head_dim].unflatten(-1, (rotated_heads, head_dim))
    normed = heads
    if q_norm_weight is not None:
        weight = torch.stack([q_norm_weight] * num_heads + [k_norm_weight] * num_key_value_heads).float()
        values = heads.float()
        normed = (values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps) * weight).to(qkv.dtype)
    first, second = normed.float().chunk(2, dim=-1)
    angles = cos_sin if positions is None else cos_sin[positions]
    cos, sin = angles.float().view(rows, 1, head_dim).chunk(2, dim=-1)
    heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
    if write_to is not None:
        *buffers, columns = write_to
        batch = torch.arange(columns.shape[0], device=qkv.device)[:, None]
        states = _keys_and_values(qkv, columns.shape, num_key_value_heads, head_dim)
        for buffer, part in zip(buffers, states, strict=True):
            buffer[batch, :, columns] = part.transpose(1, 2)
    return qkv


@torch.library.custom_op("transformers_dflash2::qk_norm_rope", mutates_args=("qkv",))
def qk_norm_rope_op(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    num_heads: int,
    num_key_value_heads: int,
    eps: float,
) -> None:
    """[`qk_norm_rope_triton`] for `torch.compile`."""
    qk_norm_rope_triton(
        qkv,
        positions,
        q_norm_weight,
        k_norm_weight,
        cos_sin,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        eps=eps,
    )


@qk_norm_rope_op.register_fake
def _(qkv, positions, q_norm_weight, k_norm_weight, cos_sin, num_heads, num_key_value_heads, eps):
    return None

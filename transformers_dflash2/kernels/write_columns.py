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
"""Keys and values of a block written into fixed buffers, each row's at columns of its own, in one launch, see
[`static_buffers.write_columns`].

An indexed assignment in plain PyTorch takes two launches per buffer, and each costs more than what it moves.
"""

import torch
import triton
import triton.language as tl

from .dispatch import FLOAT_DTYPES, INTEGER_DTYPES, device_reason, next_power_of_2, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = ["write_columns_ineligible_reason", "write_columns_triton"]


@triton.jit
def _write_columns_kernel(
    key_buffer_ptr,
    value_buffer_ptr,
    column_ptr,
    key_ptr,
    value_ptr,
    heads,
    buffer_row_stride,
    buffer_head_stride,
    buffer_column_stride,
    column_row_stride,
    key_row_stride,
    key_head_stride,
    key_entry_stride,
    value_row_stride,
    value_head_stride,
    value_entry_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    entry, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head, dim = tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    inside = (head < heads) & (dim < HEAD_DIM)
    column = tl.load(column_ptr + row * column_row_stride + entry)
    target = row * buffer_row_stride + head * buffer_head_stride + column * buffer_column_stride + dim
    keys = key_ptr + row * key_row_stride + head * key_head_stride + entry * key_entry_stride + dim
    values = value_ptr + row * value_row_stride + head * value_head_stride + entry * value_entry_stride + dim
    tl.store(key_buffer_ptr + target, tl.load(keys, mask=inside), mask=inside)
    tl.store(value_buffer_ptr + target, tl.load(values, mask=inside), mask=inside)


def write_columns_ineligible_reason(
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    columns: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> str | None:
    """Why [`write_columns_triton`] cannot take these arguments, or `None`."""
    rows, heads, _, head_dim = key_buffer.shape if key_buffer.dim() == 4 else (None,) * 4
    batch = keys.shape[0] if keys.dim() == 4 else None
    reason = (
        device_reason(key_buffer=key_buffer, value_buffer=value_buffer, columns=columns, keys=keys, values=values)
        or tensor_reason("key_buffer", key_buffer, shape=(None,) * 4, dtypes=FLOAT_DTYPES)
        or tensor_reason("value_buffer", value_buffer, shape=key_buffer.shape, dtypes=FLOAT_DTYPES)
        or tensor_reason("columns", columns, shape=(batch, None), dtypes=INTEGER_DTYPES)
    )
    for name, states, buffer in (("keys", keys, key_buffer), ("values", values, value_buffer)):
        if reason is None:
            shape = (None, heads, columns.shape[1], head_dim)
            reason = tensor_reason(name, states, shape=shape, dtypes=(buffer.dtype,))
    if reason is None and value_buffer.stride() != key_buffer.stride():
        reason = f"value_buffer has strides {value_buffer.stride()} and key_buffer {key_buffer.stride()}"
    if reason is None and (batch > rows or values.shape[0] != batch):
        reason = f"keys have {batch} rows, values {values.shape[0]} and the buffers {rows}"
    return reason


def write_columns_triton(
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    columns: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """
    Write a block's keys and values in place.

    Where two entries of a row name one column, either may be what it holds afterwards.

    Args:
        key_buffer (`torch.Tensor` of shape `(rows, kv_heads, capacity, head_dim)`):
            Key buffer; the first `batch` rows are written.
        value_buffer (`torch.Tensor` of the same shape and strides):
            Value buffer.
        columns (`torch.LongTensor` of shape `(batch, entries)`):
            Where each entry goes, from 0 to `capacity - 1`.
        keys (`torch.Tensor` of shape `(batch, kv_heads, entries, head_dim)`):
            Keys, any strides with a contiguous last dimension, in the dtype of their buffer.
        values (`torch.Tensor` of the same shape):
            Values, likewise.
    """
    reason = write_columns_ineligible_reason(key_buffer, value_buffer, columns, keys, values)
    if reason is not None:
        raise ValueError(f"write_columns_triton: {reason}")
    batch, heads, entries, head_dim = keys.shape
    if 0 in keys.shape:
        return
    with torch.cuda.device_of(keys):
        _write_columns_kernel[(entries, batch)](
            key_buffer,
            value_buffer,
            columns,
            keys,
            values,
            heads,
            *key_buffer.stride()[:3],
            columns.stride(0),
            *keys.stride()[:3],
            *values.stride()[:3],
            HEAD_DIM=head_dim,
            HEAD_BLOCK=next_power_of_2(heads),
            DIM_BLOCK=next_power_of_2(head_dim),
            **overlap_options(keys.device),
        )

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
"""Attention of a short block of queries over a preallocated key/value buffer.

A block of `T` queries (1 to 32) sits behind `length` committed columns of its row; its own keys and values are already
in columns `length .. length + T - 1`. Query `i` is at column `length + i` and sees column `j` iff

    start <= j < length + T,   j <= length + i when causal,   |length + i - j| < window when there is one

where the window bounds both sides and `start` skips left padding. What lies outside is never read, so it may hold
anything. `sinks` add one logit per head to the denominator of the softmax; `softcap` replaces a logit `s` by
`softcap * tanh(s / softcap)`. A query that sees no column gets zeros.

The kernel is bound by the bytes of the visible keys and values. It reads them once per key/value head, because all
queries of the head's group stand in one tile (128 rows at most; longer blocks take several tiles that meet in the L2
cache), and it cuts the visible columns of a row into `splits` parts, each handled by a program of its own that
leaves `(max, sum, accumulator)` in fp32 for a second kernel to combine. The number of splits follows from the
*capacity* of the buffer, so a launch has the same grid whatever the lengths are and can be captured in a CUDA graph;
the columns of a part follow from the *length*, read on the device. A short row in a large buffer keeps few columns per
program and leaves the rest of the programs without work.
"""

import contextlib
import functools
import json
import logging
import math
from pathlib import Path
from typing import NamedTuple

import torch

from ..import_utils import unavailable_reason
from .dispatch import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    device_reason,
    dispatch,
    is_interpreting,
    next_power_of_2,
    tensor_reason,
)


try:
    import triton
    import triton.language as tl
except ImportError:
    # The reference below serves without it.
    triton = None

if triton is not None:
    from .overlap import overlap_options, wait_for_inputs


logger = logging.getLogger("transformers_dflash2")

__all__ = [
    "MAX_BLOCK",
    "MAX_HEAD_DIM",
    "BlockAttentionLaunch",
    "attend_visible",
    "block_attention_ineligible_reason",
    "block_attention_launch",
    "block_attention_op",
    "block_attention_reference",
    "block_attention_triton",
    "block_attention_workspace_size",
]

# Queries per row that the kernel takes; longer inputs are prefills and belong to a prefill kernel.
MAX_BLOCK = 32
MAX_HEAD_DIM = 256
MAX_SPLITS = 128
# Columns of a part from which it is read in wide steps, if it has a multiprocessor to itself.
LONG_PART = 1024
# Query rows that the reference scores at a time, which bounds its memory during a prefill.
REFERENCE_QUERY_CHUNK = 256

_CONFIG_PATH = Path(__file__).parent / "configs" / "block_attention.json"


def attend_visible(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Grouped-head attention with an explicit mask, in fp32 (fp64 for fp64 inputs) with one rounding at the end.

    Args:
        query (`torch.Tensor` of shape `(batch, q_heads, queries, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(batch, kv_heads, columns, head_dim)`): Keys.
        value (`torch.Tensor` of shape `(batch, kv_heads, columns, value_dim)`): Values. They must be finite wherever
            no query looks, as a weight of 0 does not remove a NaN.
        visible (`torch.BoolTensor` that broadcasts to `(batch, 1, queries, columns)`): What each query sees.
        scale (`float`): Factor of the logits.
        softcap (`float`, *optional*): Cap of the logits.
        sinks (`torch.Tensor` of shape `(q_heads,)`, *optional*): Logits that enter the denominator only.

    Returns:
        `torch.Tensor` of shape `(batch, q_heads, queries, value_dim)` in the dtype of `query`; rows that see nothing
        are 0.
    """
    batch, q_heads, queries, head_dim = query.shape
    kv_heads, columns = key.shape[1:3]
    group = q_heads // kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)
    # [batch, kv_heads, group * queries, columns]: one product per key/value head, nothing is repeated.
    rows = query.to(dtype).reshape(batch, kv_heads, group * queries, head_dim)
    scores = (rows @ key.to(dtype).transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(batch, kv_heads, group, queries, columns).masked_fill(~visible.unsqueeze(2), -torch.inf)
    highest = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(dtype).view(1, kv_heads, group, 1, 1)
        highest = torch.maximum(highest, sinks)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = torch.exp(scores - highest)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - highest)
    weights = weights / total.masked_fill(total == 0, 1.0)
    output = weights.view(batch, kv_heads, group * queries, columns) @ value.to(dtype)
    return output.view(batch, q_heads, queries, value.shape[3]).to(query.dtype)


def block_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    is_causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Plain PyTorch version of [`block_attention_triton`], with the same arguments and any number of queries.

    `workspace` is ignored. On a CPU the longest row bounds the work; on other devices, where reading a length would
    stall, the capacity does.
    """
    batch, _, queries, _ = query.shape
    columns = key.shape[2]
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and batch > 0:
        columns = min(columns, int(lengths.max()) + queries)
        key, value = key[:, :, :columns], value[:, :, :columns]
    lengths = lengths.to(query.device).long().view(batch, 1, 1)
    column = torch.arange(columns, device=query.device)
    low = torch.zeros_like(lengths) if starts is None else starts.to(query.device).long().view(batch, 1, 1)
    if window is not None:
        low = torch.maximum(low, lengths - window + 1)
    readable = (column >= low) & (column < lengths + queries)  # [batch, 1, columns]
    # A masked column has weight 0, and 0 * NaN is NaN: unread columns are cleared.
    hidden = ~readable.unsqueeze(-1)
    key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    outputs = []
    for first in range(0, queries, REFERENCE_QUERY_CHUNK):
        chunk = query[:, :, first : first + REFERENCE_QUERY_CHUNK]
        steps = torch.arange(first, first + chunk.shape[2], device=query.device)
        distance = (lengths + steps[:, None]) - column  # [batch, queries, columns]
        visible = readable.expand_as(distance)
        if is_causal:
            visible = visible & (distance >= 0)
        if window is not None:
            visible = visible & (distance.abs() < window)
        outputs.append(
            attend_visible(chunk, key, value, visible.unsqueeze(1), scale=scale, softcap=softcap, sinks=sinks)
        )
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output if out is None else out.copy_(output)


class BlockAttentionLaunch(NamedTuple):
    """
    How the kernel is launched.

    Args:
        block_rows (`int`): Query rows (queries times heads of a group) of one tile; a power of two, 16 or more.
        block_columns (`int`): Columns per step; a power of two, 16 or more.
        splits (`int`): Parts into which the visible columns of a row are cut.
        num_warps (`int`): Warps per program.
        num_stages (`int`): Depth of the software pipeline.
    """

    block_rows: int
    block_columns: int
    splits: int
    num_warps: int = 4
    num_stages: int = 2


if triton is not None:

    @triton.jit
    def _visible_columns(
        lengths_ptr,
        starts_ptr,
        batch_row,
        block,
        columns,
        window,
        SPLITS: tl.constexpr,
        BLOCK_COLUMNS: tl.constexpr,
        HAS_STARTS: tl.constexpr,
        HAS_WINDOW: tl.constexpr,
    ):
        """The row's length, the columns `low .. high - 1` that some query sees, and the columns of one split."""
        length = tl.load(lengths_ptr + batch_row).to(tl.int32)
        low = tl.zeros_like(length)
        if HAS_STARTS:
            low = tl.maximum(low, tl.load(starts_ptr + batch_row).to(tl.int32))
        if HAS_WINDOW:
            low = tl.maximum(low, length - window + 1)
        high = tl.minimum(length + block, columns)
        visible = tl.maximum(high - low, 0)
        per_split = tl.cdiv(tl.cdiv(visible, SPLITS), BLOCK_COLUMNS) * BLOCK_COLUMNS
        return length, low, high, per_split

    @triton.jit
    def _tanh(x):
        # 1 - exp(-2|x|) cancels near zero, where the odd series is exact to fp32.
        square = x * x
        series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
        decay = tl.exp(-2.0 * tl.abs(x))
        ratio = (1.0 - decay) / (1.0 + decay)
        return tl.where(square < 0.01, series, tl.where(x < 0, -ratio, ratio))

    @triton.jit(do_not_specialize=["block", "columns", "window"])
    def _block_attention_kernel(
        query_ptr,
        key_ptr,
        value_ptr,
        lengths_ptr,
        starts_ptr,
        sinks_ptr,
        out_ptr,
        partial_ptr,
        partial_max_ptr,
        partial_sum_ptr,
        scale,
        softcap,
        block,
        columns,
        window,
        query_stride_batch,
        query_stride_head,
        query_stride_step,
        key_stride_batch,
        key_stride_head,
        key_stride_column,
        value_stride_batch,
        value_stride_head,
        value_stride_column,
        out_stride_batch,
        out_stride_head,
        out_stride_step,
        GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLUMNS: tl.constexpr,
        ROW_TILES: tl.constexpr,
        SPLITS: tl.constexpr,
        IS_CAUSAL: tl.constexpr,
        HAS_WINDOW: tl.constexpr,
        HAS_SOFTCAP: tl.constexpr,
        HAS_SINKS: tl.constexpr,
        HAS_STARTS: tl.constexpr,
        DOT_IN_FP32: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        wait_for_inputs(OVERLAPS)
        LOG2_E: tl.constexpr = 1.4426950408889634
        tile = tl.program_id(0) % ROW_TILES
        split = tl.program_id(0) // ROW_TILES
        kv_head = tl.program_id(1)
        batch_row = tl.program_id(2)

        length, low, high, per_split = _visible_columns(
            lengths_ptr,
            starts_ptr,
            batch_row,
            block,
            columns,
            window,
            SPLITS,
            BLOCK_COLUMNS,
            HAS_STARTS,
            HAS_WINDOW,
        )
        begin = low + split * per_split
        end = tl.minimum(begin + per_split, high)
        # A single split also has to write the zeros of a row that sees nothing.
        if (SPLITS > 1) & (begin >= end):
            return

        row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        rows = GROUP * block
        in_group = row < rows
        head = kv_head * GROUP + row // block
        step = row % block
        position = length + step
        dim = tl.arange(0, BLOCK_DIM)
        in_head = dim < HEAD_DIM
        query_offsets = (
            batch_row.to(tl.int64) * query_stride_batch
            + head.to(tl.int64)[:, None] * query_stride_head
            + step.to(tl.int64)[:, None] * query_stride_step
            + dim[None, :]
        )
        query = tl.load(query_ptr + query_offsets, mask=in_group[:, None] & in_head[None, :], other=0.0)
        if DOT_IN_FP32:
            query = query.to(tl.float32)
        key_ptr += batch_row.to(tl.int64) * key_stride_batch + kv_head.to(tl.int64) * key_stride_head
        value_ptr += batch_row.to(tl.int64) * value_stride_batch + kv_head.to(tl.int64) * value_stride_head

        # Logits are kept in base 2.
        if HAS_SOFTCAP:
            cap = tl.cast(softcap, tl.float32)
            logit_scale = tl.cast(scale, tl.float32) / cap
        else:
            logit_scale = tl.cast(scale, tl.float32) * LOG2_E
        highest = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
        accumulator = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype=tl.float32)
        for first in range(begin, end, BLOCK_COLUMNS):
            column = first + tl.arange(0, BLOCK_COLUMNS)
            in_split = column < end
            if HEAD_DIM == BLOCK_DIM:
                readable = in_split[:, None]
            else:
                readable = in_split[:, None] & in_head[None, :]
            column_offset = column.to(tl.int64)[:, None]
            key = tl.load(key_ptr + column_offset * key_stride_column + dim[None, :], mask=readable, other=0.0)
            if DOT_IN_FP32:
                key = key.to(tl.float32)
            logits = tl.dot(query, tl.trans(key), input_precision="ieee") * logit_scale
            if HAS_SOFTCAP:
                logits = _tanh(logits) * (cap * LOG2_E)
            visible = in_split[None, :]
            if IS_CAUSAL:
                visible = visible & (column[None, :] <= position[:, None])
            elif HAS_WINDOW:
                visible = visible & (column[None, :] < position[:, None] + window)
            if HAS_WINDOW:
                visible = visible & (column[None, :] > position[:, None] - window)
            logits = tl.where(visible, logits, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(logits, axis=1))
            # Rows that have seen nothing yet must not compute inf - inf.
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(logits - shift[:, None])
            decay = tl.exp2(highest - shift)
            total = total * decay + tl.sum(weights, axis=1)
            highest = new_highest
            value = tl.load(value_ptr + column_offset * value_stride_column + dim[None, :], mask=readable, other=0.0)
            if DOT_IN_FP32:
                value = value.to(tl.float32)
            accumulator = tl.dot(weights.to(value.dtype), value, accumulator * decay[:, None], input_precision="ieee")

        if SPLITS == 1:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head, mask=in_group, other=0.0).to(tl.float32) * LOG2_E
                new_highest = tl.maximum(highest, sink)
                shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                decay = tl.exp2(highest - shift)
                total = total * decay + tl.exp2(sink - shift)
                accumulator = accumulator * decay[:, None]
            accumulator = accumulator / tl.where(total == 0, 1.0, total)[:, None]
            out_offsets = (
                batch_row.to(tl.int64) * out_stride_batch
                + head.to(tl.int64)[:, None] * out_stride_head
                + step.to(tl.int64)[:, None] * out_stride_step
                + dim[None, :]
            )
            tl.store(
                out_ptr + out_offsets,
                accumulator.to(out_ptr.dtype.element_ty),
                mask=in_group[:, None] & in_head[None, :],
            )
        else:
            slot = ((batch_row * tl.num_programs(1) + kv_head) * SPLITS + split).to(tl.int64) * rows + row
            tl.store(partial_max_ptr + slot, highest, mask=in_group)
            tl.store(partial_sum_ptr + slot, total, mask=in_group)
            tl.store(
                partial_ptr + slot[:, None] * HEAD_DIM + dim[None, :],
                accumulator,
                mask=in_group[:, None] & in_head[None, :],
            )

    @triton.jit(do_not_specialize=["block", "columns", "window"])
    def _combine_splits_kernel(
        lengths_ptr,
        starts_ptr,
        sinks_ptr,
        out_ptr,
        partial_ptr,
        partial_max_ptr,
        partial_sum_ptr,
        block,
        columns,
        window,
        out_stride_batch,
        out_stride_head,
        out_stride_step,
        GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        BLOCK_DIM: tl.constexpr,
        BLOCK_COLUMNS: tl.constexpr,
        SPLITS: tl.constexpr,
        SPLITS_POW2: tl.constexpr,
        CHUNK: tl.constexpr,
        HAS_WINDOW: tl.constexpr,
        HAS_SINKS: tl.constexpr,
        HAS_STARTS: tl.constexpr,
        OVERLAPS: tl.constexpr,
    ):
        wait_for_inputs(OVERLAPS)
        LOG2_E: tl.constexpr = 1.4426950408889634
        step = tl.program_id(0)
        head = tl.program_id(1)
        batch_row = tl.program_id(2)
        kv_heads = tl.num_programs(1) // GROUP
        kv_head = head // GROUP
        rows = GROUP * block

        length, low, high, per_split = _visible_columns(
            lengths_ptr,
            starts_ptr,
            batch_row,
            block,
            columns,
            window,
            SPLITS,
            BLOCK_COLUMNS,
            HAS_STARTS,
            HAS_WINDOW,
        )
        used = tl.cdiv(tl.maximum(high - low, 0), tl.maximum(per_split, 1))
        slot = ((batch_row * kv_heads + kv_head) * SPLITS).to(tl.int64) * rows + (head % GROUP) * block + step

        split = tl.arange(0, SPLITS_POW2)
        highest = tl.load(partial_max_ptr + slot + split * rows, mask=split < used, other=float("-inf"))
        sums = tl.load(partial_sum_ptr + slot + split * rows, mask=split < used, other=0.0)
        shift = tl.max(highest, axis=0)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
            shift = tl.maximum(shift, sink)
        shift = tl.where(shift == float("-inf"), 0.0, shift)
        total = tl.sum(sums * tl.exp2(highest - shift), axis=0)
        if HAS_SINKS:
            total += tl.exp2(sink - shift)

        dim = tl.arange(0, BLOCK_DIM)
        in_head = dim < HEAD_DIM
        accumulator = tl.zeros([BLOCK_DIM], dtype=tl.float32)
        for first in range(0, used, CHUNK):
            part = first + tl.arange(0, CHUNK)
            part_slot = slot + part * rows
            part_max = tl.load(partial_max_ptr + part_slot, mask=part < used, other=float("-inf"))
            values = tl.load(
                partial_ptr + part_slot[:, None] * HEAD_DIM + dim[None, :],
                mask=(part < used)[:, None] & in_head[None, :],
                other=0.0,
            )
            accumulator += tl.sum(values * tl.exp2(part_max - shift)[:, None], axis=0)
        accumulator = accumulator / tl.where(total == 0, 1.0, total)
        out_offset = (
            batch_row.to(tl.int64) * out_stride_batch
            + head.to(tl.int64) * out_stride_head
            + step.to(tl.int64) * out_stride_step
        )
        tl.store(out_ptr + out_offset + dim, accumulator.to(out_ptr.dtype.element_ty), mask=in_head)


def block_attention_ineligible_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    is_causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    launch: "BlockAttentionLaunch | None" = None,
) -> str | None:
    """
    Why [`block_attention_triton`] cannot take these arguments, or `None` when it can.

    Only properties of the tensors are read, never their contents.
    """
    if triton is None:
        return unavailable_reason("triton") or "triton cannot be imported; repair its installation"
    reason = (
        device_reason(query=query, key=key, value=value, lengths=lengths, sinks=sinks, starts=starts)
        or tensor_reason("query", query, shape=(None, None, None, None), dtypes=FLOAT_DTYPES)
        or tensor_reason("key", key, shape=(query.shape[0], None, None, query.shape[3]), dtypes=(query.dtype,))
        or tensor_reason("value", value, shape=tuple(key.shape), dtypes=(query.dtype,))
    )
    if reason is not None:
        return reason
    batch, q_heads, block, head_dim = query.shape
    kv_heads, columns = key.shape[1:3]
    if kv_heads < 1 or q_heads % kv_heads:
        return f"query has {q_heads} heads and key {kv_heads}; the number of key heads must divide that of the query"
    if not 1 <= block <= MAX_BLOCK:
        return f"query holds {block} rows per sequence; the kernel takes 1 to {MAX_BLOCK}"
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        return f"head_dim={head_dim}; the kernel takes 1 to {MAX_HEAD_DIM}"
    if columns < block:
        return f"key has {columns} columns, fewer than the {block} rows of the block; allocate a longer buffer"
    if window is not None and window < 1:
        return f"window={window}; a query sees itself at least, pass 1 or more, or None"
    for name, tensor in (("lengths", lengths), ("starts", starts)):
        reason = tensor is not None and tensor_reason(name, tensor, shape=(batch,), dtypes=INTEGER_DTYPES)
        if reason:
            return reason
    if sinks is not None:
        reason = tensor_reason("sinks", sinks, shape=(q_heads,), dtypes=FLOAT_DTYPES)
        if reason is not None:
            return reason
    if out is not None:
        if out.device != query.device:
            return f"out is on {out.device} and query on {query.device}; allocate it there"
        return tensor_reason("out", out, shape=tuple(query.shape), dtypes=(query.dtype,))
    return None


@functools.lru_cache
def _device_entries(device: torch.device) -> tuple[dict, ...]:
    """The entries of the configuration table for a device: its own, its architecture's, or the safe default."""
    table = json.loads(_CONFIG_PATH.read_text(encoding="utf-8"))
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    if properties.name in table["devices"]:
        return tuple(table["devices"][properties.name]["entries"])
    for name, record in table["devices"].items():
        if record["capability"] == capability:
            logger.info("block_attention: %s is not in the table, using the entries of %s", properties.name, name)
            return tuple(record["entries"])
    logger.warning(
        "block_attention: no launch parameters for %s (compute capability %s), using a safe default",
        properties.name,
        capability,
    )
    return tuple(table["default"]["entries"])


@functools.lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _nearest_entry(entries: tuple[dict, ...], *, head_dim: int, rows: int, element_bytes: int) -> dict:
    """The entry with the same element size whose padded head size and, after that, number of rows are nearest."""

    def distance(entry: dict) -> tuple[float, float, float]:
        return (
            abs(math.log2(entry["element_bytes"] / element_bytes)),
            abs(math.log2(entry["head_dim"] / head_dim)),
            abs(math.log2(entry["rows"] / rows)),
        )

    return min(entries, key=distance)


@functools.lru_cache(maxsize=1024)
def _plan(
    device: torch.device,
    element_bytes: int,
    batch: int,
    kv_heads: int,
    rows: int,
    head_dim: int,
    columns: int,
    interpreted: bool,
) -> BlockAttentionLaunch:
    """Launch parameters for `rows` query rows per key/value head and `columns` columns that a row may see."""
    block_dim = max(16, next_power_of_2(head_dim))
    block_rows = max(16, next_power_of_2(rows))
    if interpreted:
        block_rows, block_columns = min(block_rows, 128), 32
        return BlockAttentionLaunch(block_rows, block_columns, max(1, min(3, columns // block_columns)))
    entry = _nearest_entry(
        _device_entries(device), head_dim=block_dim, rows=min(block_rows, 128), element_bytes=element_bytes
    )
    block_rows = min(block_rows, entry["rows_max"])
    programs = batch * kv_heads * -(-rows // block_rows)
    # A program for every multiprocessor: on an H200, combining more parts takes longer than they save.
    splits = max(1, _multiprocessors(device) // programs)
    # Rows of a batch differ in length; a bound on the columns of one program keeps a long row from being the last.
    if batch > 1:
        splits = max(splits, -(-columns // entry["split_columns_max"]))
    # Wide steps keep many bytes on their way, in nearly all of a multiprocessor's shared memory. The kernels around a
    # short part lose more by that than it gains.
    is_alone = programs * splits <= _multiprocessors(device)
    is_long = is_alone and columns // splits >= LONG_PART
    block_columns = entry["block_columns_long" if is_long else "block_columns"]
    splits = min(splits, -(-columns // block_columns), MAX_SPLITS)
    return BlockAttentionLaunch(block_rows, block_columns, splits, entry["num_warps"], entry["num_stages"])


def block_attention_launch(
    query: torch.Tensor, key: torch.Tensor, *, window: int | None = None
) -> BlockAttentionLaunch:
    """The launch parameters that [`block_attention_triton`] chooses; they follow from shapes and device alone."""
    batch, q_heads, block, head_dim = query.shape
    kv_heads, columns = key.shape[1:3]
    if window is not None:
        columns = min(columns, window + block - 1)
    rows = q_heads // kv_heads * block
    interpreted = is_interpreting()
    return _plan(query.device, query.element_size(), batch, kv_heads, rows, head_dim, columns, interpreted)


def block_attention_workspace_size(query: torch.Tensor, launch: BlockAttentionLaunch) -> int:
    """fp32 elements of partial results: `head_dim + 2` per query row and split, none for a single split."""
    batch, q_heads, block, head_dim = query.shape
    return 0 if launch.splits == 1 else batch * q_heads * block * launch.splits * (head_dim + 2)


def block_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    is_causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    launch: BlockAttentionLaunch | None = None,
) -> torch.Tensor:
    """
    Attention of a block of queries over the committed columns of its row and over the block itself.

    The module docstring defines what a query sees. Nothing is read back from the device, and grid and workspace depend
    on shapes only, so that the call can be captured in a CUDA graph and replayed with other lengths.

    Args:
        query (`torch.Tensor` of shape `(batch, q_heads, block, head_dim)`):
            Queries, `1 <= block <= 32`; any strides with a contiguous last dimension, as for `key` and `value`.
        key (`torch.Tensor` of shape `(batch, kv_heads, columns, head_dim)`):
            Key buffer; columns `lengths .. lengths + block - 1` hold the block. `kv_heads` divides `q_heads`.
        value (`torch.Tensor` of shape `(batch, kv_heads, columns, head_dim)`):
            Value buffer.
        lengths (`torch.Tensor` of shape `(batch,)`):
            int32 or int64: columns before the block. What would lie beyond the buffer is left out.
        scale (`float`):
            Factor of the logits.
        is_causal (`bool`):
            Whether query `i` sees only the first `i + 1` rows of the block.
        window (`int`, *optional*):
            Sliding window: columns at a distance of `window` or more are hidden.
        softcap (`float`, *optional*):
            Cap of the logits, applied before masking.
        sinks (`torch.Tensor` of shape `(q_heads,)`, *optional*):
            Logit per head that enters the softmax's denominator only.
        starts (`torch.Tensor` of shape `(batch,)`, *optional*):
            int32 or int64: first visible column of each row.
        out (`torch.Tensor` of shape `(batch, q_heads, block, head_dim)`, *optional*):
            Where to write; any strides with a contiguous last dimension.
        workspace (`torch.Tensor`, *optional*):
            Contiguous fp32 scratch of at least [`block_attention_workspace_size`] elements.
        launch ([`BlockAttentionLaunch`], *optional*):
            Launch parameters; [`block_attention_launch`] chooses them by default.

    Returns:
        `torch.Tensor` of shape `(batch, q_heads, block, head_dim)` in the dtype of `query`.
    """
    reason = block_attention_ineligible_reason(
        query,
        key,
        value,
        lengths,
        scale=scale,
        is_causal=is_causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        starts=starts,
        out=out,
    )
    if reason is not None:
        raise ValueError(f"block_attention_triton: {reason}")
    batch, q_heads, block, head_dim = query.shape
    kv_heads, columns = key.shape[1:3]
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if batch == 0:
        return out
    # A window that spans the whole buffer hides nothing.
    if window is not None and window >= columns:
        window = None
    if launch is None:
        launch = block_attention_launch(query, key, window=window)
    size = block_attention_workspace_size(query, launch)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.float32, device=query.device)
    elif workspace.dtype != torch.float32 or workspace.numel() < size or not workspace.is_contiguous():
        raise ValueError(
            f"block_attention_triton: workspace has {workspace.numel()} elements of {workspace.dtype}; pass {size} "
            "contiguous elements of torch.float32"
        )
    group = q_heads // kv_heads
    row_tiles = triton.cdiv(group * block, launch.block_rows)
    slots = batch * q_heads * block * launch.splits if launch.splits > 1 else 0
    workspace = workspace.view(-1)
    partial_max, partial_sum, partial = workspace[:slots], workspace[slots : 2 * slots], workspace[2 * slots :]
    block_dim = max(16, next_power_of_2(head_dim))
    has_sinks, has_starts, has_window = sinks is not None, starts is not None, window is not None
    # Pointers and numbers that a flag switches off still need a value.
    sinks_arg, starts_arg = query if sinks is None else sinks, lengths if starts is None else starts
    window_arg = 0 if window is None else window
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        _block_attention_kernel[(launch.splits * row_tiles, kv_heads, batch)](
            query,
            key,
            value,
            lengths,
            starts_arg,
            sinks_arg,
            out,
            partial,
            partial_max,
            partial_sum,
            float(scale),
            float(softcap or 1.0),
            block,
            columns,
            window_arg,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            *out.stride()[:3],
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_COLUMNS=launch.block_columns,
            ROW_TILES=row_tiles,
            SPLITS=launch.splits,
            IS_CAUSAL=is_causal,
            HAS_WINDOW=has_window,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=has_sinks,
            HAS_STARTS=has_starts,
            DOT_IN_FP32=is_interpreting(),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            **overlap_options(query.device),
        )
        if launch.splits > 1:
            _combine_splits_kernel[(block, q_heads, batch)](
                lengths,
                starts_arg,
                sinks_arg,
                out,
                partial,
                partial_max,
                partial_sum,
                block,
                columns,
                window_arg,
                *out.stride()[:3],
                GROUP=group,
                HEAD_DIM=head_dim,
                BLOCK_DIM=block_dim,
                BLOCK_COLUMNS=launch.block_columns,
                SPLITS=launch.splits,
                SPLITS_POW2=next_power_of_2(launch.splits),
                CHUNK=min(16, next_power_of_2(launch.splits)),
                HAS_WINDOW=has_window,
                HAS_SINKS=has_sinks,
                HAS_STARTS=has_starts,
                num_warps=4 if block_dim >= 128 else 2,
                **overlap_options(query.device),
            )
    return out


@torch.library.custom_op(
    "transformers_dflash2::block_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor lengths, float scale, bool is_causal, int? window=None, "
    "float? softcap=None, Tensor? sinks=None, Tensor? starts=None) -> Tensor",
)
def block_attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    is_causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Block attention for `torch.compile`: the kernel where it can run, else the reference; keywords may go by position.

    The result lies in memory as `(batch, block, q_heads, head_dim)`, the order in which an output projection reads it.
    """
    out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)
    return dispatch(
        "block_attention",
        block_attention_reference,
        query,
        key,
        value,
        lengths,
        scale=scale,
        is_causal=is_causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        starts=starts,
        out=out,
    )


@block_attention_op.register_fake
def _(query, key, value, lengths, scale, is_causal, window=None, softcap=None, sinks=None, starts=None):
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)

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
"""States of all recurrent layers moved behind what was kept of a block, see [`functional_recurrence.commit_states`].

Layers of equal shapes share a launch: a table on the device holds the addresses of their buffers. One program keeps a
tile of one head's state in registers over all tokens that its row takes in, so a state is read and written once.
"""

from collections.abc import Callable, Hashable, Iterable

import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakTensorKeyDictionary

from ..functional_recurrence import RecurrenceInputs
from .block_recurrence import advance_state, unit_length
from .dispatch import FLOAT_DTYPES, INTEGER_DTYPES, device_reason, next_power_of_2, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = ["commit_states_ineligible_reason", "commit_states_triton"]

_TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# Elements that one program of the window kernel moves.
_WINDOW_BLOCK = 1024
# Value channels of a state's tile.
_VALUE_BLOCK = 32


@triton.jit
def _commit_windows_kernel(
    address_ptr,
    count_ptr,
    elements,
    WIDTH: tl.constexpr,
    INPUT_WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    addresses = address_ptr + tl.program_id(1) * 2
    window_ptr = tl.load(addresses).to(tl.pointer_type(TYPE))
    input_ptr = tl.load(addresses + 1).to(tl.pointer_type(TYPE))
    offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < elements
    channels, columns = offsets // WIDTH, offsets % WIDTH
    count = tl.load(count_ptr + row)
    inputs = input_ptr + row * (elements // WIDTH) * INPUT_WIDTH
    taken = tl.load(inputs + channels * INPUT_WIDTH + columns + count, mask=inside)
    tl.store(window_ptr + row * elements + offsets, taken, mask=inside)


@triton.jit
def _replay_kernel(
    address_ptr,
    count_ptr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr,
    DECAYS: tl.constexpr,
    IS_DELTA_RULE: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    NORM_EPS: tl.constexpr,
    STATE_TYPE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    addresses = address_ptr + tl.program_id(1) * 5
    state_ptr = tl.load(addresses).to(tl.pointer_type(STATE_TYPE))
    key_ptr = tl.load(addresses + 1).to(tl.pointer_type(tl.float32))
    value_ptr = tl.load(addresses + 2).to(tl.pointer_type(tl.float32))
    decay_ptr = tl.load(addresses + 3).to(tl.pointer_type(tl.float32))
    beta_ptr = tl.load(addresses + 4).to(tl.pointer_type(tl.float32))
    channels = tl.arange(0, KEY_BLOCK)
    columns = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    has_key, has_value = channels < KEY_CHANNELS, columns < VALUE_CHANNELS
    inside = has_key[:, None] & has_value[None, :]
    if IS_TRANSPOSED:
        entries = columns[None, :] * KEY_CHANNELS + channels[:, None]
    else:
        entries = channels[:, None] * VALUE_CHANNELS + columns[None, :]
    entries += (row * HEADS + head) * KEY_CHANNELS * VALUE_CHANNELS
    state = tl.load(state_ptr + entries, mask=inside, other=0.0).to(tl.float32)
    count = tl.load(count_ptr + row).to(tl.int32)
    for token in range(0, count):
        at = row * TOKENS + token
        key = tl.load(key_ptr + (at * KEY_HEADS + key_head) * KEY_CHANNELS + channels, mask=has_key, other=0.0)
        value = tl.load(value_ptr + (at * HEADS + head) * VALUE_CHANNELS + columns, mask=has_value, other=0.0)
        beta = tl.load(beta_ptr + at * HEADS + head)
        decays = decay_ptr + (at * HEADS + head) * DECAYS
        if DECAYS == 1:
            log_decay = tl.load(decays)
        else:
            log_decay = tl.load(decays + channels, mask=has_key, other=0.0)[:, None]
        if NORM_EPS is not None:
            key = unit_length(key, NORM_EPS)
        state = advance_state(state, key, value, log_decay, beta, IS_DELTA_RULE)
    tl.store(state_ptr + entries, state.to(STATE_TYPE), mask=inside)


def commit_states_ineligible_reason(
    windows: list[tuple[torch.Tensor, torch.Tensor]],
    recurrences: list[tuple[torch.Tensor, RecurrenceInputs]],
    counts: torch.Tensor,
) -> str | None:
    """Why [`commit_states_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(counts=counts) or tensor_reason("counts", counts, shape=(None,), dtypes=INTEGER_DTYPES)
    if reason is not None:
        return reason
    rows = counts.shape[0]
    for index, (window, inputs) in enumerate(windows):
        name = f"windows[{index}]"
        reason = _buffer_reason(f"{name}[0]", window, counts, shape=(rows, None, None), dtypes=FLOAT_DTYPES)
        channels = window.shape[1] if window.dim() == 3 else None
        reason = reason or _buffer_reason(
            f"{name}[1]", inputs, counts, shape=(rows, channels, None), dtypes=(window.dtype,)
        )
        if reason is not None:
            return reason
    for index, (state, inputs) in enumerate(recurrences):
        name = f"recurrences[{index}]"
        reason = _buffer_reason(f"{name}[0]", state, counts, shape=(rows, None, None, None), dtypes=FLOAT_DTYPES)
        for field in ("keys", "values", "log_decay", "beta"):
            tensor = getattr(inputs, field)
            reason = reason or _buffer_reason(
                f"{name}[1].{field}",
                tensor,
                counts,
                shape=(rows, *[None] * (tensor.dim() - 1)),
                dtypes=(torch.float32,),
            )
        if reason is not None:
            return reason
    return None


def _buffer_reason(
    name: str, tensor: torch.Tensor, counts: torch.Tensor, *, shape: tuple, dtypes: tuple
) -> str | None:
    if tensor.device != counts.device:
        return f"{name} is on {tensor.device} and counts on {counts.device}; move them to one device"
    if not tensor.is_contiguous():
        return f"{name} is not contiguous; call .contiguous()"
    return tensor_reason(name, tensor, shape=shape, dtypes=dtypes)


def commit_states_triton(
    windows: list[tuple[torch.Tensor, torch.Tensor]],
    recurrences: list[tuple[torch.Tensor, RecurrenceInputs]],
    counts: torch.Tensor,
) -> None:
    """
    Move windows and states of all layers, in place, with a launch for each combination of shapes.

    A table of addresses is written the first time that buffers are seen; a CUDA graph has to be captured after that.

    Args:
        windows (`list` of pairs of `torch.Tensor`):
            Per short convolution its window, `(rows, channels, width)`, and the window before the block followed by
            the block's inputs, `(rows, channels, width + block)`; contiguous.
        recurrences (`list` of `(torch.Tensor, RecurrenceInputs)`):
            Per recurrence its state, `(rows, heads, key_channels, value_channels)`, and the block, contiguous fp32.
        counts (`torch.LongTensor` of shape `(rows,)`):
            Tokens to take in per row.
    """
    reason = commit_states_ineligible_reason(windows, recurrences, counts)
    if reason is not None:
        raise ValueError(f"commit_states_triton: {reason}")
    rows = counts.shape[0]
    if rows == 0:
        return
    with torch.cuda.device_of(counts):
        for group in _grouped(windows, lambda pair: (pair[0].shape, pair[1].shape, pair[0].dtype)):
            window, inputs = group[0]
            elements = window[0].numel()
            _commit_windows_kernel[(rows, len(group), triton.cdiv(elements, _WINDOW_BLOCK))](
                _addresses(group, counts.device),
                counts,
                elements,
                WIDTH=window.shape[-1],
                INPUT_WIDTH=inputs.shape[-1],
                TYPE=_TRITON_TYPES[window.dtype],
                BLOCK=_WINDOW_BLOCK,
                **overlap_options(counts.device),
            )
        tensors = [(state, i.keys, i.values, i.log_decay, i.beta) for state, i in recurrences]
        kinds = {id(state): (i.is_delta_rule, i.is_transposed, i.norm_eps) for state, i in recurrences}
        for group in _grouped(tensors, lambda five: (*(t.shape for t in five), five[0].dtype, kinds[id(five[0])])):
            state, keys, values, log_decay, _ = group[0]
            is_delta_rule, is_transposed, norm_eps = kinds[id(state)]
            tokens, key_heads, key_channels = keys.shape[1:]
            heads, value_channels = values.shape[2:]
            _replay_kernel[(rows * heads, len(group), triton.cdiv(value_channels, _VALUE_BLOCK))](
                _addresses(group, counts.device),
                counts,
                TOKENS=tokens,
                HEADS=heads,
                KEY_HEADS=key_heads,
                KEY_CHANNELS=key_channels,
                VALUE_CHANNELS=value_channels,
                DECAYS=log_decay.shape[-1],
                IS_DELTA_RULE=is_delta_rule,
                IS_TRANSPOSED=is_transposed,
                NORM_EPS=norm_eps,
                STATE_TYPE=_TRITON_TYPES[state.dtype],
                KEY_BLOCK=next_power_of_2(key_channels),
                VALUE_BLOCK=_VALUE_BLOCK,
                **overlap_options(counts.device),
            )


def _grouped(entries: Iterable[tuple], key: Callable[[tuple], Hashable]) -> list[list[tuple]]:
    groups: dict[Hashable, list[tuple]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return list(groups.values())


def _addresses(group: list[tuple[torch.Tensor, ...]], device: torch.device) -> torch.Tensor:
    """
    The addresses of a group's tensors, on the device.

    A table is kept as long as the first of the tensors is: a CUDA graph that reads it lives no longer.
    """
    addresses = tuple(tensor.data_ptr() for tensors in group for tensor in tensors)
    tables = _tables.setdefault(group[0][0], {})
    if addresses not in tables:
        tables[addresses] = torch.tensor(addresses, dtype=torch.int64, device=device)
    return tables[addresses]


_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

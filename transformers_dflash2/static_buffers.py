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
"""Preallocated keys and values of the static tempo, with a length of its own for every row.

Entry `j` of a row is in column `j`. A block is written behind the row's length and stays there if it is rejected:
nothing reads past a length, and the next block overwrites it. States without a time axis are held while a block is
verified, see `rollback.py`, and moved to what was kept of it at the start of the next round.
"""

from dataclasses import fields, replace

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from .functional_recurrence import RecurrenceInputs, commit_states
from .kernels.block_attention import block_attention_reference
from .kernels.dispatch import dispatch
from .modeling_dflash2 import DFlash2DraftModel
from .rollback import take_recurrence_inputs


def write_columns(
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    columns: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """
    Write keys and values of a block into buffers, each row's at columns of its own.

    Args:
        key_buffer (`torch.Tensor` of shape `(rows, kv_heads, capacity, head_dim)`): Its first rows are written.
        value_buffer (`torch.Tensor` of the same shape): Likewise.
        columns (`torch.LongTensor` of shape `(batch, entries)`): Where each entry goes.
        keys (`torch.Tensor` of shape `(batch, kv_heads, entries, head_dim)`): What is written.
        values (`torch.Tensor` of the same shape): Likewise.
    """
    rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
    for buffer, states in ((key_buffer, keys), (value_buffer, values)):
        # An indexed write, as in the host's own static layers: a compiler makes it in place.
        buffer[rows, :, columns] = states.transpose(1, 2)


def _write(*arguments: torch.Tensor) -> None:
    if torch.compiler.is_compiling():
        write_columns(*arguments)
    else:
        dispatch("write_columns", write_columns, *arguments)


class StaticTargetLayer(CacheLayerMixin):
    """
    Keys and values of one target layer.

    Args:
        columns (`torch.LongTensor` of shape `(rows, block)`): Where the next block goes; the owner keeps it current.
        keys (`torch.Tensor` of shape `(rows, kv_heads, capacity, head_dim)`): Key buffer.
        values (`torch.Tensor` of shape `(rows, kv_heads, capacity, head_dim)`): Value buffer.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, columns: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.columns = columns
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.device, self.dtype = keys.device, keys.dtype

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to do: the buffers are there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write a block of shape `(rows, kv_heads, block, head_dim)`; returns the whole buffers."""
        _write(*self.block_destination(), key_states, value_states)
        return self.keys, self.values

    def block_destination(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Key buffer, value buffer and columns: all that [`update`] writes, for a kernel that does it."""
        return self.keys, self.values, self.columns

    def get_mask_sizes(self, *args, **kwargs) -> tuple[int, int]:
        """Columns and offset; the attention function masks by length on its own."""
        return self.keys.shape[-2], 0

    def get_seq_length(self, *args, **kwargs) -> int:
        """Lengths differ from row to row and live on the device; positions are passed to the model explicitly."""
        return 0

    def get_max_length(self, *args, **kwargs) -> int:
        """Columns of the buffer."""
        return self.keys.shape[-2]

    get_max_cache_shape = get_max_length


class StaticRecurrentLayer(LinearAttentionLayer):
    """
    Convolution windows and recurrent states of one target layer, which stay as they are until [`commit_held_states`].

    Args:
        filled ([`~transformers.cache_utils.LinearAttentionCacheLayerMixin`]): The layer after a prefill.
        rows (`int`): Rows of the buffers.
        block (`int`): Tokens of a block.
    """

    is_compileable = False

    def __init__(self, filled, *, rows: int, block: int):
        super().__init__(number_of_states=filled.number_of_states)
        self.device, self.dtype = filled.device, filled.dtype
        self.has_previous_state = dict(filled.has_previous_state)
        for index, state in filled.conv_states.items():
            if state is not None:
                self.conv_states[index] = state.new_zeros(rows, *state.shape[1:])
        for index, state in filled.recurrent_states.items():
            if state is not None:
                self.recurrent_states[index] = state.new_zeros(rows, *state.shape[1:])
        # What the last block would have written: a window and the block behind it, and inputs of a recurrence.
        self._conv_inputs = {
            index: state.new_zeros(*state.shape[:-1], state.shape[-1] + block)
            for index, state in self.conv_states.items()
            if state is not None
        }
        self._recurrences: dict[int, RecurrenceInputs] = {}

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Keep a block of shape `(rows, channels, block)` aside; returns the window with the block behind it."""
        inputs = self._conv_inputs[state_idx]
        window = self.conv_states[state_idx]
        inputs[..., : window.shape[-1]] = window
        inputs[..., window.shape[-1] :] = conv_states
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Keep the block's inputs of the recurrence aside; returns the state after the whole block."""
        inputs = take_recurrence_inputs(self)
        if state_idx not in self._recurrences:
            # Outside of a graph: the first call of a round is a rehearsal. Contiguous, which the inputs need not be.
            buffers = {
                name: torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
                for name, tensor in _tensors(inputs).items()
            }
            self._recurrences[state_idx] = replace(inputs, **buffers)
        for name, tensor in _tensors(inputs).items():
            getattr(self._recurrences[state_idx], name).copy_(tensor)
        return recurrent_states

    @property
    def windows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each convolution's window, and that window with the last block behind it."""
        return [(self.conv_states[index], inputs) for index, inputs in self._conv_inputs.items()]

    @property
    def recurrences(self) -> list[tuple[torch.Tensor, RecurrenceInputs]]:
        """Each recurrence's state, and what it reads of the last block."""
        return [(self.recurrent_states[index], inputs) for index, inputs in self._recurrences.items()]

    def load(self, filled) -> None:
        """Take over the states of a prefill in the first rows; forget the last block."""
        for mine, theirs in ((self.conv_states, filled.conv_states), (self.recurrent_states, filled.recurrent_states)):
            for index, state in theirs.items():
                if state is not None:
                    mine[index][: state.shape[0]] = state
        for index, inputs in self._conv_inputs.items():
            window = self.conv_states[index]
            inputs[..., : window.shape[-1]] = window

    def hand_back(self, filled) -> None:
        """Give the states of the first rows to the layer of a prefill."""
        for mine, theirs in ((self.conv_states, filled.conv_states), (self.recurrent_states, filled.recurrent_states)):
            for index, state in theirs.items():
                if state is not None:
                    state.copy_(mine[index][: state.shape[0]])


class StaticMixedLayer(StaticRecurrentLayer, StaticTargetLayer):
    """
    A layer with states beside its keys and values.

    Args:
        filled: As for [`StaticRecurrentLayer`].
        columns, keys, values: As for [`StaticTargetLayer`].
        block (`int`): Tokens of a block.
    """

    def __init__(self, filled, columns: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, block: int):
        StaticRecurrentLayer.__init__(self, filled, rows=keys.shape[0], block=block)
        StaticTargetLayer.__init__(self, columns, keys, values)


def static_layer(filled, columns: torch.Tensor, capacity: int):
    """
    Buffers for one layer of a target's cache.

    Args:
        filled: The layer after a prefill.
        columns (`torch.LongTensor` of shape `(rows, block)`): Where the next block goes.
        capacity (`int`): Columns of key and value buffers.
    """
    rows, block = columns.shape
    if not isinstance(filled, DynamicLayer):
        return StaticRecurrentLayer(filled, rows=rows, block=block)
    buffers = [
        states.new_zeros(rows, states.shape[1], capacity, states.shape[3]) for states in (filled.keys, filled.values)
    ]
    if isinstance(filled, LinearAttentionCacheLayerMixin):
        return StaticMixedLayer(filled, columns, *buffers, block=block)
    return StaticTargetLayer(columns, *buffers)


def commit_held_states(layers: list, counts: torch.Tensor) -> None:
    """
    Take in what was kept of the last block.

    Args:
        layers (`list`): Layers of a static cache; those without held states are left alone.
        counts (`torch.LongTensor` of shape `(rows,)`): Tokens to take in per row.
    """
    recurrent = [layer for layer in layers if isinstance(layer, StaticRecurrentLayer)]
    if recurrent:
        windows = [window for layer in recurrent for window in layer.windows]
        recurrences = [recurrence for layer in recurrent for recurrence in layer.recurrences]
        dispatch("commit_states", commit_states, windows, recurrences, counts)


def _tensors(inputs: RecurrenceInputs) -> dict[str, torch.Tensor]:
    values = {entry.name: getattr(inputs, entry.name) for entry in fields(inputs)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


class StaticContext:
    """
    The drafter's context; stands in for [`DFlash2ContextCache`] in a fixed body.

    Args:
        draft ([`DFlash2DraftModel`]): The drafter.
        rows (`int`): Rows.
        capacity (`int`): Committed entries per row, plus the longest block.
    """

    def __init__(self, draft: DFlash2DraftModel, *, rows: int, capacity: int):
        config = draft.config
        # One more column takes what must not be kept.
        shape = (rows, config.num_key_value_heads, capacity + 1, config.head_dim)
        self._discard = capacity
        options = {"device": draft.device, "dtype": draft.dtype}
        self.keys = [torch.zeros(shape, **options) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, **options) for _ in range(config.num_hidden_layers)]
        self.lengths = torch.zeros(rows, dtype=torch.long, device=draft.device)
        self._columns: torch.Tensor | None = None
        self._block_columns: torch.Tensor | None = None

    def begin_append(self, positions: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """
        As [`DFlash2ContextCache.begin_append`], with `counts` on the device and for the first rows only.

        Returns:
            `torch.LongTensor` of shape `(batch, entries)`: the column of each entry.
        """
        index = torch.arange(positions.shape[1], device=positions.device)
        lengths = self.lengths[: positions.shape[0]]
        self._columns = torch.where(index < counts[:, None], lengths[:, None] + index, self._discard)
        lengths += counts
        return self._columns

    def append(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As [`DFlash2ContextCache.append`]."""
        _write(self.keys[layer_idx], self.values[layer_idx], self._columns, keys, values)

    def with_block(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor):
        """Write the block behind each row's context, layer 0 first; returns the whole buffers."""
        destination = self.block_destination(layer_idx, keys.shape[2])
        _write(*destination, keys, values)
        return destination[:2]

    def block_destination(self, layer_idx: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Key buffer, value buffer and columns: all that [`with_block`] writes, for a kernel that does it."""
        if layer_idx == 0:
            # The same in every layer of a pass.
            self._block_columns = self.lengths[:, None] + torch.arange(block, device=self.lengths.device)
        return self.keys[layer_idx], self.values[layer_idx], self._block_columns

    def block_mask(self, *args, **kwargs) -> None:
        """None: [`attend`] masks by length."""

    def attend(self, module, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention of a block over its row's context and itself; returns `(rows, block, heads, head_dim)`."""
        # Written in the order in which the output projection reads it.
        output = queries.new_empty((queries.shape[0], queries.shape[2], queries.shape[1], values.shape[3]))
        dispatch(
            "block_attention",
            block_attention_reference,
            queries,
            keys,
            values,
            self.lengths,
            scale=module.scaling,
            is_causal=module.block_is_causal,
            window=module.sliding_window,
            out=output.transpose(1, 2),
        )
        return output


__all__ = [
    "StaticContext",
    "StaticMixedLayer",
    "StaticRecurrentLayer",
    "StaticTargetLayer",
    "commit_held_states",
    "static_layer",
    "write_columns",
]

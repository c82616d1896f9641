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
"""The drafter's context cache.

A drafter keeps keys and values of *committed* tokens only, computed from the target's hidden states. Rows of a batch
commit different numbers of tokens per round, so every write names the position of each entry, and the mask of a block
follows from positions, not from a shared time axis. That is why this is not a subclass of the host's `Cache`, whose
`update` knows one length for the whole batch.

Buffers of one layer have shape `(batch, kv_heads, 1 + capacity + block, head_dim)`. Column 0 takes the entries that
must not be kept (padding, tokens outside a window) and is never read. Full layers fill the columns from 1 on in order
and double their capacity when it is used up; sliding layers use `window - 1` columns as a ring, which is what a query
at the next position can still see. The block's own keys and values are put behind the committed columns for the
duration of one pass and are overwritten later: nothing computed from mask tokens is ever counted as context.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class _Columns:
    """Where the entries of all layers with the same window live, and which position each column holds."""

    window: int | None
    layers: list[int]
    capacity: int = 0
    used: int = 0
    # Columns in use before the write in progress; the last block stands behind them.
    before: int = 0
    slots: torch.Tensor | None = None  # [batch, entries] column of each entry that is being written
    positions: torch.Tensor | None = None  # [batch, 1 + capacity], -1 = empty
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)


class DFlash2ContextCache:
    """
    Keys and values of committed tokens for every layer of a drafter, with a length of its own for every row.

    Args:
        layer_windows (`list[int | None]`):
            For each layer its sliding window (a query at position `q` sees keys at positions `> q - window`), or
            `None`.
        batch_size (`int`):
            Rows.
        block_size (`int`):
            Columns kept free for the block. A longer block makes the buffers grow.
        device (`torch.device`):
            Where the buffers live.
    """

    # Columns a full layer starts with.
    initial_capacity = 128

    def __init__(self, layer_windows: list[int | None], *, batch_size: int, block_size: int, device: torch.device):
        self.batch_size = batch_size
        self.block_size = block_size
        self.device = torch.device(device)
        # Entries written so far per row, on the host: the caller knows the counts anyway, and reading them back from
        # the device would stall it.
        self.lengths = [0] * batch_size
        self._groups: dict[int | None, _Columns] = {}
        for layer_idx, window in enumerate(layer_windows):
            self._groups.setdefault(window, _Columns(window, [])).layers.append(layer_idx)
        self._group_of_layer = [self._groups[window] for window in layer_windows]

    def get_seq_length(self, layer_idx: int = 0, row: int = 0) -> int:
        """Committed entries that layer `layer_idx` holds for `row`: all of them, or the last `window - 1`."""
        window = self._group_of_layer[layer_idx].window
        length = self.lengths[row]
        return length if window is None else min(length, window - 1)

    def begin_append(self, positions: torch.Tensor, counts: list[int]) -> None:
        """
        Reserve columns for new context entries; [`append`] then stores them layer by layer.

        Args:
            positions (`torch.LongTensor` of shape `(batch, entries)`):
                Absolute position of each entry. In row `b` the first `counts[b]` entries are kept, in ascending order.
            counts (`list[int]` of length `batch`):
                Entries to keep per row, at most `entries`.
        """
        entries = positions.shape[1]
        lengths = torch.tensor(self.lengths, device=self.device)[:, None]
        totals = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        index = torch.arange(entries, device=self.device)[None]
        counts_tensor = torch.tensor(counts, device=self.device)[:, None]
        for group in self._groups.values():
            keep = index < counts_tensor
            group.before = group.used
            if group.window is None:
                column = lengths + index
                group.used = max(totals)
                self._reserve(group, group.used)
            else:
                # Of a long prompt only what the window still shows is worth a column; without this, two entries of
                # one write would share a column.
                ring = max(group.window - 1, 1)
                keep = keep & (index >= counts_tensor - (group.window - 1))
                column = (lengths + index) % ring
                group.used = min(max(totals), ring)
                self._reserve(group, ring)
            group.slots = torch.where(keep, column + 1, 0)
            group.positions.scatter_(1, group.slots, torch.where(keep, positions, -1))
            group.positions[:, 0] = -1
        self.lengths = totals

    def append(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """
        Store the keys and values of the entries announced by [`begin_append`].

        Args:
            layer_idx (`int`): The layer.
            keys (`torch.Tensor` of shape `(batch, kv_heads, entries, head_dim)`): Normed and rotated keys.
            values (`torch.Tensor` of shape `(batch, kv_heads, entries, head_dim)`): Values.
        """
        group = self._group_of_layer[layer_idx]
        for buffers, new in ((group.keys, keys), (group.values, values)):
            if layer_idx not in buffers:
                width = 1 + group.capacity + self.block_size
                buffers[layer_idx] = new.new_zeros(*new.shape[:2], width, new.shape[3])
            # Rows that commit less than others leave columns of the last block in between. The mask hides them, but a
            # NaN times a weight of zero is still a NaN.
            start = 1 + group.before
            buffers[layer_idx][:, :, start : start + self.block_size] = 0
            index = group.slots[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
            buffers[layer_idx].scatter_(2, index, new)

    def with_block(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Context and block side by side, as attention reads them. The block is not committed by this.

        Args:
            layer_idx (`int`): The layer.
            keys (`torch.Tensor` of shape `(batch, kv_heads, block, head_dim)`): Keys of the block.
            values (`torch.Tensor` of shape `(batch, kv_heads, block, head_dim)`): Values of the block.

        Returns:
            Two views of shape `(batch, kv_heads, used + block, head_dim)`, valid until the next write.
        """
        group = self._group_of_layer[layer_idx]
        if layer_idx not in group.keys:
            return keys, values
        block = keys.shape[2]
        if block > self.block_size:
            self.block_size = block
            for other in self._groups.values():
                self._reallocate(other, other.capacity)
        start = 1 + group.used
        for buffer, new in ((group.keys[layer_idx], keys), (group.values[layer_idx], values)):
            buffer[:, :, start : start + block] = new
        stop = start + block
        return group.keys[layer_idx][:, :, 1:stop], group.values[layer_idx][:, :, 1:stop]

    def block_mask(self, layer_idx: int, block_positions: torch.Tensor, *, is_causal: bool) -> torch.Tensor | None:
        """
        Which columns of [`with_block`] each row of the block may see.

        Args:
            layer_idx (`int`): The layer.
            block_positions (`torch.LongTensor` of shape `(batch, block)`): Absolute positions of the block's rows.
            is_causal (`bool`): Whether a block row is kept from seeing later rows of the block.

        Returns:
            `torch.BoolTensor` of shape `(batch, 1, block, used + block)`, `True` = visible, or `None` where every row
            sees everything.
        """
        group = self._group_of_layer[layer_idx]
        block = block_positions.shape[1]
        window = group.window
        even = len(set(self.lengths)) == 1
        if even and not is_causal and (window is None or max(self.lengths) + block <= window):
            return None
        queries = block_positions[:, :, None]
        keys = block_positions[:, None, :]
        inside = keys <= queries if is_causal else torch.ones_like(keys <= queries)
        if window is not None:
            inside = inside & ((queries - keys).abs() < window)
        if group.positions is None:
            return inside.unsqueeze(1)
        context = group.positions[:, None, 1 : 1 + group.used]
        before = (context >= 0).expand(-1, block, -1)
        if window is not None:
            before = before & (queries - context < window)
        return torch.cat([before, inside], dim=-1).unsqueeze(1)

    def _reserve(self, group: _Columns, columns: int) -> None:
        if group.positions is None:
            group.capacity = columns if group.window is not None else max(columns, self.initial_capacity)
            shape = (self.batch_size, 1 + group.capacity)
            group.positions = torch.full(shape, -1, dtype=torch.long, device=self.device)
        elif columns > group.capacity:
            self._reallocate(group, max(columns, 2 * group.capacity))

    def _reallocate(self, group: _Columns, capacity: int) -> None:
        if group.positions is None:
            return
        old_width = 1 + group.capacity
        group.capacity = capacity
        positions = torch.full((self.batch_size, 1 + capacity), -1, dtype=torch.long, device=self.device)
        positions[:, :old_width] = group.positions
        group.positions = positions
        for buffers in (group.keys, group.values):
            for layer_idx, old in buffers.items():
                new = old.new_zeros(*old.shape[:2], 1 + capacity + self.block_size, old.shape[3])
                new[:, :, :old_width] = old[:, :, :old_width]
                buffers[layer_idx] = new


__all__ = ["DFlash2ContextCache"]

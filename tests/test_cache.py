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
"""The drafter's context cache against a store that keeps everything and looks at positions only."""

import random

import pytest
import torch

from transformers_dflash2.cache_dflash2 import DFlash2ContextCache


HEADS, HEAD_DIM = 2, 3
# Keys of context entries are told apart by their value, `row * ROW + position`; those of blocks lie above BLOCK.
ROW, BLOCK = 10_000, 1_000_000


def make_cache(windows, batch_size=1, block_size=4):
    return DFlash2ContextCache(windows, batch_size=batch_size, block_size=block_size, device=torch.device("cpu"))


def entries(positions, layer_idx, offset=0.0):
    """Keys and values that name row, position and layer in every element."""
    rows = torch.arange(positions.shape[0])[:, None] * ROW
    numbers = (offset + rows + positions).float()
    heads = torch.arange(HEADS)[:, None, None] * 0.25 + layer_idx * 0.0625
    keys = numbers[:, None, :, None] + heads
    return keys.expand(-1, -1, -1, HEAD_DIM).contiguous(), -keys.expand(-1, -1, -1, HEAD_DIM).contiguous()


class Model:
    """Drives a cache as a drafter does, and keeps every committed position in a list."""

    def __init__(self, windows, batch_size=1, block_size=4):
        self.windows = windows
        self.cache = make_cache(windows, batch_size, block_size)
        self.committed = [0] * batch_size

    def append(self, counts, width=None):
        width = max(counts) if width is None else width
        positions = torch.tensor(self.committed)[:, None] + torch.arange(width)
        # Entries that are not committed may name any position.
        positions = torch.where(torch.arange(width) < torch.tensor(counts)[:, None], positions, 7)
        self.cache.begin_append(positions, counts)
        for layer_idx in range(len(self.windows)):
            self.cache.append(layer_idx, *entries(positions, layer_idx))
        self.committed = [before + count for before, count in zip(self.committed, counts, strict=True)]

    def run_block(self, block, *, is_causal=False, poison=None):
        """One block: per layer and row of the block, the set of numbers it sees. Compares keys with values."""
        positions = torch.tensor(self.committed)[:, None] + torch.arange(block)
        seen = []
        for layer_idx in range(len(self.windows)):
            new_keys, new_values = entries(positions, layer_idx, BLOCK)
            if poison is not None:
                new_keys, new_values = torch.full_like(new_keys, poison), torch.full_like(new_values, poison)
            keys, values = self.cache.with_block(layer_idx, new_keys, new_values)
            mask = self.cache.block_mask(layer_idx, positions, is_causal=is_causal)
            assert keys.shape == values.shape
            width = keys.shape[2]
            if mask is None:
                mask = torch.ones(len(self.committed), 1, block, width, dtype=torch.bool)
            assert mask.shape == (len(self.committed), 1, block, width) and mask.dtype == torch.bool
            assert torch.equal(keys[:, :, -block:], new_keys) or poison is not None
            if poison is None:
                visible = mask.any(dim=2)[:, 0, :, None]
                for head in range(HEADS):
                    torch.testing.assert_close(keys[:, head] * visible, -values[:, head] * visible)
            numbers = keys[:, 0, :, 0] - layer_idx * 0.0625
            seen.append(
                [[sorted(numbers[row][mask[row, 0, i]].tolist()) for i in range(block)] for row in range(len(numbers))]
            )
        return seen

    def expected(self, block, *, is_causal=False):
        """The same from positions alone."""
        result = []
        for window in self.windows:
            rows = []
            for row, committed in enumerate(self.committed):
                lists = []
                for query in range(committed, committed + block):
                    context = [k for k in range(committed) if window is None or query - k < window]
                    inside = [
                        k
                        for k in range(committed, committed + block)
                        if (k <= query or not is_causal) and (window is None or abs(query - k) < window)
                    ]
                    lists.append(
                        [float(row * ROW + k) for k in context] + [float(BLOCK + row * ROW + k) for k in inside]
                    )
                rows.append(lists)
            result.append(rows)
        return result

    def check(self, block=4, **kwargs):
        assert self.run_block(block, **kwargs) == self.expected(block, **kwargs)
        for layer_idx, window in enumerate(self.windows):
            for row, committed in enumerate(self.committed):
                length = committed if window is None else min(committed, window - 1)
                assert self.cache.get_seq_length(layer_idx, row) == length


WINDOWS = [
    pytest.param([None], id="full"),
    pytest.param([1], id="window1"),
    pytest.param([2], id="window2"),
    pytest.param([5], id="window5"),
    pytest.param([16], id="window16"),
    pytest.param([6, None, 6, 3], id="mixed"),
]
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["two-sided", "causal"])


@CAUSAL
@pytest.mark.parametrize("windows", WINDOWS)
def test_any_accept_pattern(windows, is_causal):
    """Catches a length or window that drifts after some accepts: the invariant holds before every block."""
    for seed in range(3):
        rng = random.Random(seed)
        model = Model(windows)
        model.append([rng.randint(1, 12)])
        for _ in range(12):
            model.check(is_causal=is_causal)
            model.append([rng.randint(1, 4)], width=4)


@CAUSAL
@pytest.mark.parametrize("windows", WINDOWS)
def test_rows_of_different_lengths(windows, is_causal):
    """Catches a row that sees a neighbour's entries, its own left-over block, or the time axis of the longest row."""
    for seed in range(3):
        rng = random.Random(seed)
        model = Model(windows, batch_size=3)
        model.append([rng.randint(0, 9) for _ in range(3)], width=9)
        for _ in range(12):
            model.check(is_causal=is_causal)
            # A row that is finished commits nothing from then on.
            model.append([rng.randint(1, 4), rng.randint(0, 4), 0], width=4)


@pytest.mark.parametrize("windows", WINDOWS)
def test_rows_that_meet_again(windows):
    """Catches the shortcut without a mask taken for rows that are even now but were not when columns were filled."""
    model = Model(windows, batch_size=2)
    model.append([6, 2])
    model.check()
    model.append([1, 5])
    model.check()
    model.append([3, 3])
    model.check()


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("prompt", [3, 4, 5, 6, 7, 40], ids="prompt{}".format)
def test_one_write_longer_than_the_window(windows, prompt):
    """Catches two entries of one prompt in one ring column, where the order of writing would decide."""
    model = Model(windows, batch_size=2)
    model.append([prompt, prompt - 2])
    model.check()
    model.append([2, 4])
    model.check()


@pytest.mark.parametrize("prompt", [3, 7, 40], ids="prompt{}".format)
def test_no_two_entries_of_a_write_share_a_column(prompt):
    """Catches a scatter with two values for one column: on a CPU the last one wins, on a GPU either."""
    cache = make_cache([6, None], batch_size=2)
    for start in (0, prompt):
        cache.begin_append(torch.arange(start, start + prompt).expand(2, -1), [prompt, prompt - 2])
        for group in cache._groups.values():
            for row in group.slots:
                kept = row[row > 0]
                assert len(kept) > 0 and len(kept.unique()) == len(kept)


@pytest.mark.parametrize("parts", [[9], [1] * 9, [4, 5], [5, 3, 1]], ids=["once", "one-by-one", "halves", "falling"])
def test_chunks_do_not_matter(parts):
    """Catches a content that depends on how the committed tokens were grouped into writes."""
    model = Model([4, None])
    for part in parts:
        model.append([part])
    model.check()


def test_block_is_never_committed():
    """Catches mask-token keys counted as context: a block runs, nothing is appended, and the next block sees none."""
    model = Model([None, 4], batch_size=2)
    model.append([5, 3])
    for block in (4, 2, 4, 1, 3):
        model.check(block)
    assert model.cache.lengths == [5, 3]


@pytest.mark.parametrize("windows", [[None], [5]], ids=["full", "window5"])
def test_left_over_of_a_broken_block_is_gone(windows):
    """Catches a NaN of one pass that stays in a masked column: attention multiplies it by 0, and 0 * NaN is NaN."""
    model = Model(windows, batch_size=2)
    model.append([4, 4])
    model.run_block(4, poison=float("nan"))
    model.append([3, 1], width=3)
    positions = torch.tensor(model.committed)[:, None] + torch.arange(4)
    keys, values = model.cache.with_block(0, *entries(positions, 0, BLOCK))
    assert torch.isfinite(keys).all() and torch.isfinite(values).all()


@pytest.mark.parametrize("block_size", [1, 4, 9], ids="block{}".format)
@CAUSAL
def test_blocks_of_other_lengths(block_size, is_causal):
    """Catches blocks that are shorter than announced near the length limit, of one row, or longer than a window."""
    model = Model([5, None], block_size=9)
    model.append([11])
    model.check(block_size, is_causal=is_causal)
    model.append([1])
    model.check(block_size, is_causal=is_causal)


@pytest.mark.parametrize(
    "windows",
    [pytest.param([None], id="full"), pytest.param([5], id="window5"), pytest.param([5, None, 7], id="mixed")],
)
@pytest.mark.parametrize("prompt", [3, 20, 127, 128, 129], ids="prompt{}".format)
def test_block_longer_than_announced(windows, prompt):
    """Catches buffers of which only the first layer's kind grows for a block longer than the cache was made for."""
    model = Model(windows, block_size=2)
    model.append([prompt])
    model.check(2)
    model.check(8)
    model.append([5])
    model.check(8)


@pytest.mark.parametrize("prompt", [1, 3, 126, 128, 129, 300], ids="prompt{}".format)
def test_growth_keeps_the_content(prompt):
    """Catches columns lost, or a block written over context, when a full layer's buffers are enlarged."""
    model = Model([None, 6], batch_size=2)
    model.append([prompt, 1])
    for _ in range(3):
        model.check()
        model.append([60, 4], width=60)
    model.check()


def test_growth_in_small_steps(monkeypatch):
    """Catches an off-by-one at the edge of the capacity, which is met here at every length up to 40."""
    monkeypatch.setattr(DFlash2ContextCache, "initial_capacity", 1)
    model = Model([None], batch_size=2)
    for _ in range(40):
        model.append([1, 1])
        model.check(3)


def test_sliding_layers_stay_small():
    """Catches a sliding layer that keeps the whole prompt: memory must follow the window, not the context."""
    model = Model([8, None])
    model.append([500])
    block = torch.zeros(1, HEADS, 4, HEAD_DIM)
    assert model.cache.with_block(0, block, block)[0].shape[2] == 7 + 4
    assert model.cache.with_block(1, block, block)[0].shape[2] == 500 + 4


@pytest.mark.parametrize("windows", WINDOWS)
def test_counts_of_zero(windows):
    """Catches a write of nothing that moves a length or leaves a trace."""
    model = Model(windows, batch_size=2)
    model.append([0, 0], width=3)
    model.check()
    model.append([5, 0])
    model.check()
    model.append([0, 0], width=4)
    model.check()


@pytest.mark.parametrize("windows", WINDOWS)
@CAUSAL
def test_without_any_context(windows, is_causal):
    """Catches an empty cache that cannot be read, or a causal block that is unmasked because there is no context."""
    Model(windows, batch_size=2).check(is_causal=is_causal)


def test_mask_is_left_out_only_where_all_is_visible():
    """Catches a mask built for nothing on the common path, and one left out one token too late."""
    model = Model([8])
    model.append([4])
    positions = torch.arange(4, 8)[None]
    assert model.cache.block_mask(0, positions, is_causal=False) is None
    assert model.cache.block_mask(0, positions, is_causal=True) is not None
    model.append([1])
    # The last of four rows at 5..8 no longer sees position 0.
    assert model.cache.block_mask(0, positions + 1, is_causal=False) is not None


def test_refuses_counts_of_another_batch():
    """Catches a silent broadcast when counts and rows do not belong together."""
    with pytest.raises(ValueError):
        make_cache([None], batch_size=2).begin_append(torch.zeros(2, 3, dtype=torch.long), [1, 1, 1])

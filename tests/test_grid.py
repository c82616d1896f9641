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
"""
Prompt length x block size x new tokens, against plain decoding.

`pytest -m slow tests/test_grid.py` goes through every prompt of 1 to 20 tokens, block of 1 to 17 and text of 0 to 20
tokens, one row and three; the default run takes a spread-out part of it. Catches state that is written wrongly at one
length only: block equal to window, to buffer, to the tokens that are left.
"""

import functools

import pytest
import torch
from generation_checks import pure_target

from transformers_dflash2.testing import (
    broken_table,
    cycle_table,
    left_pad,
    random_drafter,
    read_table,
    table_drafter,
    table_target,
)


PROMPT_LENGTHS = range(1, 21)
BLOCK_SIZES = range(1, 18)
NEW_TOKENS = range(0, 21)
# Coprime to the sizes of the grid, so that the part that is taken by default meets every length of each kind.
STRIDE = 127


@functools.cache
def mixed_target():
    """Blocks are accepted for any number of tokens, most often for one to three."""
    return table_target(3, table=cycle_table(32, 3))


TARGETS = {"mixed": mixed_target, "follows-the-table": pure_target}
# Every point of the grid is run with one of them, neighbours with different ones.
PAIRS = [
    ("mixed", "right"),
    ("follows-the-table", "half-right"),
    ("mixed", "random"),
    ("follows-the-table", "right"),
    ("mixed", "half-right"),
]


@functools.cache
def drafter(target, kind, block_size):
    model = TARGETS[target]()
    if kind == "random":
        return random_drafter(model, block_size=block_size)
    table = read_table(model)
    if kind == "half-right":
        table = broken_table(table, range(0, 32, 3))
    return table_drafter(model, table, block_size=block_size)


@functools.cache
def prompts(length, batch):
    generator = torch.Generator().manual_seed(100 * length + batch)
    lengths = [length, max(1, length // 2), max(1, length - 1)][:batch]
    return left_pad([torch.randint(1, 31, (size,), generator=generator).tolist() for size in lengths])


@functools.cache
def plain(target, length, batch):
    return TARGETS[target]().generate(**prompts(length, batch), max_new_tokens=max(NEW_TOKENS), do_sample=False)


def check(target, kind, length, block_size, new_tokens, batch):
    model, draft = TARGETS[target](), drafter(target, kind, block_size)
    inputs = {**prompts(length, batch), "max_new_tokens": new_tokens, "do_sample": False}
    if new_tokens == 0:
        # Plain `generate` refuses to generate nothing.
        with pytest.raises(ValueError) as refused:
            model.generate(**inputs)
        with pytest.raises(ValueError) as drafted:
            model.generate(**inputs, assistant_model=draft)
        assert str(drafted.value) == str(refused.value)
        return
    drafted = model.generate(**inputs, assistant_model=draft)
    expected = plain(target, length, batch)[:, : length + new_tokens]
    assert torch.equal(drafted, expected), (target, kind, length, block_size, new_tokens, batch)


def test_the_drafters_of_the_grid():
    """Catches a grid that is run with drafters that never reach acceptance, or never rejection."""
    inputs = {**prompts(3, 1), "max_new_tokens": 65, "do_sample": False}
    for kind, low, high in (("right", 7.9, 8.0), ("half-right", 1.2, 4.0), ("random", 1.0, 1.5)):
        draft = drafter("follows-the-table", kind, 8)
        pure_target().generate(**inputs, assistant_model=draft)
        assert low <= draft.last_stats.mean_accepted_length <= high, kind
    counts = torch.zeros(8)
    for length in (1, 5, 20):
        draft = drafter("mixed", "right", 8)
        mixed_target().generate(**{**inputs, **prompts(length, 3)}, assistant_model=draft)
        reached = torch.tensor([draft.last_stats.rounds, *draft.last_stats.accepted_per_position])
        counts += reached - torch.cat([reached[1:], torch.zeros(1)])
    assert (counts > 0).all(), counts


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_fault_59_part_of_the_grid(length, batch):
    """Catches lengths at which a block, the prompt and the limit do not fit together."""
    points = [
        (block_size, new_tokens)
        for index, (block_size, new_tokens) in enumerate((b, n) for b in BLOCK_SIZES for n in NEW_TOKENS)
        if (index + 7 * length + 3 * batch) % STRIDE == 0
    ]
    for index, (block_size, new_tokens) in enumerate(points):
        target, kind = PAIRS[(index + length) % len(PAIRS)]
        check(target, kind, length, block_size, new_tokens, batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_fault_59_whole_grid(length, batch):
    """Catches what the default part leaves out; one test is one prompt length with 17 x 21 calls."""
    for block_size in BLOCK_SIZES:
        for new_tokens in NEW_TOKENS:
            target, kind = PAIRS[(length + block_size + new_tokens) % len(PAIRS)]
            check(target, kind, length, block_size, new_tokens, batch)

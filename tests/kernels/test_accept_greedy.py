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
"""The greedy accept kernel, exhaustively for small drafts."""

import itertools

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import opcheck  # noqa: E402

from transformers_dflash2.functional_dflash2 import accept_greedy  # noqa: E402
from transformers_dflash2.kernels.accept_greedy import (  # noqa: E402
    accept_greedy_ineligible_reason,
    accept_greedy_op,
    accept_greedy_triton,
)


@pytest.mark.parametrize("slots", [1, 2, 3, 4], ids="slots{}".format)
def test_every_pattern_of_agreement(device, slots):
    """Catches an agreement after the first refusal that counts, and a bonus of the wrong position."""
    patterns = torch.tensor(list(itertools.product([0, 1], repeat=slots)), device=device)
    predictions = torch.randint(0, 1000, (len(patterns), slots + 1), device=device)
    tokens = torch.where(patterns == 1, predictions[:, :-1], 1000)
    accepted, bonus = accept_greedy_triton(tokens, predictions)
    expected = accept_greedy(tokens, predictions)
    assert accepted.dtype == bonus.dtype == torch.int64
    assert torch.equal(accepted, expected[0]) and torch.equal(bonus, expected[1])


@pytest.mark.parametrize("slots", [5, 7, 15, 16, 33], ids="slots{}".format)
def test_longer_drafts(device, slots):
    """Catches lanes past the draft, which agree with nothing and must not end it."""
    lengths = torch.arange(slots + 1, device=device)
    predictions = torch.randint(0, 5, (slots + 1, slots + 1), device=device)
    tokens = predictions[:, :-1] + (torch.arange(slots, device=device) >= lengths[:, None])
    accepted, bonus = accept_greedy_triton(tokens, predictions)
    assert torch.equal(accepted, lengths)
    assert torch.equal(bonus, predictions[lengths, lengths])


def test_ids_beyond_32_bits_and_placeholders(device):
    """Catches ids compared or returned in 32 bits, and a placeholder that is accepted."""
    large = 2**40
    tokens = torch.tensor([[large, 1], [5, 1], [-1, 1]], device=device)
    predictions = torch.tensor([[large, 1, large + 1], [large + 5, 1, 2], [3, 1, 2]], device=device)
    accepted, bonus = accept_greedy_triton(tokens, predictions)
    assert accepted.tolist() == [2, 0, 0]
    assert bonus.tolist() == [large + 1, large + 5, 3]


def test_drafts_that_must_be_ignored(device):
    """Catches an agreement by chance that counts in a row without a draft, and flags of another row."""
    predictions = torch.randint(0, 3, (40, 6), device=device)
    tokens = torch.randint(0, 3, (40, 5), device=device)
    tokens[::2] = predictions[::2, :-1]
    usable = torch.rand(40, device=device) < 0.5
    accepted, bonus = accept_greedy_triton(tokens, predictions, usable=usable)
    expected = accept_greedy(tokens, predictions, usable=usable)
    assert torch.equal(accepted, expected[0]) and torch.equal(bonus, expected[1])
    # The reference by its meaning: what no prediction can be.
    unknown = accept_greedy(tokens.masked_fill(~usable[:, None], -1), predictions)
    assert torch.equal(accepted, unknown[0]) and torch.equal(bonus, unknown[1])


def test_strided_and_32_bit_inputs(device):
    """Catches contiguous addressing: drafts are a slice of `[anchor, tokens]`."""
    block = torch.randint(0, 3, (6, 5), dtype=torch.int32, device=device)
    predictions = torch.randint(0, 3, (6, 9), device=device)[:, 2:7]
    accepted, bonus = accept_greedy_triton(block[:, 1:], predictions)
    expected = accept_greedy(block[:, 1:], predictions)
    assert torch.equal(accepted, expected[0]) and torch.equal(bonus, expected[1])


@pytest.mark.parametrize(("batch", "slots"), [(3, 0), (0, 4)], ids=["no-slots", "no-rows"])
def test_nothing_drafted(device, batch, slots):
    """Catches a launch without lanes or programs; without a draft the first prediction is the bonus."""
    predictions = torch.randint(0, 9, (batch, slots + 1), device=device)
    accepted, bonus = accept_greedy_triton(predictions[:, :slots], predictions)
    assert torch.equal(accepted, torch.full((batch,), slots, device=device))
    assert torch.equal(bonus, predictions[:, slots])


def test_writes_into_buffers(device):
    """Catches output buffers that are ignored, as a captured graph would not."""
    tokens, predictions = torch.tensor([[1, 2]], device=device), torch.tensor([[1, 2, 3]], device=device)
    out = tuple(torch.full((1,), -7, device=device) for _ in range(2))
    returned = accept_greedy_triton(tokens, predictions, out=out)
    assert returned[0] is out[0] and returned[1] is out[1]
    assert [buffer.item() for buffer in out] == [2, 3]


@pytest.mark.parametrize(
    ("tokens", "predictions", "out", "reason"),
    [
        pytest.param(torch.zeros(2, 3), torch.zeros(2, 4).long(), None, "tokens is float32", id="float"),
        pytest.param(torch.zeros(2).long(), torch.zeros(2, 4).long(), None, "tokens has shape", id="one-dimension"),
        pytest.param(torch.zeros(2, 3).long(), torch.zeros(2, 3).long(), None, "predictions has shape", id="no-bonus"),
        pytest.param(
            torch.zeros(3, 2).long().T, torch.zeros(2, 4).long(), None, "tokens has stride", id="slots-apart"
        ),
        pytest.param(
            torch.zeros(2, 3).long(),
            torch.zeros(2, 4).long(),
            (torch.zeros(2).long(), torch.zeros(2).int()),
            "out[1] is int32",
            id="out",
        ),
    ],
)
def test_reasons(device, tokens, predictions, out, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    tokens, predictions = tokens.to(device), predictions.to(device)
    out = out and tuple(buffer.to(device) for buffer in out)
    assert reason in accept_greedy_ineligible_reason(tokens, predictions, out=out)
    with pytest.raises(ValueError, match="accept_greedy_triton: "):
        accept_greedy_triton(tokens, predictions, out=out)


def test_reasons_of_usable(device):
    """Catches flags of another type or number, which a launch would misread."""
    tokens, predictions = torch.zeros(2, 3, device=device).long(), torch.zeros(2, 4, device=device).long()
    for usable, reason in (
        (torch.ones(2, device=device).long(), "usable is int64"),
        (torch.ones(3, device=device).bool(), "usable has shape"),
    ):
        assert reason in accept_greedy_ineligible_reason(tokens, predictions, usable=usable)
        with pytest.raises(ValueError, match="accept_greedy_triton: "):
            accept_greedy_triton(tokens, predictions, usable=usable)


def test_operator(device):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    predictions = torch.randint(0, 3, (4, 6), device=device)
    tokens = torch.randint(0, 3, (4, 5), device=device)
    opcheck(accept_greedy_op, tokens, predictions)
    opcheck(accept_greedy_op, tokens, predictions, torch.tensor([True, False, True, False], device=device))
    compiled = torch.compile(lambda *args: accept_greedy_op(*args), fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(tokens, predictions), accept_greedy(tokens, predictions), strict=True):
        assert torch.equal(actual, expected)

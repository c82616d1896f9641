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
"""The Markov heads against hand-made numbers and against a float64 evaluation, number by number."""

import math

import pytest
import torch
from dspark_checks import HEADS, exact_markov, markov_head

from transformers_dflash2.functional_dspark import gated_code, markov_law, markov_step, recurrent_code, survival


# Largest difference of float32 logits of order 5 from float64 ones.
LOGITS_TOLERANCE = 1e-5
PROBABILITY_TOLERANCE = 2e-6
# Golden values are written with six decimals.
GOLDEN_TOLERANCE = 1e-6
SAMPLED = torch.tensor([False])

# Vocabulary 4, rank 2, hidden size 1, anchor 1: rows of W1 and W2, base logits of two slots, hidden rows 0.5 and -1.
W1 = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [-1.0, 0.5]])
W2 = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, -0.5]])
BASE = torch.tensor([[1.0, 0.5, 0.0, 0.25], [0.0, 0.0, 0.5, 0.25]])
HIDDEN = torch.tensor([[0.5], [-1.0]])


def golden_head(kind):
    head = markov_head(kind, rank=2, hidden_size=1, vocab_size=4, draft_vocab_size=4)
    head.markov_w1.weight.copy_(W1)
    head.markov_w2.weight.copy_(W2)
    if kind == "gated":
        # G [h; e] + g with columns h, e1, e2.
        head.gate_proj.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, -0.5]]))
        head.gate_proj.bias.copy_(torch.tensor([0.0, 1.0]))
    elif kind == "rnn":
        # J [s; e; h] + j with columns s1, s2, e1, e2, h: forget, update, output.
        head.joint_proj.weight.zero_()
        head.joint_proj.weight[0, 4] = 1.0
        head.joint_proj.weight[2, 2] = 1.0
        head.joint_proj.weight[3, 3] = 0.5
        head.joint_proj.weight[4, 0] = 2.0
        head.joint_proj.weight[5, 1] = 1.0
        head.joint_proj.weight[5, 3] = 1.0
        head.joint_proj.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.25]))
    return head


# By hand.
# vanilla: e = (0, 2) gives the bias (0, 0, 2, -1) and token 2; then e = (1, 1) gives (0, 1, 1, 0).
# gated: the gate of the second entry is sigmoid(1 - 1), the code (0, 1); tokens 0 and 2 tie, and the first is taken.
#   Then e = (1, 0) passes a gate of sigmoid(-1).
# rnn: the code is (0, tanh(2.25)) and the state becomes (0, 0.5 tanh(1)); then o = (0, 0.5 tanh(1) + 0.25).
GATE = 1 / (1 + math.e)
FIRST = math.tanh(2.25)
SECOND = math.tanh(0.5 * math.tanh(1.0) + 0.25)
GOLDEN = {
    "vanilla": ([2, 2], [[1.0, 0.5, 2.0, -0.75], [0.0, 1.0, 1.5, 0.25]]),
    "gated": ([0, 2], [[1.0, 0.5, 1.0, -0.25], [0.0, GATE, 0.5, 0.25 + 0.5 * GATE]]),
    "rnn": ([0, 2], [[1.0, 0.5, FIRST, 0.25 - 0.5 * FIRST], [0.0, 0.0, 0.5 + SECOND, 0.25 - 0.5 * SECOND]]),
}


def run(head, hidden, base, anchors, *, noise=None, temperatures=None, greedy=None, ids=None, **kwargs):
    """`(tokens, logits, q)` of a batch."""
    batch = base.shape[0]
    temperatures = torch.ones(batch) if temperatures is None else temperatures
    greedy = torch.full((batch,), noise is None) if greedy is None else greedy
    ids = torch.arange(base.shape[-1]).expand(base.shape) if ids is None else ids
    tokens, logits, index = head(hidden, base, ids, anchors, noise, temperatures, greedy, **kwargs)
    return tokens, logits, markov_law(logits, index, temperatures, greedy)


@pytest.mark.parametrize("kind", HEADS)
def test_golden_block(kind):
    """Catches swapped tables, a joint projection split in another order, and a predecessor that stays the anchor."""
    tokens, logits = GOLDEN[kind]
    actual = run(golden_head(kind), HIDDEN[None], BASE[None], torch.tensor([1]))
    assert actual[0].tolist() == [tokens]
    torch.testing.assert_close(actual[1], torch.tensor([logits]), atol=GOLDEN_TOLERANCE, rtol=0)
    assert torch.equal(actual[2], torch.nn.functional.one_hot(actual[0], 4).float())


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", HEADS)
def test_block_equals_float64(kind, sampled):
    """Catches a state that is not carried on, a row that reads another's, and a q that is not the law of the draw."""
    torch.manual_seed(1)
    batch, slots, vocab = 3, 6, 11
    head = markov_head(kind)
    hidden, base = torch.randn(batch, slots, 6), 3 * torch.randn(batch, slots, vocab)
    anchors, temperatures = torch.tensor([0, 4, 10]), torch.tensor([0.5, 1.0, 2.5])
    noise = torch.empty(batch, slots, vocab).exponential_() if sampled else None
    tokens, logits, q = run(head, hidden, base, anchors, noise=noise, temperatures=temperatures)
    for row in range(batch):
        expected = exact_markov(
            head,
            hidden[row],
            base[row],
            range(vocab),
            anchors[row],
            noise=noise[row] if sampled else None,
            temperature=float(temperatures[row]),
        )
        assert tokens[row].tolist() == expected[0]
        torch.testing.assert_close(logits[row].double(), expected[1], atol=LOGITS_TOLERANCE, rtol=0)
        torch.testing.assert_close(q[row].double(), expected[2], atol=PROBABILITY_TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", HEADS)
def test_greedy_and_sampled_rows_mix(kind):
    """Catches a flag of one row that acts on all."""
    torch.manual_seed(2)
    head, hidden, base = markov_head(kind), torch.randn(2, 4, 6), torch.randn(2, 4, 11)
    noise, anchors = torch.empty(2, 4, 11).exponential_(), torch.tensor([3, 3])
    mixed = run(head, hidden, base, anchors, noise=noise, greedy=torch.tensor([True, False]))
    greedy = run(head, hidden[:1], base[:1], anchors[:1])
    sampled = run(head, hidden[1:], base[1:], anchors[1:], noise=noise[1:])
    for actual, first, second in zip(mixed, greedy, sampled, strict=True):
        torch.testing.assert_close(actual, torch.cat([first, second]), atol=PROBABILITY_TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", HEADS)
def test_a_subset_of_candidates_has_the_scores_of_the_whole(kind):
    """Catches bias rows that belong to other candidates once only some are scored."""
    torch.manual_seed(3)
    head, hidden, base = markov_head(kind), torch.randn(2, 3, 6), torch.randn(2, 3, 11)
    anchors = torch.tensor([1, 9])
    ids = torch.stack([torch.randperm(11)[:11] for _ in range(6)]).view(2, 3, 11)
    whole = run(head, hidden, base, anchors)
    subset = run(head, hidden, base.gather(-1, ids), anchors, ids=ids, successor_rows=ids)
    assert torch.equal(subset[0], whole[0])
    torch.testing.assert_close(subset[1], whole[1].gather(-1, ids), atol=LOGITS_TOLERANCE, rtol=0)


def test_gumbel_draws_follow_the_law():
    """Catches noise of the wrong sign or scale: 20,000 draws of one slot against the softmax."""
    stats = pytest.importorskip("scipy.stats")
    torch.manual_seed(4)
    draws, logits = 20_000, torch.tensor([1.0, 0.0, -1.0, 0.5, -math.inf])
    _, index = markov_step(
        logits.expand(draws, -1),
        torch.zeros(draws, 2),
        torch.zeros(5, 2),
        torch.empty(draws, 5).exponential_(),
        torch.full((draws,), 0.7),
        torch.zeros(draws, dtype=torch.bool),
    )
    counts, law = torch.bincount(index, minlength=5).double(), torch.softmax(logits.double() / 0.7, dim=-1)
    assert counts[4] == 0
    assert stats.chisquare(counts[:4].numpy(), (law[:4] * draws).numpy()).pvalue > 1e-3


def test_first_maximum_and_first_nan_win():
    """Catches a last-maximum rule, and a NaN that is passed over."""
    base = torch.tensor([[0.0, 2.0, 2.0], [0.0, math.nan, math.nan]])
    code, successor = torch.zeros(2, 1), torch.zeros(3, 1)
    _, index = markov_step(base, code, successor, None, torch.ones(2), torch.tensor([True, True]))
    assert index.tolist() == [1, 1]


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_a_broken_slot_shows_in_its_law(greedy):
    """Catches a NaN that a one-hot law would hide; the other row and the other slot stay as they are."""
    logits = torch.randn(2, 2, 4)
    logits[0, 1, 2] = math.nan
    index = torch.zeros(2, 2, dtype=torch.long)
    law = markov_law(logits, index, torch.ones(2), torch.full((2,), greedy))
    assert law[0, 1].isnan().all() and not law[0, 0].isnan().any() and not law[1].isnan().any()


@pytest.mark.parametrize("temperature", [0.0, 1e-6], ids="t{}".format)
def test_smallest_temperature(temperature):
    """Catches a division by zero, and noise of zero on an excluded token, which is not a number."""
    base = torch.tensor([[0.0, 2.0, -math.inf]])
    logits, index = markov_step(
        base, torch.zeros(1, 1), torch.zeros(3, 1), torch.zeros(1, 3), torch.tensor([temperature]), SAMPLED
    )
    law = markov_law(logits[:, None], index[:, None], torch.tensor([temperature]), SAMPLED)
    assert index.tolist() == [1] and law.tolist() == [[[0.0, 1.0, 0.0]]]


def test_predecessor_without_a_row():
    """Catches an index error for an anchor that only the target's padded head can produce."""
    head = markov_head("vanilla")
    base = torch.randn(1, 1, 11)
    _, logits, _ = run(head, torch.zeros(1, 1, 6), base, torch.tensor([40]))
    assert torch.equal(logits, base)


def test_codes_are_float32_in_half_types():
    """Catches a state that is rounded to bfloat16 from slot to slot."""
    hidden, embedding = torch.randn(2, 6).bfloat16(), torch.randn(2, 5).bfloat16()
    assert (
        gated_code(hidden, embedding, torch.randn(5, 11).bfloat16(), torch.randn(5).bfloat16()).dtype == torch.float32
    )
    code, state = recurrent_code(
        torch.randn(2, 5), embedding, hidden, torch.randn(15, 16).bfloat16(), torch.randn(15).bfloat16()
    )
    assert code.dtype == state.dtype == torch.float32


def test_survival():
    """Catches a product that starts one slot late, and a NaN that would let every later slot through."""
    confidence = torch.tensor([[0.5, 0.5, 1.0, 2.0], [1.0, math.nan, 1.0, 1.0]])
    assert survival(confidence).tolist() == [[0.5, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]

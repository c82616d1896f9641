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
Sampling: the law of what comes out is the target's own processed law, whatever the drafter proposes.

The exact law of three tokens is enumerated with one target pass over every prefix and the host's own processors, and
compared with counts of many draws, all of them rows of a few batches: 6,000 by default, 20,000 in the slow tests,
which go through every combination (`pytest -m slow tests/test_distribution.py -s` lists their p-values).

One token more is generated than is counted, so that all counted tokens behind the first can be drafted ones.
"""

import functools
import itertools
import zlib

import pytest
import torch
from generation_checks import SMALLEST_P_VALUE, chi_square_p_value, module_inputs, target_inputs
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from transformers_dflash2.testing import broken_table, random_drafter, read_table, table_drafter, table_target


pytest.importorskip("scipy.stats")

VOCAB = 8
PROMPT = [3, 6]
DRAWS = 6_000
MANY_DRAWS = 20_000
BATCH = 2_000


@functools.cache
def target():
    """Flat enough that temperature, top-k and top-p all cut somewhere, and dependent on more than the last token."""
    return table_target(1, VOCAB, mix=0.15, logit_scale=0.35)


def v1_drafter():
    return random_drafter(target(), draft_family="dflash")


DRAFTERS = {
    "sure-and-right": lambda: table_drafter(target()),
    "sure-and-wrong": lambda: table_drafter(target(), broken_table(read_table(target()))),
    "spread-out": lambda: table_drafter(target(), sharpness=1.5),
    "random": lambda: random_drafter(target(), selector_top_k=4),
    "random-one-candidate": lambda: random_drafter(target(), selector_top_k=1),
    "v1": v1_drafter,
}

LAWS = {
    "temperature": ({"temperature": 0.7, "top_k": 0}, [TemperatureLogitsWarper(0.7)]),
    "hot": ({"temperature": 2.0, "top_k": 0}, [TemperatureLogitsWarper(2.0)]),
    "top-k": ({"temperature": 0.9, "top_k": 4}, [TemperatureLogitsWarper(0.9), TopKLogitsWarper(4)]),
    "top-p": ({"top_p": 0.9, "top_k": 0}, [TopPLogitsWarper(0.9)]),
    "min-p": ({"min_p": 0.12, "top_k": 0}, [MinPLogitsWarper(0.12)]),
    "repetition": (
        {"repetition_penalty": 1.7, "top_k": 0},
        [RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "all": (
        {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.9)],
    ),
}


def next_token_law(prefixes, processors):
    """Processed distribution after each prefix: `(prefixes, vocab)`."""
    with torch.no_grad():
        logits = target()(prefixes).logits[:, -1].float()
    return LogitsProcessorList(processors)(prefixes, logits).softmax(-1).double()


@functools.cache
def joint_law(name, length=3):
    """Probability of every continuation of `length` tokens."""
    processors = LAWS[name][1]
    law = torch.ones(1, dtype=torch.float64)
    prefixes = torch.tensor([PROMPT])
    for _ in range(length):
        law = (law[:, None] * next_token_law(prefixes, processors)).flatten()
        prefixes = torch.cat(
            [prefixes.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(prefixes))[:, None]], dim=1
        )
    return law


def draw(draft, options, length, seed, draws=DRAWS, extra=1):
    """Counts of every continuation, and how often the first place was accepted and offered."""
    torch.manual_seed(seed)
    places = VOCAB ** torch.arange(length - 1, -1, -1)
    counts = torch.zeros(VOCAB**length)
    accepted = offered = 0
    for _ in range(draws // BATCH):
        out = target().generate(
            torch.tensor([PROMPT]).expand(BATCH, -1),
            assistant_model=draft,
            do_sample=True,
            max_new_tokens=length + extra,
            **options,
        )
        width = len(PROMPT) + length
        out = torch.nn.functional.pad(out, (0, max(0, width - out.shape[1])))[:, len(PROMPT) : width]
        counts += torch.bincount((out * places).sum(-1), minlength=VOCAB**length)
        accepted += sum(draft.last_stats.accepted_per_position[:1])
        offered += sum(draft.last_stats.drafted_per_position[:1])
    return counts.double(), accepted, offered


def check_joint_law(drafter, law, seed=0, draws=DRAWS):
    counts, _, _ = draw(DRAFTERS[drafter](), LAWS[law][0], 3, seed, draws)
    p_value = chi_square_p_value(counts, joint_law(law))
    print(f"chi-square p = {p_value:.4f} ({drafter}, {law}, seed {seed}, {draws} draws)")
    assert p_value >= SMALLEST_P_VALUE


@pytest.mark.parametrize("law", ["top-p", "min-p", "repetition", "all"])
@pytest.mark.parametrize("drafter", ["sure-and-right", "sure-and-wrong"])
def test_fault_04_joint_law_of_three_tokens(drafter, law):
    """Catches an acceptance test whose q is not what the draft was drawn from, or a residual of the wrong place."""
    check_joint_law(drafter, law)


@pytest.mark.parametrize("law", ["repetition", "all"])
@pytest.mark.parametrize("drafter", ["random", "spread-out", "random-one-candidate", "v1"])
def test_fault_04_joint_law_with_other_drafters(drafter, law):
    """Catches a q that is reported spread out for a token that was chosen as the best, or the other way round."""
    check_joint_law(drafter, law)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fault_04_joint_law_in_every_combination(drafter, law, seed):
    """Catches a pair of drafter and law that the default cases leave out."""
    check_joint_law(drafter, law, seed, MANY_DRAWS)


def test_chi_square_notices_a_lossy_rule():
    """Catches a test that could not fail: 20,000 draws of a law that is off by a total variation of 0.03."""
    law = joint_law("temperature")
    other = 0.97 * law + 0.03 * law.flip(0)
    torch.manual_seed(0)
    counts = torch.bincount(torch.multinomial(other, MANY_DRAWS, replacement=True), minlength=law.numel()).double()
    assert chi_square_p_value(counts, law) < 1e-6
    counts = torch.bincount(torch.multinomial(law, MANY_DRAWS, replacement=True), minlength=law.numel()).double()
    assert chi_square_p_value(counts, law) >= SMALLEST_P_VALUE


@pytest.mark.parametrize("drafter", ["sure-and-right", "spread-out"])
def test_fault_28_law_of_the_last_token(drafter):
    """Catches a last token that is drawn from the wrong place because the block is cut by the length limit."""
    for length in (2, 3):
        counts, _, _ = draw(DRAFTERS[drafter](), LAWS["temperature"][0], length, seed=3, extra=0)
        assert chi_square_p_value(counts, joint_law("temperature", length)) >= SMALLEST_P_VALUE


def first_place_law(draft, temperature):
    """What the drafter draws its first token from, by anchor: `(vocab, vocab)`, from one round over all anchors."""
    anchors = torch.arange(VOCAB)
    prompts = torch.cat([torch.tensor([PROMPT]).expand(VOCAB, -1), anchors[:, None]], dim=1)
    from transformers_dflash2.candidate_generator import DraftSession
    from transformers_dflash2.target import TargetAdapter

    adapter = TargetAdapter(target(), draft.config)
    session = DraftSession(draft, adapter, batch_size=VOCAB, block_size=draft.config.block_size)
    with torch.no_grad(), adapter.tap() as tap, tap.listen():
        target()(prompts[:, :-1])
        features = tap.take()
        positions = torch.arange(len(PROMPT)).expand(VOCAB, -1)
        session.append(features, positions, [len(PROMPT)] * VOCAB)
        proposal = session.propose(
            anchors,
            torch.full((VOCAB,), len(PROMPT)),
            slots=1,
            temperature=temperature,
            greedy=False,
        )
    law = torch.zeros(VOCAB, VOCAB)
    return law.scatter_add(1, proposal.candidate_ids[:, 0], proposal.q[:, 0]).double()


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(MANY_DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("drafter", ["sure-and-right", "sure-and-wrong", "spread-out", "random", "v1"])
def test_fault_25_first_place_is_accepted_as_often_as_the_rule_says(drafter, temperature, draws):
    """
    Catches greedy drafts held against sampled targets, and equality tests: valid, but accepted less often.

    The first anchor is drawn by the target alone; given it, the rule accepts with the sum of min(p, q).
    """
    draft = DRAFTERS[drafter]()
    options, processors = {"temperature": temperature, "top_k": 0}, [TemperatureLogitsWarper(temperature)]
    anchors = torch.arange(VOCAB)
    first = next_token_law(torch.tensor([PROMPT]), processors)[0]
    prefixes = torch.cat([torch.tensor([PROMPT]).expand(VOCAB, -1), anchors[:, None]], dim=1)
    p, q = next_token_law(prefixes, processors), first_place_law(draft, temperature)
    torch.testing.assert_close(q.sum(-1), torch.ones(VOCAB, dtype=torch.float64), atol=1e-5, rtol=0)
    expected = float((first * torch.minimum(p, q).sum(-1)).sum())
    at_least = float((first * (p * q).sum(-1)).sum())
    # Noise of its own for every case: with one seed for all, one unlucky stream would look like a bias of all.
    seed = zlib.crc32(f"{drafter}-{temperature}".encode())
    _, accepted, offered = draw(draft, options, 3, seed=seed, draws=draws, extra=0)
    # With three tokens there is one round with one slot; a row that is refused there has no room for another.
    assert offered == draws
    error = max((expected * (1 - expected) / offered) ** 0.5, 1 / offered)
    print(f"first place: accepted {accepted / offered:.4f}, sum of min(p, q) {expected:.4f} +- {error:.4f}")
    assert abs(accepted / offered - expected) <= 3 * error, (accepted / offered, expected, error)
    assert accepted / offered >= at_least - 3 * error


@pytest.mark.parametrize("drafter", ["spread-out", "random", "v1"])
def test_drawn_drafts_follow_the_reported_q(drafter):
    """Catches a q that belongs to another temperature, another predecessor or another candidate order."""
    draft = DRAFTERS[drafter]()
    law = first_place_law(draft, 0.7)
    torch.manual_seed(7)
    counts = torch.zeros(VOCAB, VOCAB)
    for _ in range(4):
        with target_inputs(target()) as blocks, module_inputs(draft.fc):
            target().generate(
                torch.tensor([PROMPT]).expand(BATCH, -1),
                assistant_model=draft,
                do_sample=True,
                max_new_tokens=3,
                temperature=0.7,
                top_k=0,
                num_assistant_tokens=2,
            )
        block = blocks[1]
        counts += torch.bincount(block[:, 0] * VOCAB + block[:, 1], minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)
    for anchor, row in enumerate(counts.double()):
        if row.sum() >= 200:
            kept = law[anchor] > 1e-9
            assert row[~kept].sum() == 0
            if kept.sum() > 1:
                expected = law[anchor, kept] / law[anchor, kept].sum()
                assert chi_square_p_value(row[kept], expected) >= SMALLEST_P_VALUE


def test_rows_of_a_batch_draw_independently():
    """Catches one random number for all rows, or rows that share a draft."""
    draft = DRAFTERS["spread-out"]()
    torch.manual_seed(11)
    out = target().generate(
        torch.tensor([PROMPT]).expand(BATCH, -1),
        assistant_model=draft,
        do_sample=True,
        max_new_tokens=3,
        temperature=0.7,
        top_k=0,
    )[:, len(PROMPT) :]
    law = joint_law("temperature", 1)
    pairs = out[0::2, 0] * VOCAB + out[1::2, 0]
    counts = torch.bincount(pairs, minlength=VOCAB**2).double()
    assert chi_square_p_value(counts, (law[:, None] * law[None]).flatten()) >= SMALLEST_P_VALUE


def test_law_after_an_end_token():
    """Catches an end token that is accepted more or less often than the target draws it, or text behind it."""
    options = {"temperature": 0.7, "top_k": 0, "eos_token_id": 5, "pad_token_id": 0}
    counts, _, _ = draw(DRAFTERS["spread-out"](), options, 3, seed=13)
    law = joint_law("temperature").clone()
    folded = torch.zeros_like(law)
    for index, tokens in enumerate(itertools.product(range(VOCAB), repeat=3)):
        if 5 in tokens:
            end = tokens.index(5)
            tokens = tokens[: end + 1] + (0,) * (2 - end)
        folded[sum(token * VOCAB ** (2 - place) for place, token in enumerate(tokens))] += law[index]
    assert chi_square_p_value(counts, folded) >= SMALLEST_P_VALUE


def test_fault_29_half_precision_target_keeps_its_law():
    """Catches probabilities that are compared in bfloat16, where many are equal."""
    model = table_target(1, VOCAB, mix=0.15, logit_scale=0.35, dtype=torch.bfloat16)
    draft = table_drafter(model, sharpness=1.5)
    torch.manual_seed(17)
    prompts = torch.tensor([PROMPT]).expand(BATCH, -1)
    counts = torch.zeros(VOCAB)
    for _ in range(5):
        out = model.generate(
            prompts, assistant_model=draft, do_sample=True, max_new_tokens=2, temperature=0.7, top_k=0
        )
        counts += torch.bincount(out[:, -1], minlength=VOCAB)
    with torch.no_grad():
        first = (model(prompts[:1]).logits[:, -1].float() / 0.7).softmax(-1).double()[0]
        prefixes = torch.cat([prompts[:VOCAB], torch.arange(VOCAB)[:, None]], dim=1)
        second = (model(prefixes).logits[:, -1].float() / 0.7).softmax(-1).double()
    # One pass over two tokens rounds otherwise than two passes: a few parts in a thousand, far under the noise here.
    assert chi_square_p_value(counts.double(), first @ second) >= SMALLEST_P_VALUE

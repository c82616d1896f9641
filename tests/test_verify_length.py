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
"""How many drafted tokens are verified: the rule, its law, its limits, and what the caller may say about it."""

import math

import pytest
import torch
from dspark_checks import HEADS, random_dspark, table_dspark
from generation_checks import PROMPT, d0, pure_drafter, pure_target, t0, target_passes
from test_distribution import BATCH, LAWS, VOCAB, chi_square_p_value, joint_law
from test_distribution import PROMPT as LAW_PROMPT
from test_distribution import target as law_target

from transformers_dflash2.candidate_generator import DraftSession
from transformers_dflash2.functional_dflash2 import accept_sampled, residual_distribution
from transformers_dflash2.functional_dspark import survival
from transformers_dflash2.target import TargetAdapter
from transformers_dflash2.testing import (
    assert_same_tokens,
    broken_table,
    left_pad,
    random_drafter,
    read_table,
    table_drafter,
    walk_table,
)
from transformers_dflash2.verify_length import VerifyLength


SMALLEST_P_VALUE = 1e-3
HEURISTIC = {"num_assistant_tokens_schedule": "heuristic"}
ROWS = [[3, 7, 1], [4, 9, 2, 8, 11], [6, 1, 30, 2, 9, 17, 5, 22, 3]]


# ------------------------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("confidence", "threshold", "rows", "expected"),
    [
        pytest.param([[0.9, 0.9, 0.9, 0.9]], 0.7, [0], 3, id="product"),
        pytest.param([[0.5, 1.0, 1.0, 1.0]], 0.5, [0], 4, id="at-the-threshold"),
        pytest.param([[0.1, 1.0, 1.0, 1.0]], 0.5, [0], 1, id="at-least-one"),
        pytest.param([[0.1, 1.0], [1.0, 0.9]], 0.5, [0, 1], 2, id="longest-row"),
        pytest.param([[0.1, 1.0], [1.0, 0.9]], 0.5, [0], 1, id="finished-rows-do-not-count"),
        pytest.param([[math.nan, 1.0], [1.0, 0.4]], 0.5, [0, 1], 1, id="unusable-row"),
    ],
)
def test_rule(confidence, threshold, rows, expected):
    """Catches a threshold on the confidence instead of the survival, and a block of no slots."""
    assert VerifyLength(threshold).choose(torch.tensor(confidence), rows) == expected


def test_calibration_follows_recent_acceptance():
    """Catches confidences that stay too high or too low for ever, and rounds that are never forgotten."""
    rule = VerifyLength(0.2, calibrates=True)
    confidence = torch.full((1, 4), 0.5)
    assert rule.choose(confidence, [0]) == 2
    for _ in range(20):
        rule.choose(confidence, [0])
        rule.observe(0, 4, 4)
    assert rule.scale > 1.8 and rule.choose(confidence, [0]) == 4
    for _ in range(40):
        rule.choose(confidence, [0])
        rule.observe(0, 0, 4)
    assert rule.scale < 0.1 and rule.choose(confidence, [0]) == 1
    assert VerifyLength(0.2).scale == 1.0


def test_only_tested_slots_count():
    """Catches slots behind the first refused one in the comparison: nothing is known about them."""
    left, right = VerifyLength(0.0, calibrates=True), VerifyLength(0.0, calibrates=True)
    left.choose(torch.tensor([[0.8, 0.6, 0.9, 0.9]]), [0])
    left.observe(0, 1, 4)
    right.choose(torch.tensor([[0.8, 0.6, 0.1, 0.2]]), [0])
    right.observe(0, 1, 4)
    assert left.scale == right.scale == pytest.approx((7.2 + 1) / (7.2 + 1.4))


# ------------------------------------------------------------------------------------------------------- in generate


def verified_lengths(target, draft, new_tokens=25, **kwargs):
    """Drafted tokens in each verify pass of a greedy call for one row."""
    with target_passes(target) as passes:
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=new_tokens, do_sample=False, **kwargs)
    return [length - 1 for _, length in passes[1:]]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("anchor", [True, False], ids=["from-anchor", "from-masks"])
def test_known_survival_gives_the_lengths_of_the_rule(kind, anchor):
    """Catches a confidence of the slot's own token in place of the one before, and a survival that is shifted."""
    target = pure_target()
    switches = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    draft = table_dspark(target, markov_head_type=kind, sample_from_anchor=anchor, **switches)
    after = torch.linspace(0.3, 0.99, 32)[torch.randperm(32, generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        # The Markov table holds unit vectors, so the confidence behind a token is one weight.
        draft.confidence_head.proj.weight.zero_()
        draft.confidence_head.proj.weight[0, -32:] = torch.logit(after)
        draft.confidence_head.proj.bias.zero_()
    walk = [int(PROMPT[0, -1]), *walk_table(read_table(target), int(PROMPT[0, -1]), 60)]
    expected, anchor_at, threshold = [], 1, 0.25
    while (room := 25 - anchor_at) > 1:
        alive, count = 1.0, 0
        for token in walk[anchor_at : anchor_at + min(7, room - 1)]:
            alive *= float(after[token])
            count += alive >= threshold
        expected.append(max(count, 1))
        anchor_at += expected[-1] + 1
    assert len(set(expected)) > 2
    lengths = verified_lengths(target, draft, assistant_confidence_threshold=threshold)
    assert lengths[: len(expected)] == expected


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: d0(), id="dflash2"),
        pytest.param(lambda: random_drafter(t0()), id="dflash2-random"),
        pytest.param(lambda: random_drafter(t0(), draft_family="dflash"), id="v1"),
        pytest.param(lambda: table_dspark(t0()), id="dspark"),
        pytest.param(lambda: random_dspark(t0(), enable_confidence_head=True), id="dspark-head"),
    ],
)
@pytest.mark.parametrize(
    "options", [HEURISTIC, {"assistant_confidence_threshold": 0.6}], ids=["heuristic", "threshold"]
)
def test_greedy_parity(make, options):
    """Catches caches that are cropped by the drafted length where less was verified."""
    assert_same_tokens(t0(), make(), **left_pad(ROWS), max_new_tokens=30, draft_kwargs=options)
    assert_same_tokens(t0(), make(), PROMPT, max_new_tokens=30, repetition_penalty=1.3, draft_kwargs=options)


def test_a_drafter_that_is_never_right_soon_drafts_one():
    """Catches an adaptation that nothing reaches: rows verified fall, the text stays."""
    target = pure_target()
    wrong = table_drafter(target, broken_table(read_table(target)))
    assert_same_tokens(target, wrong, PROMPT, max_new_tokens=60, draft_kwargs=HEURISTIC)
    lengths = verified_lengths(target, wrong, new_tokens=60, **HEURISTIC)
    assert lengths[0] == 7 and set(lengths[-40:-8]) == {1}


def test_a_drafter_that_is_always_right_drafts_whole_blocks():
    """Catches acceptance that is lost to adaptation."""
    target, draft = pure_target(), pure_drafter()
    assert verified_lengths(target, draft, **HEURISTIC) == verified_lengths(target, draft)


def test_bound_and_threshold_of_the_call():
    """Catches a bound that is ignored, and a value that outlives its call (fault 34)."""
    target, draft = pure_target(), pure_drafter()
    assert max(verified_lengths(target, draft, num_assistant_tokens=3, **HEURISTIC)) == 3
    wrong = table_drafter(target, broken_table(read_table(target)), sharpness=1.0)
    # At the very end there is no room for a draft.
    assert set(verified_lengths(target, wrong, assistant_confidence_threshold=0.9)[:-1]) == {1}
    assert set(verified_lengths(target, wrong)[:10]) == {7}
    assert set(verified_lengths(target, wrong, assistant_confidence_threshold=0.0, **HEURISTIC)[:10]) == {7}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_assistant_tokens_schedule": "adaptive"}, "'adaptive' is unknown; use one of 'constant', 'heuristic'"),
        ({"assistant_confidence_threshold": 1.5}, "assistant_confidence_threshold=1.5 must be a number from 0 to 1"),
        ({"assistant_confidence_threshold": True}, "assistant_confidence_threshold=True must be a number"),
    ],
)
def test_options_that_mean_nothing(options, words):
    """Catches a typo that would silently verify everything."""
    with pytest.raises(ValueError, match=words):
        t0().generate(PROMPT, assistant_model=d0(), max_new_tokens=4, **options)


def test_static_tempo_says_that_its_blocks_have_one_length(fresh_reports):
    """Catches an option that has no effect and no message."""
    draft_kwargs = {"cache_implementation": "static", **HEURISTIC}
    assert_same_tokens(t0(), d0(), PROMPT, max_new_tokens=20, draft_kwargs=draft_kwargs)
    assert any("blocks of one length" in record.getMessage() for record in fresh_reports.records)


# ------------------------------------------------------------------------------------------------------- the law


def one_round(draft, rule, seed, rows=6_000, temperature=0.7):
    """
    Counts of the two tokens behind the first one, after one round in which every row has a length of its own; a third
    comes from the target where it is needed. `rule` maps a proposal to lengths.
    """
    torch.manual_seed(seed)
    target, slots = law_target(), 3
    prompt = torch.tensor([LAW_PROMPT]).expand(rows, -1)
    adapter = TargetAdapter(target, draft.config)
    session = DraftSession(draft, adapter, batch_size=rows, block_size=slots + 1)

    def law_after(ids):
        return (target(ids).logits[:, -1] / temperature).softmax(-1)

    with torch.no_grad(), adapter.tap() as tap:
        with tap.listen():
            first = (target(prompt).logits[:, -1] / temperature).softmax(-1)
            features = tap.take()
        session.append(features, torch.arange(2).expand(rows, -1), [2] * rows)
        anchors = torch.multinomial(first, 1)
        proposal = session.propose(
            anchors[:, 0],
            torch.full((rows,), 2),
            slots=slots,
            temperature=temperature,
            greedy=False,
            with_confidence=True,
        )
        lengths = rule(proposal)
        ids = torch.cat([prompt, anchors, proposal.tokens], dim=1)
        probs = (target(ids).logits[:, 2:] / temperature).softmax(-1)
        passed = accept_sampled(
            proposal.tokens, proposal.candidate_ids, proposal.q, probs[:, :slots], torch.rand(rows, slots)
        )
        passed &= torch.arange(slots) < lengths[:, None]
        accepted = passed.long().cumprod(-1).sum(-1)
        index, at = torch.arange(rows), accepted.clamp(max=slots - 1)
        residual = residual_distribution(probs[index, at], proposal.candidate_ids[index, at], proposal.q[index, at])
        law = torch.where((accepted < lengths)[:, None], residual, probs[index, accepted])
        ids = ids.scatter(1, 3 + accepted[:, None].clamp(max=slots - 1), torch.multinomial(law, 1))
        # Rows that got one token of the round take the next one from the target.
        more = torch.multinomial(law_after(ids[:, :4]), 1)
        ids[:, 4:5] = torch.where(accepted[:, None] == 0, more, ids[:, 4:5])
    counts = torch.bincount((ids[:, 2:5] * VOCAB ** torch.arange(2, -1, -1)).sum(-1), minlength=VOCAB**3)
    return counts.double(), lengths


# A drafter, and a threshold that cuts its rows at different lengths.
LAW_DRAFTERS = {
    "dflash2": (lambda: table_drafter(law_target(), sharpness=1.5), 0.3),
    "dflash2-random": (lambda: random_drafter(law_target(), selector_top_k=4), 0.18),
    "dspark": (lambda: random_dspark(law_target()), 0.06),
    "dspark-head": (
        lambda: random_dspark(
            law_target(), markov_head_type="gated", enable_confidence_head=True, confidence_head_with_markov=True
        ),
        0.04,
    ),
}


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(name, marks=() if name in ("dflash2", "dspark-head") else pytest.mark.slow)
        for name in LAW_DRAFTERS
    ],
)
def test_law_with_a_length_of_its_own_for_every_row(drafter):
    """Catches a signal that knows the token it decides about."""
    make, threshold = LAW_DRAFTERS[drafter]
    counts, lengths = one_round(
        make(), lambda proposal: (survival(proposal.confidence) >= threshold).sum(-1).clamp(min=1), seed=5
    )
    assert len(lengths.unique()) > 1, "the rule gave every row the same length"
    p_value = chi_square_p_value(counts, joint_law("temperature"))
    print(f"chi-square p = {p_value:.4f} ({drafter}, one round)")
    assert p_value >= SMALLEST_P_VALUE


def test_a_rule_that_looks_at_its_own_token_is_lossy():
    """Catches a test of the law that could not fail: here a slot is left out when its own token was unlikely."""

    def own_token(proposal):
        drawn = proposal.q.gather(
            -1, (proposal.candidate_ids == proposal.tokens[..., None]).long().argmax(-1)[..., None]
        )
        return (survival(drawn[..., 0]) >= 0.3).sum(-1)

    counts, lengths = one_round(LAW_DRAFTERS["dflash2"][0](), own_token, seed=5)
    assert len(lengths.unique()) > 1
    assert chi_square_p_value(counts, joint_law("temperature")) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("drafter", LAW_DRAFTERS)
def test_law_of_generate_for_single_rows(drafter):
    """Catches what the loop itself adds: 2,000 calls for one row each, lengths adapted within the call."""
    make, threshold = LAW_DRAFTERS[drafter]
    draft = make()
    torch.manual_seed(6)
    counts = torch.zeros(VOCAB**3)
    options = {**LAWS["temperature"][0], "assistant_confidence_threshold": threshold, **HEURISTIC}
    for _ in range(BATCH):
        out = law_target().generate(
            torch.tensor([LAW_PROMPT]), assistant_model=draft, do_sample=True, max_new_tokens=4, **options
        )
        counts[int((out[0, 2:5] * VOCAB ** torch.arange(2, -1, -1)).sum())] += 1
    p_value = chi_square_p_value(counts.double(), joint_law("temperature"))
    print(f"chi-square p = {p_value:.4f} ({drafter}, single rows)")
    assert p_value >= SMALLEST_P_VALUE

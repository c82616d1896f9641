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
"""DSpark drafters inside `generate`: greedy parity, the law of sampled output, padded vocabularies and their mask."""

import functools
import itertools
import zlib

import pytest
import torch
from dspark_checks import HEADS, random_dspark, table_dspark, width_scaled_target
from generation_checks import PROMPT, pure_target, t0
from test_distribution import LAWS, chi_square_p_value
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessorList

from transformers_dflash2 import static_decoding
from transformers_dflash2.candidate_generator import DraftSession, host_assisted_loop
from transformers_dflash2.target import TargetAdapter
from transformers_dflash2.testing import (
    assert_same_tokens,
    broken_table,
    left_pad,
    random_table,
    read_table,
    table_target,
)


SMALLEST_P_VALUE = 1e-3
# Largest difference of float32 base logits of order 5 from one order of the same operations to another.
LOGITS_TOLERANCE = 1e-5
ANCHORS = pytest.mark.parametrize("anchor", [True, False], ids=["from-anchor", "from-masks"])
KINDS = pytest.mark.parametrize("kind", HEADS)
ROWS = [[3, 7, 1], [4, 9, 2, 8, 11], [6, 1, 30, 2, 9, 17, 5, 22, 3]]


@functools.cache
def gemma():
    return table_target(0, model_type="gemma2", mix=0.1, sliding_window=8, final_logit_softcapping=5.0)


@functools.cache
def scaled():
    return width_scaled_target()


def half_right(target, **kwargs):
    table = read_table(target)
    return table_dspark(target, broken_table(table, range(0, table.numel(), 3)), **kwargs)


TARGETS = {"qwen3": t0, "gemma2": gemma}
MAKERS = {"table": half_right, "random": random_dspark}
SLOW = pytest.mark.slow


def _cases(default, *, of):
    """All combinations, those that are not in the default run marked as slow."""
    return [pytest.param(*case, marks=() if case in default else SLOW) for case in itertools.product(*of)]


# ------------------------------------------------------------------------------------------------------- greedy


@ANCHORS
@KINDS
def test_the_walk_of_the_table_is_accepted_whole(kind, anchor):
    """Catches rows that are read one place early or late, and a bias of the wrong predecessor: fewer are accepted."""
    target = pure_target()
    draft = table_dspark(target, markov_head_type=kind, sample_from_anchor=anchor)
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=1 + 3 * 8)
    assert draft.last_stats.accepted_per_position == [3] * 7


@pytest.mark.parametrize(
    ("target", "make", "kind", "anchor"),
    _cases(
        {
            *(("qwen3", "table", kind, anchor) for kind in HEADS for anchor in (True, False)),
            *(("gemma2", "random", kind, kind != "gated") for kind in HEADS),
        },
        of=(TARGETS, MAKERS, HEADS, (True, False)),
    ),
)
def test_greedy_parity_in_a_padded_batch(target, make, kind, anchor):
    """Catches a drafter that changes the text."""
    draft = MAKERS[make](TARGETS[target](), markov_head_type=kind, sample_from_anchor=anchor)
    assert_same_tokens(TARGETS[target](), draft, **left_pad(ROWS), max_new_tokens=24)


@KINDS
def test_greedy_parity_with_a_reduced_vocabulary(kind):
    """Catches draft ids that are offered as target ids; tokens outside the table are the target's own."""
    target = pure_target()
    ids = sorted(set(range(32)) - {5, 11, 12})
    draft = table_dspark(target, markov_head_type=kind, d2t=ids)
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=30)
    assert draft.last_stats.mean_accepted_length > 3
    random = random_dspark(t0(), markov_head_type=kind, d2t=[31, 0, 2, 7, 5])
    assert_same_tokens(t0(), random, PROMPT, max_new_tokens=20)


@ANCHORS
@pytest.mark.parametrize("slots", [1, 3, 9])
@pytest.mark.parametrize("new_tokens", [1, 2, 8, 25])
def test_fault_59_any_draft_length(slots, anchor, new_tokens):
    """Catches state that is written wrongly at one length only."""
    draft = half_right(t0(), sample_from_anchor=anchor)
    assert_same_tokens(t0(), draft, PROMPT, max_new_tokens=new_tokens, draft_kwargs={"num_assistant_tokens": slots})
    if new_tokens > 2:
        assert len(draft.last_stats.drafted_per_position) == min(slots, new_tokens - 2)


@pytest.mark.parametrize(("kind", "anchor"), _cases({("vanilla", False), ("rnn", True)}, of=(HEADS, (True, False))))
def test_static_tempo(kind, anchor, monkeypatch):
    """Catches buffers that have no room for a block longer than what is verified."""
    taken = []
    original = static_decoding.StaticDecoding.run
    monkeypatch.setattr(static_decoding.StaticDecoding, "run", lambda self: taken.append(1) or original(self))
    for slots in (None, 2):
        draft = half_right(t0(), markov_head_type=kind, sample_from_anchor=anchor)
        draft_kwargs = {"cache_implementation": "static", "num_assistant_tokens": slots}
        assert_same_tokens(t0(), draft, **left_pad(ROWS), max_new_tokens=20, draft_kwargs=draft_kwargs)
    assert len(taken) == 2


@ANCHORS
def test_hosts_own_loop(anchor):
    """Catches a candidate generator that knows the blocks of DFlash2 only."""
    target = pure_target()
    draft = table_dspark(target, sample_from_anchor=anchor)
    plain = target.generate(PROMPT, max_new_tokens=25, do_sample=False)
    with host_assisted_loop(target, draft):
        assert torch.equal(target.generate(PROMPT, assistant_model=draft, max_new_tokens=25, do_sample=False), plain)


# ------------------------------------------------------------------------------------------------------- sampled


VOCAB, LAW_PROMPT, BATCH, DRAWS = 8, [3, 6], 2_000, 4_000
LAW_TARGETS = {
    "qwen3": lambda: table_target(1, VOCAB, mix=0.15, logit_scale=0.35),
    "gemma2": lambda: table_target(1, VOCAB, model_type="gemma2", mix=0.3, logit_scale=0.8, sliding_window=8),
    "width-scaled": lambda: width_scaled_target(
        1, vocab_size=VOCAB, padded=12, mix=0.15, logit_scale=1.4, table=random_table(VOCAB, 1)
    ),
}


@functools.cache
def law_target(name):
    return LAW_TARGETS[name]()


@functools.cache
def joint_law(target, law):
    """Probability of every continuation of three tokens."""
    processors = LogitsProcessorList(LAWS[law][1])
    joint, prefixes = torch.ones(1, dtype=torch.float64), torch.tensor([LAW_PROMPT])
    for _ in range(3):
        with torch.no_grad():
            logits = law_target(target)(prefixes).logits[:, -1].float()
        joint = (joint[:, None] * processors(prefixes, logits).softmax(-1).double()).flatten()
        prefixes = torch.cat(
            [prefixes.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(prefixes))[:, None]], dim=1
        )
    return joint


def check_joint_law(target, draft, law, *case):
    # Noise of its own for every case: with one seed for all, one unlucky stream would look like a bias of all.
    torch.manual_seed(zlib.crc32(repr((target, law, *case)).encode()))
    counts = torch.zeros(VOCAB**3)
    for _ in range(DRAWS // BATCH):
        out = law_target(target).generate(
            torch.tensor([LAW_PROMPT]).expand(BATCH, -1),
            assistant_model=draft,
            do_sample=True,
            # One more than is counted, so that all but the first can be drafted ones.
            max_new_tokens=4,
            **LAWS[law][0],
        )[:, 2:5]
        counts += torch.bincount((out * VOCAB ** torch.arange(2, -1, -1)).sum(-1), minlength=VOCAB**3)
    assert draft.last_stats.accepted > 0
    p_value = chi_square_p_value(counts.double(), joint_law(target, law))
    print(f"chi-square p = {p_value:.4f} ({target}, {law}, {case})")
    assert p_value >= SMALLEST_P_VALUE


DRAFTERS = {
    "spread-out": lambda target, **kwargs: table_dspark(target, sharpness=1.5, **kwargs),
    "sure-and-wrong": lambda target, **kwargs: table_dspark(
        target, broken_table(read_table(target), range(0, VOCAB, 2)), **kwargs
    ),
    "random": random_dspark,
}


@pytest.mark.parametrize(
    ("drafter", "kind", "anchor"),
    _cases(
        {("spread-out", "vanilla", True), ("random", "gated", False), ("random", "rnn", True)},
        of=(DRAFTERS, HEADS, (True, False)),
    ),
)
def test_joint_law_of_three_tokens(drafter, kind, anchor):
    """Catches a q that is not what the draft was drawn from: of another predecessor, another slot, or none."""
    draft = DRAFTERS[drafter](law_target("qwen3"), markov_head_type=kind, sample_from_anchor=anchor)
    check_joint_law("qwen3", draft, "all", drafter, kind, anchor)


@pytest.mark.parametrize(("target", "kind"), _cases({("width-scaled", "rnn")}, of=(("gemma2", "width-scaled"), HEADS)))
def test_joint_law_on_other_targets(target, kind):
    """Catches a law that is off where the target caps, scales or pads its logits."""
    model = law_target(target)
    draft = table_dspark(model, random_table(VOCAB, 1), sharpness=1.5, markov_head_type=kind)
    check_joint_law(target, draft, "temperature", kind)


@pytest.mark.parametrize("kind", ["vanilla", pytest.param("gated", marks=SLOW), pytest.param("rnn", marks=SLOW)])
def test_joint_law_with_a_reduced_vocabulary(kind):
    """Catches a residual that gives tokens which are never drafted too little."""
    draft = table_dspark(law_target("qwen3"), sharpness=1.5, markov_head_type=kind, d2t=[6, 0, 3, 1])
    check_joint_law("qwen3", draft, "temperature", "reduced", kind)


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        pytest.param({"draft_top_k": 3}, "vanilla", id="top-k"),
        pytest.param({"draft_top_k": 3}, "rnn", id="top-k-rnn", marks=SLOW),
        pytest.param({"drafts_greedily": True}, "vanilla", id="greedy-drafts", marks=SLOW),
        pytest.param({"drafts_greedily": True}, "rnn", id="greedy-drafts-rnn", marks=SLOW),
    ],
)
def test_joint_law_with_restricted_drafts(kind, option):
    """Catches a q over the whole vocabulary for a draw among few, or for no draw at all."""
    draft = table_dspark(law_target("qwen3"), sharpness=1.5, markov_head_type=kind)
    for name, value in option.items():
        setattr(draft, name, value)
    check_joint_law("qwen3", draft, "repetition", kind, option)


# ------------------------------------------------------------------------- padded vocabulary and width multiplier


@ANCHORS
@KINDS
def test_width_scaled_target_with_a_mask_in_the_padding(kind, anchor):
    """Catches loud rows of the padding that are drafted, and a mask id that is held against the real vocabulary."""
    draft = table_dspark(
        scaled(), random_table(24), markov_head_type=kind, sample_from_anchor=anchor, mask_token_id=29
    )
    assert_same_tokens(scaled(), draft, **left_pad([[3, 7, 1], [4, 9, 2, 8, 11]]), max_new_tokens=30)
    assert draft.last_stats.mean_accepted_length > 1.5


def test_mask_id_past_the_padding_is_refused():
    """Catches a bound that is not the number of embedding rows."""
    draft = random_dspark(scaled(), mask_token_id=31)
    draft.config.mask_token_id = 32
    with pytest.raises(ValueError, match="mask_token_id`=32.*32 rows"):
        scaled().generate(PROMPT, assistant_model=draft, max_new_tokens=4)


def test_reduced_vocabulary_of_another_target_is_refused():
    """Catches draft ids that the target pads: they would be looked up behind its probabilities."""
    draft = random_dspark(scaled(), d2t=[1, 5, 24])
    with pytest.raises(ValueError, match="`d2t` maps draft tokens to ids 1 to 24, but the target has ids 0 to 23"):
        scaled().generate(PROMPT, assistant_model=draft, max_new_tokens=4)


def base_logits(target, draft, monkeypatch):
    """What the Markov head is given in the first round, and the final rows of the drafter."""
    seen = []
    monkeypatch.setattr(draft.markov_head, "forward", _recording(draft.markov_head.forward, seen))
    adapter = TargetAdapter(target, draft.config)
    session = DraftSession(draft, adapter, batch_size=1, block_size=8)
    with torch.no_grad(), adapter.tap() as tap, tap.listen():
        target(PROMPT[:, :-1])
        session.append(tap.take(), torch.arange(2)[None], [2])
        proposal = session.propose(PROMPT[:, -1], torch.tensor([2]), slots=7, temperature=1.0, greedy=False)
    hidden, base = seen
    return hidden, base, proposal


def _recording(forward, seen):
    def record(hidden, base, *args, **kwargs):
        seen.extend([hidden, base])
        return forward(hidden, base, *args, **kwargs)

    return record


def test_base_logits_are_divided_once(monkeypatch):
    """Catches a multiplier that is left out, applied twice, or read from the drafter's config."""
    draft = random_dspark(scaled())
    hidden, base, _ = base_logits(scaled(), draft, monkeypatch)
    expected = (hidden / 4.0) @ scaled().lm_head.weight.T
    torch.testing.assert_close(base, expected[..., :24], atol=LOGITS_TOLERANCE, rtol=0)


@functools.cache
def inkling():
    config = AutoConfig.for_model(
        "inkling_text",
        vocab_size=40,
        unpadded_vocab_size=33,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=8,
        d_rel=4,
        rel_extent=16,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense"] * 4,
        logits_mup_width_multiplier=4.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def test_inkling_base_logits(monkeypatch):
    """Catches a normed embedding in the block, padded candidates, and a head without the division."""
    target = inkling()
    draft = random_dspark(target, mask_token_id=37)
    embedded = []
    monkeypatch.setattr(draft, "forward", _recording_first(draft.forward, embedded))
    hidden, base, proposal = base_logits(target, draft, monkeypatch)
    rows = target.get_input_embeddings().weight
    assert torch.equal(embedded[0], torch.cat([rows[PROMPT[0, -1:]], rows[37].expand(6, -1)])[None])
    expected = (hidden / 4.0) @ target.lm_head.weight.T
    torch.testing.assert_close(base, expected[..., :33], atol=LOGITS_TOLERANCE, rtol=0)
    assert proposal.q.shape == (1, 7, 33)


def _recording_first(forward, seen):
    def record(first, *args, **kwargs):
        seen.append(first)
        return forward(first, *args, **kwargs)

    return record


@ANCHORS
@KINDS
def test_inkling_greedy_parity(kind, anchor):
    """Catches a convolution state that is not taken back; runs where targets with such states are supported."""
    target = inkling()
    draft = random_dspark(target, markov_head_type=kind, sample_from_anchor=anchor, mask_token_id=37)
    try:
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=2)
    except ValueError as error:
        pytest.skip(str(error))
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=30)

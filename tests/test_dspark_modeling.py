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
"""DSpark checkpoints: what a config says in each spelling, strict loading, saving, and what a proposal is made of."""

import json

import pytest
import torch
from dspark_checks import HEADS, dspark_config, exact_markov, random_dspark
from safetensors.torch import load_file, save_file

from transformers_dflash2 import AutoDraftModel, DFlash2DraftModel, DSparkConfig, DSparkDraftModel
from transformers_dflash2.testing import random_drafter, table_target


pytestmark = pytest.mark.filterwarnings("error::UserWarning")

# Largest difference of float32 logits of order 10 from float64 ones.
LOGITS_TOLERANCE = 2e-5
PROBABILITY_TOLERANCE = 2e-6
LAYERS = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
SETTINGS = {"block_size": 7, "mask_token_id": 31, "target_layer_ids": [0, 2]}
MARKOV = {"markov_rank": 8, "markov_head_type": "vanilla"}
NATIVE = {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", **LAYERS, **SETTINGS, **MARKOV}
PREFIXED = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    **LAYERS,
    "dspark_block_size": 7,
    "dspark_noise_token_id": 31,
    "dspark_target_layer_ids": [0, 2],
    "dspark_markov_rank": 8,
}
SPECULATORS = {
    "speculators_model_type": "dspark",
    "transformer_layer_config": {"model_type": "qwen3", **LAYERS},
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 31,
    **MARKOV,
    "speculators_config": {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"name_or_path": "org/target"},
    },
}


def nested(section):
    return {"architectures": ["DSparkDraftModel"], "model_type": "qwen3", **LAYERS, section: {**SETTINGS, **MARKOV}}


SPELLINGS = {
    "flat": NATIVE,
    "dspark-section": nested("dspark_config"),
    "dflash-section": nested("dflash_config"),
    "prefixed": PREFIXED,
    "speculators": SPECULATORS,
}


# ------------------------------------------------------------------------------------------------------- the config


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_says_the_same(spelling, tmp_path):
    """Catches a spelling that is not read, a block size that counts the anchor, and a file that changes on the way."""
    raw = SPELLINGS[spelling]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = DSparkConfig.from_pretrained(tmp_path)
    assert config.draft_family == "dspark"
    assert (config.block_size, config.speculative_tokens, config.mask_token_id) == (7, 7, 31)
    assert (config.target_layer_ids, config.markov_rank, config.markov_head_type) == ([0, 2], 8, "vanilla")
    assert config.sample_from_anchor is (spelling != "speculators")
    assert not config.enable_confidence_head and not config.has_own_head and config.draft_vocab_size == 32
    config.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    written.pop("transformers_version")
    assert written == raw
    assert DSparkConfig.from_pretrained(tmp_path / "again") == config


def test_prefixed_keys_win(recwarn):
    """Catches a nested value that is preferred to the prefixed one, and a disagreement that nobody hears of."""
    with pytest.warns(UserWarning, match="`dspark_block_size`=5 and `dspark_config.block_size`=7 disagree"):
        config = DSparkConfig.from_dict({**nested("dspark_config"), "dspark_block_size": 5})
    assert config.block_size == 5


@pytest.mark.parametrize(
    ("spelling", "place"),
    [
        ("flat", ("block_size",)),
        ("dspark-section", ("dspark_config", "block_size")),
        ("prefixed", ("dspark_block_size",)),
    ],
)
def test_a_changed_value_is_written_where_it_was_read(spelling, place):
    """Catches a second spelling in the file that disagrees with the first."""
    config = DSparkConfig.from_dict(SPELLINGS[spelling])
    config.block_size = 5
    written = config.to_dict()
    value = written
    for key in place:
        value = value[key]
    assert value == 5
    assert DSparkConfig.from_dict(written).block_size == 5


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param({**NATIVE, "markov_rank": 0}, ["markov_rank`=0", "DFlash"], id="rank-zero"),
        pytest.param({**NATIVE, "markov_rank": True}, ["markov_rank`=True", "integer"], id="rank-bool"),
        pytest.param({**NATIVE, "markov_head_type": "mixture"}, ["mixture", "'rnn'"], id="unknown-head"),
        pytest.param({**NATIVE, "markov_head_type": None}, ["markov_head_type`=None"], id="no-head-type"),
        pytest.param({**NATIVE, "block_size": None}, ["block_size`=None", "missing"], id="no-block-size"),
        pytest.param({**NATIVE, "target_layer_ids": None}, ["target_layer_ids`=None"], id="no-taps"),
        pytest.param({**NATIVE, "mask_token_id": None}, ["mask_token_id`=None"], id="no-mask"),
        pytest.param({**NATIVE, "draft_vocab_size": 40}, ["draft_vocab_size`=40", "vocab_size`=32"], id="larger"),
        pytest.param({**NATIVE, "enable_confidence_head": 1}, ["enable_confidence_head`=1"], id="switch"),
        pytest.param(
            {**NATIVE, "selector_rank": 4, "selector_top_k": 4}, ["selector_rank`=4", "DSpark"], id="selector"
        ),
        pytest.param({**NATIVE, "attention_value_scale": 0.6}, ["attention_value_scale`=0.6"], id="value-scale"),
        pytest.param(
            {**nested("dspark_config"), "dflash_config": {"block_size": 7}}, ["two sections"], id="two-sections"
        ),
        pytest.param({**NATIVE, "architectures": ["DFlash2DraftModel"]}, ["DFlash2DraftModel", "AutoDraft"], id="2"),
        pytest.param({**SPECULATORS, "speculators_model_type": "dflash2"}, ["dflash2", "AutoDraft"], id="spec"),
    ],
)
def test_refused(raw, words):
    """Catches a value that would run with another meaning; the message names it and the way out."""
    with pytest.raises(ValueError) as error:
        DSparkConfig.from_dict(raw)
    assert all(word in str(error.value) for word in words), error.value


def test_head_type_is_read_in_any_case():
    """Catches a comparison that minds capitals."""
    assert DSparkConfig.from_dict({**NATIVE, "markov_head_type": "Gated"}).markov_head_type == "gated"


# ------------------------------------------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def target():
    return table_target()


FULL = {"enable_confidence_head": True, "confidence_head_with_markov": True}
REDUCED = [1, 4, 5, 9, 30, 17, 16, 2]


def rewrite(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def assert_same_tensors(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("d2t", [None, REDUCED], ids=["full", "reduced"])
def test_round_trip_is_bit_equal(target, kind, d2t, tmp_path):
    """Catches a tensor that is renamed, dropped or rounded on the way to the file and back."""
    draft = random_dspark(target, markov_head_type=kind, d2t=d2t, **FULL)
    draft.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.bias"} <= names
    assert ({"d2t", "lm_head.weight"} <= names) == (d2t is not None)
    loaded = AutoDraftModel.from_pretrained(tmp_path)
    assert type(loaded) is DSparkDraftModel
    assert_same_tensors(loaded, draft)
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    assert DSparkConfig.from_pretrained(tmp_path / "again") == DSparkConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_auto_class_by_spelling(target, spelling, tmp_path):
    """Catches a loader that takes a drafter for another family because of how its config is spelled."""
    random_dspark(target).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SPELLINGS[spelling]))
    loaded = AutoDraftModel.from_pretrained(tmp_path)
    assert type(loaded) is DSparkDraftModel
    with pytest.raises(ValueError, match="DSparkDraftModel, or any drafter with AutoDraftModel"):
        DFlash2DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["dflash2", "dflash"])
def test_auto_class_of_other_families(target, family, tmp_path):
    """Catches a DFlash drafter that is taken for one with a Markov head, and the reverse call without a way out."""
    kwargs = {} if family == "dflash2" else {"draft_family": "dflash"}
    random_drafter(target, **kwargs).save_pretrained(tmp_path)
    loaded = AutoDraftModel.from_pretrained(tmp_path)
    assert type(loaded) is DFlash2DraftModel and loaded.config.draft_family == family
    assert type(AutoDraftModel.from_pretrained(tmp_path, config=loaded.config)) is DFlash2DraftModel
    with pytest.raises(ValueError, match="DFlash2DraftModel, or any drafter with AutoDraftModel"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_auto_class_is_no_model():
    """Catches an instance that would do nothing."""
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoDraftModel()


def test_confidence_head_stays_in_float32(target, tmp_path):
    """Catches a head that is rounded with the rest of the drafter."""
    random_dspark(target, **FULL).save_pretrained(tmp_path)
    loaded = DSparkDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded.markov_head.markov_w1.weight.dtype == torch.bfloat16
    assert loaded.confidence_head.proj.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "name", ["markov_head.markov_w2.weight", "confidence_head.proj.weight", "lm_head.weight", "d2t"]
)
def test_missing_tensor_is_named(target, name, tmp_path):
    """Catches a head that runs with fresh weights because the checkpoint lacks it."""
    random_dspark(target, d2t=REDUCED, **FULL).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(ValueError, match=f"missing.*{name}"):
        DSparkDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("explicit", [False, True], ids=["by-name", "with-config"])
def test_fault_55_full_size_head_of_its_own_is_used(target, explicit, tmp_path):
    """Catches a head that is replaced by the target's because its size does not tell them apart."""
    random_dspark(target).save_pretrained(tmp_path)
    weight = torch.randn(32, 32)
    rewrite(tmp_path, lambda tensors: {**tensors, "lm_head.weight": weight})
    kwargs = {"config": DSparkConfig.from_pretrained(tmp_path)} if explicit else {}
    loaded = AutoDraftModel.from_pretrained(tmp_path, **kwargs)
    assert torch.equal(loaded.lm_head.weight, weight)
    if explicit:
        assert not kwargs["config"].has_own_head
    loaded.save_pretrained(tmp_path / "again")
    assert_same_tensors(AutoDraftModel.from_pretrained(tmp_path / "again"), loaded)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        pytest.param([1, 30] + [0] * 6, "ids 1 to 31", id="fits"),
        pytest.param([1, 31] + [0] * 6, "ids 1 to 32", id="too-large"),
        pytest.param([-1, 0] + [0] * 6, "ids -1 to 7", id="negative"),
        pytest.param([1, 0] + [0] * 6, "8 draft tokens to 7 ids", id="twice"),
    ],
)
def test_fault_55_table_of_ids_is_checked(target, offsets, words, tmp_path):
    """Catches ids that the target does not have, and a table that is read as ids where it holds offsets."""
    random_dspark(target, d2t=REDUCED).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "d2t": torch.tensor(offsets)})
    if "31" in words:
        assert DSparkDraftModel.from_pretrained(tmp_path).target_ids(32).tolist() == [1, 31, 2, 3, 4, 5, 6, 7]
        return
    with pytest.raises(ValueError, match=words):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_table_of_another_length_is_refused(target, tmp_path):
    """Catches a map that covers a part of the head."""
    random_dspark(target, d2t=REDUCED).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "d2t": torch.zeros(7, dtype=torch.long)})
    with pytest.raises(ValueError, match="another shape.*d2t"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_table_that_the_config_does_not_announce(target, tmp_path):
    """Catches a reduced vocabulary that is run as if draft ids were target ids."""
    random_dspark(target).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "d2t": torch.zeros(32, dtype=torch.long)})
    with pytest.raises(ValueError, match="d2t.*draft_vocab_size"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_target_to_draft_table_is_skipped(target, tmp_path):
    """Catches an error about a table that says nothing new."""
    random_dspark(target, d2t=REDUCED).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "t2d": torch.zeros(32, dtype=torch.bool)})
    DSparkDraftModel.from_pretrained(tmp_path)


def test_fault_53_no_embedding_or_head_is_allocated(target):
    """Catches vocabulary-sized modules that are created and never loaded."""
    draft = DSparkDraftModel(dspark_config(target))
    sizes = [
        name for name, parameter in draft.named_parameters() if 32 in parameter.shape[:1] and "layers" not in name
    ]
    assert {name for name in sizes if "norm" not in name and name != "fc.weight"} == {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
    }


# ------------------------------------------------------------------------------------------------------- proposals


class Head:
    """A linear head with what a drafter asks of the target's."""

    def __init__(self, vocab_size=32, width_multiplier=1.0, rows=None):
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(rows or vocab_size, 32, generator=generator)
        self.vocab_size, self.width_multiplier = vocab_size, width_multiplier

    def __call__(self, hidden):
        return hidden @ self.weight.T


def propose(draft, hidden, head, anchors, *, greedy, temperature=0.7, seed=0, **kwargs):
    torch.manual_seed(seed)
    batch, slots = hidden.shape[:2]
    noise = None if greedy else draft.draw_noise(batch, slots, head.vocab_size)
    with torch.no_grad():
        proposal = draft.propose(
            hidden,
            anchors,
            head,
            temperatures=torch.full((batch,), temperature),
            greedy_mask=torch.full((batch,), greedy),
            noise=noise,
            **kwargs,
        )
    return proposal, noise


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    ("settings", "multiplier"),
    [
        pytest.param({}, 1.0, id="shared-head"),
        pytest.param({}, 4.0, id="width-multiplier"),
        pytest.param({"final_logit_softcapping": 3.0, "output_multiplier": 0.5}, 1.0, id="transform"),
        pytest.param({"d2t": REDUCED}, 4.0, id="own-reduced-head"),
    ],
)
def test_proposal_equals_float64(target, kind, greedy, settings, multiplier):
    """
    Catches hidden states that are divided twice, or divided for the gate, the state and a head of the drafter's own
    as well; a transform of the sum instead of the base logits; and draft ids where target ids belong.
    """
    draft = random_dspark(target, markov_head_type=kind, **settings)
    torch.manual_seed(9)
    hidden, head, anchors = torch.randn(2, 4, 32), Head(width_multiplier=multiplier), torch.tensor([7, 20])
    proposal, noise = propose(draft, hidden, head, anchors, greedy=greedy)
    weight = head.weight.double() / multiplier if draft.lm_head is None else draft.lm_head.weight.detach().double()
    base = hidden.double() @ weight.T
    if "final_logit_softcapping" in settings:
        base = 3.0 * torch.tanh(0.5 * base / 3.0)
    ids = REDUCED if "d2t" in settings else range(32)
    assert proposal.candidate_ids.tolist() == [[list(ids)] * 4] * 2
    for row in range(2):
        tokens, _, laws = exact_markov(
            draft.markov_head,
            hidden[row],
            base[row],
            ids,
            anchors[row],
            noise=None if greedy else noise[row],
            temperature=0.7,
        )
        assert proposal.tokens[row].tolist() == tokens
        torch.testing.assert_close(proposal.q[row].double(), laws, atol=PROBABILITY_TOLERANCE, rtol=0)
    assert proposal.usable.all() and proposal.confidence is None


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_ids_in_the_padding_are_never_candidates(target, greedy):
    """Catches padded rows of the head that score high, and a candidate the target has no probability for."""
    draft, head = random_dspark(target), Head(vocab_size=30, rows=40)
    head.weight[30:] *= 50
    proposal, _ = propose(draft, torch.randn(3, 5, 32), head, torch.tensor([0, 1, 2]), greedy=greedy)
    assert proposal.q.shape == proposal.candidate_ids.shape == (3, 5, 30)
    assert int(proposal.candidate_ids.max()) == 29 and int(proposal.tokens.max()) < 30


@pytest.mark.parametrize("d2t", [None, REDUCED], ids=["full", "reduced"])
@pytest.mark.parametrize("kind", HEADS)
def test_restricted_to_the_best_base_logits(target, kind, d2t):
    """Catches candidates that are chosen after the bias, or scored with the bias of other tokens."""
    draft, head = random_dspark(target, markov_head_type=kind, d2t=d2t), Head()
    hidden, anchors = torch.randn(2, 4, 32), torch.tensor([3, 4])
    whole, _ = propose(draft, hidden, head, anchors, greedy=True)
    draft.draft_top_k = len(REDUCED) if d2t else 32
    same, _ = propose(draft, hidden, head, anchors, greedy=True)
    assert torch.equal(same.tokens, whole.tokens)
    draft.draft_top_k = 3
    few, _ = propose(draft, hidden, head, anchors, greedy=False)
    logits = head(hidden) if d2t is None else hidden @ draft.lm_head.weight.detach().T
    best = logits.topk(3).indices
    best = best if d2t is None else torch.tensor(REDUCED)[best]
    assert torch.equal(few.candidate_ids.sort(-1).values, best.sort(-1).values)
    torch.testing.assert_close(few.q.sum(-1), torch.ones(2, 4), atol=PROBABILITY_TOLERANCE, rtol=0)
    assert (few.tokens[..., None] == few.candidate_ids).any(-1).all()


def test_greedy_drafts_of_a_sampled_request_are_one_hot(target):
    """Catches a spread-out law that is reported for a token chosen as the best."""
    draft, head = random_dspark(target), Head()
    hidden, anchors = torch.randn(1, 4, 32), torch.tensor([3])
    draft.drafts_greedily = True
    proposal, _ = propose(draft, hidden, head, anchors, greedy=False)
    greedy, _ = propose(draft, hidden, head, anchors, greedy=True)
    assert torch.equal(proposal.tokens, greedy.tokens) and torch.equal(proposal.q, greedy.q)
    assert set(proposal.q.flatten().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("with_markov", [False, True], ids=["hidden", "hidden-and-markov"])
@pytest.mark.parametrize("multiplier", [1.0, 4.0], ids=["plain", "width-multiplier"])
def test_confidence_equals_the_formula(target, with_markov, multiplier):
    """Catches divided hidden states, and a row of the slot's own token in place of the one before."""
    draft = random_dspark(target, enable_confidence_head=True, confidence_head_with_markov=with_markov)
    hidden, anchors = torch.randn(2, 3, 32), torch.tensor([7, 20])
    proposal, _ = propose(
        draft, hidden, Head(width_multiplier=multiplier), anchors, greedy=False, with_confidence=True
    )
    previous = torch.cat([anchors[:, None], proposal.tokens[:, :-1]], dim=1)
    inputs = hidden.double()
    if with_markov:
        inputs = torch.cat([inputs, draft.markov_head.markov_w1.weight.detach().double()[previous]], dim=-1)
    proj = draft.confidence_head.proj
    expected = torch.sigmoid(inputs @ proj.weight.detach().double()[0] + proj.bias.detach().double())
    torch.testing.assert_close(proposal.confidence.double(), expected, atol=PROBABILITY_TOLERANCE, rtol=0)


def test_confidence_without_a_head_is_the_largest_probability(target):
    """Catches a one-hot law taken for certainty."""
    draft, head = random_dspark(target), Head()
    hidden, anchors = 0.3 * torch.randn(1, 4, 32), torch.tensor([3])
    sampled, _ = propose(draft, hidden, head, anchors, greedy=False, with_confidence=True)
    torch.testing.assert_close(sampled.confidence, sampled.q.amax(-1), atol=PROBABILITY_TOLERANCE, rtol=0)
    greedy, _ = propose(draft, hidden, head, anchors, greedy=True, with_confidence=True)
    assert (greedy.confidence < 1).all()
    assert float(greedy.confidence[0, 0]) == pytest.approx(float(sampled.confidence[0, 0]), abs=PROBABILITY_TOLERANCE)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", HEADS)
def test_rows_that_are_not_finite_are_unusable(target, kind, greedy):
    """Catches a proposal made of NaN, and a NaN that reaches the other row."""
    draft, head = random_dspark(target, markov_head_type=kind), Head()
    hidden, anchors = torch.randn(2, 3, 32), torch.tensor([3, 4])
    clean, _ = propose(draft, hidden, head, anchors, greedy=greedy)
    hidden[0, 1] = torch.nan
    broken, _ = propose(draft, hidden, head, anchors, greedy=greedy)
    assert broken.usable.tolist() == [False, True]
    assert torch.equal(broken.tokens[1], clean.tokens[1])


@pytest.mark.parametrize(("anchor", "rows"), [(True, (7, 0)), (False, (8, 1))], ids=["anchor", "masks"])
def test_a_short_proposal_is_cut_from_a_full_block(target, anchor, rows):
    """Catches blocks of a size that the drafter was not trained with."""
    draft = random_dspark(target, sample_from_anchor=anchor)
    assert draft.block_rows(7) == draft.block_rows(3) == rows
    assert draft.block_rows(9) == (rows[0] + 2, rows[1])

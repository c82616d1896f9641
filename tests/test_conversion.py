# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""Which target a drafter belongs to, and its way into the Speculators form and back."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_configuration import MUSE_30B, QWEN_8B_V1, QWEN_27B, SMOLLM2_135M, SPECULATORS

from transformers_dflash2 import DFlash2Config, DFlash2DraftModel, conversion
from transformers_dflash2.conversion import convert_checkpoint, to_public, to_speculators
from transformers_dflash2.testing import draft_config, random_drafter, table_target


V1_NESTED = {
    **{key: value for key, value in QWEN_8B_V1.items() if key != "block_size"},
    "dflash_config": {**QWEN_8B_V1["dflash_config"], "block_size": 16},
}
NAMED = {**QWEN_27B, "target_name_or_path": "org/target"}
PUBLIC = [
    pytest.param(QWEN_27B, id="qwen"),
    pytest.param(MUSE_30B, id="muse"),
    pytest.param(SMOLLM2_135M, id="smollm2"),
    pytest.param(V1_NESTED, id="v1"),
    pytest.param(NAMED, id="named-target"),
]


@pytest.mark.parametrize("raw", PUBLIC)
def test_public_config_comes_back(raw):
    """Catches a setting that a conversion there and back drops, adds or changes."""
    before = copy.deepcopy(raw)
    converted = to_speculators(raw)
    assert raw == before
    assert to_public(converted) == raw
    # As JSON on disk, too.
    assert to_public(json.loads(json.dumps(converted))) == raw


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="as-it-is"),
        pytest.param({"block_size": 8, "unknown_to_us": [1]}, id="more-keys"),
        pytest.param({"speculators_version": "0.5", "architectures": ["Other"]}, id="other-values"),
        pytest.param({"sliding_window_non_causal": False}, id="causal"),
    ],
)
def test_speculators_config_comes_back(changes):
    """Catches what only the Speculators form has words for, lost on the way through the public form."""
    raw = {**SPECULATORS, **changes}
    public = to_public(raw)
    assert "speculators_model_type" not in public and public["target_name_or_path"] == "org/target"
    assert to_speculators(json.loads(json.dumps(public))) == raw


def test_speculators_config_is_what_engines_read():
    """Catches a config that the Speculators reader of a serving engine would refuse: its required keys and ids."""
    converted = to_speculators(QWEN_27B, verifier="org/target")
    assert converted["speculators_model_type"] == converted["speculators_config"]["algorithm"] == "dflash2"
    # Layer ids count from the embedding's output.
    assert converted["aux_hidden_state_layer_ids"] == [6, 20, 34, 48, 62]
    assert converted["mask_token_id"] == 248070
    assert converted["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert converted["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert converted["speculators_config"]["default_proposal_method"] == "greedy"
    assert converted["sliding_window_non_causal"] is True
    assert converted["transformer_layer_config"]["model_type"] == "qwen3"
    assert converted["draft_vocab_size"] == converted["transformer_layer_config"]["vocab_size"]
    assert {converted[key] for key in ("conv_kernel_size", "conv_group_size")} == {2, 16}


def test_what_cannot_be_said_is_refused():
    """Catches a drafter that changes its meaning in the other form."""
    mixed = {**SMOLLM2_135M, "is_causal": None}
    with pytest.raises(ValueError, match=r"layer_is_causal.*cannot be said"):
        to_speculators(mixed)
    unknown = {**SMOLLM2_135M, "dflash_config": {**SMOLLM2_135M["dflash_config"], "new": 1}}
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="new"):
        to_speculators(unknown)
    with pytest.raises(ValueError, match="already"):
        to_speculators(SPECULATORS)
    with pytest.raises(ValueError, match="not in the Speculators form"):
        to_public(QWEN_27B)


@pytest.fixture
def folder(tmp_path):
    draft = random_drafter(table_target(0), 0)
    draft.save_pretrained(tmp_path / "public", max_shard_size="20KB")
    assert (tmp_path / "public" / "model.safetensors.index.json").is_file()
    return tmp_path


def tensors(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_folder_comes_back(folder, capsys):
    """Catches weights that change on the way, an index that does not fit them, or a folder that does not load."""
    arguments = [str(folder / "public"), str(folder / "there"), "--to", "speculators", "--verifier", "org/target"]
    conversion.main(arguments)
    assert "there" in capsys.readouterr().out
    convert_checkpoint(folder / "there", folder / "back", to="public")
    for path in (folder / "public").glob("*.safetensors"):
        assert path.read_bytes() == (folder / "back" / path.name).read_bytes()
    first, last = (json.loads((folder / name / "config.json").read_text()) for name in ("public", "back"))
    assert last == {**first, "target_name_or_path": "org/target"}
    weights = tensors(folder / "public")
    for name in ("there", "back"):
        loaded = DFlash2DraftModel.from_pretrained(folder / name).state_dict()
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[key], weights[key]) for key in weights)
    with pytest.raises(FileExistsError, match="not empty"):
        convert_checkpoint(folder / "public", folder / "there", to="speculators")
    with pytest.raises(ValueError, match="to='sglang'"):
        convert_checkpoint(folder / "public", folder / "other", to="sglang")


def test_verifier_weights_of_speculators(folder):
    """Catches a Speculators checkpoint that does not load for the target's own weights, which it repeats."""
    convert_checkpoint(folder / "public", folder / "there", to="speculators")
    path = min((folder / "there").glob("*.safetensors"))
    copies = {name: torch.zeros(2, 2) for name in ("embed_tokens.weight", "lm_head.weight", "verifier_norm.weight")}
    save_file({**load_file(path), **copies}, path, metadata={"format": "pt"})
    draft = DFlash2DraftModel.from_pretrained(folder / "there")
    assert draft.state_dict().keys() == tensors(folder / "public").keys()
    convert_checkpoint(folder / "there", folder / "back", to="public")
    assert tensors(folder / "back").keys() == tensors(folder / "public").keys()


def test_folder_without_safetensors(tmp_path):
    """Catches a conversion that writes a config without weights."""
    draft_config(table_target(0)).save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match="no safetensors"):
        convert_checkpoint(tmp_path / "draft", tmp_path / "out", to="speculators")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        pytest.param("---\nbase_model: org/target\n---\n", "org/target", id="name"),
        pytest.param("---\nbase_model:\n- org/target\n---\n", "org/target", id="list"),
        pytest.param("---\nlicense: mit\n---\n", None, id="no-entry"),
        pytest.param("A text.\n", None, id="no-metadata"),
        pytest.param(None, None, id="no-card"),
    ],
)
def test_target_from_the_card(tmp_path, card, expected):
    """Catches a drafter whose target is written in its card and not found there."""
    draft_config(table_target(0)).save_pretrained(tmp_path)
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    config = DFlash2Config.from_pretrained(tmp_path)
    assert config.trained_for == expected
    # The card is no part of the config.
    assert "target_name_or_path" not in config.to_dict()


def test_target_of_a_quantised_copy(tmp_path):
    """Catches a quantised drafter whose base, a drafter, is taken for its target."""
    for name, card in (
        ("draft", "base_model: org/target"),
        ("quantised", f"base_model: {tmp_path / 'draft'}\nbase_model_relation: quantized"),
    ):
        draft_config(table_target(0)).save_pretrained(tmp_path / name)
        (tmp_path / name / "README.md").write_text(f"---\n{card}\n---\n")
    assert DFlash2Config.from_pretrained(tmp_path / "quantised").trained_for == "org/target"


def test_config_comes_before_the_card(tmp_path):
    """Catches a card that overrules what the checkpoint itself says, or a Speculators verifier that is not read."""
    draft_config(table_target(0), target_name_or_path="org/config").save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("---\nbase_model: org/card\n---\n")
    assert DFlash2Config.from_pretrained(tmp_path).trained_for == "org/config"
    assert DFlash2Config.from_dict(SPECULATORS).trained_for == "org/target"


@pytest.mark.parametrize(
    ("trained_for", "words"),
    [
        pytest.param("org/right", "was trained for 'org/right'", id="known"),
        pytest.param(None, "does not say which target it was trained for", id="unknown"),
    ],
)
def test_wrong_target_is_refused_in_words(trained_for, words):
    """Catches a refusal that names shapes only and leaves the user to find the right pair."""
    draft = random_drafter(table_target(0), 0)
    draft.config.target_name_or_path = trained_for
    other = table_target(0, num_hidden_layers=2)
    other.name_or_path = "org/wrong"
    with pytest.raises(ValueError, match=rf"layers.*{words}; this target is \w+ 'org/wrong'"):
        other.generate(torch.tensor([[1, 2]]), assistant_model=draft, max_new_tokens=2)

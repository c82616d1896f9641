# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""The model cards: built from their template, valid for the Hub, and right about the drafters."""

import importlib.util
import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from test_configuration import MUSE_30B, QWEN_27B

from transformers_dflash2 import DFlash2Config


CARDS = Path(__file__).resolve().parents[1] / "model_cards"
spec = importlib.util.spec_from_file_location("build_cards", CARDS / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
CONFIGS = {
    "smollm2-135m-dflash2": json.loads((CARDS / "smollm2-135m-dflash2" / "config.json").read_text()),
    "qwen3.8-27b-dflash2": QWEN_27B,
    "muse-glimmer-30b-dflash2": MUSE_30B,
}


def test_cards_are_built_from_the_template(capsys, monkeypatch, tmp_path):
    """Catches a card that was edited by hand, and a check that cannot fail."""
    assert build.main(["--check"]) == 0, "run python model_cards/build.py"
    assert {folder.name for folder in build.FOLDERS} == CONFIGS.keys()
    monkeypatch.setattr(build, "build_card", lambda folder: "other\n")
    assert build.main(["--check"]) == 1
    assert "out of date: model_cards/smollm2-135m-dflash2/README.md" in capsys.readouterr().out


@pytest.mark.parametrize("folder", build.FOLDERS, ids=lambda folder: folder.name)
def test_card_is_valid(folder):
    """Catches metadata that the Hub's parser refuses, or a key that this kind of model is found by."""
    card = ModelCard((folder / "README.md").read_text(encoding="utf-8"), ignore_metadata_errors=False)
    data = card.data
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    assert {"dflash2", "speculative-decoding", "block-diffusion", "draft-model"} <= set(data.tags)
    assert data.base_model.count("/") == 1
    assert all(result.metric_type == "accepted_length" for result in data.eval_results or [])
    # Only the drafter whose weights are here has a licence and figures of ours.
    is_ours = any(folder.glob("*.safetensors"))
    assert (data.license is not None) == (data.eval_results is not None) == is_ours
    assert is_ours or "not measured with this library" in card.text
    # The way of saving a card keeps what was read.
    assert ModelCard(str(card)).data.to_dict() == data.to_dict()


@pytest.mark.parametrize("folder", build.FOLDERS, ids=lambda folder: folder.name)
def test_card_is_valid_for_the_hub(folder):
    """Asks the Hub's own validation, where there is a network."""
    card = ModelCard((folder / "README.md").read_text(encoding="utf-8"))
    try:
        card.validate()
    except ValueError as error:
        pytest.fail(str(error))
    except Exception as error:
        pytest.skip(f"the Hub is out of reach ({type(error).__name__})")


@pytest.mark.parametrize("name", CONFIGS)
def test_card_says_what_the_config_says(name):
    """Catches a card that describes another drafter."""
    config = DFlash2Config.from_dict(dict(CONFIGS[name]))
    text = (CARDS / name / "README.md").read_text(encoding="utf-8")
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads)
    assert f"| {' / '.join(map(str, sizes))} |" in text
    assert f"| block | {config.block_size} (" in text
    assert f"| mask token | {config.mask_token_id} |" in text
    assert f"rank {config.selector_rank} over the {config.selector_top_k} best" in text
    *first, last = map(str, config.target_layer_ids)
    assert f"{', '.join(first)} and {last}" in " ".join(text.split())
    assert f"{config.num_target_layers} layers" in text

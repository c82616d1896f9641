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
"""What a drafter's `config.json` says: every public spelling, every refusal, and the way back to the file."""

import copy
import json
import logging
import pickle
import warnings

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from transformers_dflash2 import configuration_dflash2
from transformers_dflash2.configuration_dflash2 import DFlash2Config, _default_target_layer_ids


pytestmark = pytest.mark.filterwarnings("error::UserWarning")

QWEN_27B = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 248070,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "dtype": "bfloat16",
    "eos_token_id": 248046,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "pad_token_id": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "transformers_version": "5.15.0",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 248320,
}

MUSE_30B = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "bos_token_id": 200000,
    "dflash_config": {
        "block_size": 16,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0,
        "mask_token_id": 201818,
        "output_multiplier": 0.19611613513818404,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [1, 13, 25, 37, 49],
    },
    "dtype": "bfloat16",
    "eos_token_id": [200001, 200008],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 131072,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 52,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 202048,
}

SMOLLM2_135M = {
    "transformers_version": "5.17.0",
    "architectures": ["DFlash2DraftModel"],
    "output_hidden_states": False,
    "return_dict": True,
    "dtype": "bfloat16",
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "problem_type": None,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "use_cache": True,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "attention_bias": False,
    "use_sliding_window": True,
    "sliding_window": 256,
    "max_window_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "attention_dropout": 0.0,
    "pad_token_id": 2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "_name_or_path": "",
    "is_causal": False,
    "num_target_layers": 30,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 16,
        "selector_rank": 32,
        "selector_top_k": 16,
        "target_layer_ids": [1, 9, 18, 27],
    },
    "model_type": "qwen3",
    "output_attentions": False,
}

MUSE_ASSISTANT = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "attention_dropout": 0,
    "block_size": 16,
    "bos_token_id": 200000,
    "dtype": "bfloat16",
    "eos_token_id": 200001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "layer_types": ["sliding_attention"] * 5,
    "mask_token_id": 201818,
    "max_position_embeddings": 131072,
    "model_type": "muse_glimmer_assistant",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "target_layer_ids": [1, 13, 25, 37, 49],
}

QWEN_8B_V1 = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

SPECULATORS = {
    "architectures": ["DFlash2Speculator"],
    "aux_hidden_state_layer_ids": [1, 3],
    "conv_group_size": 8,
    "conv_kernel_size": 2,
    "draft_vocab_size": 32,
    "dtype": "float32",
    "final_logit_softcapping": 20.0,
    "mask_token_id": 31,
    "output_multiplier": 0.5,
    "sample_from_anchor": False,
    "selector_rank": 8,
    "selector_top_k": 4,
    "sliding_window_non_causal": True,
    "speculators_config": {
        "algorithm": "dflash2",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "org/target"},
    },
    "speculators_model_type": "dflash2",
    "speculators_version": "0.6.0",
    "transformer_layer_config": {
        "head_dim": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "sliding_window": 6,
        "vocab_size": 32,
    },
}

TINY_LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "vocab_size": 32,
}
TINY_DRAFT = {
    "block_size": 8,
    "conv_group_size": 8,
    "conv_kernel_size": 2,
    "mask_token_id": 31,
    "selector_rank": 8,
    "selector_top_k": 4,
    "target_layer_ids": [0, 2],
}
REMOVED = object()


def tiny(nested=None, **top):
    """A valid two-layer DFlash2 checkpoint config; `nested` and `top` replace keys, `REMOVED` drops one."""
    draft = {key: value for key, value in {**TINY_DRAFT, **(nested or {})}.items() if value is not REMOVED}
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "num_target_layers": 4,
        **TINY_LAYERS,
        "dflash_config": draft,
        **top,
    }
    return {key: value for key, value in config.items() if value is not REMOVED}


def tiny_v1(nested=None, **top):
    nested = {
        **dict.fromkeys(("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"), REMOVED),
        **(nested or {}),
    }
    return tiny(nested, **{"architectures": ["DFlashDraftModel"], **top})


def write(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(folder):
    return json.loads((folder / "config.json").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Public configs


def test_public_names():
    assert configuration_dflash2.__all__ == sorted(configuration_dflash2.__all__) == ["DFlash2Config"]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(
            QWEN_27B,
            {
                "vocab_size": 248320,
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "num_hidden_layers": 5,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 262144,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
                "layer_types": ["sliding_attention"] * 5,
                "sliding_window": 2048,
                "layer_is_causal": [False] * 5,
                "num_target_layers": 64,
                "target_hidden_size": 5120,
                "block_size": 8,
                "mask_token_id": 248070,
                "target_layer_ids": [5, 19, 33, 47, 61],
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 256,
                "selector_top_k": 16,
                "output_multiplier": 1.0,
                "final_logit_softcapping": None,
                "input_embedding_scale": 1.0,
                "draft_family": "dflash2",
                "eos_token_id": 248046,
                "dtype": torch.bfloat16,
            },
            id="qwen3.8-27b",
        ),
        pytest.param(
            MUSE_30B,
            {
                "vocab_size": 202048,
                "hidden_size": 6656,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_window": 2048,
                "layer_is_causal": [False] * 5,
                "num_target_layers": 52,
                "block_size": 16,
                "mask_token_id": 201818,
                "target_layer_ids": [1, 13, 25, 37, 49],
                "output_multiplier": 0.19611613513818404,
                "final_logit_softcapping": 20.0,
                "draft_family": "dflash2",
                "eos_token_id": [200001, 200008],
            },
            id="muse-glimmer-30b",
        ),
        pytest.param(
            SMOLLM2_135M,
            {
                "vocab_size": 49152,
                "hidden_size": 576,
                "head_dim": 64,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
                "sliding_window": 256,
                "layer_is_causal": [False] * 4,
                "num_target_layers": 30,
                "block_size": 8,
                "mask_token_id": 16,
                "target_layer_ids": [1, 9, 18, 27],
                "selector_rank": 32,
                "draft_family": "dflash2",
            },
            id="smollm2-135m",
        ),
        pytest.param(
            MUSE_ASSISTANT,
            {
                "vocab_size": 202048,
                "sliding_window": 2048,
                "layer_is_causal": [False] * 5,
                "selector_rank": 0,
                "conv_kernel_size": 0,
                "num_target_layers": None,
                "target_layer_ids": [1, 13, 25, 37, 49],
                "draft_family": "dflash",
            },
            id="muse-assistant",
        ),
        pytest.param(
            QWEN_8B_V1,
            {
                "block_size": 16,
                "mask_token_id": 151669,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_window": None,
                "layer_is_causal": [False] * 5,
                "draft_family": "dflash",
                "dtype": torch.bfloat16,
            },
            id="qwen3-8b-v1",
        ),
        pytest.param(
            SPECULATORS,
            {
                "vocab_size": 32,
                "hidden_size": 32,
                "block_size": 8,
                "target_layer_ids": [0, 2],
                "mask_token_id": 31,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 6,
                "layer_is_causal": [False, False],
                "output_multiplier": 0.5,
                "final_logit_softcapping": 20.0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
                "target_name_or_path": "org/target",
                "draft_family": "dflash2",
            },
            id="speculators",
        ),
    ],
)
def test_reads_public_config(tmp_path, raw, expected):
    """Would catch a default that takes the place of a value in the file."""
    config = DFlash2Config.from_pretrained(write(tmp_path, raw))
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.model_type == DFlash2Config.model_type == "dflash2"
    assert config.get_text_config() is config


def test_a_folder_without_a_config(tmp_path):
    """Catches a model card that is taken for a checkpoint whose config lacks everything."""
    (tmp_path / "README.md").write_text("A card.", encoding="utf-8")
    with pytest.raises(OSError, match=r"holds no config.json. Pass the folder or the Hub id"):
        DFlash2Config.from_pretrained(tmp_path)


def test_loads_without_a_message(tmp_path, caplog):
    """Would catch the host's warning about a `model_type` that is not ours."""
    with caplog.at_level(logging.WARNING, logger="transformers"):
        logging.getLogger("transformers").propagate = True
        DFlash2Config.from_pretrained(write(tmp_path, QWEN_27B))
    assert not caplog.records


ROUND_TRIPS = [
    pytest.param(QWEN_27B, id="qwen3.8-27b"),
    pytest.param(MUSE_30B, id="muse-glimmer-30b"),
    pytest.param(SMOLLM2_135M, id="smollm2-135m"),
    pytest.param(MUSE_ASSISTANT, id="muse-assistant"),
    pytest.param(QWEN_8B_V1, id="qwen3-8b-v1"),
    pytest.param(SPECULATORS, id="speculators"),
    pytest.param(tiny({"block_size": REMOVED}, block_size=4), id="nested-and-flat"),
    pytest.param({**tiny(dflash_config=REMOVED), **TINY_DRAFT}, id="flat"),
    pytest.param(
        {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3_vl",
            "dflash_config": TINY_DRAFT,
            "text_config": {**TINY_LAYERS, "dtype": "float16"},
        },
        id="text-config",
    ),
    pytest.param(tiny(auto_map={"AutoConfig": "a.B"}, temperature=0.6, note={"x": [1, None]}), id="unknown-keys"),
]


@pytest.mark.parametrize("raw", ROUND_TRIPS)
def test_file_round_trip(tmp_path, raw):
    """Would catch keys that are lost, rewritten or added between reading and writing."""
    config = DFlash2Config.from_pretrained(write(tmp_path / "a", raw))
    config.save_pretrained(tmp_path / "b")
    written = read(tmp_path / "b")
    written.pop("transformers_version")
    assert written == {key: value for key, value in raw.items() if key != "transformers_version"}
    assert DFlash2Config.from_pretrained(tmp_path / "b") == config


@pytest.mark.parametrize("raw", ROUND_TRIPS)
def test_in_memory_round_trips(raw):
    """Would catch state that only survives in files, and a constructor that edits its arguments."""
    given = copy.deepcopy(raw)
    config = DFlash2Config.from_dict(given)
    assert given == raw
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert DFlash2Config.from_dict(config.to_dict()) == config
    assert DFlash2Config(**config.to_dict()) == config
    assert json.loads(config.to_json_string(use_diff=True)) == json.loads(config.to_json_string(use_diff=False))
    assert repr(config).startswith("DFlash2Config {")
    for derived in ("layer_is_causal", "draft_family"):
        assert f'"{derived}"' not in config.to_json_string()


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({**TINY_LAYERS, **TINY_DRAFT}, id="flat-keywords"),
        pytest.param({**TINY_LAYERS, "dflash_config": TINY_DRAFT}, id="nested-keyword"),
        pytest.param({**TINY_LAYERS, **TINY_DRAFT, "architectures": ["DFlash2DraftModel"]}, id="with-architectures"),
        pytest.param(
            {
                **TINY_LAYERS,
                **TINY_DRAFT,
                "block_size": REMOVED,
                "dflash_config": {"block_size": 8},
                "target_layer_ids": (0, 2),
            },
            id="both",
        ),
    ],
)
def test_built_in_code_writes_public_form(tmp_path, kwargs):
    """Would catch a config that only this package can read back."""
    config = DFlash2Config(**{key: value for key, value in kwargs.items() if value is not REMOVED})
    config.save_pretrained(tmp_path)
    written = read(tmp_path)
    assert written["architectures"] == ["DFlash2DraftModel"]
    assert written["model_type"] == "qwen3"
    assert written["dflash_config"] == TINY_DRAFT
    assert not set(TINY_DRAFT) & set(written)
    assert written["head_dim"] == 8 and written["layer_types"] == ["full_attention"] * 2
    assert DFlash2Config.from_pretrained(tmp_path) == config


def test_built_in_code_full_settings(tmp_path):
    """Would catch an optional setting that gets lost on the way to the public form."""
    config = DFlash2Config(
        **TINY_LAYERS,
        **TINY_DRAFT,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        is_causal=False,
        num_target_layers=4,
        output_multiplier=0.5,
        final_logit_softcapping=20.0,
        input_embedding_scale=2.0,
        target_name_or_path="org/target",
        dtype="float32",
    )
    config.save_pretrained(tmp_path)
    written = read(tmp_path)
    assert written["use_sliding_window"] is True and written["sliding_window"] == 6
    assert written["dflash_config"] == {
        **TINY_DRAFT,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 20.0,
        "input_embedding_scale": 2.0,
    }
    assert written["num_target_layers"] == 4 and written["is_causal"] is False and written["dtype"] == "float32"
    assert DFlash2Config.from_pretrained(tmp_path) == config


def test_built_in_code_v1(tmp_path):
    """Would catch a v1 drafter that comes back as DFlash2."""
    config = DFlash2Config(**TINY_LAYERS, block_size=8, mask_token_id=0, target_layer_ids=[1])
    assert config.draft_family == "dflash"
    config.save_pretrained(tmp_path)
    assert read(tmp_path)["architectures"] == ["DFlashDraftModel"]
    assert read(tmp_path)["dflash_config"] == {"block_size": 8, "mask_token_id": 0, "target_layer_ids": [1]}
    assert DFlash2Config.from_pretrained(tmp_path) == config


# ---------------------------------------------------------------------------------------------------------------------
# Changes after construction


@pytest.mark.parametrize(
    ("raw", "changes", "places"),
    [
        pytest.param(tiny(), {"block_size": 4}, {("dflash_config", "block_size"): 4}, id="nested"),
        pytest.param(QWEN_8B_V1, {"block_size": 4}, {("block_size",): 4}, id="flat"),
        pytest.param(
            tiny(block_size=8), {"block_size": 4}, {("block_size",): 4, ("dflash_config", "block_size"): 4}, id="both"
        ),
        pytest.param(tiny(), {"output_multiplier": 0.5}, {("dflash_config", "output_multiplier"): 0.5}, id="new-key"),
        pytest.param(tiny(), {"num_target_layers": 8}, {("num_target_layers",): 8}, id="top"),
        pytest.param(SPECULATORS, {"target_layer_ids": [1]}, {("aux_hidden_state_layer_ids",): [2]}, id="aux-ids"),
        pytest.param(SPECULATORS, {"hidden_size": 64}, {("transformer_layer_config", "hidden_size"): 64}, id="layer"),
        pytest.param(
            SPECULATORS,
            {"target_name_or_path": "org/other"},
            {("speculators_config", "verifier", "name_or_path"): "org/other"},
            id="verifier",
        ),
        pytest.param(
            QWEN_8B_V1,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            {("rope_parameters", "rope_theta"): 5.0, ("rope_theta",): REMOVED},
            id="rope",
        ),
        pytest.param(
            QWEN_8B_V1, {"dtype": torch.float32}, {("dtype",): "float32", ("torch_dtype",): "float32"}, id="dtype"
        ),
        pytest.param(tiny(), {"dtype": "bfloat16"}, {("dtype",): "bfloat16"}, id="new-dtype"),
        pytest.param(tiny(), {"layer_is_causal": [True, True]}, {("layer_is_causal",): REMOVED}, id="derived"),
        pytest.param(
            tiny(), {"quantization_config": {"bits": 4}}, {("quantization_config",): {"bits": 4}}, id="quant"
        ),
        pytest.param(tiny(), {"output_attentions": True}, {("output_attentions",): True}, id="property"),
    ],
)
def test_changed_attributes_are_written_where_they_belong(tmp_path, raw, changes, places):
    """Would catch an edit that is lost on saving, or that lands in a place that is read second."""
    config = DFlash2Config.from_dict(raw)
    for key, value in changes.items():
        setattr(config, key, value)
    config.save_pretrained(tmp_path)
    written = read(tmp_path)
    for path, expected in places.items():
        value = written
        for key in path:
            value = value.get(key, REMOVED)
        assert value == expected
    again = DFlash2Config.from_pretrained(tmp_path)
    for key, value in changes.items():
        if key not in ("layer_is_causal", "dtype"):
            assert getattr(again, key) == value


@pytest.mark.parametrize(
    ("raw", "architectures"),
    [
        pytest.param(tiny(architectures=["MiniMaxDFlash2DraftModel"]), ["MiniMaxDFlash2DraftModel"], id="alias"),
        pytest.param(QWEN_8B_V1, ["DFlashDraftModel"], id="v1"),
        pytest.param(tiny_v1(architectures=REMOVED), ["DFlashDraftModel"], id="v1-undeclared"),
        pytest.param(tiny(architectures=REMOVED), ["DFlash2DraftModel"], id="undeclared"),
    ],
)
def test_saving_a_model_keeps_the_architecture_of_the_checkpoint(raw, architectures):
    """Would catch a v1 drafter saved under the DFlash2 name, because one class loads both."""
    config = DFlash2Config.from_dict(raw)
    config.architectures = ["DFlash2DraftModel"]
    assert config.to_dict()["architectures"] == architectures
    assert DFlash2Config.from_dict(config.to_dict()) == config
    assert DFlash2Config.from_dict(config.to_dict()).draft_family == config.draft_family


def test_overrides_are_checked_and_resolved(tmp_path):
    """Would catch a keyword of `from_pretrained` that goes around the checks of the constructor."""
    folder = write(tmp_path, tiny())
    config, unused = DFlash2Config.from_pretrained(
        folder, block_size=4, is_causal=True, foo=1, return_unused_kwargs=True
    )
    assert (config.block_size, config.layer_is_causal, unused["foo"]) == (4, [True, True], 1)
    assert config.to_dict()["dflash_config"]["block_size"] == 4
    config = DFlash2Config.from_pretrained(folder, dflash_config={**TINY_DRAFT, "mask_token_id": 3})
    assert config.mask_token_id == 3
    with pytest.raises(ValueError, match="block_size.*=0"):
        DFlash2Config.from_pretrained(folder, block_size=0)


def test_saving_checks_changed_values(tmp_path):
    """Would catch a broken config.json that only fails at the next load."""
    config = DFlash2Config.from_dict(tiny())
    config.conv_group_size = 5
    with pytest.raises(ValueError, match="conv_group_size.*5"):
        config.save_pretrained(tmp_path)


def test_attn_implementation_and_name_stay_out_of_the_file(tmp_path):
    config = DFlash2Config.from_pretrained(write(tmp_path, tiny()), attn_implementation="eager", block_size=4)
    config.name_or_path = "somewhere"
    assert config._attn_implementation == "eager"
    assert not [key for key in config.to_dict() if "attn" in key or "name_or_path" in key]


def test_equality_sees_values():
    assert DFlash2Config.from_dict(tiny()) != DFlash2Config.from_dict(tiny({"block_size": 4}))
    assert DFlash2Config.from_dict(tiny()) != 3


# ---------------------------------------------------------------------------------------------------------------------
# Names and families


@pytest.mark.parametrize(
    ("raw", "family"),
    [
        pytest.param(tiny(), "dflash2", id="DFlash2DraftModel"),
        pytest.param(tiny(architectures=["MiniMaxDFlash2DraftModel"]), "dflash2", id="MiniMaxDFlash2DraftModel"),
        pytest.param(tiny(architectures=["DFlash2BeamDraftModel"]), "dflash2", id="DFlash2BeamDraftModel"),
        pytest.param(tiny(architectures=["DFlash2Model"]), "dflash2", id="backbone"),
        pytest.param(tiny_v1(), "dflash", id="DFlashDraftModel"),
        pytest.param(MUSE_ASSISTANT, "dflash", id="MuseGlimmerAssistantModel"),
        pytest.param(tiny(architectures=REMOVED), "dflash2", id="undeclared-with-selector"),
        pytest.param(tiny_v1(architectures=None), "dflash", id="undeclared-without-selector"),
        pytest.param({**SPECULATORS, "architectures": None}, "dflash2", id="speculators-dflash2"),
        pytest.param(
            {
                **{key: value for key, value in SPECULATORS.items() if key[:4] not in ("conv", "sele")},
                "speculators_model_type": "dflash",
            },
            "dflash",
            id="speculators-dflash",
        ),
    ],
)
def test_family(raw, family):
    """Would catch an alias that is refused, or a v1 drafter that is asked for a selector."""
    assert DFlash2Config.from_dict(raw).draft_family == family


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param(
            tiny(architectures=["DSparkDraftModel"]), ["DSparkDraftModel", "not supported here"], id="dspark"
        ),
        pytest.param(
            tiny(architectures=["Qwen3DSparkModel"]), ["Qwen3DSparkModel", "DFlash2DraftModel"], id="dspark-2"
        ),
        pytest.param(tiny(architectures=["Qwen3OmniDSparkModel"]), ["Qwen3OmniDSparkModel"], id="dspark-omni"),
        pytest.param(
            tiny(architectures=["DFlashLagunaForCausalLM"]), ["DFlashLagunaForCausalLM", "MuseGlimmer"], id="laguna"
        ),
        pytest.param(tiny(architectures=["Qwen3ForCausalLM"]), ["Qwen3ForCausalLM", "target's"], id="a-target"),
        pytest.param(
            {**SPECULATORS, "speculators_model_type": "dspark"}, ["dspark", "dflash2"], id="speculators-dspark"
        ),
        pytest.param(
            {**SPECULATORS, "speculators_model_type": "eagle3"}, ["eagle3", "dflash2"], id="speculators-eagle"
        ),
    ],
)
def test_other_drafters_are_refused(raw, words):
    """Would catch a drafter of another kind that runs with the wrong meaning of its rows."""
    with pytest.raises(ValueError) as error:
        DFlash2Config.from_dict(raw)
    assert all(word in str(error.value) for word in words)


def test_muse_defaults():
    """Would catch a Muse assistant without `vocab_size` and without layer types read as full and causal."""
    raw = {key: MUSE_ASSISTANT[key] for key in ("architectures", "model_type", "target_layer_ids")}
    config = DFlash2Config.from_dict(raw)
    full = DFlash2Config.from_dict(MUSE_ASSISTANT)
    for key in ("vocab_size", "hidden_size", "layer_types", "sliding_window", "rope_parameters", "layer_is_causal"):
        assert getattr(config, key) == getattr(full, key)
    assert (config.block_size, config.mask_token_id, config.vocab_size) == (16, 201818, 202048)
    assert config.to_dict().keys() == {*raw, "transformers_version"}


def test_text_config_is_read_through():
    """Would catch sizes taken from defaults because they sit one level down."""
    raw = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "wrapper",
        "text_config": {**TINY_LAYERS, "dflash_config": TINY_DRAFT, "is_causal": True, "dtype": "bfloat16"},
    }
    config = DFlash2Config.from_dict(raw)
    assert (config.hidden_size, config.block_size, config.mask_token_id) == (32, 8, 31)
    assert config.layer_is_causal == [True, True] and config.dtype == torch.bfloat16
    assert config.get_text_config() is config


# ---------------------------------------------------------------------------------------------------------------------
# Nested and flat keys (fault 35)


OTHER = {
    "block_size": 4,
    "conv_group_size": 16,
    "conv_kernel_size": 3,
    "mask_token_id": 30,
    "selector_rank": 16,
    "selector_top_k": 8,
    "target_layer_ids": [1, 3],
}
FLAT = tiny(dflash_config=REMOVED)


@pytest.mark.parametrize("rope", ["new", "old"])
@pytest.mark.parametrize("place", ["flat", "nested", "equal", "different"])
def test_fault_35_nested_and_flat_keys(tmp_path, place, rope):
    """Would catch a block of 16 for a drafter trained with 8, and a rotary base of 10000 for every drafter."""
    raw = {
        "flat": {**FLAT, **TINY_DRAFT},
        "nested": tiny(),
        "equal": {**tiny(), **TINY_DRAFT},
        "different": {**tiny(), **OTHER},
    }[place]
    raw["rope_parameters"] = {"rope_theta": 5000.0, "rope_type": "default"}
    if rope == "old":
        raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
    folder = write(tmp_path, raw)
    if place == "different":
        with pytest.warns(UserWarning) as record:
            config = DFlash2Config.from_pretrained(folder)
        messages = [str(warning.message) for warning in record]
        for key in OTHER:
            assert any(
                f"`dflash_config.{key}`={TINY_DRAFT[key]!r}" in text and f"`{key}`={OTHER[key]!r}" in text
                for text in messages
            )
        assert len(messages) == len(OTHER)
    else:
        config = DFlash2Config.from_pretrained(folder)
    assert {key: getattr(config, key) for key in TINY_DRAFT} == TINY_DRAFT
    assert config.rope_parameters == {"rope_theta": 5000.0, "rope_type": "default"}
    frequencies = Qwen3RotaryEmbedding(config).inv_freq
    torch.testing.assert_close(frequencies, 5000.0 ** (-torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param(tiny(rope_theta=5.0), ["rope_parameters.rope_theta", "10000.0", "5.0"], id="rope-theta"),
        pytest.param(
            tiny(rope_scaling={"rope_type": "linear", "factor": 2.0}),
            ["rope_scaling", "linear", "default"],
            id="rope-scaling",
        ),
        pytest.param(
            tiny({"final_logit_softcapping": None}, final_logit_softcapping=20.0),
            ["dflash_config.final_logit_softcapping", "None", "20.0"],
            id="nested-null-softcap",
        ),
        pytest.param(
            {**SPECULATORS, "block_size": 4},
            ["block_size", "4", "speculative_tokens", "8"],
            id="speculators-block-size",
        ),
        pytest.param(
            {**SPECULATORS, "target_layer_ids": [1, 3]},
            ["target_layer_ids", "[1, 3]", "[0, 2]"],
            id="speculators-taps",
        ),
        pytest.param(
            {"text_config": TINY_LAYERS, **tiny(hidden_size=64)},
            ["text_config.hidden_size", "32", "64"],
            id="text-config",
        ),
        pytest.param(
            tiny({"use_swa": True, "swa_window_size": 6}, sliding_window=8),
            ["swa_window_size", "6", "sliding_window", "8"],
            id="swa-window",
        ),
        pytest.param(tiny({"blok_size": 4}), ["dflash_config.blok_size", "4"], id="unknown-nested-key"),
        pytest.param(tiny({"block_size": REMOVED}), ["block_size", "16"], id="no-block-size"),
        pytest.param(tiny(rope_parameters=REMOVED), ["rope_theta", "10000"], id="no-rotary-base"),
    ],
)
def test_disagreement_is_reported(raw, words):
    """Would catch one of two values dropped without a word."""
    with pytest.warns(UserWarning) as record:
        DFlash2Config.from_dict(raw)
    assert len(record) == 1
    assert all(word in str(record[0].message) for word in words)


@pytest.mark.parametrize(
    ("raw", "key", "value"),
    [
        pytest.param(tiny(block_size=4), "block_size", 8, id="block-size"),
        pytest.param(tiny({"block_size": None}, block_size=4), "block_size", 4, id="nested-null-block-size"),
        pytest.param(tiny({"block_size": REMOVED}), "block_size", 16, id="default-block-size"),
        pytest.param(
            tiny(num_target_layers=REMOVED, dflash_config={**TINY_DRAFT, "num_target_layers": 3}),
            "num_target_layers",
            3,
            id="nested-layers",
        ),
        pytest.param(tiny(output_multiplier=0.5), "output_multiplier", 0.5, id="flat-multiplier"),
        pytest.param(tiny({"output_multiplier": 2}), "output_multiplier", 2.0, id="nested-multiplier"),
        pytest.param(tiny(input_embedding_scale=3.0), "input_embedding_scale", 3.0, id="flat-scale"),
        pytest.param(tiny(final_logit_softcapping=20), "final_logit_softcapping", 20.0, id="flat-softcap"),
        pytest.param(
            tiny({"final_logit_softcapping": None}, final_logit_softcapping=20.0),
            "final_logit_softcapping",
            None,
            id="nested-null-softcap",
        ),
        pytest.param(tiny({"final_logit_softcapping": 0}), "final_logit_softcapping", None, id="softcap-zero"),
        pytest.param(tiny({"final_logit_softcapping": False}), "final_logit_softcapping", None, id="softcap-false"),
        pytest.param(tiny({"final_logit_softcapping": -1.0}), "final_logit_softcapping", None, id="softcap-negative"),
        pytest.param({**SPECULATORS, "block_size": 4}, "block_size", 4, id="speculators-block-size"),
        pytest.param({**SPECULATORS, "target_layer_ids": [1, 3]}, "target_layer_ids", [1, 3], id="speculators-taps"),
        pytest.param(
            {
                **{key: value for key, value in SPECULATORS.items() if key != "output_multiplier"},
                "transformer_layer_config": {**SPECULATORS["transformer_layer_config"], "output_multiplier": 0.25},
            },
            "output_multiplier",
            0.25,
            id="speculators-layer-multiplier",
        ),
        pytest.param(
            {
                **SPECULATORS,
                "transformer_layer_config": {**SPECULATORS["transformer_layer_config"], "input_embedding_scale": 3},
            },
            "input_embedding_scale",
            3.0,
            id="speculators-layer-scale",
        ),
        pytest.param(tiny({"mask_token_id": REMOVED}, pard_token=7), "mask_token_id", 7, id="mask-alias"),
        pytest.param(tiny(draft_vocab_size=32), "vocab_size", 32, id="full-draft-vocabulary"),
        pytest.param(tiny(logit_scale=1.0), "vocab_size", 32, id="neutral-logit-scale"),
        pytest.param(tiny({"attention_value_scale": None}), "vocab_size", 32, id="no-value-scale"),
        pytest.param(tiny({"attention_sink_bias": False}), "vocab_size", 32, id="no-sinks"),
        pytest.param(tiny(num_key_value_heads=REMOVED), "num_key_value_heads", 4, id="default-kv-heads"),
        pytest.param(tiny(), "head_dim", 8, id="default-head-dim"),
        pytest.param(tiny(target_hidden_size=64), "target_hidden_size", 64, id="target-hidden-size"),
        pytest.param(tiny(eos_token_id=[3, 4]), "eos_token_id", [3, 4], id="several-eos"),
        pytest.param(tiny(target_name_or_path="org/x"), "target_name_or_path", "org/x", id="target-name"),
    ],
)
def test_value(raw, key, value):
    """Would catch the wrong one of several places, or the wrong default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = getattr(DFlash2Config.from_dict(raw), key)
    assert found == value and type(found) is type(value)


# ---------------------------------------------------------------------------------------------------------------------
# Rotary parameters


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        pytest.param(
            {"rope_parameters": REMOVED, "rope_theta": 500}, {"rope_type": "default", "rope_theta": 500.0}, id="flat"
        ),
        pytest.param(
            {"rope_parameters": REMOVED, "rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            id="legacy-linear",
        ),
        pytest.param(
            {
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
                "max_position_embeddings": 64,
            },
            {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64},
            id="yarn",
        ),
        pytest.param({"rope_parameters": None}, {"rope_type": "default", "rope_theta": 10000.0}, id="absent"),
        pytest.param(
            {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": None},
            {"rope_type": "default", "rope_theta": 5.0},
            id="no-type",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "rope_theta": 5.0,
                    "partial_rotary_factor": 1.0,
                    "rope_dim": 8,
                    "is_neox_style": True,
                }
            },
            {"rope_type": "default", "rope_theta": 5.0},
            id="neutral-keys",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "type": "mrope",
                    "rope_theta": 5.0,
                    "mrope_section": [1, 1, 2],
                    "mrope_interleaved": True,
                }
            },
            {"rope_type": "default", "rope_theta": 5.0},
            id="multimodal",
        ),
        pytest.param(
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}}},
            {"rope_type": "default", "rope_theta": 5.0},
            id="by-layer-type",
        ),
    ],
)
def test_rope_parameters(top, expected):
    """Would catch rotary parameters that the rotary module of either host version cannot read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = DFlash2Config.from_dict(tiny(**top))
    assert config.rope_parameters == expected
    rotary = Qwen3RotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1, 3, 32), torch.arange(3)[None])
    assert cos.shape == sin.shape == (1, 3, 8)


# ---------------------------------------------------------------------------------------------------------------------
# Layer types, windows and causality


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("raw", "layer_types", "window", "causal"),
    [
        pytest.param(tiny(), [FULL, FULL], None, [False, False], id="no-layer-types"),
        pytest.param(tiny(sliding_window=6), [FULL, FULL], None, [False, False], id="stray-window"),
        pytest.param(
            tiny(layer_types=[SLIDING, FULL], sliding_window=6), [SLIDING, FULL], 6, [True, False], id="by-layer-type"
        ),
        pytest.param(
            tiny(layer_types=[SLIDING, FULL], sliding_window=6, use_sliding_window=False),
            [SLIDING, FULL],
            6,
            [True, False],
            id="host-switch-off",
        ),
        pytest.param(
            tiny(layer_types=[SLIDING, FULL], sliding_window=6, is_causal=False),
            [SLIDING, FULL],
            6,
            [False, False],
            id="not-causal",
        ),
        pytest.param(
            tiny(layer_types=[SLIDING, FULL], sliding_window=6, is_causal=True),
            [SLIDING, FULL],
            6,
            [True, True],
            id="causal",
        ),
        pytest.param(
            tiny({"causal": False}, layer_types=[SLIDING, FULL], sliding_window=6, is_causal=None),
            [SLIDING, FULL],
            6,
            [False, False],
            id="nested-causal",
        ),
        pytest.param(tiny({"causal": False}, is_causal=True), [FULL, FULL], None, [True, True], id="top-level-first"),
        pytest.param(
            tiny({"use_swa": True, "swa_window_size": 6}), [SLIDING, SLIDING], 6, [False, False], id="use-swa"
        ),
        pytest.param(
            tiny({"use_swa": True}, sliding_window=5), [SLIDING, SLIDING], 5, [False, False], id="use-swa-flat-window"
        ),
        pytest.param(
            tiny({"use_swa": True, "swa_window_size": 6, "causal": True}),
            [SLIDING] * 2,
            6,
            [True, True],
            id="causal-swa",
        ),
        pytest.param(tiny({"use_swa": False, "swa_window_size": 6}), [FULL, FULL], None, [False, False], id="swa-off"),
        pytest.param(
            tiny(use_sliding_window=True, sliding_window=6, max_window_layers=28),
            [FULL] * 2,
            None,
            [False] * 2,
            id="host-rule-full",
        ),
        pytest.param(
            {**SPECULATORS, "sliding_window_non_causal": False},
            [SLIDING, FULL],
            6,
            [True, True],
            id="speculators-causal",
        ),
        pytest.param(
            {**SPECULATORS, "sliding_window_non_causal": None},
            [SLIDING, FULL],
            6,
            [False] * 2,
            id="speculators-default",
        ),
    ],
)
def test_layers(raw, layer_types, window, causal):
    """Fault 46: would catch sliding layers that run full, and two-sided layers that run causal."""
    config = DFlash2Config.from_dict(raw)
    assert (config.layer_types, config.sliding_window, config.layer_is_causal) == (layer_types, window, causal)


# ---------------------------------------------------------------------------------------------------------------------
# Taps


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "expected"),
    [
        pytest.param(52, 5, [1, 13, 25, 37, 49], id="52-5"),
        pytest.param(64, 5, [1, 16, 31, 46, 61], id="64-5"),
        pytest.param(36, 5, [1, 9, 17, 25, 33], id="36-5"),
        pytest.param(40, 5, [1, 10, 19, 28, 37], id="40-5"),
        pytest.param(40, 8, [1, 6, 11, 16, 22, 27, 32, 37], id="40-8"),
        pytest.param(36, 1, [18], id="36-1"),
        # 1 + 2.5 is 3.5 and 1 + 1.5 is 2.5: half to even gives 4 and 2.
        pytest.param(9, 3, [1, 4, 6], id="half-up-to-even"),
        pytest.param(7, 3, [1, 2, 4], id="half-down-to-even"),
    ],
)
def test_default_taps_of_v1(num_target_layers, num_draft_layers, expected):
    """Would catch rounding away from zero, which reads a neighbouring layer."""
    assert _default_target_layer_ids(num_target_layers, num_draft_layers) == expected
    raw = tiny_v1(
        {"target_layer_ids": REMOVED}, num_target_layers=num_target_layers, num_hidden_layers=num_draft_layers
    )
    with pytest.warns(UserWarning, match="target_layer_ids.*missing.*default of DFlash v1") as record:
        config = DFlash2Config.from_dict(raw)
    assert config.target_layer_ids == expected
    assert str(expected) in str(record[0].message)


def test_muse_taps_when_absent():
    raw = {key: value for key, value in MUSE_ASSISTANT.items() if key != "target_layer_ids"}
    with pytest.warns(UserWarning, match="target_layer_ids"):
        assert DFlash2Config.from_dict(raw).target_layer_ids == [1, 13, 25, 37, 49]


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


REFUSALS = [
    # fault 10: taps
    ("taps-absent", tiny({"target_layer_ids": REMOVED}), ["`target_layer_ids`", "None", "List"]),
    ("taps-null", tiny({"target_layer_ids": None}), ["`target_layer_ids`", "None", "List"]),
    ("taps-empty", tiny({"target_layer_ids": []}), ["target_layer_ids`=[]", "non-empty"]),
    ("taps-out-of-range", tiny({"target_layer_ids": [0, 4]}), ["target_layer_ids`=[0, 4]", "num_target_layers`=4"]),
    ("taps-negative", tiny({"target_layer_ids": [-1, 2]}), ["target_layer_ids`=[-1, 2]", "-1"]),
    ("taps-repeated", tiny({"target_layer_ids": [2, 2]}), ["target_layer_ids`=[2, 2]", "twice"]),
    ("taps-bool", tiny({"target_layer_ids": [True, 2]}), ["target_layer_ids`=[True, 2]", "integer"]),
    ("taps-float", tiny({"target_layer_ids": [1.0, 2]}), ["target_layer_ids`=[1.0, 2]", "integer"]),
    ("taps-number", tiny({"target_layer_ids": 2}), ["target_layer_ids`=2", "list"]),
    ("taps-text", tiny({"target_layer_ids": "02"}), ["target_layer_ids`='02'", "list"]),
    (
        "taps-v1-without-layer-count",
        tiny_v1({"target_layer_ids": REMOVED}, num_target_layers=REMOVED),
        ["target_layer_ids`=None", "num_target_layers`=None"],
    ),
    (
        "taps-v1-small-target",
        tiny_v1({"target_layer_ids": REMOVED}, num_target_layers=3),
        ["target_layer_ids", "num_target_layers`=3"],
    ),
    # fault 56: mask id
    ("mask-absent", tiny({"mask_token_id": REMOVED}), ["`mask_token_id`=None", "Give"]),
    ("mask-null", tiny({"mask_token_id": None}), ["`mask_token_id`=None", "Give"]),
    ("mask-negative", tiny({"mask_token_id": -1}), ["mask_token_id`=-1", "at least 0"]),
    ("mask-bool", tiny({"mask_token_id": True}), ["mask_token_id`=True", "integer"]),
    ("mask-float", tiny({"mask_token_id": 3.0}), ["mask_token_id`=3.0", "integer"]),
    (
        "mask-name-only",
        tiny({"mask_token_id": None, "mask_token": "<m>"}),
        ["mask_token_id`=None", "mask_token`='<m>'"],
    ),
    # pairs and sizes
    ("conv-taps-alone", tiny({"conv_group_size": REMOVED}), ["conv_kernel_size`=2", "conv_group_size`=0", "both"]),
    ("conv-group-alone", tiny({"conv_kernel_size": 0}), ["conv_kernel_size`=0", "conv_group_size`=8", "both"]),
    ("conv-group-width", tiny({"conv_group_size": 5}), ["conv_group_size`=5", "hidden_size`=32"]),
    ("conv-negative", tiny({"conv_kernel_size": -2}), ["conv_kernel_size`=-2", "0"]),
    ("conv-bool", tiny({"conv_kernel_size": True}), ["conv_kernel_size`=True", "integer"]),
    ("selector-rank-alone", tiny({"selector_top_k": REMOVED}), ["selector_rank`=8", "selector_top_k`=0", "both"]),
    ("selector-top-k-alone", tiny({"selector_rank": REMOVED}), ["selector_rank`=0", "selector_top_k`=4", "both"]),
    ("selector-bool", tiny({"selector_rank": True}), ["selector_rank`=True", "integer"]),
    ("selector-off", tiny({"selector_rank": 0, "selector_top_k": 0}), ["selector_rank`=0", "DFlash2DraftModel"]),
    ("selector-top-k-large", tiny({"selector_top_k": 33}), ["selector_top_k`=33", "vocab_size`=32"]),
    ("v1-with-selector", tiny(architectures=["DFlashDraftModel"]), ["selector_rank`=8", "DFlashDraftModel"]),
    ("block-size-zero", tiny({"block_size": 0}), ["block_size`=0", "at least 1"]),
    ("block-size-bool", tiny({"block_size": True}), ["block_size`=True", "integer"]),
    ("block-size-float", tiny({"block_size": 8.0}), ["block_size`=8.0", "integer"]),
    ("block-size-text", tiny({"block_size": "8"}), ["block_size`='8'", "integer"]),
    ("target-layers-zero", tiny(num_target_layers=0), ["num_target_layers`=0", "at least 1"]),
    ("target-hidden-bool", tiny(target_hidden_size=True), ["target_hidden_size`=True", "integer"]),
    ("nested-not-a-dict", tiny(dflash_config=[1]), ["dflash_config`=[1]", "object"]),
    *(
        (f"{key}-absent", tiny(**{key: REMOVED}), [f"`{key}`=None", "missing"])
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    ),
    ("hidden-bool", tiny(hidden_size=True), ["hidden_size`=True", "integer"]),
    ("hidden-zero", tiny(hidden_size=0), ["hidden_size`=0", "at least 1"]),
    ("heads-do-not-divide", tiny(num_key_value_heads=3), ["num_key_value_heads`=3", "num_attention_heads`=4"]),
    ("head-dim-unknown", tiny(num_attention_heads=6, num_key_value_heads=6), ["head_dim`=None", "hidden_size`=32"]),
    ("head-dim-odd", tiny(head_dim=7), ["head_dim`=7", "even"]),
    ("activation", tiny(hidden_act="swigluoai"), ["hidden_act`='swigluoai'", "silu"]),
    ("eps-zero", tiny(rms_norm_eps=0), ["rms_norm_eps`=0", "positive"]),
    ("bias-number", tiny(attention_bias=1), ["attention_bias`=1", "true"]),
    ("eos-bool", tiny(eos_token_id=[True]), ["eos_token_id`=[True]", "integer"]),
    # layers
    ("layer-types-short", tiny(layer_types=[FULL]), ["layer_types`=['full_attention']", "num_hidden_layers`=2"]),
    (
        "layer-types-unknown",
        tiny(layer_types=[FULL, "linear_attention"]),
        ["layer_types", "linear_attention", SLIDING],
    ),
    ("window-absent", tiny(layer_types=[FULL, SLIDING]), ["sliding_window`=None", "layer_types", "Set"]),
    ("window-zero", tiny(layer_types=[FULL, SLIDING], sliding_window=0), ["sliding_window`=0", "at least 1"]),
    ("window-bool", tiny(layer_types=[FULL, SLIDING], sliding_window=True), ["sliding_window`=True", "integer"]),
    ("causal-number", tiny(is_causal=0), ["is_causal`=0", "true or false"]),
    ("nested-causal-text", tiny({"causal": "no"}), ["causal`='no'", "true or false"]),
    ("swa-with-full-layers", tiny({"use_swa": True}, layer_types=[FULL, SLIDING]), ["use_swa`=True", "layer_types"]),
    ("swa-without-window", tiny({"use_swa": True}), ["sliding_window`=None", "Set"]),
    (
        "host-rule-ambiguous",
        tiny(use_sliding_window=True, sliding_window=6, max_window_layers=1),
        ["use_sliding_window`=True", "max_window_layers`=1", "layer_types"],
    ),
    # unary transform
    ("multiplier-zero", tiny({"output_multiplier": 0}), ["output_multiplier`=0", "greater than 0"]),
    ("multiplier-bool", tiny({"output_multiplier": True}), ["output_multiplier`=True", "number"]),
    ("softcap-text", tiny({"final_logit_softcapping": "20"}), ["final_logit_softcapping`='20'", "number"]),
    ("softcap-true", tiny({"final_logit_softcapping": True}), ["final_logit_softcapping`=True", "number"]),
    ("scale-text", tiny({"input_embedding_scale": "2"}), ["input_embedding_scale`='2'", "number"]),
    # what is not implemented
    ("sinks", tiny({"attention_sink_bias": True}), ["attention_sink_bias`=True", "not supported"]),
    ("sinks-number", tiny({"attention_sink_bias": 1}), ["attention_sink_bias`=1", "true or false"]),
    (
        "sinks-top-level",
        tiny(add_swa_attention_sink_bias=True),
        ["add_swa_attention_sink_bias`=True", "not supported"],
    ),
    ("value-scale", tiny({"attention_value_scale": 0.612}), ["attention_value_scale`=0.612", "not supported"]),
    ("value-scale-bool", tiny({"attention_value_scale": True}), ["attention_value_scale`=True", "number"]),
    ("projector", tiny({"projector_type": "domino"}), ["projector_type`='domino'", "not supported"]),
    ("gemma-norm", tiny(use_gemma_norm=True), ["use_gemma_norm`=True", "not supported"]),
    ("partial-rotary", tiny(partial_rotary_factor=0.5), ["partial_rotary_factor`=0.5", "not supported"]),
    (
        "partial-rotary-nested",
        tiny(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ["rope_parameters.partial_rotary_factor`=0.5", "not supported"],
    ),
    ("rope-dim", tiny(rope_parameters={"rope_theta": 1e4, "rope_dim": 4}), ["rope_dim`=4", "head_dim`=8"]),
    ("interleaved", tiny(rope_is_neox_style=False), ["rope_is_neox_style`=False", "not supported"]),
    (
        "interleaved-nested",
        tiny(rope_parameters={"rope_theta": 1e4, "is_neox_style": False}),
        ["is_neox_style`=False", "not supported"],
    ),
    ("interleave-flag", tiny(rope_interleave=True), ["rope_interleave`=True", "not supported"]),
    ("rope-type", tiny(rope_parameters={"rope_theta": 1e4, "rope_type": "spiral"}), ["rope_type`='spiral'", "yarn"]),
    (
        "rope-incomplete",
        tiny(rope_parameters={"rope_theta": 1e4, "rope_type": "linear"}),
        ["rope_parameters", "factor"],
    ),
    ("rope-theta-zero", tiny(rope_parameters={"rope_theta": 0}), ["rope_theta`=0", "positive"]),
    ("rope-list", tiny(rope_parameters=[1]), ["rope_parameters`=[1]", "object"]),
    (
        "rope-by-layer-type",
        tiny(
            layer_types=[FULL, SLIDING],
            sliding_window=6,
            rope_parameters={FULL: {"rope_theta": 5.0}, SLIDING: {"rope_theta": 7.0}},
        ),
        ["rope_parameters", "7.0", "layer type"],
    ),
    ("reduced-vocabulary", tiny(draft_vocab_size=16), ["draft_vocab_size`=16", "vocab_size`=32"]),
    ("logit-scale", tiny(logit_scale=0.5), ["logit_scale`=0.5", "output_multiplier"]),
    ("per-layer", tiny(per_layer_config={"0": {"hidden_size": 4}}), ["per_layer_config", "not supported"]),
    # Speculators
    ("speculators-anchor", {**SPECULATORS, "sample_from_anchor": True}, ["sample_from_anchor`=True", "false"]),
    (
        "speculators-no-layers",
        {key: value for key, value in SPECULATORS.items() if key != "transformer_layer_config"},
        ["transformer_layer_config`=None", "Add"],
    ),
    (
        "speculators-aux-zero",
        {**SPECULATORS, "aux_hidden_state_layer_ids": [0, 2]},
        ["aux_hidden_state_layer_ids`=0", "at least 1"],
    ),
    (
        "speculators-no-aux",
        {key: value for key, value in SPECULATORS.items() if key != "aux_hidden_state_layer_ids"},
        ["target_layer_ids`=None", "missing"],
    ),
    (
        "speculators-no-mask",
        {key: value for key, value in SPECULATORS.items() if key != "mask_token_id"},
        ["mask_token_id`=None", "missing"],
    ),
    ("speculators-reduced", {**SPECULATORS, "draft_vocab_size": 16}, ["draft_vocab_size`=16", "vocab_size`=32"]),
    ("speculators-window-flag", {**SPECULATORS, "sliding_window_non_causal": 1}, ["sliding_window_non_causal`=1"]),
]


@pytest.mark.parametrize(("raw", "words"), [pytest.param(raw, words, id=name) for name, raw, words in REFUSALS])
def test_refused(raw, words):
    """Faults 10, 35, 46, 55, 56: would catch a setting that is guessed, dropped or taken in the wrong unit."""
    with pytest.raises(ValueError) as error:
        DFlash2Config.from_dict(raw)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"
    # The fix: at least one sentence after the statement of the problem.
    assert str(error.value).rstrip().endswith(".") and ". " in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# Fit with a target


TARGET = {"embedding_rows": 32, "num_layers": 4, "hidden_size": 32, "vocab_size": 32}


@pytest.mark.parametrize("mask_token_id", [0, 31])
def test_fault_56_legal_mask_ids(mask_token_id):
    """Would catch id 0 taken for a missing id, and the last row taken for out of range."""
    config = DFlash2Config.from_dict(tiny({"mask_token_id": mask_token_id}))
    assert config.mask_token_id == mask_token_id
    config.validate_for_target(**TARGET)


def test_mask_id_in_padding_rows_is_legal(tmp_path, caplog):
    """Would catch the real vocabulary used as the bound: the mask id is only embedded."""
    logging.getLogger("transformers").propagate = True
    config = DFlash2Config.from_dict(tiny({"mask_token_id": 35}))
    config.validate_for_target(**{**TARGET, "embedding_rows": 40})
    config.save_pretrained(tmp_path)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("raw", "target", "words"),
    [
        pytest.param(tiny({"mask_token_id": 32}), {}, ["mask_token_id`=32", "32 rows", "correct"], id="mask-id"),
        pytest.param(
            tiny({"target_layer_ids": [0, 4]}, num_target_layers=REMOVED),
            {},
            ["[0, 4]", "holds 4", "4 layers"],
            id="taps",
        ),
        pytest.param(tiny(), {"num_layers": 6}, ["num_target_layers`=4", "6 layers", "Use"], id="layer-count"),
        pytest.param(
            tiny(target_hidden_size=16), {}, ["target_hidden_size`=16", "32", "Use"], id="target-hidden-size"
        ),
        pytest.param(
            tiny(target_hidden_size=64), {"hidden_size": 64}, ["`hidden_size`=32", "64", "Use"], id="hidden-size"
        ),
        pytest.param(tiny(), {"vocab_size": 3}, ["selector_top_k`=4", "3 tokens", "at most 3"], id="top-k"),
    ],
)
def test_unfit_target(raw, target, words):
    """Would catch a drafter that runs with the wrong target and is never accepted."""
    config = DFlash2Config.from_dict(raw)
    with pytest.raises(ValueError) as error:
        config.validate_for_target(**{**TARGET, **target})
    assert all(word in str(error.value) for word in words)


def test_warnings_are_not_repeated_by_saving(tmp_path):
    with pytest.warns(UserWarning):
        config = DFlash2Config.from_dict(tiny(block_size=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.save_pretrained(tmp_path)
        copy.deepcopy(config)
        repr(config)

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
"""Configuration of DFlash and DFlash2 draft models.

A drafter's `config.json` comes in several spellings. All of them end in the same attributes:

* the public form: a Qwen3-like config whose draft settings sit in a nested `dflash_config`;
* the same settings as flat keys (DFlash v1, Muse Glimmer assistant), or a mixture of both;
* a config that wraps the layer settings in a nested text config;
* the Speculators form (`speculators_model_type`, `transformer_layer_config`, `aux_hidden_state_layer_ids`).

Reading happens once, in the constructor: every value is looked up, checked and stored as a plain attribute. The keys
that were read are kept aside, so that writing gives back the spelling that was read.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

from transformers import __version__ as transformers_version
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .pairing import base_model_from_card


# `None`: the family follows from `selector_rank`.
_FAMILY_BY_ARCHITECTURE = {
    "DFlashDraftModel": "dflash",
    "MuseGlimmerAssistantModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "MiniMaxDFlash2DraftModel": "dflash2",
    "DFlash2BeamDraftModel": "dflash2",
    "DFlash2Model": None,
}
_MUSE_ARCHITECTURE = "MuseGlimmerAssistantModel"
_FAMILY_BY_SPECULATORS_TYPE = {"dflash": "dflash", "dflash2": "dflash2"}
_FAMILY_NAMES = {"dflash": "DFlash v1", "dflash2": "DFlash2", "dspark": "DSpark"}
# What `save_pretrained` of a model writes into `architectures`; a checkpoint keeps its own name instead.
_MODEL_CLASS_NAMES = ("DFlash2DraftModel", "DFlash2Model", "DSparkDraftModel")
_PUBLIC_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}

# Settings of the drafter proper: nested `dflash_config` first, then flat.
_DRAFT_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
    "mask_token",
    "causal",
    "use_swa",
    "swa_window_size",
    "attention_value_scale",
    "attention_sink_bias",
    "projector_type",
)
# Those that only make sense together with a `projector_type`, which is refused as a whole.
_PROJECTOR_KEYS = ("shift_label", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim")
# An explicit nested null of these says "off"; of the others it says "not here".
_NULLABLE_DRAFT_KEYS = ("final_logit_softcapping", "attention_value_scale", "projector_type")
# Other spellings of the mask id found in public checkpoints.
_MASK_TOKEN_ID_ALIASES = ("dspark_noise_token_id", "pard_token", "ptd_token_id")

# Settings of the decoder layers: nested text config first, then top level.
_LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "sliding_window",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_TOP_KEYS = ("target_hidden_size", "target_name_or_path", "is_causal")
# Read through the same rules, but never turned into attributes.
_CONSUMED_KEYS = (
    "dflash_config",
    "text_config",
    "transformer_layer_config",
    "model_type",
    "transformers_version",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rope_dim",
)
_DERIVED_ATTRIBUTES = ("layer_is_causal", "draft_family", "has_own_head")
# Arguments of a call, not properties of a checkpoint.
_CALL_KEYS = ("attn_implementation", "experts_implementation", "name_or_path", "_commit_hash")
_LAYER_TYPES = ("full_attention", "sliding_attention")

_MUSE_DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "sliding_window": 2048,
    "rope_theta": 500000.0,
    "bos_token_id": 200000,
    "eos_token_id": 200001,
    "pad_token_id": 200018,
    "block_size": 16,
    "mask_token_id": 201818,
}
_MUSE_NUM_TARGET_LAYERS = 52
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_ROPE_THETA = 10000.0
# Multimodal targets: draft positions are one-dimensional, so the section split has no meaning for the drafter.
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")
_ROPE_STYLE_KEYS = ("rope_is_neox_style", "is_neox_style")
_ROPE_INTERLEAVE_KEYS = ("rope_interleave", "rope_interleaved", "interleaved")


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    return left == right


def _int(key: str, value: Any, minimum: int, fix: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{key}`={value!r} must be an integer, not {type(value).__name__}. {fix}")
    if value < minimum:
        raise ValueError(f"`{key}`={value!r} must be at least {minimum}. {fix}")
    return value


def _number(key: str, value: Any, fix: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"`{key}`={value!r} must be a finite number. {fix}")
    return float(value)


def _bool(key: str, value: Any, fix: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"`{key}`={value!r} must be true or false. {fix}")
    return value


def _default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    # Python's `round` is half-to-even, as the formula wants.
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + index * step) for index in range(num_draft_layers)]


class _Source:
    """Looks keys up in the places where a checkpoint may keep them, and reports disagreements.

    Class attributes say what differs between families of drafters; `configuration_dspark` has its own.

    Args:
        raw (`dict[str, Any]`):
            The keys of `config.json`.
        is_file (`bool`, *optional*, defaults to `False`):
            Whether the keys are known to come from a file.
    """

    # Nested sections with the settings of the drafter; a config holds one of them.
    section_names: tuple[str, ...] = ("dflash_config",)
    # Of flat keys that win over the nested ones.
    prefix: str | None = None
    draft_keys = _DRAFT_KEYS
    families = _FAMILY_BY_ARCHITECTURE
    speculators_families = _FAMILY_BY_SPECULATORS_TYPE
    # Slots of a block that propose nothing: the anchor's.
    idle_slots = 1
    default_block_size: int | None = _DEFAULT_BLOCK_SIZE
    may_reduce_vocabulary = False

    def __init__(self, raw: dict[str, Any], is_file: bool = False):
        self.raw = raw
        self.is_speculators = raw.get("speculators_model_type") is not None
        self.inner_name = "transformer_layer_config" if self.is_speculators else "text_config"
        self.inner = self._section(raw, self.inner_name)
        if self.is_speculators and not self.inner:
            raise ValueError(
                f"`transformer_layer_config`={raw.get('transformer_layer_config')!r} must hold the layer settings of "
                "a Speculators config. Add the Qwen3-like layer config under this key."
            )
        sections = {
            **{name: self._section(raw, name) for name in self.section_names},
            **{
                f"{self.inner_name}.{name}": self._section(self.inner, name, f"{self.inner_name}.{name}")
                for name in self.section_names
            },
        }
        filled = [name for name, section in sections.items() if section]
        if len({name.split(".")[-1] for name in filled}) > 1:
            raise ValueError(
                f"`{filled[0]}`={sections[filled[0]]!r} and `{filled[1]}`={sections[filled[1]]!r} are two sections "
                "for the same settings. Keep one."
            )
        self.nested_name = filled[0] if filled else self.section_names[0]
        self.nested = sections[self.nested_name]
        # Settings that another format spells differently: `key -> (spelling, value)`.
        self.translated: dict[str, tuple[str, Any]] = {}
        architectures = raw.get("architectures") or self.inner.get("architectures") or []
        self.architecture = architectures[0] if isinstance(architectures, (list, tuple)) and architectures else None
        self.is_muse = self.architecture == _MUSE_ARCHITECTURE
        self.is_checkpoint = bool(
            is_file or self.is_speculators or self.inner or self.is_muse or raw.get("model_type")
        )

    @staticmethod
    def _section(parent: dict[str, Any], key: str, name: str | None = None) -> dict[str, Any]:
        section = parent.get(key)
        if section is None:
            return {}
        if not isinstance(section, dict):
            raise ValueError(
                f"`{name or key}`={section!r} must be an object with keys. Write it as a JSON object (a Python dict)."
            )
        return section

    @staticmethod
    def _pick(places: list[tuple[str, Any]]) -> tuple[str, Any]:
        name, value = places[0]
        for other_name, other in places[1:]:
            if other is not None and not _same(value, other):
                _warn(
                    f"`{name}`={value!r} and `{other_name}`={other!r} disagree; `{name}`={value!r} is used. Remove "
                    "one of the two keys from the config."
                )
        return name, value

    def draft(self, key: str) -> tuple[str, Any]:
        """The spelling and the value of a drafter setting; the value is `None` where it is absent."""
        places = [
            (f"{self.nested_name}.{key}", self.nested.get(key)),
            (key, self.raw.get(key)),
            (f"{self.inner_name}.{key}", self.inner.get(key)),
        ]
        if self.prefix is not None:
            prefixed = self.prefixed(key)
            places.insert(0, (prefixed, self.raw.get(prefixed)))
        if key in self.translated:
            places.append(self.translated[key])
        if not (key in _NULLABLE_DRAFT_KEYS and key in self.nested):
            places = [place for place in places if place[1] is not None]
        if places:
            return self._pick(places)
        return key, _MUSE_DEFAULTS.get(key) if self.is_muse else None

    @classmethod
    def prefixed(cls, key: str) -> str:
        """The flat spelling of a drafter setting that wins over the nested one."""
        return f"{cls.prefix}{key}"

    @classmethod
    def own_keys(cls) -> set[str]:
        """Top-level keys that hold settings of the drafter."""
        prefixed = set() if cls.prefix is None else {cls.prefixed(key) for key in cls.draft_keys}
        return {*cls.draft_keys, *cls.section_names, *prefixed}

    def given(self, key: str) -> list[tuple[str, Any]]:
        """The places that hold a decoder setting, the first one being the one that counts."""
        places = [(f"{self.inner_name}.{key}", self.inner.get(key)), (key, self.raw.get(key))]
        return [place for place in places if place[1] is not None]

    def layer(self, key: str, default: Any = None) -> tuple[str, Any]:
        """The spelling and the value of a decoder setting, or `default` where it is absent."""
        places = self.given(key)
        if places:
            return self._pick(places)
        return key, _MUSE_DEFAULTS.get(key, default) if self.is_muse else default

    def everywhere(self, key: str) -> list[tuple[str, Any]]:
        """Every place that has the key, whatever its rank."""
        places = [
            (f"{self.nested_name}.{key}", self.nested.get(key)),
            (key, self.raw.get(key)),
            (f"{self.inner_name}.{key}", self.inner.get(key)),
        ]
        return [place for place in places if place[1] is not None]


def _read_speculators(source: _Source) -> None:
    raw = source.raw
    kind = raw["speculators_model_type"]
    if kind not in source.speculators_families:
        raise ValueError(
            f"`speculators_model_type`={kind!r} is not supported here. {_other_class_hint('dspark' in str(kind))} "
            f"Types read here: {', '.join(map(repr, source.speculators_families))}."
        )
    if source.idle_slots and _bool(
        "sample_from_anchor", raw.get("sample_from_anchor") or False, "Set it to false or remove it."
    ):
        raise ValueError(
            "`sample_from_anchor`=True is not supported: rows of a DFlash drafter predict the token at their own "
            "position. Set it to false, or use a drafter trained without it."
        )
    aux_layer_ids = raw.get("aux_hidden_state_layer_ids")
    if aux_layer_ids is not None:
        fix = "Give a list of integers from 1 up, each the id of a target layer plus one."
        if not isinstance(aux_layer_ids, (list, tuple)) or not aux_layer_ids:
            raise ValueError(f"`aux_hidden_state_layer_ids`={aux_layer_ids!r} must be a non-empty list. {fix}")
        aux_layer_ids = [_int("aux_hidden_state_layer_ids", layer_id, 1, fix) for layer_id in aux_layer_ids]
        source.translated["target_layer_ids"] = (
            "aux_hidden_state_layer_ids minus one",
            [layer_id - 1 for layer_id in aux_layer_ids],
        )
    settings = source._section(raw, "speculators_config")
    methods = settings.get("proposal_methods")
    if methods and isinstance(methods[0], dict) and methods[0].get("speculative_tokens") is not None:
        name = "speculators_config.proposal_methods[0].speculative_tokens"
        count = _int(name, methods[0]["speculative_tokens"], 0, "Give the number of proposed tokens per round.")
        source.translated["block_size"] = (f"{name} plus {source.idle_slots}", count + source.idle_slots)
    non_causal = raw.get("sliding_window_non_causal")
    non_causal = True if non_causal is None else _bool("sliding_window_non_causal", non_causal, "Set it to true.")
    source.translated["causal"] = ("not sliding_window_non_causal", not non_causal)


def _other_class_hint(is_dspark: bool) -> str:
    if is_dspark:
        return "It is a DSpark drafter: load it with DSparkDraftModel, or any drafter with AutoDraftModel."
    return "Load a DFlash or DFlash2 drafter with DFlash2DraftModel, or any drafter with AutoDraftModel."


def _read_family(source: _Source, selector_rank: int) -> str:
    architecture = source.architecture
    if source.is_speculators:
        return source.speculators_families[source.raw["speculators_model_type"]]
    if architecture is None:
        return source.families.get(None) or ("dflash2" if selector_rank > 0 else "dflash")
    if architecture not in source.families:
        if "DSpark" in architecture or architecture in _FAMILY_BY_ARCHITECTURE:
            kind = _other_class_hint("DSpark" in architecture)
        elif "Laguna" in architecture:
            kind = "Laguna drafters have gated attention and per-feature norms; use a drafter without them."
        else:
            kind = "It names no drafter. Pass the drafter's repository rather than the target's."
        supported = ", ".join(name for name in source.families if name not in (None, "DFlash2Model"))
        raise ValueError(
            f"`architectures`={[architecture]!r} is not supported here. {kind} This class loads {supported}."
        )
    return source.families[architecture] or ("dflash2" if selector_rank > 0 else "dflash")


def _refuse_unsupported(source: _Source, vocab_size: int) -> None:
    for key in ("attention_sink_bias", "add_swa_attention_sink_bias", "add_full_attention_sink_bias"):
        for name, value in source.everywhere(key):
            if _bool(name, value, "Set it to false or remove it."):
                raise ValueError(
                    f"`{name}`=True is not supported: attention sinks of a drafter are not implemented. Use a drafter "
                    "without them."
                )
    name, value = source.draft("attention_value_scale")
    if value is not None and _number(name, value, "Remove it.") != 1.0:
        raise ValueError(
            f"`{name}`={value!r} is not supported: scaled values are not implemented. Use a drafter without the key."
        )
    name, value = source.draft("projector_type")
    if value is not None:
        raise ValueError(
            f"`{name}`={value!r} is not supported: projector heads are not implemented. Use a drafter without the key."
        )
    name, value = source.layer("use_gemma_norm")
    if value is not None and _bool(name, value, "Set it to false or remove it."):
        raise ValueError(
            f"`{name}`=True is not supported: norms that multiply by one plus the weight are not implemented. Add one "
            "to the norm weights of the checkpoint and set the key to false."
        )
    name, value = source.layer("draft_vocab_size")
    is_reduced = value is not None and _int(name, value, 1, "Remove it.") != vocab_size
    if is_reduced and not source.may_reduce_vocabulary:
        raise ValueError(
            f"`{name}`={value!r} differs from `vocab_size`={vocab_size}: drafters with a reduced vocabulary and their "
            "own head are not supported. Use a drafter over the target's full vocabulary."
        )
    name, value = source.layer("logit_scale")
    if value is not None and _number(name, value, "Remove it.") != 1.0:
        raise ValueError(
            f"`{name}`={value!r} is not supported. If the drafter multiplies its logits, give the factor as "
            "`output_multiplier`; otherwise remove the key."
        )
    if source.raw.get("per_layer_config") is not None:
        raise ValueError(
            f"`per_layer_config`={source.raw['per_layer_config']!r} is not supported: all layers of a drafter share "
            "their sizes. Remove the key."
        )


def _rope_keys(parameters: dict[str, Any]) -> dict[str, Any]:
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    return {**{key: value for key, value in parameters.items() if key != "type"}, "rope_type": rope_type}


def _read_rope(source: _Source, head_dim: int, layer_types: list[str]) -> dict[str, Any]:
    """One set of rotary parameters in the form that the rotary modules of `transformers` 5 take."""
    name, parameters = source.layer("rope_parameters")
    legacy_name, legacy = source.layer("rope_scaling")
    for key, value in ((name, parameters), (legacy_name, legacy)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"`{key}`={value!r} must be an object with keys. Write it as a JSON object.")
    if not parameters:
        name, parameters = (legacy_name, legacy) if legacy else (name, {})
    elif legacy:
        merged = {**_rope_keys(parameters), **_rope_keys(legacy)}
        if merged != _rope_keys(parameters):
            _warn(f"`{name}`={parameters!r} and `{legacy_name}`={legacy!r} disagree; `{name}` is used.")
    parameters = copy.deepcopy(parameters)

    by_type = [key for key in _LAYER_TYPES if key in parameters]
    if by_type:
        used = [parameters[key] for key in by_type if key in layer_types] or [parameters[by_type[0]]]
        if not all(isinstance(entry, dict) and _same(entry, used[0]) for entry in used):
            raise ValueError(
                f"`{name}`={parameters!r} is not supported: rotary parameters that differ by layer type are not "
                "implemented. Use one set of parameters for all layers."
            )
        parameters = dict(used[0])

    places = source.given("rope_theta")
    if parameters.get("rope_theta") is not None:
        places.insert(0, (f"{name}.rope_theta", parameters["rope_theta"]))
    theta_name, theta = source._pick(places) if places else source.layer("rope_theta")
    if theta is None:
        theta = _DEFAULT_ROPE_THETA
        if source.is_checkpoint:
            _warn(
                f"`rope_theta` is missing; {theta} is used, as `Qwen3Config` does. Add the drafter's rotary base to "
                "`rope_parameters`."
            )
    theta = _number(theta_name, theta, "Give the base of the rotary frequencies, a positive number.")
    if theta <= 0:
        raise ValueError(f"`{theta_name}`={theta!r} must be positive. Give the base of the rotary frequencies.")

    rotary_fix = "Rotating part of a head is not implemented; use a drafter that rotates whole heads."
    places = [(f"{name}.{key}", parameters.pop(key)) for key in ("partial_rotary_factor",) if key in parameters]
    for place, value in places + source.everywhere("partial_rotary_factor"):
        if value is not None and _number(place, value, rotary_fix) != 1.0:
            raise ValueError(f"`{place}`={value!r} is not supported. {rotary_fix}")
    places = [(f"{name}.{key}", parameters.pop(key)) for key in ("rope_dim",) if key in parameters]
    for place, value in places + source.everywhere("rope_dim"):
        if value is not None and _int(place, value, 1, rotary_fix) != head_dim:
            raise ValueError(f"`{place}`={value!r} differs from `head_dim`={head_dim}. {rotary_fix}")
    for keys, wanted in ((_ROPE_STYLE_KEYS, True), (_ROPE_INTERLEAVE_KEYS, False)):
        for key in keys:
            places = [(f"{name}.{key}", parameters.pop(key))] if key in parameters else []
            for place, value in places + source.everywhere(key):
                if value is not None and _bool(place, value, f"Set it to {str(wanted).lower()}.") is not wanted:
                    raise ValueError(
                        f"`{place}`={value!r} is not supported: interleaved rotation is not implemented. Use a "
                        "drafter with half-split (neox) rotation."
                    )
    for key in _MROPE_KEYS:
        parameters.pop(key, None)

    legacy_type = parameters.pop("type", None)
    rope_type = parameters.pop("rope_type", None) or legacy_type or "default"
    if rope_type == "mrope":
        rope_type = "default"
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *sorted(key for key in ROPE_INIT_FUNCTIONS if key != "default")])
        raise ValueError(f"`{name}.rope_type`={rope_type!r} is unknown. Use one of: {known}.")
    parameters.pop("rope_theta", None)
    return {"rope_type": rope_type, "rope_theta": theta, **parameters}


def _read_layers(source: _Source, num_layers: int) -> tuple[list[str], int | None, list[bool]]:
    """Attention type of each layer, the window, and the causality of each layer."""
    types_name, layer_types = source.layer("layer_types")
    window_name, window = source.layer("sliding_window")
    swa_name, use_swa = source.draft("use_swa")
    use_swa = use_swa is not None and _bool(swa_name, use_swa, "Set it to true or false.")

    if layer_types is not None:
        if not isinstance(layer_types, (list, tuple)) or len(layer_types) != num_layers:
            raise ValueError(
                f"`{types_name}`={layer_types!r} does not match `num_hidden_layers`={num_layers}. List one "
                "attention type for each layer."
            )
        for layer_type in layer_types:
            if layer_type not in _LAYER_TYPES:
                raise ValueError(
                    f"`{types_name}` holds {layer_type!r}. A drafter has layers of type {_LAYER_TYPES[0]!r} and "
                    f"{_LAYER_TYPES[1]!r} only; use one of the two."
                )
        layer_types = list(layer_types)

    if use_swa:
        if layer_types is not None and "full_attention" in layer_types:
            raise ValueError(
                f"`{swa_name}`=True puts a window on every layer, but `{types_name}`={layer_types!r} has full layers. "
                "Remove one of the two keys."
            )
        layer_types = ["sliding_attention"] * num_layers
        width_name, width = source.draft("swa_window_size")
        if width is not None:
            if source.layer("sliding_window")[1] is not None and not _same(width, window):
                _warn(
                    f"`{width_name}`={width!r} and `{window_name}`={window!r} disagree; `{width_name}`={width!r} is "
                    "used. Remove one of the two keys from the config."
                )
            window_name, window = width_name, width
    elif layer_types is None:
        layer_types = ["sliding_attention" if source.is_muse else "full_attention"] * num_layers
        if not source.is_muse and source.layer("use_sliding_window")[1] is True and window is not None:
            first_name, first = source.layer("max_window_layers", 28)
            if _int(first_name, first, 0, "Give `layer_types` instead.") < num_layers:
                raise ValueError(
                    f"`use_sliding_window`=True with `{first_name}`={first} and no `layer_types` leaves open which "
                    "layers have a window. Give `layer_types`, one type per layer."
                )

    if "sliding_attention" in layer_types:
        fix = "Set the number of visible positions, the current one included."
        if window is None:
            raise ValueError(f"`{window_name}`=None, but `layer_types`={layer_types!r} has sliding layers. {fix}")
        window = _int(window_name, window, 1, fix)
    else:
        window = None

    causal = None
    causal_fix = "Set it to true or false, or remove it."
    for name, value in (source.layer("is_causal"), source.draft("causal")):
        if causal is None and value is not None:
            causal = _bool(name, value, causal_fix)
    if causal is None and (use_swa or source.is_muse):
        causal = False
    if causal is None:
        return layer_types, window, [layer_type == "sliding_attention" for layer_type in layer_types]
    return layer_types, window, [causal] * num_layers


def _read_taps(source: _Source, family: str, num_layers: int, num_target_layers: int | None) -> list[int]:
    name, ids = source.draft("target_layer_ids")
    fix = "List the zero-based ids of the target layers whose outputs feed the drafter, as it was trained."
    if ids is None:
        if family != "dflash":
            raise ValueError(f"`target_layer_ids`=None is missing from the config. {fix}")
        if num_target_layers is None and source.is_muse:
            num_target_layers = _MUSE_NUM_TARGET_LAYERS
        if num_target_layers is None:
            raise ValueError(f"`target_layer_ids`=None and `num_target_layers`=None are both missing. {fix}")
        if num_layers > 1 and num_target_layers < 4:
            raise ValueError(
                f"`target_layer_ids`=None is missing, and `num_target_layers`={num_target_layers} is too small for "
                f"the default of DFlash v1, which needs 4. {fix}"
            )
        ids = _default_target_layer_ids(num_target_layers, num_layers)
        _warn(
            f"`target_layer_ids` is missing; the default of DFlash v1 for `num_target_layers`={num_target_layers} and "
            f"`num_hidden_layers`={num_layers} is used: {ids}. {fix}"
        )
    if not isinstance(ids, (list, tuple)) or not ids:
        raise ValueError(f"`{name}`={ids!r} must be a non-empty list. {fix}")
    for layer_id in ids:
        if isinstance(layer_id, bool) or not isinstance(layer_id, int) or layer_id < 0:
            raise ValueError(f"`{name}`={list(ids)!r} holds {layer_id!r}, which is not an integer from 0 up. {fix}")
        if num_target_layers is not None and layer_id >= num_target_layers:
            raise ValueError(
                f"`{name}`={list(ids)!r} holds {layer_id!r}, but the target has `num_target_layers`="
                f"{num_target_layers} layers, 0 to {num_target_layers - 1}. {fix}"
            )
    if len(set(ids)) != len(ids):
        raise ValueError(f"`{name}`={list(ids)!r} names a layer twice. {fix}")
    return list(ids)


def _read_pair(source: _Source, first: str, second: str) -> tuple[int, int]:
    values = []
    for key in (first, second):
        name, value = source.draft(key)
        values.append(0 if value is None else _int(name, value, 0, "Give a size, or 0 to switch it off."))
    if (values[0] > 0) != (values[1] > 0):
        raise ValueError(
            f"`{first}`={values[0]} and `{second}`={values[1]} belong together. Set both, or neither (0 is off)."
        )
    return values[0], values[1]


def _read_token_id(source: _Source, key: str, several: bool = False) -> int | list[int] | None:
    name, value = source.layer(key)
    fix = "Give a token id of the target, or null."
    entries = list(value) if several and isinstance(value, (list, tuple)) else [value]
    for entry in entries:
        if entry is not None and (isinstance(entry, bool) or not isinstance(entry, int)):
            raise ValueError(f"`{name}`={value!r} must be an integer or null. {fix}")
    return entries if several and isinstance(value, (list, tuple)) else value


def _read_mask_token_id(source: _Source) -> int:
    name, value = source.draft("mask_token_id")
    if value is None:
        for alias in _MASK_TOKEN_ID_ALIASES:
            if value is None and source.raw.get(alias) is not None:
                name, value = alias, source.raw[alias]
    fix = "Give the id of the token that the drafter was trained to see in open slots (0 is a legal id)."
    if value is None:
        _, token = source.draft("mask_token")
        hint = f" (`mask_token`={token!r} is a name; its id in the target's tokenizer is needed)" if token else ""
        raise ValueError(f"`mask_token_id`=None is missing from the config{hint}. {fix}")
    return _int(name, value, 0, fix)


def _read_attributes(source: _Source) -> dict[str, Any]:
    """Every attribute that a model trusts, looked up and checked."""
    raw = source.raw
    if source.is_speculators:
        _read_speculators(source)
    attributes: dict[str, Any] = {}

    def read_size(key: str, default: int | None = None) -> int:
        name, value = source.layer(key, default)
        if value is None:
            raise ValueError(f"`{key}`=None is missing from the config. Add it, as an integer from 1 up.")
        return _int(name, value, 1, "Set it to the size used by the weights.")

    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        attributes[key] = read_size(key)
    hidden_size, num_heads = attributes["hidden_size"], attributes["num_attention_heads"]
    num_layers, vocab_size = attributes["num_hidden_layers"], attributes["vocab_size"]
    attributes["num_key_value_heads"] = read_size("num_key_value_heads", num_heads)
    if num_heads % attributes["num_key_value_heads"]:
        raise ValueError(
            f"`num_key_value_heads`={attributes['num_key_value_heads']} must divide `num_attention_heads`={num_heads}."
            " Set both to the head counts of the weights."
        )
    if source.layer("head_dim")[1] is None and hidden_size % num_heads:
        raise ValueError(
            f"`head_dim`=None is missing, and `hidden_size`={hidden_size} is not a multiple of "
            f"`num_attention_heads`={num_heads}. Add the width of one head."
        )
    attributes["head_dim"] = read_size("head_dim", hidden_size // num_heads)
    if attributes["head_dim"] % 2:
        raise ValueError(f"`head_dim`={attributes['head_dim']} must be even for rotary positions. Set an even width.")
    name, activation = source.layer("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACT2FN:
        raise ValueError(
            f"`{name}`={activation!r} is not an activation of `transformers`. Use a key of ACT2FN: 'silu'."
        )
    attributes["hidden_act"] = activation
    attributes["max_position_embeddings"] = read_size("max_position_embeddings", 32768)
    for key, default, strict in (
        ("initializer_range", 0.02, False),
        ("rms_norm_eps", 1e-6, True),
        ("attention_dropout", 0.0, False),
    ):
        name, value = source.layer(key, default)
        attributes[key] = _number(name, value, f"The usual value is {default}.")
        if value < 0 or (strict and value == 0):
            raise ValueError(f"`{name}`={value!r} must be {'positive' if strict else 'at least 0'}. Use {default}.")
    name, value = source.layer("attention_bias", False)
    attributes["attention_bias"] = _bool(name, value, "Set it to true if q, k, v and o projections have a bias.")

    layer_types, window, layer_is_causal = _read_layers(source, num_layers)
    attributes["layer_types"], attributes["sliding_window"] = layer_types, window
    attributes["rope_parameters"] = _read_rope(source, attributes["head_dim"], layer_types)
    attributes["bos_token_id"] = _read_token_id(source, "bos_token_id")
    attributes["eos_token_id"] = _read_token_id(source, "eos_token_id", several=True)
    attributes["pad_token_id"] = _read_token_id(source, "pad_token_id")
    attributes["is_causal"] = source.layer("is_causal")[1]

    conv_kernel_size, conv_group_size = _read_pair(source, "conv_kernel_size", "conv_group_size")
    if conv_group_size and hidden_size % conv_group_size:
        raise ValueError(
            f"`conv_group_size`={conv_group_size} must divide `hidden_size`={hidden_size}. Set the group width of the "
            "weights."
        )
    selector_rank, selector_top_k = _read_pair(source, "selector_rank", "selector_top_k")
    family = _read_family(source, selector_rank)
    declared = source.architecture or source.raw.get("speculators_model_type")
    if family == "dflash2" and selector_rank == 0:
        raise ValueError(
            f"`selector_rank`=0: a DFlash2 drafter ({declared!r}) has a candidate selector. Set `selector_rank` and "
            "`selector_top_k`, or declare `architectures`=['DFlashDraftModel'] if it is a DFlash v1 drafter."
        )
    if family != "dflash2" and (selector_rank or conv_kernel_size):
        raise ValueError(
            f"`selector_rank`={selector_rank} and `conv_kernel_size`={conv_kernel_size} belong to DFlash2, but the "
            f"config declares a {_FAMILY_NAMES[family]} drafter ({declared or 'no selector'!r}). Set `architectures`="
            "['DFlash2DraftModel'] with a selector, or remove these keys."
        )
    if selector_top_k > vocab_size:
        raise ValueError(
            f"`selector_top_k`={selector_top_k} exceeds `vocab_size`={vocab_size}. Set it to at most the vocabulary."
        )

    name, value = source.draft("num_target_layers")
    num_target_layers = None if value is None else _int(name, value, 1, "Set the layer count of the target.")
    attributes["num_target_layers"] = num_target_layers
    name, value = source.layer("target_hidden_size", hidden_size)
    attributes["target_hidden_size"] = _int(name, value, 1, "Set the hidden size of the target.")

    name, value = source.draft("block_size")
    if value is None:
        value = source.default_block_size
        if value is None:
            raise ValueError("`block_size`=None is missing. Add the block size that the drafter was trained with.")
        if source.is_checkpoint:
            _warn(f"`block_size` is missing; {value} is used. Add the block size that the drafter was trained with.")
    attributes["block_size"] = _int(name, value, 1, "Set the block size that the drafter was trained with.")
    attributes["mask_token_id"] = _read_mask_token_id(source)
    attributes["target_layer_ids"] = _read_taps(source, family, num_layers, num_target_layers)
    attributes["conv_kernel_size"], attributes["conv_group_size"] = conv_kernel_size, conv_group_size
    attributes["selector_rank"], attributes["selector_top_k"] = selector_rank, selector_top_k

    name, value = source.draft("output_multiplier")
    attributes["output_multiplier"] = _number(name, 1.0 if value is None else value, "Remove it, or give a factor.")
    if attributes["output_multiplier"] <= 0:
        raise ValueError(f"`{name}`={value!r} must be greater than 0. Remove it, or give the factor of the logits.")
    name, value = source.draft("final_logit_softcapping")
    value = _number(name, value, "Remove it, or give the cap.") if value else None
    attributes["final_logit_softcapping"] = value if value is not None and value > 0 else None
    name, value = source.draft("input_embedding_scale")
    attributes["input_embedding_scale"] = _number(
        name, 1.0 if value is None else value, "Remove it, or give a factor."
    )

    unknown = sorted(set(source.nested) - set(source.draft_keys) - set(_PROJECTOR_KEYS) - set(_ROPE_STYLE_KEYS))
    if unknown:
        values = ", ".join(f"`{source.nested_name}.{key}`={source.nested[key]!r}" for key in unknown)
        _warn(f"{values}: unknown to this version and not used. Check the spelling, or remove the key.")

    _refuse_unsupported(source, vocab_size)
    attributes["layer_is_causal"] = layer_is_causal
    attributes["draft_family"] = family
    name, value = "target_name_or_path", raw.get("target_name_or_path")
    if value is None and source.is_speculators:
        name = "speculators_config.verifier.name_or_path"
        verifier = source._section(raw, "speculators_config").get("verifier")
        value = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if value is not None and not isinstance(value, str):
        raise ValueError(f"`{name}`={value!r} must be text. Give the repository or the folder of the target.")
    attributes["target_name_or_path"] = value
    return attributes


def _public_form(
    raw: dict[str, Any], attributes: dict[str, Any], source_class: type[_Source] = _Source
) -> dict[str, Any]:
    """The keys of the public form for a config that was put together in code."""
    handled = {*source_class.own_keys(), *_LAYER_KEYS, *_TOP_KEYS, *_CONSUMED_KEYS, *_MASK_TOKEN_ID_ALIASES}
    public = {key: value for key, value in raw.items() if key not in handled}
    is_dflash2 = attributes["draft_family"] == "dflash2"
    public["architectures"] = raw.get("architectures") or [_PUBLIC_ARCHITECTURES[attributes["draft_family"]]]
    public["model_type"] = "qwen3"
    for key in _LAYER_KEYS:
        public[key] = attributes[key]
    # Readers that build a `Qwen3Config` drop the window unless this flag is set.
    public["use_sliding_window"] = attributes["sliding_window"] is not None
    public["max_window_layers"] = attributes["num_hidden_layers"]
    public.setdefault("tie_word_embeddings", False)
    if attributes["is_causal"] is not None:
        public["is_causal"] = attributes["is_causal"]
    if attributes["num_target_layers"] is not None:
        public["num_target_layers"] = attributes["num_target_layers"]
    if attributes["target_hidden_size"] != attributes["hidden_size"]:
        public["target_hidden_size"] = attributes["target_hidden_size"]
    if attributes["target_name_or_path"] is not None:
        public["target_name_or_path"] = attributes["target_name_or_path"]

    nested = {key: raw[key] for key in ("causal", "use_swa", "swa_window_size") if raw.get(key) is not None}
    for section in source_class.section_names:
        nested.update(raw.get(section) or {})
    nested.pop("num_target_layers", None)
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        nested[key] = attributes[key]
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if is_dflash2 or key in nested:
            nested[key] = attributes[key]
    for key, neutral in (
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", None),
        ("input_embedding_scale", 1.0),
    ):
        if attributes[key] != neutral or key in nested:
            nested[key] = attributes[key]
    public[source_class.section_names[0]] = nested
    return copy.deepcopy(public)


class DFlash2Config(PreTrainedConfig):
    r"""
    Configuration of a [`DFlash2DraftModel`]. It reads DFlash and DFlash2 checkpoints in every public spelling, checks
    each value once, and writes back the spelling that was read. Built from keywords, it writes the public form.

    Settings of the drafter may be given in `dflash_config`, as the keywords below, or both; `dflash_config` wins and a
    disagreement is reported with a warning.

    Args:
        dflash_config (`dict`, *optional*):
            Nested section of the public form with the settings of the drafter.
        vocab_size (`int`):
            Rows of the target's vocabulary, and of the selector's codebooks.
        hidden_size (`int`):
            Width of the drafter.
        intermediate_size (`int`):
            Width of the MLPs.
        num_hidden_layers (`int`):
            Number of draft layers.
        num_attention_heads (`int`):
            Number of query heads.
        num_key_value_heads (`int`, *optional*, defaults to `num_attention_heads`):
            Number of key and value heads.
        head_dim (`int`, *optional*, defaults to `hidden_size // num_attention_heads`):
            Width of one head.
        hidden_act (`str`, *optional*, defaults to `"silu"`):
            Activation of the MLPs.
        max_position_embeddings (`int`, *optional*, defaults to 32768):
            Longest context.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of newly initialised weights.
        rms_norm_eps (`float`, *optional*, defaults to 1e-06):
            Epsilon of the norms.
        rope_parameters (`dict`, *optional*):
            Rotary parameters. `rope_theta` and `rope_scaling` are read as well.
        attention_bias (`bool`, *optional*, defaults to `False`):
            Whether the attention projections have a bias.
        attention_dropout (`float`, *optional*, defaults to 0.0):
            Dropout of attention weights in training.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` for each layer; all full if absent.
        sliding_window (`int`, *optional*):
            Positions visible in sliding layers, the current one included; needed when a layer is sliding.
        is_causal (`bool`, *optional*):
            Whether block slots see only earlier slots, for all layers. If absent, `dflash_config["causal"]`; if that
            is absent too, sliding layers are causal and full layers are not.
        bos_token_id (`int`, *optional*):
            Beginning-of-sequence id of the target.
        eos_token_id (`int` or `list[int]`, *optional*):
            End-of-sequence id of the target.
        pad_token_id (`int`, *optional*):
            Padding id of the target.
        num_target_layers (`int`, *optional*):
            Layer count of the target.
        target_hidden_size (`int`, *optional*, defaults to `hidden_size`):
            Hidden size of the target.
        block_size (`int`, *optional*, defaults to 16):
            Slots of a block: the anchor and the proposed tokens.
        mask_token_id (`int`):
            Token in the open slots of a block. It is only embedded, so it may lie past the real vocabulary.
        target_layer_ids (`list[int]`):
            Zero-based ids of the target layers whose **outputs** feed the drafter, in order.
        conv_kernel_size (`int`, *optional*, defaults to 0):
            Taps of the grouped dynamic convolutions; 0 is off. Goes with `conv_group_size`.
        conv_group_size (`int`, *optional*, defaults to 0):
            Channels that share a dynamic kernel; divides `hidden_size`.
        selector_rank (`int`, *optional*, defaults to 0):
            Rank of the candidate selector; 0 makes a DFlash v1 drafter. Goes with `selector_top_k`.
        selector_top_k (`int`, *optional*, defaults to 0):
            Candidates kept in each slot.
        output_multiplier (`float`, *optional*, defaults to 1.0):
            Factor on the logits.
        final_logit_softcapping (`float`, *optional*):
            Soft cap on the logits; absent, 0 or negative is off.
        input_embedding_scale (`float`, *optional*, defaults to 1.0):
            Factor on the embeddings of a block.
        target_name_or_path (`str`, *optional*):
            The target that the drafter was trained for.
        kwargs (`dict`, *optional*):
            Further keys of [`PreTrainedConfig`] and of the checkpoint; kept and written back.

    Two more attributes are derived and never written: `layer_is_causal` (`list[bool]`, one entry per layer) and
    `draft_family` (`"dflash2"` or `"dflash"`).

    Example:

    ```python
    >>> from transformers_dflash2 import DFlash2Config

    >>> config = DFlash2Config(
    ...     vocab_size=32,
    ...     hidden_size=32,
    ...     intermediate_size=64,
    ...     num_hidden_layers=2,
    ...     num_attention_heads=4,
    ...     block_size=8,
    ...     mask_token_id=31,
    ...     target_layer_ids=[0, 2],
    ...     conv_kernel_size=2,
    ...     conv_group_size=8,
    ...     selector_rank=8,
    ...     selector_top_k=4,
    ... )
    >>> config.draft_family
    'dflash2'
    ```
    """

    model_type = "dflash2"
    # Sizes have no sensible default, so the host must not build an empty instance to compare with.
    has_no_defaults_at_init = True
    # How the keys of the family are spelled, and how they are read and written.
    _source_class = _Source
    _read = staticmethod(_read_attributes)
    _form = staticmethod(_public_form)

    def __init__(self, dflash_config: dict[str, Any] | None = None, **kwargs):
        is_file = kwargs.pop("_is_file", False)
        raw = {key: _plain(value) for key, value in kwargs.items() if key not in _CALL_KEYS}
        if dflash_config is not None:
            raw["dflash_config"] = _plain(dflash_config)
        source = self._source_class(raw, is_file)
        attributes = self._read(source)
        if not source.is_checkpoint:
            raw = self._form(raw, attributes)

        handled = {*source.own_keys(), *_LAYER_KEYS, *_TOP_KEYS, *_CONSUMED_KEYS}
        extra = {key: copy.deepcopy(value) for key, value in raw.items() if key not in handled and key[0] != "_"}
        if not any(extra.get(key) is not None for key in ("dtype", "torch_dtype")):
            inner_dtype = source.inner.get("dtype") or source.inner.get("torch_dtype")
            if inner_dtype is not None:
                extra["dtype"] = inner_dtype
        extra.setdefault("tie_word_embeddings", False)
        extra.setdefault("use_cache", True)
        super().__init__(**extra, **{key: kwargs[key] for key in _CALL_KEYS if key in kwargs})

        for key, value in attributes.items():
            setattr(self, key, value)
        for section in source.section_names:
            setattr(self, section, copy.deepcopy(raw.get(section)))
        self.standardize_rope_params()
        try:
            self.validate_rope()
        except KeyError as error:
            raise ValueError(
                f"`rope_parameters`={self.rope_parameters!r} is incomplete: {error.args[0] if error.args else error}. "
                "Add the missing key."
            ) from error
        self._source = raw
        self._baseline = copy.deepcopy(self._public_attributes())

    def _public_attributes(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key[0] != "_"}

    @property
    def trained_for(self) -> str | None:
        """
        Name of the target that the drafter belongs to: `target_name_or_path`, the verifier of a Speculators config, or
        the `base_model` of the model card beside the config. `None` where none of them says it.
        """
        return self.target_name_or_path or base_model_from_card(self._name_or_path)

    def validate(self) -> None:
        """Runs the checks of the constructor on the present values; [`~PreTrainedConfig.save_pretrained`] calls it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            type(self)(**self.to_dict(), _is_file=True)

    def validate_for_target(self, embedding_rows: int, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        """
        Checks that the drafter fits a target.

        Args:
            embedding_rows (`int`):
                Rows of the target's input embedding, padding rows included.
            num_layers (`int`):
                Decoder layers of the target.
            hidden_size (`int`):
                Hidden size of the target.
            vocab_size (`int`):
                Real vocabulary of the target, without padding rows.
        """
        if not 0 <= self.mask_token_id < embedding_rows:
            raise ValueError(
                f"`mask_token_id`={self.mask_token_id} has no row in the target's input embedding, which has "
                f"{embedding_rows} rows. Use the target that the drafter was trained for, or correct the id."
            )
        if self.num_target_layers is not None and self.num_target_layers != num_layers:
            raise ValueError(
                f"`num_target_layers`={self.num_target_layers}, but the target has {num_layers} layers. Use the "
                "target that the drafter was trained for."
            )
        for layer_id in self.target_layer_ids:
            if not 0 <= layer_id < num_layers:
                raise ValueError(
                    f"`target_layer_ids`={self.target_layer_ids} holds {layer_id}, but the target has {num_layers} "
                    f"layers, 0 to {num_layers - 1}. Use the target that the drafter was trained for, or correct the "
                    "list."
                )
        for key in ("target_hidden_size", "hidden_size"):
            if getattr(self, key) != hidden_size:
                raise ValueError(
                    f"`{key}`={getattr(self, key)}, but the target's hidden size is {hidden_size}, and the drafter "
                    "borrows its embeddings and its head. Use the target that the drafter was trained for."
                )
        if self.selector_top_k > vocab_size:
            raise ValueError(
                f"`selector_top_k`={self.selector_top_k} exceeds the target's vocabulary of {vocab_size} tokens. Set "
                f"it to at most {vocab_size}."
            )

    @property
    def speculative_tokens(self) -> int:
        """Tokens that a block proposes when the caller does not say: all slots but the anchor's."""
        return self.block_size - 1

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        cache_dir=None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        revision: str = "main",
        **kwargs,
    ) -> DFlash2Config:
        """
        Reads the config of a drafter. Same arguments as [`PreTrainedConfig.from_pretrained`]; the `model_type` in the
        file is that of the layers (usually `"qwen3"`) and says nothing about the drafter, so it is not compared.
        """
        kwargs.update(
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
            revision=revision,
        )
        config_dict, kwargs = cls.get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not config_dict:
            raise OSError(
                f"{str(pretrained_model_name_or_path)!r} holds no config.json. Pass the folder or the Hub id of a "
                "drafter's checkpoint."
            )
        loaded = cls.from_dict(config_dict, **kwargs)
        # Where the model card is; `from_dict` may return unused arguments as well.
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        config.name_or_path = str(pretrained_model_name_or_path)
        return loaded

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Same as [`PreTrainedConfig.from_dict`], with the checks run on overridden values too."""
        return_unused_kwargs = kwargs.pop("return_unused_kwargs", False)
        config, unused = super().from_dict({**config_dict, "_is_file": True}, return_unused_kwargs=True, **kwargs)
        changed = [
            key
            for key in config._changed_attributes()
            if key in {*cls._source_class.own_keys(), *_LAYER_KEYS, *_TOP_KEYS}
        ]
        if changed:
            private = {
                key: value
                for key, value in config.__dict__.items()
                if key[0] == "_" and key not in ("_source", "_baseline")
            }
            config = cls(**config.to_dict(), _is_file=True)
            config.__dict__.update(private)
        return (config, unused) if return_unused_kwargs else config

    def _changed_attributes(self) -> dict[str, Any]:
        """Attributes that were set after construction and belong in the file."""
        changed = {}
        for key, value in self._public_attributes().items():
            if key in _DERIVED_ATTRIBUTES or key == "transformers_version":
                continue
            before = self._baseline.get(key)
            if key == "dtype":
                before, value = _dtype_name(before), _dtype_name(value)
            if key == "architectures" and value and value[0] in _MODEL_CLASS_NAMES:
                # Saving a model writes its class here; the checkpoint keeps the name of its own form.
                if before or "speculators_model_type" in self._source:
                    continue
                value = [_PUBLIC_ARCHITECTURES[self.draft_family]]
            if key not in self._baseline or not _same(before, value):
                changed[key] = value
        return changed

    def to_dict(self) -> dict[str, Any]:
        """
        The config in the spelling that was read, with attributes that were changed since put where they belong.

        Returns:
            `dict[str, Any]`: Keys and values of `config.json`.
        """
        output = copy.deepcopy(self._source)
        changed = copy.deepcopy(self._changed_attributes())
        for key in sorted(changed, key=lambda key: key not in self._source_class.section_names):
            self._write(output, key, changed[key])
        for key in self._baseline:
            if key not in self.__dict__ and key in output:
                del output[key]
        if self.output_attentions != output.get("output_attentions", False):
            output["output_attentions"] = self.output_attentions
        quantization_config = output.get("quantization_config")
        if hasattr(quantization_config, "to_dict"):
            output["quantization_config"] = quantization_config.to_dict()
        output["transformers_version"] = transformers_version
        self._remove_keys_not_serialized(output)
        self.dict_dtype_to_str(output)
        return output

    def to_diff_dict(self) -> dict[str, Any]:
        """Same as [`~DFlash2Config.to_dict`]: a checkpoint's keys are all worth keeping."""
        return self.to_dict()

    def _write(self, output: dict[str, Any], key: str, value: Any) -> None:
        source = self._source_class(output)
        if key in source.section_names:
            if value is None:
                output.pop(key, None)
            else:
                output[key] = value
            return
        if key == "dtype" and "torch_dtype" in output:
            output["torch_dtype"] = value
        if key == "rope_parameters":
            for section in (output, source.inner):
                for legacy in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
                    section.pop(legacy, None)
        if source.is_speculators and key == "target_layer_ids" and "aux_hidden_state_layer_ids" in output:
            output["aux_hidden_state_layer_ids"] = [layer_id + 1 for layer_id in value]
            if key not in output and key not in source.nested:
                return
        if source.is_speculators and key == "target_name_or_path":
            settings = output.setdefault("speculators_config", {})
            settings["verifier"] = {**(settings.get("verifier") or {}), "name_or_path": value}
            return

        # Every place that has the key gets the new value, so that none disagrees afterwards.
        sections = [section for section in (source.nested, source.inner, output) if key in section]
        if source.prefix is not None and source.prefixed(key) in output:
            output[source.prefixed(key)] = copy.deepcopy(value)
            if not sections:
                return
        if not sections and key in source.draft_keys and key != "num_target_layers" and source.nested:
            sections = [source.nested]
        elif not sections and key in _LAYER_KEYS and source.inner:
            sections = [source.inner]
        for section in sections or [output]:
            section[key] = copy.deepcopy(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DFlash2Config):
            return NotImplemented
        left, right = self._public_attributes(), other._public_attributes()
        for attributes in (left, right):
            attributes.pop("transformers_version", None)
            # `to_dict` settles which name belongs in the file.
            attributes.pop("architectures", None)
            attributes["dtype"] = _dtype_name(attributes.get("dtype"))
        return left == right and self.to_dict() == other.to_dict()


def _dtype_name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).split(".")[-1]


def _plain(value: Any) -> Any:
    """A copy with plain containers: nested configs become dicts, tuples become lists."""
    if isinstance(value, PreTrainedConfig):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return copy.deepcopy(value)


__all__ = ["DFlash2Config"]

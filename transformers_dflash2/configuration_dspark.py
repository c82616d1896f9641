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
"""Configuration of DSpark draft models.

DSpark keeps the backbone of DFlash and adds a Markov head, so the settings of `configuration_dflash2` are read by the
same rules. On top of its spellings come a nested `dspark_config`, flat keys with the prefix `dspark_`, which win over
everything else, and the Speculators form with `speculators_model_type` "dspark".
"""

from typing import Any

from .configuration_dflash2 import (
    _DRAFT_KEYS,
    DFlash2Config,
    _bool,
    _int,
    _public_form,
    _read_attributes,
    _Source,
)


MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")

_MARKOV_KEYS = ("markov_rank", "markov_head_type")
_SWITCHES = ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")
_FAMILIES = {
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "Qwen3OmniDSparkModel": "dspark",
    # Built in code.
    None: "dspark",
}


class _DSparkSource(_Source):
    section_names = ("dspark_config", "dflash_config")
    prefix = "dspark_"
    draft_keys = (*_DRAFT_KEYS, *_MARKOV_KEYS, *_SWITCHES)
    families = _FAMILIES
    speculators_families = {"dspark": "dspark"}
    # The block size counts proposed tokens.
    idle_slots = 0
    default_block_size = None
    may_reduce_vocabulary = True

    @classmethod
    def prefixed(cls, key: str) -> str:
        return "dspark_noise_token_id" if key == "mask_token_id" else f"{cls.prefix}{key}"

    @property
    def has_prefixed_keys(self) -> bool:
        return any(self.raw.get(self.prefixed(key)) is not None for key in self.draft_keys)


def is_dspark_config(raw: dict[str, Any]) -> bool:
    """
    Whether the keys of a `config.json` are those of a DSpark drafter.

    A config that names its architecture is judged by it, another by the presence of a Markov head.
    """
    source = _DSparkSource({key: value for key, value in raw.items() if value is not None})
    if source.is_speculators:
        return raw["speculators_model_type"] in source.speculators_families
    if source.architecture is not None:
        return source.architecture in source.families
    return source.draft("markov_rank")[1] is not None


def _read_switch(source: _DSparkSource, key: str, default: bool) -> bool:
    name, value = source.draft(key)
    return default if value is None else _bool(name, value, "Set it to true or false, or remove it.")


def _read_dspark_attributes(source: _DSparkSource) -> dict[str, Any]:
    attributes = _read_attributes(source)
    name, value = source.draft("markov_rank")
    fix = "Set the rank of the Markov head's tables; a drafter without that head is a DFlash drafter."
    attributes["markov_rank"] = _int(name, 0 if value is None else value, 1, fix)
    name, value = source.draft("markov_head_type")
    if value is None and source.has_prefixed_keys:
        value = "vanilla"
    kind = value.lower() if isinstance(value, str) else value
    if kind not in MARKOV_HEAD_TYPES:
        raise ValueError(f"`{name}`={value!r} must be one of {', '.join(map(repr, MARKOV_HEAD_TYPES))}.")
    attributes["markov_head_type"] = kind

    attributes["enable_confidence_head"] = _read_switch(source, "enable_confidence_head", False)
    attributes["confidence_head_with_markov"] = _read_switch(source, "confidence_head_with_markov", False)
    # Rows of native checkpoints predict the token behind their own, those of Speculators the one at their place.
    attributes["sample_from_anchor"] = _read_switch(source, "sample_from_anchor", not source.is_speculators)

    vocab_size = attributes["vocab_size"]
    name, value = source.layer("draft_vocab_size", vocab_size)
    attributes["draft_vocab_size"] = _int(name, value, 1, "Set the rows of the drafter's own head, or remove it.")
    if value > vocab_size:
        raise ValueError(f"`{name}`={value!r} exceeds `vocab_size`={vocab_size}. A drafter proposes tokens of those.")
    # A full-size head of the drafter's own shows only when the tensors are read.
    attributes["has_own_head"] = value < vocab_size
    return attributes


def _dspark_form(raw: dict[str, Any], attributes: dict[str, Any]) -> dict[str, Any]:
    public = _public_form(raw, attributes, _DSparkSource)
    section = public[_DSparkSource.section_names[0]]
    for key in (*_MARKOV_KEYS, *_SWITCHES):
        section[key] = attributes[key]
    if attributes["draft_vocab_size"] != attributes["vocab_size"]:
        public["draft_vocab_size"] = attributes["draft_vocab_size"]
    return public


class DSparkConfig(DFlash2Config):
    r"""
    Configuration of a [`DSparkDraftModel`]. It reads the native, the prefixed and the Speculators spelling, checks
    each value once, and writes back the spelling that was read. Built from keywords, it writes the native form with a
    nested `dspark_config`.

    Args:
        dspark_config (`dict`, *optional*):
            Nested section with the settings of the drafter; `dflash_config` is read as well.
        block_size (`int`):
            Tokens that a block proposes.
        markov_rank (`int`):
            Rank of the Markov head's tables.
        markov_head_type (`str`):
            `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head (`bool`, *optional*, defaults to `False`):
            Whether the checkpoint has a head that estimates which tokens will be accepted.
        confidence_head_with_markov (`bool`, *optional*, defaults to `False`):
            Whether that head sees the Markov table's row of the token before, too.
        sample_from_anchor (`bool`, *optional*):
            Whether the rows of a block predict the token behind their own, so that the anchor's row proposes the first
            one; `True` for native checkpoints, `False` for Speculators.
        draft_vocab_size (`int`, *optional*, defaults to `vocab_size`):
            Rows of the drafter's own head; a reduced vocabulary comes with a table `d2t` of offsets to target ids.
        kwargs (`dict`, *optional*):
            Settings of [`DFlash2Config`], without those of convolution and selector.

    Attributes that are derived: `layer_is_causal`, `draft_family` (`"dspark"`) and `has_own_head`.

    Example:

    ```python
    >>> from transformers_dflash2 import DSparkConfig

    >>> config = DSparkConfig(
    ...     vocab_size=32,
    ...     hidden_size=32,
    ...     intermediate_size=64,
    ...     num_hidden_layers=2,
    ...     num_attention_heads=4,
    ...     block_size=7,
    ...     mask_token_id=31,
    ...     target_layer_ids=[0, 2],
    ...     markov_rank=8,
    ...     markov_head_type="vanilla",
    ... )
    >>> config.speculative_tokens
    7
    ```
    """

    model_type = "dspark"
    _source_class = _DSparkSource
    _read = staticmethod(_read_dspark_attributes)
    _form = staticmethod(_dspark_form)

    def __init__(self, dspark_config: dict[str, Any] | None = None, **kwargs):
        if dspark_config is not None:
            kwargs["dspark_config"] = dspark_config
        super().__init__(**kwargs)

    @property
    def speculative_tokens(self) -> int:
        """Tokens that a block proposes when the caller does not say."""
        return self.block_size


__all__ = ["MARKOV_HEAD_TYPES", "DSparkConfig", "is_dspark_config"]

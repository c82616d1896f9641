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
"""Conversion of a drafter's folder between the public form and the Speculators form.

```bash
python -m transformers_dflash2.conversion z-lab/Qwen3-8B-DFlash-b16 converted --to speculators --verifier Qwen/Qwen3-8B
```

Tensors keep their values and, apart from renames that the loader applies anyway, their names. A conversion there and
back gives the same config: what one form has no word for travels along, in the Speculators form as a key of its own
and in the public form in a `speculators` section.
"""

import argparse
import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from .configuration_dflash2 import DFlash2Config
from .modeling_dflash2 import CHECKPOINT_KEY_MAPPING, SPECULATORS_VERIFIER_KEYS


FORMS = ("public", "speculators")

_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
_SPECULATORS_VERSION = "0.6.0"
# Said at the top of both forms. Everything else of the public top level describes layers.
_SHARED_KEYS = ("dtype", "num_target_layers", "target_hidden_size", "torch_dtype", "transformers_version")
# Said in `dflash_config` of the public form and at the top of the Speculators form, in the same words.
_DRAFT_KEYS = (
    "block_size",
    "mask_token_id",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
    "causal",
    "use_swa",
    "swa_window_size",
)
# Attributes that both forms have to agree on.
_COMPARED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "layer_types", "sliding_window"),
    *("layer_is_causal", "rope_parameters", "rms_norm_eps", "target_layer_ids", "draft_family", "num_target_layers"),
    *("target_hidden_size", "block_size", "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank"),
    *("selector_top_k", "output_multiplier", "final_logit_softcapping", "input_embedding_scale"),
)


def convert_checkpoint(source: str | Path, destination: str | Path, *, to: str, verifier: str | None = None) -> Path:
    """
    Write a drafter in another form.

    Args:
        source (`str` or `Path`): Folder or Hub id of the drafter, with safetensors weights.
        destination (`str` or `Path`): Folder to write; it must not exist or be empty.
        to (`str`): `"public"` or `"speculators"`.
        verifier (`str`, *optional*): Name of the target, for a drafter whose config does not say it.

    Returns:
        `Path`: The destination.

    Raises:
        `ValueError`: The drafter is in that form already, or says something that the other form has no words for.
        `FileExistsError`: The destination holds something.
    """
    if to not in FORMS:
        raise ValueError(f"to={to!r} is no form of a drafter; use one of {list(FORMS)}.")
    source, destination = _local(source), Path(destination)
    if destination.exists() and any(destination.iterdir()):
        raise FileExistsError(f"{destination} is not empty; name a new folder.")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = to_speculators(raw, verifier=verifier) if to == "speculators" else to_public(raw, target=verifier)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{source} holds no safetensors file; save the drafter with safe serialization first.")
    destination.mkdir(parents=True, exist_ok=True)
    weight_map, size = {}, 0
    for path in files:
        for name, bytes_ in _convert_file(path, destination / path.name):
            weight_map[name] = path.name
            size += bytes_
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(destination / "model.safetensors.index.json", index)
    _write_json(destination / "config.json", config)
    return destination


def to_speculators(raw: dict[str, Any], *, verifier: str | None = None) -> dict[str, Any]:
    """The Speculators config of a drafter whose `config.json` in the public form is `raw`."""
    if "speculators_model_type" in raw:
        raise ValueError("The drafter is in the Speculators form already.")
    before = DFlash2Config.from_dict(copy.deepcopy(raw))
    public = copy.deepcopy(raw)
    for key in ("architectures", "auto_map"):
        public.pop(key, None)
    stash = public.pop("speculators", {})
    target = public.pop("target_name_or_path", None)
    nested = public.pop("dflash_config", None) or {}
    # DFlash v1 keeps settings at the top as well; the nested ones count.
    settings = {key: public.pop(key) for key in (*_DRAFT_KEYS, "target_layer_ids") if key in public} | nested
    settings.pop("target_layer_ids", None)
    unknown = sorted(settings.keys() - set(_DRAFT_KEYS))
    if unknown:
        raise ValueError(f"`dflash_config` holds {unknown}, which the Speculators form has no words for. Remove them.")

    family = before.draft_family
    result = {key: public.pop(key) for key in _SHARED_KEYS if key in public}
    result |= settings
    result |= {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": "speculator_model",
        "speculators_model_type": family,
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": family,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": before.block_size - 1}],
            "verifier": {"architectures": [], "name_or_path": verifier or target},
        },
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in before.target_layer_ids],
        "draft_vocab_size": before.vocab_size,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not any(before.layer_is_causal),
        "transformer_layer_config": public,
    }
    result |= copy.deepcopy(stash.get("keys", {}))
    for key in stash.get("without", []):
        result.pop(key, None)
    _check_same(before, result)
    return result


def to_public(raw: dict[str, Any], *, target: str | None = None) -> dict[str, Any]:
    """The public config of a drafter whose `config.json` in the Speculators form is `raw`."""
    if "speculators_model_type" not in raw:
        raise ValueError("The drafter is not in the Speculators form (no `speculators_model_type`).")
    before = DFlash2Config.from_dict(copy.deepcopy(raw))
    result = copy.deepcopy(raw["transformer_layer_config"])
    result |= {key: copy.deepcopy(raw[key]) for key in _SHARED_KEYS if key in raw}
    result["architectures"] = [_ARCHITECTURES[before.draft_family]]
    name = target or before.target_name_or_path
    if name is not None:
        result["target_name_or_path"] = name
    nested = {key: copy.deepcopy(raw[key]) for key in _DRAFT_KEYS if key in raw}
    nested |= {"block_size": before.block_size, "target_layer_ids": list(before.target_layer_ids)}
    result["dflash_config"] = nested
    if before.layer_is_causal != DFlash2Config.from_dict(copy.deepcopy(result)).layer_is_causal:
        nested["causal"] = all(before.layer_is_causal)

    # What the way back would not make again.
    again = to_speculators(result)
    keys = {key: value for key, value in raw.items() if key not in again or again[key] != value}
    without = sorted(again.keys() - raw.keys())
    if keys or without:
        result["speculators"] = {"keys": copy.deepcopy(keys), "without": without}
    _check_same(before, result)
    return result


def _check_same(before: DFlash2Config, raw: dict[str, Any]) -> None:
    after = DFlash2Config.from_dict(copy.deepcopy(raw))
    for key in _COMPARED:
        if getattr(before, key) != getattr(after, key):
            raise ValueError(
                f"`{key}`={getattr(before, key)!r} cannot be said in the other form, which would read as "
                f"{getattr(after, key)!r}. Keep the drafter in its own form."
            )


def _local(source: str | Path) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(source), allow_patterns=["config.json", "*.safetensors"]))


def _convert_file(source: Path, destination: Path) -> Iterator[tuple[str, int]]:
    """Copies one file of weights and yields name and bytes of what it holds."""
    with safe_open(source, framework="pt") as weights:
        names, metadata = list(weights.keys()), weights.metadata()
    renamed = {name: _public_name(name) for name in names}
    # The verifier's own weights, which Speculators stores along with a drafter.
    kept = {name: new for name, new in renamed.items() if new not in SPECULATORS_VERIFIER_KEYS}
    if kept == {name: name for name in names}:
        shutil.copyfile(source, destination)
    else:
        tensors = load_file(source)
        save_file({new: tensors[name] for name, new in kept.items()}, destination, metadata=metadata)
    with safe_open(destination, framework="pt") as weights:
        for name in weights.keys():
            tensor = weights.get_tensor(name)
            yield name, tensor.numel() * tensor.element_size()


def _public_name(name: str) -> str:
    for pattern, replacement in CHECKPOINT_KEY_MAPPING.items():
        name = re.sub(pattern, replacement, name)
    return name


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert a drafter between the public and the Speculators form.")
    parser.add_argument("source", help="folder or Hub id")
    parser.add_argument("destination", help="folder to write")
    parser.add_argument("--to", choices=FORMS, required=True)
    parser.add_argument("--verifier", help="name of the target, for a drafter whose config does not say it")
    options = parser.parse_args(arguments)
    path = convert_checkpoint(options.source, options.destination, to=options.to, verifier=options.verifier)
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()


__all__ = ["convert_checkpoint", "main", "to_public", "to_speculators"]

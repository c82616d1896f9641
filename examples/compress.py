# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a copy of a model in one of the formats of compressed-tensors, rounding to nearest.

    python examples/compress.py W4A16 smollm2-w4a16

Good enough to try a format; for a checkpoint to keep, use a tool that calibrates, such as llm-compressor.
"""

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from transformers_dflash2.import_utils import require


__all__ = ["GROUP_SIZE", "compress", "load_untied", "quantise"]

# Weights that share a scale in 4-bit integer formats; it divides the sizes of small models too.
GROUP_SIZE = 32


def compress(model: nn.Module, scheme: str, destination: Path, *, ignore: Sequence[str] = ()) -> None:
    """
    Compress the linear layers of a model and save it; the arguments but one are those of [`quantise`].

    Args:
        destination (`Path`):
            Folder to write.
    """
    compressor = quantise(model, scheme, ignore=ignore)
    model.save_pretrained(destination)
    compressor.update_config(destination)


def quantise(model: nn.Module, scheme: str, *, ignore: Sequence[str] = ()):
    """
    Compress the linear layers of a model in memory: the head too, unless it is tied to the embedding.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            A dense model; changed in place.
        scheme (`str`):
            Name of a preset of compressed-tensors: `"W8A8"`, `"FP8_DYNAMIC"`, `"W4A16"`, `"NVFP4A16"`.
        ignore (`Sequence[str]`, *optional*):
            Layers to leave dense, by name or by `"re:"` and a pattern. A drafter's are `"re:.*kernel_projection"` and
            `"re:.*hidden_projection"`.

    Returns:
        `compressed_tensors.compressors.ModelCompressor`: what knows the format.
    """
    require("compressed-tensors", "Compressing a model")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    preset = preset_name_to_scheme(scheme, ["Linear"])
    if preset.weights.type == "int" and preset.weights.strategy == "group":
        preset.weights.group_size = GROUP_SIZE
    ignore = [*ignore, "lm_head"] if model.config.tie_word_embeddings else list(ignore)
    apply_quantization_config(model, QuantizationConfig(config_groups={"linear": preset}, ignore=ignore))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _round_to_nearest(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


@torch.no_grad()
def _round_to_nearest(module: nn.Module) -> None:
    """Fill in the scales that cover a layer's weights from the smallest to the largest."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments, weight, options = module.quantization_scheme.weights, module.weight, {}
    # [rows, groups, weights that share a scale]
    groups = weight.unflatten(-1, (-1, arguments.group_size or weight.shape[-1]))
    lowest, highest = groups.amin(-1), groups.amax(-1)
    if hasattr(module, "weight_global_scale"):
        options["global_scale"] = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.copy_(options["global_scale"])
    scale, zero_point = calculate_qparams(lowest, highest, arguments, **options)
    module.weight_scale.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.copy_(zero_point)


def load_untied(folder: str | Path) -> PreTrainedModel:
    """Loads a dense model and gives its head weights of its own, so that the head can be compressed as well."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if not model.config.tie_word_embeddings:
        return model
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    untied = type(model)(config).to(model.dtype)
    weights = model.state_dict()
    weights["lm_head.weight"] = model.get_input_embeddings().weight
    untied.load_state_dict(weights)
    untied.generation_config = model.generation_config
    return untied


def main() -> None:
    import smollm2

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scheme", help="preset of compressed-tensors, for instance W8A8, FP8_DYNAMIC or W4A16")
    parser.add_argument("destination", type=Path, help="folder to write")
    parser.add_argument("--target", help="folder of a dense model; by default SmolLM2-135M-Instruct")
    args = parser.parse_args()
    folder, _ = smollm2.find_target(args.target)
    compress(load_untied(folder), args.scheme, args.destination)
    AutoTokenizer.from_pretrained(folder).save_pretrained(args.destination)


if __name__ == "__main__":
    main()

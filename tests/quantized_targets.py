"""Tiny targets whose linear layers, head included, are quantised by the libraries themselves."""

import functools
import logging
import tempfile
from pathlib import Path

import compress
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, CompressedTensorsConfig, TorchAoConfig

from transformers_dflash2 import DFlash2DraftModel, import_utils
from transformers_dflash2.testing import cycle_table, table_drafter, table_target, walk_table


# Format: library, options of its config.
FORMATS = {
    "bnb-nf4": ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "bnb-nf4-nested": (
        "bitsandbytes",
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "bnb-fp4": ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
    "bnb-int8": ("bitsandbytes", {"load_in_8bit": True}),
    "ct-w8a8": ("compressed-tensors", {"scheme": "W8A8"}),
    "ct-w8a8-dequantised": ("compressed-tensors", {"scheme": "W8A8", "dequantize": True}),
    "ct-fp8": ("compressed-tensors", {"scheme": "FP8_DYNAMIC"}),
    "ct-fp8-dequantised": ("compressed-tensors", {"scheme": "FP8_DYNAMIC", "dequantize": True}),
    "ct-w4a16": ("compressed-tensors", {"scheme": "W4A16"}),
    "ct-w4a16-dequantised": ("compressed-tensors", {"scheme": "W4A16", "dequantize": True}),
    # Its library decompresses to bfloat16 whatever the model's dtype is.
    "ct-nvfp4": ("compressed-tensors", {"scheme": "NVFP4A16"}),
    "ao-int8": ("torchao", {"config": "Int8WeightOnlyConfig"}),
    # The int4 layouts for GPUs have no CPU kernel; this one stores int4 values and computes anywhere.
    "ao-int4": ("torchao", {"config": "IntxWeightOnlyConfig", "weight_dtype": torch.int4}),
    "ao-fp8": ("torchao", {"config": "Float8WeightOnlyConfig"}),
}

VOCAB = 32
# A cycle through all tokens but one: the mask token of the drafters, which plain decoding never meets.
CYCLE = cycle_table(VOCAB, 0, length=VOCAB - 1, start=3)
UNUSED = next(token for token in range(VOCAB) if token not in walk_table(CYCLE, 3, VOCAB - 1))


def dtype_of(name):
    return torch.bfloat16 if name == "ct-nvfp4" else torch.float32


def require(name):
    """Skip the test, naming the install command, when the library of a format is missing."""
    reason = import_utils.unavailable_reason(FORMATS[name][0])
    if reason is not None:
        pytest.skip(reason)


def quantize(model, name, dtype=None):
    """A quantised copy of a dense model, head included where it is not tied to the embedding."""
    require(name)
    dtype = dtype or dtype_of(name)
    library, options = FORMATS[name]
    options = dict(options)
    is_draft = isinstance(model, DFlash2DraftModel)
    dense = ["lm_head"] if not is_draft and model.config.get_text_config().tie_word_embeddings else []
    with tempfile.TemporaryDirectory() as folder:
        if library == "bitsandbytes":
            # It logs a cast to float16 on every call of an 8-bit layer.
            logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
            if "load_in_4bit" in options:
                options["bnb_4bit_compute_dtype"] = dtype
            config = BitsAndBytesConfig(**options, llm_int8_skip_modules=dense)
        elif library == "torchao":
            import torchao.quantization

            make = getattr(torchao.quantization, options.pop("config"))
            config = TorchAoConfig(make(**options), modules_to_not_convert=dense)
        else:
            scheme = options.pop("scheme")
            dense = ["re:.*kernel_projection", "re:.*hidden_projection"] if is_draft else []
            compress.compress(model, scheme, Path(folder), ignore=dense)
            config = CompressedTensorsConfig(**options)
        if library != "compressed-tensors":
            model.save_pretrained(folder)
        quantized = type(model).from_pretrained(folder, quantization_config=config, dtype=dtype)
    return as_stored(quantized) if "load_in_4bit" in options else quantized


def as_stored(model):
    """
    The model, kept from packing 4-bit weights anew for CPUs that can multiply bfloat16.

    Those would compute in bfloat16 whatever the compute dtype is, and refuse inputs that blocks of 64 do not divide.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
    return model.eval()


@functools.cache
def table_pair(name, padding=0):
    """
    A quantised table target of two layers, and a table drafter for it.

    `padding` rows are added to embedding and head. They outscore every real row on the drafter's mask slots and
    nowhere else, and are left out of the vocabulary that the config states.
    """
    dense = dense_target()
    padded = dense_target()
    if padding:
        padded.resize_token_embeddings(VOCAB + padding, mean_resizing=False)
        garbage = torch.zeros(padding, padded.config.hidden_size)
        garbage[:, UNUSED] = 5.0
        padded.get_output_embeddings().weight.data[VOCAB:] = garbage
        padded.config.unpadded_vocab_size = VOCAB
    draft = table_drafter(dense, CYCLE, mask_token_id=UNUSED, target_layer_ids=[0, 1])
    return quantize(padded, name), draft.to(dtype_of(name))


def dense_target():
    target = table_target(0, VOCAB, table=CYCLE, mix=0.01, num_hidden_layers=2)
    # No token leads to the unused one. An all-zero row has scale 0, of which float8 weights of torchao make NaN.
    target.get_output_embeddings().weight.data[UNUSED, UNUSED] = 0.1
    return target


@functools.cache
def tied_target(name):
    """A quantised model of random weights whose head is its embedding."""
    settings = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    settings |= {"initializer_range": 0.5, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    return quantize(AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **settings)), name)


def dequantized_head(target):
    """The matrix that a quantised head stands for, in float32."""
    head = target.get_output_embeddings()
    weight = head.weight
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(weight.data, weight.quant_state)
    elif hasattr(weight, "SCB"):
        weight = head.state.CB * head.state.SCB[:, None] / 127
    elif type(weight) is not nn.Parameter:
        weight = weight.dequantize()
    return weight.detach().float()


def rounded_input(head, hidden):
    """What a head multiplies its weights with: `hidden`, rounded by those that compute in 8 bits."""
    if hasattr(head.weight, "SCB"):
        scale = hidden.abs().amax(-1, keepdim=True) / 127
        return (hidden / scale).round() * scale
    scheme = getattr(head, "quantization_scheme", None)
    if scheme is None or scheme.input_activations is None:
        return hidden
    from compressed_tensors.quantization import forward_quantize

    return forward_quantize(head, hidden, "input", scheme.input_activations)

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
"""Private methods and moving names of `transformers`, one function per difference between supported versions.

Supported: 5.17 and later. Elsewhere the package only reads attributes that the host leaves on its own objects, such as
`generation_config._pad_token_tensor`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.generation import GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput


# The name of the key-value cache in model inputs and in generate's outputs: `cache` from 5.24, before it
# `past_key_values`.
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
# Callers may use either.
CACHE_KEYS = ("cache", "past_key_values")

# Names of `cache_implementation` that ask for preallocated buffers.
STATIC_CACHE_IMPLEMENTATIONS = (
    "static",
    "offloaded_static",
    "hybrid",
    "hybrid_chunked",
    "offloaded_hybrid",
    "offloaded_hybrid_chunked",
    "sliding_window",
)


def get_cache(model_kwargs: dict[str, Any]) -> Cache | None:
    """The key-value cache among the keyword arguments of a model call, under whichever name it travels."""
    for key in CACHE_KEYS:
        if model_kwargs.get(key) is not None:
            return model_kwargs[key]
    return None


def prefill(target, input_ids: torch.Tensor, generation_config, model_kwargs: dict[str, Any]):
    """
    Run the prompt through the target as plain `generate` does: unseen tokens only, in chunks when asked to.

    Returns:
        The target's output for the last chunk. `model_kwargs` then hold the filled cache.
    """
    outputs = target._prefill(input_ids, generation_config, model_kwargs)
    model_kwargs[CACHE_KEY] = outputs[CACHE_KEY]
    return outputs


def block_inputs(target, block_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """
    Model inputs of a forward over `block_ids` on top of a filled cache.

    Args:
        target: The target model.
        block_ids (`torch.LongTensor` of shape `(batch, block)`): Tokens that are not in the cache yet.
        model_kwargs (`dict`): Their positions, the mask over cache and block, the cache, and what the caller of
            `generate` passed on to the model.
    """
    block = block_ids.shape[1]
    inputs = target.prepare_inputs_for_generation(block_ids, next_sequence_length=block, **model_kwargs)
    if "logits_to_keep" in inputs:
        # Falcon-H1 puts a number from its config there.
        inputs["logits_to_keep"] = block
    return inputs


def make_output(output_class: type[GenerateDecoderOnlyOutput], cache: Cache | None, **fields):
    """Build one of `generate`'s output classes, with the cache under the host's name for it."""
    return output_class(**{CACHE_KEY: cache}, **fields)


def unsupported_cache_layer(cache: Cache, *, batch_size: int) -> str | None:
    """
    Why a cache cannot forget rejected tokens, or `None` if it can.

    Args:
        cache ([`~transformers.Cache`]): The target's cache.
        batch_size (`int`): Rows; more than one need layers whose rows can be moved separately.
    """
    for layer in cache.layers:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer):
            continue
        name = type(layer).__name__
        if isinstance(layer, LinearAttentionCacheLayerMixin) and isinstance(layer, DynamicLayer):
            continue
        if "Static" in name:
            return f"its layer {name} is preallocated"
        if "Quantized" in name:
            return f"its layer {name} stores quantised keys that cannot be cropped"
        if batch_size > 1 or not isinstance(layer, DynamicLayer):
            return f"its layer {name} cannot be cropped row by row"
    if cache.layers and not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        return "it has no attention layer, whose length tells how many tokens were seen"
    return None


def recurrent_layers(cache: Cache) -> list[LinearAttentionCacheLayerMixin]:
    """Layers of a cache that keep convolution windows or recurrent states, alone or beside keys and values."""
    return [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]


def layer_states(layer: LinearAttentionCacheLayerMixin) -> list[torch.Tensor]:
    """Convolution windows and recurrent states that a layer has come to hold."""
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in states if state is not None]


def cache_states(cache: Cache) -> list[torch.Tensor]:
    """All states of a cache that have no time axis, those that MiniMax keeps beside its layers among them."""
    beside = [state for state in getattr(cache, "linear_cache", []) if isinstance(state, torch.Tensor)]
    return [state for layer in recurrent_layers(cache) for state in layer_states(layer)] + beside


def save_states(cache: Cache) -> Callable[[], None]:
    """Copy all states of a cache that have no time axis; returns the function that puts them back."""
    states = cache_states(cache)
    copies = [state.clone() for state in states]
    beside = list(getattr(cache, "linear_cache", []))

    def restore() -> None:
        for state, copy in zip(states, copies, strict=True):
            state.copy_(copy)
        if beside:
            # Replaced in every forward, not written in place.
            cache.linear_cache[:] = beside

    return restore


def attention_layers(cache: Cache) -> list[DynamicLayer]:
    """Layers of a cache that hold keys and values."""
    return [
        layer
        for layer in cache.layers
        if isinstance(layer, DynamicLayer) and layer.is_initialized and layer.keys.numel()
    ]


def crop_attention(cache: Cache, surplus: int) -> None:
    """
    Drop the last `surplus` entries of keys and values; recurrent states stay as they are.

    Args:
        cache ([`~transformers.Cache`]): Changed in place. Sliding layers also fall back to their window.
        surplus (`int`): At least 0.
    """
    for layer in attention_layers(cache):
        _crop_layer(layer, surplus)


def _crop_layer(layer: DynamicLayer, surplus: int) -> None:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        # The host's own method would cut the convolution windows as well.
        base = DynamicSlidingWindowLayer if isinstance(layer, DynamicSlidingWindowLayer) else DynamicLayer
        base.crop(layer, -surplus)
    else:
        layer.crop(-surplus)


def crop_attention_to(cache: Cache, length: int) -> None:
    """Cut keys and values to `length` tokens, also where a forward that was broken off reached some layers only."""
    for layer in attention_layers(cache):
        surplus = layer.get_seq_length() - length
        if surplus > 0:
            _crop_layer(layer, surplus)


def set_past_recording(cache: Cache, record: bool) -> None:
    """Make sliding layers keep what a block pushes out of the window until the next crop, or stop doing so."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = record


def sliding_window_of(layer) -> int | None:
    """The window of a cache layer, `None` for one that keeps everything."""
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None


def set_layer_content(layer, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
    """Replace the content of a dynamic cache layer; `length` is the number of tokens seen, also by a sliding layer."""
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = length


# Modules whose forward hooks a replay may leave out.
_PASSIVE_HOOKS = ("transformers.utils.output_capturing", "transformers_dflash2.target")


def has_global_hooks() -> bool:
    """Whether something runs around the forward of every module of the process."""
    registry = torch.nn.modules.module
    return bool(registry._global_forward_hooks or registry._global_forward_pre_hooks)


def has_active_hooks(module: torch.nn.Module) -> bool:
    """
    Whether something runs around a module's forward that a replayed graph would skip.

    Three kinds of hook do not count. Those with which the host records hidden states stay on a model once they were
    used, and do nothing in a call that does not ask for hidden states. The one with which compressed-tensors unpacks a
    model's weights is gone after the prefill. Taps of this library that belong to a call of another thread listen to
    that thread only.
    """
    if hasattr(module, "_hf_hook"):
        return True
    if any(getattr(hook, "__name__", "") != "ct_decompress_hook" for hook in module._forward_pre_hooks.values()):
        return True
    return any(hook.__module__ not in _PASSIVE_HOOKS for hook in module._forward_hooks.values())


def must_synchronise_ranks(target) -> bool:
    """Whether several processes have to run the same number of forwards (DeepSpeed ZeRO-3, FSDP)."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    if torch.distributed.get_world_size() < 2:
        return False
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    return is_deepspeed_zero3_enabled() or is_fsdp_managed_module(target)


def tensor_parallel_mesh(target):
    """The one-dimensional device mesh over which the host has spread a target's weights, `None` for a whole one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor

    for module in filter(_is_tensor_parallel, target.modules()):
        for parameter in module.parameters(recurse=False):
            if isinstance(parameter, DTensor):
                return parameter.device_mesh
    return None


def _is_tensor_parallel(module: torch.nn.Module) -> bool:
    # The host wraps the forward of what it shards. Weights alone do not tell: data parallelism shards them too.
    forward = vars(module).get("forward")
    return getattr(forward, "__module__", None) == "transformers.distributed.tensor_parallel"


def embedding_rows(weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding matrix, which may be spread over ranks."""
    if type(weight) is torch.nn.Parameter:
        return torch.nn.functional.embedding(token_ids, weight)
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(weight, DTensor):
        return torch.nn.functional.embedding(token_ids, weight)
    everywhere = DTensor.from_local(token_ids, weight.device_mesh, [Replicate()], run_check=False)
    return torch.nn.functional.embedding(everywhere, weight).full_tensor()


def vocabulary_shard(head: torch.nn.Module) -> int | None:
    """
    Token id of this rank's first row of an output head, `None` unless the head's rows are spread over ranks.

    Only a dense linear layer counts, one whose forward the host has wrapped and nobody else: then its scores are rows
    times input. Any other head gathers the scores of the whole vocabulary in its own forward.
    """
    if type(head) is not torch.nn.Linear or hasattr(head, "quantization_scheme") or not _is_tensor_parallel(head):
        return None
    from torch.distributed.tensor import DTensor, Shard

    weight = head.weight
    if not isinstance(weight, DTensor) or weight.placements != (Shard(0),):
        return None
    rows, mesh = weight.shape[0], weight.device_mesh
    # As `torch.chunk` deals them out.
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


__all__ = [
    "CACHE_KEY",
    "CACHE_KEYS",
    "STATIC_CACHE_IMPLEMENTATIONS",
    "attention_layers",
    "block_inputs",
    "cache_states",
    "crop_attention",
    "crop_attention_to",
    "embedding_rows",
    "get_cache",
    "has_active_hooks",
    "has_global_hooks",
    "layer_states",
    "make_output",
    "must_synchronise_ranks",
    "prefill",
    "recurrent_layers",
    "save_states",
    "set_layer_content",
    "set_past_recording",
    "sliding_window_of",
    "tensor_parallel_mesh",
    "unsupported_cache_layer",
    "vocabulary_shard",
]

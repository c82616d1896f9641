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
"""`"block_attention"`: block attention as an attention function of the host.

A model whose attention implementation is `"block_attention"` behaves as with `"sdpa"` until its caller sets row
lengths:

    with use_block_attention(model), block_attention_lengths(lengths):
        model(input_ids, position_ids=..., past_key_values=static_cache)

Inside, the host builds no mask, and every attention layer expects the whole preallocated buffers of its cache as keys
and values, with column `j` holding the token at column `j` of the row, also in sliding layers (the window hides what
is out of reach), and the block just written at columns `lengths .. lengths + block - 1`. The lengths are tensors that
a CUDA graph captures by address; a replay reads their values of that moment.

`softcap` and `s_aux` (sinks) are honoured inside and outside.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .block_attention import attend_visible, block_attention_op, block_attention_reference
from .dispatch import dispatch


__all__ = [
    "ATTENTION_NAME",
    "block_attention_forward",
    "block_attention_lengths",
    "block_attention_mask",
    "current_block_lengths",
    "register_block_attention",
    "unsupported_model_reason",
    "use_block_attention",
]

# The host takes every name with "flash" in it for an implementation of flash attention: it looks for the package when
# the name is set, and some models then prepare other inputs.
ATTENTION_NAME = "block_attention"

# Per thread, so that models may run side by side.
_rows = threading.local()

# Held while a model's configs name this attention function, so that nobody saves that name as the previous one.
_switching = threading.RLock()


@contextlib.contextmanager
def block_attention_lengths(lengths: torch.Tensor, starts: torch.Tensor | None = None) -> Iterator[None]:
    """
    Row lengths for the attention layers of the forward passes run inside.

    Args:
        lengths (`torch.Tensor` of shape `(batch,)`):
            int32 or int64: columns of each row that precede the block.
        starts (`torch.Tensor` of shape `(batch,)`, *optional*):
            int32 or int64: first visible column of each row, where rows are padded on the left.
    """
    if lengths.dim() != 1 or (starts is not None and starts.shape != lengths.shape):
        shapes = tuple(lengths.shape), None if starts is None else tuple(starts.shape)
        raise ValueError(f"lengths and starts have shapes {shapes[0]} and {shapes[1]}; both should be (batch,)")
    previous = current_block_lengths()
    _rows.lengths, _rows.starts = lengths, starts
    try:
        yield
    finally:
        _rows.lengths, _rows.starts = previous


def current_block_lengths() -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`(lengths, starts)` of the innermost [`block_attention_lengths`] of this thread; `(None, None)` outside."""
    return getattr(_rows, "lengths", None), getattr(_rows, "starts", None)


def block_attention_mask(**kwargs) -> torch.Tensor | None:
    """The mask function that goes with [`block_attention_forward`]: none inside a context, that of sdpa outside."""
    lengths, _ = current_block_lengths()
    if lengths is None:
        return sdpa_mask(**kwargs)
    chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
    if kwargs.get("use_vmap") or chunk is not None:
        what = f"attention_chunk_size={chunk}" if chunk is not None else "a mask function of its own"
        raise ValueError(
            f"attn_implementation={ATTENTION_NAME!r} knows causal and sliding-window masks, and the model uses "
            f"{what}; use attn_implementation='sdpa' with it"
        )
    return None


def block_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Attention function of the host's interface.

    Args:
        module (`torch.nn.Module`):
            The attention layer; its `is_causal` counts where the argument is `None`.
        query (`torch.Tensor` of shape `(batch, q_heads, block, head_dim)`):
            Queries.
        key (`torch.Tensor` of shape `(batch, kv_heads, columns, head_dim)`):
            The cache's key buffer, as [`block_attention_lengths`] wants it.
        value (`torch.Tensor` of shape `(batch, kv_heads, columns, head_dim)`):
            The cache's value buffer.
        attention_mask (`torch.Tensor`, *optional*):
            Counts outside a context only; inside it must be `None`, as the mask function returns it.
        dropout (`float`, *optional*, defaults to 0.0):
            Must be 0 inside a context.
        scaling (`float`, *optional*):
            Factor of the logits, `head_dim ** -0.5` by default.
        is_causal (`bool`, *optional*):
            Overrides the layer's.
        sliding_window (`int`, *optional*):
            Window of the layer.
        softcap (`float`, *optional*):
            Cap of the logits.
        s_aux (`torch.Tensor` of shape `(q_heads,)`, *optional*):
            Sink logits.

    Returns:
        The output of shape `(batch, block, q_heads, head_dim)`, and `None` for the weights.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    lengths, starts = current_block_lengths()
    if lengths is None:
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                **kwargs,
            )
        return _masked_attention(query, key, value, attention_mask, scaling, is_causal, softcap, s_aux), None

    if attention_mask is not None or kwargs.get("position_bias") is not None or dropout:
        given = "attention_mask" if attention_mask is not None else "dropout" if dropout else "position_bias"
        raise ValueError(
            f"{given} was given to attention with row lengths, which has no place for it; leave "
            "block_attention_lengths or use attn_implementation='sdpa'"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = s_aux.detach() if s_aux is not None else None
    if torch.compiler.is_compiling():
        output = block_attention_op(
            query, key, value, lengths, scale, is_causal, sliding_window, softcap, sinks, starts
        )
        return output.transpose(1, 2), None
    # Written in the order in which the output projection reads it.
    output = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))
    dispatch(
        "block_attention",
        block_attention_reference,
        query,
        key,
        value,
        lengths,
        scale=scale,
        is_causal=is_causal,
        window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        starts=starts,
        out=output.transpose(1, 2),
    )
    return output, None


def _masked_attention(query, key, value, attention_mask, scaling, is_causal, softcap, sinks) -> torch.Tensor:
    """Attention under the mask of sdpa, for layers with a soft-cap or sinks, which sdpa lacks."""
    queries, columns = query.shape[2], key.shape[2]
    if attention_mask is None:
        visible = torch.ones(1, 1, queries, columns, dtype=torch.bool, device=query.device)
        # Without a mask, several queries are a prefill: they start at column 0, and the rest of a static buffer is
        # unused.
        if is_causal and queries > 1:
            visible = visible.tril()
    else:
        visible = attention_mask[..., :columns]
    if visible.dtype != torch.bool:
        raise ValueError(
            f"attention_mask is {attention_mask.dtype}; attn_implementation={ATTENTION_NAME!r} takes boolean masks"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = attend_visible(query, key, value, visible, scale=scale, softcap=softcap, sinks=sinks)
    return output.transpose(1, 2).contiguous()


def register_block_attention() -> str:
    """Make `attn_implementation="block_attention"` known to the host, as often as you like; returns the name."""
    AttentionInterface.register(ATTENTION_NAME, block_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, block_attention_mask)
    return ATTENTION_NAME


def _text_configs(model: PreTrainedModel) -> list:
    """The config objects that the model's text layers read, each once."""
    text = model.config.get_text_config(decoder=True)
    configs = {id(text): text, id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        # Copies of the text config, as composite models make them; towers of other kinds keep what they have.
        if type(config) is type(text):
            configs[id(config)] = config
    return list(configs.values())


# Layer types of the host that take an attention function, or no attention at all.
_KNOWN_LAYER_TYPES = {"conv", "full_attention", "linear_attention", "mamba", "sliding_attention"}


def _takes_attention_function(model: PreTrainedModel) -> bool:
    if getattr(model, "_supports_attention_backend", False):
        return True
    # Some classes look a function up without saying so. The interface then is a name in the file of their layers.
    modules = {type(module).__module__ for module in model.get_decoder().modules()}
    return any(hasattr(sys.modules[module], "ALL_ATTENTION_FUNCTIONS") for module in modules)


def unsupported_model_reason(model: PreTrainedModel) -> str | None:
    """
    Why a model cannot run with [`block_attention_forward`], or `None` if it can.

    Its layers must take an attention function and must mask in a causal way, with or without a sliding window that
    they pass along.
    """
    name = type(model).__name__
    if not _takes_attention_function(model):
        return f"{name} does not take an attention function"
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attention_chunk_size", None) is not None:
        return f"{name} attends in chunks (attention_chunk_size={config.attention_chunk_size})"
    kinds = set(getattr(config, "layer_types", None) or []) - _KNOWN_LAYER_TYPES
    if kinds:
        return f"{name} has layers whose attention is not known: {', '.join(sorted(kinds))}"
    if not getattr(config, "is_causal", True):
        return f"{name} is not causal"
    # Flash attention gets its window from the layer as well, so a model that supports it passes the window along.
    if getattr(config, "sliding_window", None) is not None and not getattr(model, "_supports_flash_attn", False):
        return f"{name} has sliding windows and does not pass them to its attention function"
    return None


@contextlib.contextmanager
def use_block_attention(model: PreTrainedModel) -> Iterator[None]:
    """
    Let the model's text layers use [`block_attention_forward`] inside, and what they had before afterwards.

    One thread at a time is inside. Another thread that runs the same model meanwhile sees the change and gets what
    `"sdpa"` would give it, so a model that several threads share should have been loaded with `"sdpa"`.
    """
    register_block_attention()
    with _switching:
        # The setter of the public attribute would also reach the configs of other towers.
        previous = [(config, config._attn_implementation_internal) for config in _text_configs(model)]
        for config, _ in previous:
            config._attn_implementation_internal = ATTENTION_NAME
        try:
            yield
        finally:
            for config, implementation in previous:
                config._attn_implementation_internal = implementation

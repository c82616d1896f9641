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
"""Fused stand-ins for modules of a model, for as long as a CUDA graph is recorded.

A decoder layer of the host is some thirty launches around its seven matrix products; at a few rows a launch costs more
than its arithmetic. While the context is open

* RMS norms run as one kernel, and the one behind an attention block takes the residual addition along;
* cosines and sines of the rotary embedding are made by one kernel;
* query and key norms and the rotation of a layer run as one kernel on its joined projections, which also puts keys and
  values into a cache of fixed buffers;
* `silu(gate) * up` runs as one kernel;
* in linear attention, the short convolution with its activation and the norm with its gate run as one kernel each;
* at up to 64 rows, plain linear layers of one input run as one product that streams all of their weights, and what
  follows them at once (`silu(gate) * up`, the output side of a drafter's convolution, the residual addition) is done
  in it; queries, keys and values do so at up to 128 rows, and where they cannot, above 64 rows, are written side by
  side as they are made;
* at up to 64 rows, the narrow product that gives a convolution its coefficients is cut into parts, so that its weights
  arrive from all of the device; the convolution adds them up;
* at up to 64 rows, 4-bit layers of bitsandbytes run as one product that decodes their weights on the way.

Other quantised projections, and wrapped ones, are only ever called, and keep their own forward. A module is replaced
where its class computes what the stand-in computes, which the bytecode of its `forward` tells (and that of the
functions it calls); what the tensors of a call do not allow is left to the class. Kernels round less often than the
host's modules, so half types agree within rounding.

The short convolution is a function of a host file, so its stand-in is seen by every model of that file, in every
thread, for as long as the context is open. It computes the same for all of them, as a replaced module does.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNormGated, causal_conv1d_fn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from . import compat
from .import_utils import unavailable_reason
from .kernels.dispatch import ineligible_reason
from .modeling_dflash2 import DFlash2Attention, DFlash2DecoderLayer, DFlash2GroupedConv


def _same_code(function: Callable, like: Callable) -> bool:
    """Whether two functions do the same to their arguments, as far as their own bytecode goes."""
    if not isinstance(inspect.unwrap(function), FunctionType):
        return False
    code, other = inspect.unwrap(function).__code__, inspect.unwrap(like).__code__
    # A docstring, where there is one, is the first constant.
    constants = [
        [value for value in c.co_consts if value != inspect.unwrap(f).__doc__]
        for f, c in ((function, code), (like, other))
    ]
    return (code.co_code, code.co_names) == (other.co_code, other.co_names) and constants[0] == constants[1]


def _is_untouched(module: nn.Module) -> bool:
    """Whether a module runs the forward of its class."""
    return "forward" not in vars(module)


def is_llama_norm(module: nn.Module) -> bool:
    """Whether a module normalises as Llama does: fp32, rounded, then times the weight."""
    return (
        isinstance(getattr(module, "weight", None), torch.Tensor)
        and hasattr(module, "variance_epsilon")
        and _is_untouched(module)
        and _same_code(type(module).forward, modeling_llama.LlamaRMSNorm.forward)
    )


def _is_gemma_norm(module: nn.Module) -> bool:
    """Whether a module normalises as Gemma does: fp32 times one plus the weight, then rounded."""
    return (
        isinstance(getattr(module, "weight", None), torch.Tensor)
        and hasattr(module, "eps")
        and _is_untouched(module)
        and _same_code(type(module).forward, GemmaRMSNorm.forward)
        and _same_code(getattr(type(module), "_norm", None), GemmaRMSNorm._norm)
    )


def _norm_options(module: nn.Module | None) -> dict[str, Any] | None:
    """How the kernel computes a norm; `None` for a module that is none it knows."""
    if is_llama_norm(module):
        return {"eps": module.variance_epsilon}
    if _is_gemma_norm(module):
        return {"eps": module.eps, "unit_offset": True}
    return None


def _is_gated_norm(module: nn.Module) -> bool:
    return (
        isinstance(getattr(module, "weight", None), torch.Tensor)
        and getattr(module, "activation", None) == "silu"
        and _is_untouched(module)
        and _same_code(type(module).forward, Qwen3_5RMSNormGated.forward)
    )


def _is_gated_silu(module: nn.Module) -> bool:
    return (
        type(getattr(module, "act_fn", None)) in (nn.SiLU, type(ACT2FN["silu"]))
        and _is_untouched(module)
        and _same_code(type(module).forward, modeling_llama.LlamaMLP.forward)
    )


# Rotary classes whose forward is known; transformers 5.17 writes the same in two ways.
_ROTARY_KINDS = (modeling_llama.LlamaRotaryEmbedding, Qwen3RotaryEmbedding)


def _is_rotary(module: nn.Module) -> bool:
    """Whether a module makes position embeddings as Llama does, from frequencies that never change."""
    rope_type = getattr(module, "rope_type", None)
    return (
        isinstance(getattr(module, "inv_freq", None), torch.Tensor)
        # What the decorator of the host's forwards looks for to recompute the frequencies.
        and isinstance(rope_type, str)
        and "dynamic" not in rope_type
        and rope_type != "longrope"
        and _is_untouched(module)
        and any(_same_code(type(module).forward, kind.forward) for kind in _ROTARY_KINDS)
    )


def _is_draft_attention(module: nn.Module) -> bool:
    return (
        isinstance(module, DFlash2Attention)
        and _is_untouched(module)
        and type(module).forward is DFlash2Attention.forward
    )


def _is_draft_layer(module: nn.Module) -> bool:
    """Whether a module is a drafter's layer whose sublayers' stand-ins can take along what follows them."""
    return (
        isinstance(module, DFlash2DecoderLayer)
        and _is_untouched(module)
        and type(module).forward is DFlash2DecoderLayer.forward
        and _is_draft_attention(module.self_attn)
        and _is_gated_silu(module.mlp)
        # What a convolution computes is taken over, not called.
        and all(type(conv) in (DFlash2GroupedConv, type(None)) for conv in (module.attention_conv, module.mlp_conv))
    )


def _rotates_halves(forward: Callable) -> bool:
    """Whether the rotary function that a forward calls is Llama's, on halves of a head."""
    rotate = inspect.unwrap(forward).__globals__.get("apply_rotary_pos_emb")
    if rotate is None or not _same_code(rotate, modeling_llama.apply_rotary_pos_emb):
        return False
    halves = inspect.unwrap(rotate).__globals__["rotate_half"]
    return _same_code(halves, modeling_llama.rotate_half)


def _attend(module: nn.Module, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
    return module.self_attn(hidden_states=hidden_states, **kwargs)[0]


def _attend_or_recur(
    module: nn.Module,
    hidden_states: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    if module.block_type == "linear_attention":
        # By place: the host's name for the cache differs between layers and releases.
        return module.linear_attn(hidden_states, kwargs.pop(compat.CACHE_KEY, None), attention_mask, **kwargs)
    return _attend(
        module,
        hidden_states,
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        position_ids=position_ids,
        **kwargs,
    )


# Decoder layers whose forward is known, and what they run between their two norms.
_LAYER_KINDS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    modeling_llama.LlamaDecoderLayer: _attend,
    Qwen3_5DecoderLayer: _attend_or_recur,
    Qwen3NextDecoderLayer: _attend_or_recur,
}


def _mixer_of(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """What a known decoder layer runs between its norms; `None` for any other module."""
    if _is_untouched(module) and _norm_options(getattr(module, "post_attention_layernorm", None)) is not None:
        for kind, mixer in _LAYER_KINDS.items():
            if _same_code(type(module).forward, kind.forward):
                return mixer
    return None


# Attention classes whose forward is known, and what they pass on as their window.
_ATTENTION_KINDS: dict[type[nn.Module], Callable[[nn.Module], dict[str, Any]]] = {
    Qwen3Attention: lambda module: {"sliding_window": module.sliding_window},
    Qwen2Attention: lambda module: {"sliding_window": module.sliding_window},
    MistralAttention: lambda module: {"sliding_window": getattr(module.config, "sliding_window", None)},
    modeling_llama.LlamaAttention: lambda module: {},
}


def _window_of(module: nn.Module) -> Callable[[nn.Module], dict[str, Any]] | None:
    """How a module of a known attention class tells its window; `None` for any other module."""
    forward = type(module).forward
    if not _is_untouched(module) or not hasattr(module, "q_proj"):
        return None
    for kind, window in _ATTENTION_KINDS.items():
        if _same_code(forward, kind.forward) and _rotates_halves(forward):
            norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
            has_norms = kind is Qwen3Attention
            if len(norms) == (2 if has_norms else 0) and all(map(is_llama_norm, norms)):
                return window
    return None


class _RotaryTables:
    """The kernel's table of cosines and sines, made once for the layers that share position embeddings."""

    def __init__(self):
        # Holds the key's tensor, whose identity is then its own.
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, cos: torch.Tensor, sin: torch.Tensor, batch: int) -> torch.Tensor:
        """`(batch * block, head_dim)` table with a row for each row of a `(batch, block)` block."""
        known = self._tables.get(id(cos))
        if known is None or known[0] is not cos:
            from .kernels.rotary_embedding import cos_sin_table

            table = cos_sin_table(cos, sin).expand(batch, -1, -1).flatten(0, 1)
            known = self._tables[id(cos)] = (cos, table)
        return known[1]


def _fused_norm(module: nn.Module, options: dict[str, Any], hidden_states: torch.Tensor) -> torch.Tensor:
    # Heads may lie behind tokens in memory; rows are normed in the order in which they lie.
    swaps = hidden_states.dim() == 4 and hidden_states.stride(1) < hidden_states.stride(2)
    rows = hidden_states.transpose(1, 2) if swaps else hidden_states
    if ineligible_reason("rms_norm", rows, module.weight, **options) is not None:
        return type(module).forward(module, hidden_states)
    from .kernels import rms_norm_triton

    normed = rms_norm_triton(rows, module.weight, **options)[0]
    return normed.transpose(1, 2) if swaps else normed


def _fused_gated_norm(module: nn.Module, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    arguments, options = (hidden_states, gate, module.weight), {"eps": module.variance_epsilon}
    if ineligible_reason("gated_rms_norm", *arguments, **options) is not None:
        return type(module).forward(module, hidden_states, gate)
    from .kernels import gated_rms_norm_triton

    return gated_rms_norm_triton(*arguments, **options)


def _fused_rotary(module: nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    arguments, options = (position_ids, module.inv_freq), {"scaling": module.attention_scaling, "dtype": x.dtype}
    if ineligible_reason("rotary_embedding", *arguments, **options) is not None:
        return type(module).forward(module, x, position_ids)
    from .kernels import rotary_embedding_triton

    return rotary_embedding_triton(*arguments, **options).chunk(2, dim=-1)


def _weight_of(linear: nn.Module) -> torch.Tensor | None:
    """The weight of a layer that does nothing but multiply with it; `None` for any other module."""
    is_plain = (
        type(linear) is nn.Linear
        and linear.bias is None
        and type(linear.weight) is nn.Parameter
        and (_is_untouched(linear) or getattr(linear.forward, "func", None) in (_dense_linear, _linear_in_parts))
        and not compat.has_active_hooks(linear)
    )
    return linear.weight if is_plain else None


class _Convolution(NamedTuple):
    """The output side of a convolution around a sublayer."""

    module: DFlash2GroupedConv
    dynamic: torch.Tensor


def _finished(
    output: torch.Tensor, residual: torch.Tensor | None = None, convolution: _Convolution | None = None
) -> torch.Tensor:
    """What a layer makes of a sublayer's output."""
    if convolution is not None:
        return convolution.module.finish(output, convolution.dynamic, residual)
    return output if residual is None else residual + output


def _are_wide(*weights: torch.Tensor) -> bool:
    """Whether one product with all of the weights has work for most of their device."""
    from .kernels.skinny_linear import skinny_linear_pays

    return skinny_linear_pays(weights[0].device, sum(weight.shape[0] for weight in weights))


def _product(
    x: torch.Tensor,
    *linears: nn.Module,
    is_gated: bool = False,
    residual: torch.Tensor | None = None,
    convolution: _Convolution | None = None,
) -> torch.Tensor | None:
    """What `skinny_linear` makes of linear layers of one input; `None` where the kernel cannot take them."""
    weights = [_weight_of(linear) for linear in linears]
    if any(weight is None for weight in weights):
        return None
    if residual is not None:
        residual = residual.flatten(0, -2)
    rows, options = x.flatten(0, -2), {"is_gated": is_gated, "residual": residual}
    if convolution is not None:
        # Rows of a batch lie one after another, as those of the input do.
        dynamic = convolution.dynamic.flatten(-4, -3)
        options["convolution"] = (convolution.module.base_kernel[1], dynamic, x.shape[-2])
    if ineligible_reason("skinny_linear", rows, *weights, **options) is not None:
        return None
    from .kernels.skinny_linear import skinny_linear_triton

    if not _are_wide(*weights):
        return None
    return skinny_linear_triton(rows, *weights, **options).view(*x.shape[:-1], -1)


def _dense_linear(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    product = _product(x, linear)
    return nn.Linear.forward(linear, x) if product is None else product


def _linear_in_parts(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """A layer that is narrow for the device: sums in parts of shape `(parts, *x.shape[:-1], out_features)`."""
    from .kernels.skinny_linear import skinny_linear_parts, skinny_linear_triton

    rows, weight = x.flatten(0, -2), _weight_of(linear)
    if weight is not None:
        options = {"parts": skinny_linear_parts(x.device, len(rows), *weight.shape[::-1])}
        if options["parts"] > 1 and ineligible_reason("skinny_linear", rows, weight, **options) is None:
            return skinny_linear_triton(rows, weight, **options).unflatten(1, x.shape[:-1])
    return _dense_linear(linear, x)


def _side_by_side(x: torch.Tensor, *linears: nn.Module) -> torch.Tensor:
    """What linear layers make of one input, as if they were one layer."""
    from .kernels.skinny_linear import MAX_ROWS

    product = _product(x, *linears)
    if product is not None:
        return product
    rows, weights = x.flatten(0, -2), [_weight_of(linear) for linear in linears]
    # With fewer rows the kernel may still take some of them.
    is_few = len(rows) <= MAX_ROWS
    if is_few or torch.is_grad_enabled() or any(weight is None for weight in weights):
        return torch.cat([linear(x) for linear in linears], dim=-1)
    sizes = [weight.shape[0] for weight in weights]
    joined = x.new_empty(len(rows), sum(sizes))
    for weight, part in zip(weights, joined.split(sizes, dim=1), strict=True):
        torch.mm(rows, weight.t(), out=part)
    return joined.view(*x.shape[:-1], -1)


def _is_linear_4bit(module: nn.Module) -> bool:
    """Whether a module is a layer of bitsandbytes that does nothing but multiply with a 4-bit weight."""
    library = getattr(sys.modules.get("bitsandbytes"), "nn", None)
    return (
        type(module) is getattr(library, "Linear4bit", None)
        and module.bias is None
        and _is_untouched(module)
        and not compat.has_active_hooks(module)
    )


def _operands_4bit(linear: nn.Module, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]] | None:
    """What `skinny_linear_4bit` takes of a layer; `None` where its forward sets something up, or casts its input."""
    state = getattr(linear.weight, "quant_state", None)
    if state is None or not linear.compute_type_is_set or linear.compute_dtype not in (None, x.dtype):
        return None
    # Stored for the library's kernels on CPUs, the transposed way, or with scales that it refuses itself.
    is_other = getattr(state, "packing_format_for_cpu", False) or state.shape[-1] != x.shape[-1]
    if is_other or (state.nested and state.state2.blocksize != 256):
        return None
    options = {
        "block_size": state.blocksize,
        "out_features": state.shape[0],
        "nested": (state.state2.code, state.state2.absmax, state.offset) if state.nested else None,
    }
    # The bytes may be declared as numbers of another type, which sharding asks for.
    return (linear.weight.data.view(torch.uint8).view(-1, 1), state.absmax, state.code), options


def _linear_4bit(linear: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """A 4-bit layer, and a residual addition after it."""
    operands, rows = _operands_4bit(linear, x), x.reshape(-1, x.shape[-1])
    # For a single row the library has a product that does not write the weight out.
    if operands is not None and len(rows) > 1:
        tensors, options = operands
        options["residual"] = None if residual is None else residual.reshape(len(rows), -1)
        if ineligible_reason("skinny_linear_4bit", rows, *tensors, **options) is None:
            from .kernels import skinny_linear_4bit_triton

            return skinny_linear_4bit_triton(rows, *tensors, **options).view(*x.shape[:-1], -1)
    return _finished(type(linear).forward(linear, x), residual)


def _linear(
    linear: nn.Module,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    convolution: _Convolution | None = None,
) -> torch.Tensor:
    """A linear layer, and what its layer makes of its output."""
    if convolution is None and getattr(linear.forward, "func", None) is _linear_4bit:
        return linear.forward(x, residual)
    product = _product(x, linear, residual=residual, convolution=convolution)
    return _finished(linear(x), residual, convolution) if product is None else product


def _fused_mlp(
    module: nn.Module,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    convolution: _Convolution | None = None,
) -> torch.Tensor:
    activated = _product(x, module.gate_proj, module.up_proj, is_gated=True)
    if activated is None:
        gate, up = module.gate_proj(x), module.up_proj(x)
        if ineligible_reason("silu_mul", gate, up) is None:
            from .kernels import silu_mul_triton

            activated = silu_mul_triton(gate, up)
        else:
            activated = module.act_fn(gate) * up
    return _linear(module.down_proj, activated, residual, convolution)


def _fused_layer(
    module: nn.Module,
    mixer: Callable,
    options: dict[str, Any],
    has_gated_silu: bool,
    hidden_states: torch.Tensor,
    **kwargs,
) -> torch.Tensor:
    residual, norm = hidden_states, module.post_attention_layernorm
    hidden_states = mixer(module, module.input_layernorm(hidden_states), **kwargs)
    options = {**options, "residual": residual}
    if ineligible_reason("rms_norm", hidden_states, norm.weight, **options) is None:
        from .kernels import rms_norm_triton

        hidden_states, residual = rms_norm_triton(hidden_states, norm.weight, **options)
    else:
        residual = residual + hidden_states
        hidden_states = norm(residual)
    if has_gated_silu:
        return _fused_mlp(module.mlp, hidden_states, residual)
    hidden_states = module.mlp(hidden_states)
    # Some mixtures of experts return what their router said as well.
    return residual + (hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states)


def _block_destination(cache, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Where a target's cache takes a block; `None` where updating it is more than a write into fixed buffers."""
    layers = getattr(cache, "layers", ())
    # Other caches may make their layers as they are first updated.
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    # Only layers of the static tempo tell it.
    return layer.block_destination() if hasattr(layer, "block_destination") else None


def _attention_states(
    module: nn.Module,
    tables: _RotaryTables,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    destination: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    update: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """
    Normed and rotated queries of shape `(batch, heads, block, head_dim)`, and the keys and values that they attend to.

    The block's own are written to `destination` as they are made, or else given to `update`. `None` where the kernel
    cannot take them; nothing has been changed then.
    """
    cos, sin = position_embeddings
    head_dim = module.head_dim
    if cos.shape[-1] != head_dim or cos.dim() != 3:
        return None
    batch, block = hidden_states.shape[:2]
    joined = _side_by_side(hidden_states, module.q_proj, module.k_proj, module.v_proj)
    rows = joined.view(batch * block, -1)
    kv_heads = module.config.num_key_value_heads
    heads = rows.shape[-1] // head_dim - 2 * kv_heads
    weights = [getattr(module, name).weight if hasattr(module, name) else None for name in ("q_norm", "k_norm")]
    sizes = {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "eps": module.q_norm.variance_epsilon if weights[0] is not None else 0.0,
    }
    arguments = (rows, None, *weights, tables.get(cos, sin, batch))
    # Columns of another block would be read as if they were those of this one.
    writes = (
        destination is not None
        and destination[2].shape == (batch, block)
        and ineligible_reason("qk_norm_rope", *arguments, **sizes, write_to=destination) is None
    )
    if not writes and ineligible_reason("qk_norm_rope", *arguments, **sizes) is not None:
        return None
    from .kernels import qk_norm_rope_triton

    qk_norm_rope_triton(*arguments, **sizes, write_to=destination if writes else None)
    parts = joined.unflatten(-1, (-1, head_dim)).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    queries, *states = parts
    return queries, *(destination[:2] if writes else update(*states))


def _fused_attention(
    module: nn.Module,
    tables: _RotaryTables,
    window: dict[str, Any],
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    cache, states = kwargs.get(compat.CACHE_KEY), None
    if cache is not None:
        states = _attention_states(
            module,
            tables,
            hidden_states,
            position_embeddings,
            _block_destination(cache, module.layer_idx),
            lambda keys, values: cache.update(keys, values, module.layer_idx),
        )
    if states is None:
        return type(module).forward(
            module, hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
        )
    queries, keys, values = states
    del kwargs[compat.CACHE_KEY]
    implementation = module.config._attn_implementation
    eager = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
    output, weights = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)(
        module,
        queries,
        keys,
        values,
        attention_mask,
        dropout=0.0 if not module.training else module.attention_dropout,
        scaling=module.scaling,
        **window,
        **kwargs,
    )
    return _linear(module.o_proj, output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def _fused_draft_attention(
    module: DFlash2Attention,
    tables: _RotaryTables,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    context,
    residual: torch.Tensor | None = None,
    convolution: _Convolution | None = None,
) -> torch.Tensor:
    # Only contexts of fixed size attend on their own.
    states = None
    if hasattr(context, "attend"):
        states = _attention_states(
            module,
            tables,
            hidden_states,
            position_embeddings,
            context.block_destination(module.layer_idx, hidden_states.shape[1]),
            partial(context.with_block, module.layer_idx),
        )
    if states is None:
        output = type(module).forward(module, hidden_states, position_embeddings, attention_mask, context)
        return _finished(output, residual, convolution)
    output = context.attend(module, *states)
    return _linear(module.o_proj, output.reshape(*hidden_states.shape[:-1], -1), residual, convolution)


def _fused_draft_layer(
    module: DFlash2DecoderLayer,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    context,
) -> torch.Tensor:
    attend = partial(
        module.self_attn,
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        context=context,
    )
    for norm, conv, sublayer in (
        (module.input_layernorm, module.attention_conv, attend),
        (module.post_attention_layernorm, module.mlp_conv, module.mlp),
    ):
        mixed, convolution = norm(hidden_states), None
        if conv is not None:
            mixed, dynamic = conv.prepare(mixed)
            convolution = _Convolution(conv, dynamic)
        hidden_states = sublayer(mixed, residual=hidden_states, convolution=convolution)
    return hidden_states


def _fused_convolution(
    original: Callable,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs,
) -> torch.Tensor:
    packed = any(kwargs.get(name) is not None for name in ("cu_seqlens", "seq_idx"))
    if packed or ineligible_reason("short_conv", hidden_states, weight, bias, activation=activation) is not None:
        return original(hidden_states, weight, bias, activation=activation, **kwargs)
    from .kernels import short_conv_triton

    return short_conv_triton(hidden_states, weight, bias, activation=activation)


def _convolving_files(models: tuple[nn.Module, ...]) -> list[ModuleType]:
    """Host files of the models' modules that have the short convolution as a function."""
    names = dict.fromkeys(type(module).__module__ for model in models for module in model.modules())
    files = [sys.modules.get(name) for name in names]
    return [file for file in files if _same_code(getattr(file, "causal_conv1d_fn", None), causal_conv1d_fn)]


def _stand_in(module: nn.Module, tables: _RotaryTables, is_coefficients: bool = False) -> tuple[str, Callable] | None:
    """
    What takes the place of a module's forward, and what it is called in counts.

    The coefficients of a convolution are read by a kernel that adds up parts.
    """
    options = _norm_options(module)
    if options is not None:
        return "norm", partial(_fused_norm, module, options)
    if _is_gated_norm(module):
        return "gated_norm", partial(_fused_gated_norm, module)
    if _is_rotary(module):
        return "rotary", partial(_fused_rotary, module)
    if _is_gated_silu(module):
        return "mlp", partial(_fused_mlp, module)
    if _is_linear_4bit(module):
        return "linear_4bit", partial(_linear_4bit, module)
    weight = _weight_of(module)
    if weight is not None and weight.dtype.itemsize == 2:
        return "linear", partial(_linear_in_parts if is_coefficients else _dense_linear, module)
    mixer = _mixer_of(module)
    if mixer is not None:
        options = _norm_options(module.post_attention_layernorm)
        return "layer", partial(_fused_layer, module, mixer, options, _is_gated_silu(module.mlp))
    if _is_draft_layer(module):
        return "draft_layer", partial(_fused_draft_layer, module)
    if _is_draft_attention(module):
        return "attention", partial(_fused_draft_attention, module, tables)
    window = _window_of(module)
    if window is not None:
        return "attention", partial(_fused_attention, module, tables, window(module))
    return None


@contextmanager
def fused_modules(*models: nn.Module) -> Iterator[Counter]:
    """
    Run the models' norms, feed-forwards, rotary embeddings, short convolutions and residual additions through fused
    kernels while the context is open.

    Yields:
        `Counter`: how many modules of each kind were replaced; for `"convolution"`, how many functions.
    """
    tables = _RotaryTables()
    counts: Counter = Counter()
    with ExitStack() as stack:
        if unavailable_reason("triton") is None:
            # Kinds are told from untouched modules, so all are looked at before any is replaced.
            modules = [module for model in models for module in model.modules()]
            # A head is wide enough for the library's product.
            heads = [model.get_output_embeddings() for model in models if isinstance(model, PreTrainedModel)]
            dense_heads = {id(head) for head in heads if type(head) is nn.Linear}
            coefficients = {id(m.kernel_projection) for m in modules if isinstance(m, DFlash2GroupedConv)}
            found = [
                (module, _stand_in(module, tables, id(module) in coefficients))
                for module in modules
                if id(module) not in dense_heads
            ]
            for module, stand_in in found:
                if stand_in is not None:
                    kind, module.forward = stand_in
                    stack.callback(delattr, module, "forward")
                    counts[kind] += 1
            for file in _convolving_files(models):
                original = file.causal_conv1d_fn
                file.causal_conv1d_fn = partial(_fused_convolution, original)
                stack.callback(setattr, file, "causal_conv1d_fn", original)
                counts["convolution"] += 1
        yield counts


def _traceable(module: nn.Module) -> Callable | None:
    """A form of a module's forward that a compiler sees as products of a few rows; `None` where there is none."""
    from .kernels.skinny_linear import skinny_linear_op

    def is_streamed(*weights: torch.Tensor | None) -> bool:
        return all(weight is not None and weight.dtype.itemsize == 2 for weight in weights) and _are_wide(*weights)

    if _is_gated_silu(module):
        gate, up, down = (_weight_of(linear) for linear in (module.gate_proj, module.up_proj, module.down_proj))
        if is_streamed(gate, up) and is_streamed(down):
            return lambda x: skinny_linear_op(skinny_linear_op(x, [gate, up], True), [down])
    weight = _weight_of(module)
    return (lambda x: skinny_linear_op(x, [weight])) if is_streamed(weight) else None


@contextmanager
def skinny_linears(model: nn.Module) -> Iterator[int]:
    """
    Let a model's plain linear layers and gated feed-forwards, unless they are narrow, be traced as products of a few
    rows while the context is open.

    For a compiler, which fuses what is around the products but not the products.

    Yields:
        `int`: how many modules were replaced.
    """
    count = 0
    with ExitStack() as stack:
        if unavailable_reason("triton") is None:
            # All are looked at before any is replaced.
            found = [(module, _traceable(module)) for module in model.modules()]
            for module, forward in found:
                if forward is not None:
                    module.forward = forward
                    stack.callback(delattr, module, "forward")
                    count += 1
        yield count


__all__ = ["fused_modules", "is_llama_norm", "skinny_linears"]

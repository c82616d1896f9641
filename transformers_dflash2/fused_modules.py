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
* query and key norms and the rotary embedding of a layer run as one kernel on its joined projections;
* `silu(gate) * up` runs as one kernel;
* at up to 16 rows, plain linear layers of one input run as one product that streams all of their weights, and what
  follows them at once (`silu(gate) * up`, the residual addition) is done in it.

Quantised and wrapped projections are only ever called, and keep their own forward. A module is replaced where its
class computes what the stand-in computes, which the bytecode of its `forward` tells (and that of the functions it
calls); what the tensors of a call do not allow is left to the class. Kernels round less often than the host's modules,
so half types agree within rounding.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from . import compat
from .import_utils import unavailable_reason
from .kernels.dispatch import ineligible_reason
from .modeling_dflash2 import DFlash2Attention


def _same_code(function: Callable, like: Callable) -> bool:
    """Whether two functions do the same to their arguments, as far as their own bytecode goes."""
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


def _is_gated_silu(module: nn.Module) -> bool:
    return (
        type(getattr(module, "act_fn", None)) in (nn.SiLU, type(ACT2FN["silu"]))
        and _is_untouched(module)
        and _same_code(type(module).forward, modeling_llama.LlamaMLP.forward)
    )


def _is_llama_layer(module: nn.Module) -> bool:
    return (
        is_llama_norm(getattr(module, "post_attention_layernorm", None))
        and _is_untouched(module)
        and _same_code(type(module).forward, modeling_llama.LlamaDecoderLayer.forward)
    )


def _rotates_halves(forward: Callable) -> bool:
    """Whether the rotary function that a forward calls is Llama's, on halves of a head."""
    rotate = inspect.unwrap(forward).__globals__.get("apply_rotary_pos_emb")
    if rotate is None or not _same_code(rotate, modeling_llama.apply_rotary_pos_emb):
        return False
    halves = inspect.unwrap(rotate).__globals__["rotate_half"]
    return _same_code(halves, modeling_llama.rotate_half)


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
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def get(self, cos: torch.Tensor, sin: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`(rows, head_dim)` table and the place of each row of a `(batch, block)` block in it."""
        known = self._tables.get(id(cos))
        if known is None or known[0] is not cos:
            half = cos.shape[-1] // 2
            table = torch.cat([cos[..., :half], sin[..., :half]], dim=-1).expand(batch, -1, -1).flatten(0, 1)
            places = torch.arange(table.shape[0], device=table.device)
            known = self._tables[id(cos)] = (cos, table, places)
        return known[1:]


def _fused_norm(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    options = {"eps": module.variance_epsilon}
    if ineligible_reason("rms_norm", hidden_states, module.weight, **options) is not None:
        return type(module).forward(module, hidden_states)
    from .kernels import rms_norm_triton

    return rms_norm_triton(hidden_states, module.weight, **options)[0]


def _weight_of(linear: nn.Module) -> torch.Tensor | None:
    """The weight of a layer that does nothing but multiply with it; `None` for any other module."""
    is_plain = (
        type(linear) is nn.Linear
        and linear.bias is None
        and type(linear.weight) is nn.Parameter
        and _is_untouched(linear)
        and not compat.has_active_hooks(linear)
    )
    return linear.weight if is_plain else None


def _product(
    x: torch.Tensor, *linears: nn.Module, is_gated: bool = False, residual: torch.Tensor | None = None
) -> torch.Tensor | None:
    """What `skinny_linear` makes of linear layers of one input; `None` where the kernel cannot take them."""
    weights = [_weight_of(linear) for linear in linears]
    if any(weight is None for weight in weights):
        return None
    if residual is not None:
        residual = residual.flatten(0, -2)
    rows, options = x.flatten(0, -2), {"is_gated": is_gated, "residual": residual}
    if ineligible_reason("skinny_linear", rows, *weights, **options) is not None:
        return None
    from .kernels import skinny_linear_triton

    return skinny_linear_triton(rows, *weights, **options).view(*x.shape[:-1], -1)


def _linear(linear: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer, and a residual addition after it."""
    product = _product(x, linear, residual=residual)
    if product is None:
        product = linear(x) if residual is None else residual + linear(x)
    return product


def _fused_mlp(module: nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    activated = _product(x, module.gate_proj, module.up_proj, is_gated=True)
    if activated is None:
        gate, up = module.gate_proj(x), module.up_proj(x)
        if ineligible_reason("silu_mul", gate, up) is None:
            from .kernels import silu_mul_triton

            activated = silu_mul_triton(gate, up)
        else:
            activated = module.act_fn(gate) * up
    return _linear(module.down_proj, activated, residual)


def _fused_layer(module: nn.Module, has_gated_silu: bool, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
    residual, norm = hidden_states, module.post_attention_layernorm
    hidden_states, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **kwargs)
    options = {"eps": norm.variance_epsilon, "residual": residual}
    if ineligible_reason("rms_norm", hidden_states, norm.weight, **options) is None:
        from .kernels import rms_norm_triton

        hidden_states, residual = rms_norm_triton(hidden_states, norm.weight, **options)
    else:
        residual = residual + hidden_states
        hidden_states = norm(residual)
    if has_gated_silu:
        return _fused_mlp(module.mlp, hidden_states, residual)
    return residual + module.mlp(hidden_states)


def _rotated_heads(
    module: nn.Module, tables: _RotaryTables, hidden_states: torch.Tensor, position_embeddings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """
    Normed and rotated queries and keys, and values, each `(batch, heads, block, head_dim)`.

    `None` where the kernel cannot take them; nothing has been changed then.
    """
    cos, sin = position_embeddings
    head_dim = module.head_dim
    if cos.shape[-1] != head_dim or cos.dim() != 3:
        return None
    batch, block = hidden_states.shape[:2]
    projections = [module.q_proj, module.k_proj, module.v_proj]
    joined = _product(hidden_states, *projections)
    if joined is None:
        joined = torch.cat([projection(hidden_states) for projection in projections], dim=-1)
    rows = joined.view(batch * block, -1)
    kv_heads = module.config.num_key_value_heads
    heads = rows.shape[-1] // head_dim - 2 * kv_heads
    weights = [getattr(module, name).weight if hasattr(module, name) else None for name in ("q_norm", "k_norm")]
    sizes = {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "eps": module.q_norm.variance_epsilon if weights[0] is not None else 0.0,
    }
    table, places = tables.get(cos, sin, batch)
    if ineligible_reason("qk_norm_rope", rows, places, *weights, table, **sizes) is not None:
        return None
    from .kernels import qk_norm_rope_triton

    qk_norm_rope_triton(rows, places, *weights, table, **sizes)
    parts = joined.unflatten(-1, (-1, head_dim)).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    return parts


def _fused_attention(
    module: nn.Module,
    tables: _RotaryTables,
    window: dict[str, Any],
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    cache = kwargs.get(compat.CACHE_KEY)
    states = None if cache is None else _rotated_heads(module, tables, hidden_states, position_embeddings)
    if states is None:
        return type(module).forward(
            module, hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **kwargs
        )
    queries, keys, values = states
    keys, values = cache.update(keys, values, module.layer_idx)
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
) -> torch.Tensor:
    # Only contexts of fixed size attend on their own.
    states = None
    if hasattr(context, "attend"):
        states = _rotated_heads(module, tables, hidden_states, position_embeddings)
    if states is None:
        return type(module).forward(module, hidden_states, position_embeddings, attention_mask, context)
    queries, keys, values = states
    keys, values = context.with_block(module.layer_idx, keys, values)
    output = context.attend(module, queries, keys, values)
    return _linear(module.o_proj, output.reshape(*hidden_states.shape[:-1], -1))


def _stand_in(module: nn.Module, tables: _RotaryTables) -> tuple[str, Callable] | None:
    """What takes a module's place, and what it is called in counts."""
    if is_llama_norm(module):
        return "norm", partial(_fused_norm, module)
    if _is_gated_silu(module):
        return "mlp", partial(_fused_mlp, module)
    if _is_llama_layer(module):
        return "layer", partial(_fused_layer, module, _is_gated_silu(module.mlp))
    if isinstance(module, DFlash2Attention) and _is_untouched(module):
        return "attention", partial(_fused_draft_attention, module, tables)
    window = _window_of(module)
    if window is not None:
        return "attention", partial(_fused_attention, module, tables, window(module))
    return None


@contextmanager
def fused_modules(*models: nn.Module) -> Iterator[Counter]:
    """
    Run the models' norms, feed-forwards, rotary embeddings and residual additions through fused kernels while the
    context is open.

    Yields:
        `Counter`: how many modules of each kind were replaced.
    """
    tables = _RotaryTables()
    replaced: list[nn.Module] = []
    counts: Counter = Counter()
    if unavailable_reason("triton") is None:
        # Kinds are told from untouched modules, so all are looked at before any is replaced.
        found = [(module, _stand_in(module, tables)) for model in models for module in model.modules()]
    else:
        found = []
    try:
        for module, stand_in in found:
            if stand_in is not None:
                kind, module.forward = stand_in
                replaced.append(module)
                counts[kind] += 1
        yield counts
    finally:
        for module in replaced:
            del module.forward


__all__ = ["fused_modules", "is_llama_norm"]

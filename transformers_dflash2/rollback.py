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
"""Recurrent states of hybrid targets after a partly accepted block.

Keys and values of rejected tokens are forgotten by cutting them off. A recurrent state has no tokens in it to cut, and
the host overwrites it in every forward. So while a block is verified, the states are *held*: the cache layers answer
the target's updates as always but keep what they had, and what the block would have written is recorded instead:

* per short convolution, its window followed by the block's inputs. The window after `n` tokens is a slice of that;
* per recurrence, the block's keys, values, decays and gates ([`RecurrenceInputs`]), taken where the target calls the
  host's recurrence function. The state after `n` tokens is the recurrence alone, run over the first `n` of them.
  Where the library's kernel can take the call it answers it too: the host's functions are made for prompts.

[`StateReplay.commit`] then moves every row to its own count of kept tokens. No projection is computed twice, and
nothing needs undoing when a round is abandoned.

Targets whose recurrence is written out inside a layer, where it cannot be recorded, are rolled back by
[`SecondPass`]: all states are put back and the kept tokens run through the target once more.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from . import compat
from .functional_recurrence import RecurrenceInputs, replay_recurrence, window_after


try:
    from transformers_dflash2.kernels.dispatch import dispatch
except ImportError:
    # The code of a drafter that was loaded from the Hub on its own: the host's functions run as they are.
    dispatch = None


# Added to the squared length of keys and queries by the host's delta rules.
_NORM_EPS = 1e-6


@dataclass
class _BlockCall:
    """A call of a recurrence function of the host, as arguments of `functional_recurrence.run_recurrence`."""

    state: torch.Tensor | None
    queries: torch.Tensor
    inputs: RecurrenceInputs
    options: dict[str, Any]
    # Whether the host's function returns a state, or `None`, beside the outputs.
    returns_pair: bool = True


def _delta_rule_call(arguments: dict[str, Any]) -> _BlockCall:
    take = arguments.pop
    queries, log_decay = take("query"), take("g")
    if log_decay.dim() == 3:  # one decay per head, otherwise one per key channel
        log_decay = log_decay[..., None]
    norm_eps = _NORM_EPS if take("use_qk_l2norm_in_kernel") else None
    inputs = RecurrenceInputs(
        take("key"), take("value"), log_decay, take("beta"), is_delta_rule=True, norm_eps=norm_eps
    )
    options = {"scale": queries.shape[-1] ** -0.5, "wants_state": take("output_final_state")}
    return _BlockCall(take("initial_state"), queries, inputs, options)


def _mamba2_call(arguments: dict[str, Any]) -> _BlockCall:
    take = arguments.pop
    step, bias = take("dt"), take("dt_bias")
    if bias is not None:
        step = step + bias.to(step.dtype)
    if take("dt_softplus"):
        step = torch.nn.functional.softplus(step)
    low, high = take("dt_limit")
    step = step.clamp(min=low, max=high)
    log_decay = (take("A").float() * step.float())[..., None]
    # The host's state is `(heads, value channels, key channels)` here, and its outputs stay in fp32.
    inputs = RecurrenceInputs(take("B"), take("hidden_states"), log_decay, step, is_transposed=True)
    options = {"skip": take("D"), "output_dtype": torch.float32}
    return _BlockCall(take("initial_states"), take("C"), inputs, options, returns_pair=take("return_final_states"))


# The host's recurrence functions over several tokens, by name, and what takes the arguments it knows out of a call.
_RECURRENCES: dict[str, Callable[[dict[str, Any]], _BlockCall]] = {
    "chunk_kimi_delta_attention": _delta_rule_call,
    "mamba2_chunk_scan": _mamba2_call,
    "torch_chunk_gated_delta_rule": _delta_rule_call,
}

_signature = functools.lru_cache(inspect.signature)


class _Watch:
    """
    Stands in for a recurrence function of a host module while blocks are verified: notes what it is called with, and
    runs the block in one kernel where that is possible.

    Several threads may verify at once; the function is put back when the last one is done. Calls of other threads pass
    through.
    """

    _lock = threading.Lock()
    _installed: dict[tuple[str, str], list] = {}  # (module, function) -> [original, users]
    _local = threading.local()

    @classmethod
    @contextmanager
    def over(cls, modules: frozenset[str]) -> Iterator[None]:
        """Watch the recurrence functions of these host modules, for this thread."""
        targets = [(module, name) for module in modules for name in _RECURRENCES if hasattr(sys.modules[module], name)]
        with ExitStack() as stack:
            for module, name in targets:
                stack.callback(cls._remove, module, name)
                cls._install(module, name)
            stack.callback(setattr, cls._local, "is_watching", False)
            cls._local.is_watching, cls._local.last = True, None
            yield

    @classmethod
    def take(cls) -> RecurrenceInputs | None:
        """Inputs of this thread's last call of a watched function, once."""
        last, cls._local.last = getattr(cls._local, "last", None), None
        return last

    @classmethod
    def _install(cls, module: str, name: str) -> None:
        with cls._lock:
            entry = cls._installed.setdefault((module, name), [None, 0])
            entry[1] += 1
            if entry[1] > 1:
                return
            original = entry[0] = getattr(sys.modules[module], name)

            @functools.wraps(original)
            def watched(*args, **kwargs):
                if not getattr(cls._local, "is_watching", False):
                    return original(*args, **kwargs)
                return cls._run(original, _RECURRENCES[name], args, kwargs)

            setattr(sys.modules[module], name, watched)

    @classmethod
    def _run(cls, original: Callable, read: Callable[[dict[str, Any]], _BlockCall], args: tuple, kwargs: dict):
        bound = _signature(original).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {**bound.arguments.pop("kwargs", {}), **bound.arguments}
        call = read(arguments)
        cls._local.last = call.inputs
        # What remains are flags of the target's forward, and how to cut chunks. A tensor says more: which sequences
        # are packed into a row, for one.
        if (
            dispatch is None
            or not call.returns_pair
            or any(isinstance(rest, torch.Tensor) for rest in arguments.values())
        ):
            return original(*args, **kwargs)

        def run_original(*_, **__):
            return original(*args, **kwargs)

        return dispatch("block_recurrence", run_original, call.state, call.queries, call.inputs, **call.options)

    @classmethod
    def _remove(cls, module: str, name: str) -> None:
        with cls._lock:
            entry = cls._installed.get((module, name))
            if entry is None:
                return
            entry[1] -= 1
            if entry[1] == 0:
                setattr(sys.modules[module], name, entry[0])
                del cls._installed[module, name]


def watch_recurrences(modules: frozenset[str]):
    """
    Context in which calls of the host's recurrence functions are noted, for this thread.

    Args:
        modules (`frozenset[str]`): What [`host_modules`] says of the target.
    """
    return _Watch.over(modules)


def take_recurrence_inputs(layer) -> RecurrenceInputs:
    """
    What the recurrence that has just given `layer` its new state was called with.

    Raises:
        `RuntimeError`: It is none that is watched.
    """
    inputs = _Watch.take()
    if inputs is None:
        raise RuntimeError(
            f"A {type(layer).__name__} was given a new state by a recurrence that is not watched; its rejected tokens "
            "could not be taken back. Generate without assistant_model, and please report the model."
        )
    return inputs


@dataclass
class _Held:
    """What a block would have written to one cache layer, by the host's index of the state within the layer."""

    conv_inputs: dict[int, torch.Tensor] = field(default_factory=dict)  # [batch, channels, window + block]
    recurrences: dict[int, RecurrenceInputs] = field(default_factory=dict)
    # States after the whole block.
    final_states: dict[int, torch.Tensor] = field(default_factory=dict)
    # What the layer held before. Only for blocks of one token, which host functions write in place.
    before: list[torch.Tensor] | None = None


class StateReplay:
    """
    Holds the recurrent layers of a cache during a block and moves them to what was kept of it.

    Args:
        layers (`list`): The recurrent layers of a cache that the prefill has filled.
        modules (`frozenset[str]`): What [`host_modules`] says of the target.
    """

    needs_even_rows = False

    def __init__(self, layers: list, modules: frozenset[str]):
        self.layers, self._modules = layers, modules
        self._held: list[_Held] = []
        # Tokens of the block that is held; 0 when none is.
        self.block = 0

    @contextmanager
    def hold(self, block: int) -> Iterator[None]:
        """Keep the states as they are while the target runs over `block` tokens."""
        self._held, self.block = [_Held() for _ in self.layers], block
        if block == 1:
            for layer, held in zip(self.layers, self._held, strict=True):
                held.before = [state.clone() for state in compat.layer_states(layer)]
        with ExitStack() as stack:
            for layer, held in zip(self.layers, self._held, strict=True):
                stack.enter_context(_holding(layer, held))
            stack.enter_context(watch_recurrences(self._modules))
            yield

    @torch.no_grad()
    def commit(self, kept: list[int]) -> None:
        """
        Move every row's states behind the first `kept[row]` tokens of the block.

        Args:
            kept (`list[int]` of length `batch`): Tokens to keep per row; 0 leaves a row as it was.
        """
        held_layers, self._held, block, self.block = self._held, [], self.block, 0
        if not held_layers:
            return
        counts: torch.Tensor | None = None
        for layer, held in zip(self.layers, held_layers, strict=True):
            if counts is None or counts.device != layer.device:
                counts = torch.tensor(kept, device=layer.device)
            if held.before is not None:
                for state, before in zip(compat.layer_states(layer), held.before, strict=True):
                    _copy_rows(state, before, counts == 0)
            for index, inputs in held.conv_inputs.items():
                state = layer.conv_states[index]
                state.copy_(window_after(inputs, counts, state.shape[-1]))
            for index, final in held.final_states.items():
                state = layer.recurrent_states[index]
                inputs = held.recurrences.get(index)
                if inputs is None or min(kept) == block:
                    # A block of one token, or one that every row kept whole.
                    _copy_rows(state, final, counts > 0)
                else:
                    state.copy_(replay_recurrence(state, inputs, counts))


def _copy_rows(state: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    """Overwrite the rows that `rows`, `(batch,)`, names."""
    state.copy_(torch.where(rows.view(-1, *[1] * (state.dim() - 1)), source.to(state.dtype), state))


@contextmanager
def _holding(layer, held: _Held) -> Iterator[None]:
    """Let a cache layer answer updates without storing them."""

    def update_conv_state(conv_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        held.conv_inputs[state_idx] = torch.cat([layer.conv_states[state_idx], conv_states], dim=-1)
        return held.conv_inputs[state_idx]

    def update_recurrent_state(recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        held.final_states[state_idx] = recurrent_states
        if held.before is None:
            held.recurrences[state_idx] = take_recurrence_inputs(layer)
        return recurrent_states

    layer.update_conv_state, layer.update_recurrent_state = update_conv_state, update_recurrent_state
    try:
        yield
    finally:
        del layer.update_conv_state, layer.update_recurrent_state


class SecondPass:
    """
    Puts all states back after a block and runs the kept tokens through the target again.

    Rows have to keep equal counts, so a batch advances by the smallest accepted one.

    Args:
        cache ([`~transformers.Cache`]): The target's cache, filled by the prefill.
    """

    needs_even_rows = True

    def __init__(self, cache):
        self._cache = cache
        self._restore: Callable[[], None] | None = None

    @contextmanager
    def hold(self, block: int) -> Iterator[None]:
        """Remember the states before the target runs."""
        self._restore = compat.save_states(self._cache)
        yield

    def commit(self, kept: list[int]) -> None:
        """The block has been kept as far as the states have it."""
        self._restore = None

    def abandon(self) -> None:
        """Put the states back as they were before the block."""
        if self._restore is not None:
            self._restore()
            self._restore = None


def rollback_reason(target, cache) -> str | None:
    """Why a target's recurrent state cannot be rolled back, or `None` if it can, or if there is none."""
    if getattr(target, "_is_stateful", False) and (cache is None or not compat.recurrent_layers(cache)):
        return f"{type(target).__name__} keeps a recurrent state outside of its cache"
    return None


def make_rollback(target, cache) -> StateReplay | SecondPass | None:
    """
    What takes a block's rejected tokens out of a filled cache's recurrent states; `None` where there are none.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target model.
        cache ([`~transformers.Cache`]): Its cache after the prefill.
    """
    states = compat.cache_states(cache)
    if not states:
        return None
    layers = compat.recurrent_layers(cache)
    if sum(len(compat.layer_states(layer)) for layer in layers) < len(states):
        return SecondPass(cache)
    modules = host_modules(target)
    convolutions_only = not any(state is not None for layer in layers for state in layer.recurrent_states.values())
    if convolutions_only or any(hasattr(sys.modules[module], name) for module in modules for name in _RECURRENCES):
        return StateReplay(layers, modules)
    return SecondPass(cache)


def host_modules(target) -> frozenset[str]:
    """Python modules that define the target's layers."""
    return frozenset(type(module).__module__ for module in target.get_decoder().layers.modules())


__all__ = [
    "SecondPass",
    "StateReplay",
    "host_modules",
    "make_rollback",
    "rollback_reason",
    "take_recurrence_inputs",
    "watch_recurrences",
]

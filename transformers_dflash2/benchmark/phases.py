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
"""Where the time of a round goes.

The static tempo is measured from within a call: a decoding object of the tempo's own class stops before its first
round, plays each phase by itself on the buffers as they are, and then goes on. On CUDA every reading is that of a
replayed graph. `round` is all phases in one graph, `plain step` one token of the target through the same buffers (not
compiled), and the parts of `draft` that only its family has are read once more by themselves.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from .. import compat
from ..functional_dflash2 import top_candidates, transform_unary
from ..kernels.attention_interface import block_attention_lengths, use_block_attention
from ..kernels.top_k import select_top_k
from ..modeling_dspark import DSparkDraftModel
from ..static_buffers import StaticRecurrentLayer, StaticTargetLayer
from ..static_decoding import StaticDecoding
from ..target import FeatureTap
from .contestants import Workload
from .measure import seconds_replayed


class _MixedStepLayer(LinearAttentionLayer, StaticTargetLayer):
    """A layer that holds states beside its keys and values, for steps of one token."""

    def __init__(self, columns: torch.Tensor, layer):
        LinearAttentionLayer.__init__(self, number_of_states=layer.number_of_states)
        StaticTargetLayer.__init__(self, columns, layer.keys, layer.values)


def _step_layer(columns: torch.Tensor, layer):
    """
    A layer of the host's kind for steps of one token: it shares keys and values with a round's layer, and moves a copy
    of its states in place.
    """
    if not isinstance(layer, StaticRecurrentLayer):
        return StaticTargetLayer(columns, layer.keys, layer.values)
    is_mixed = isinstance(layer, StaticTargetLayer)
    step = _MixedStepLayer(columns, layer) if is_mixed else LinearAttentionLayer(layer.number_of_states)
    # A new layer takes what it gets first for that of a prompt, and copies it.
    for index, state in layer.conv_states.items():
        if state is not None:
            step.update_conv_state(state, state_idx=index)
    for index, state in layer.recurrent_states.items():
        if state is not None:
            step.update_recurrent_state(state, state_idx=index)
    step.has_previous_state = dict(layer.has_previous_state)
    return step


class _PhaseProbe(StaticDecoding):
    """A static call that measures its phases before its first round."""

    def __init__(self, *args, repeats: int, kernels: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self._repeats, self._wants_kernels = repeats, kernels
        self.seconds: dict[str, float] = {}
        self.kernels: list[dict[str, Any]] = []

    def _round(self, tap: FeatureTap) -> None:
        if not self.seconds:
            self._measure(tap)
        super()._round(tap)

    def _measure(self, tap: FeatureTap) -> None:
        round_, phases = self.static_round, self.phases(tap)
        state = (round_.lengths, round_.counts, round_.anchors, round_.context.lengths)
        saved = [tensor.clone() for tensor in state]

        def whole_round():
            # Nothing is committed, so that every repetition finds the same lengths.
            round_.counts.zero_()
            for phase in phases.values():
                phase()

        with self.recording(phases):
            # A commit moves what a verified block has left behind.
            whole_round()
            calls = {**phases, "round": whole_round, **self._parts(phases)}
            if self.compile_options is None:
                calls["plain step"] = self._plain_step()
            for name, call in calls.items():
                round_.counts.zero_()
                self.seconds[name] = seconds_replayed(call, self.device, repeats=self._repeats)
            if self._wants_kernels:
                self.kernels = _kernels(whole_round)
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)

    def _draft_without_convolution(self, phases: dict[str, Callable[[], Any]]) -> None:
        names = ("attention_conv", "mlp_conv")
        saved = [(layer, name, getattr(layer, name)) for layer in self.draft.layers for name in names]
        try:
            for layer, name, _ in saved:
                setattr(layer, name, None)
            phases["draft"]()
        finally:
            for layer, name, conv in saved:
                setattr(layer, name, conv)

    def _parts(self, phases: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
        """What drafting has besides attention and feed-forward, on inputs of the right shape."""
        round_, draft = self.static_round, self.draft
        shape = (round_.rows, round_.block, draft.config.hidden_size)
        hidden = torch.randn(shape, device=self.device, dtype=draft.dtype)
        parts: dict[str, Callable[[], Any]] = {}
        if any(conv is not None for layer in draft.layers for conv in (layer.attention_conv, layer.mlp_conv)):
            # Half of a convolution is done in other kernels: what it takes is what its absence saves.
            parts["draft: without convolution"] = lambda: self._draft_without_convolution(phases)
        if isinstance(draft, DSparkDraftModel):
            return {**parts, "draft: markov": self._markov(hidden[:, 1:])}
        return {**parts, **self._selection(hidden[:, 1:])}

    def _selection(self, hidden: torch.Tensor) -> dict[str, Callable[[], Any]]:
        round_, selector = self.static_round, self.draft.candidate_selector
        if selector is None:
            return {}
        logits = self.adapter.logits(hidden, self.session.target_dtype)
        top_k = self.draft.config.selector_top_k
        unary, ids = top_candidates(logits, top_k=top_k)
        arguments = (unary, ids, round_.anchors, round_.draft_noise, round_.temperatures, round_.greedy_mask)
        return {
            "draft: top-k": lambda: select_top_k(logits, top_k),
            "draft: selector": lambda: selector.walk(hidden, *arguments),
        }

    def _markov(self, hidden: torch.Tensor) -> Callable[[], Any]:
        round_, config = self.static_round, self.draft.config
        ids = self.draft.target_ids(self.adapter.candidate_limit)
        base = transform_unary(
            self.adapter.logits(hidden, self.session.target_dtype)[..., : ids.numel()],
            multiplier=config.output_multiplier,
            softcap=config.final_logit_softcapping,
        )
        arguments = (ids.expand(base.shape), round_.anchors, round_.draft_noise, round_.temperatures)
        return lambda: self.draft.markov_head(hidden, base, *arguments, round_.greedy_mask)

    def _plain_step(self) -> Callable[[], torch.Tensor]:
        """One token of the target behind the anchors; returns its scores."""
        round_ = self.static_round
        columns = round_.lengths[:, None].clone()
        kwargs = {**self._verify_kwargs}
        kwargs[compat.CACHE_KEY] = Cache(layers=[_step_layer(columns, layer) for layer in round_.cache.layers])
        kwargs["position_ids"] = round_.position_base + columns
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = 1
        inputs = compat.block_inputs(self.target, round_.anchors[:, None], kwargs)

        def step():
            with use_block_attention(self.target), block_attention_lengths(round_.lengths):
                logits = self.target(**inputs, return_dict=True).logits
            logits.argmax(dim=-1)
            return logits

        return step


def static_phases(
    target, draft, workload: Workload, *, compile_config=None, repeats: int = 20, kernels: bool = False
) -> dict[str, Any]:
    """
    Seconds of the phases of one static round of a workload.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        draft ([`DFlash2DraftModel`]): Its drafter.
        workload ([`Workload`]): The first batch of it is used.
        compile_config ([`~transformers.CompileConfig`], *optional*): Compiles the target's forward.
        repeats (`int`, *optional*, defaults to 20): Readings per phase; the median counts.
        kernels (`bool`, *optional*, defaults to `False`): Whether to list the kernels of a round, on CUDA.

    Returns:
        `dict`: `seconds` by phase, and `kernels`.
    """
    probes = []

    def decode(
        model, input_ids, logits_processor=None, stopping_criteria=None, generation_config=None, **model_kwargs
    ):
        probe = _PhaseProbe(
            model,
            draft,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            num_assistant_tokens=workload.slots,
            streamer=None,
            model_kwargs=model_kwargs,
            compile_config=compile_config,
            repeats=repeats,
            kernels=kernels,
        )
        probes.append(probe)
        return probe.run()

    options = {"max_new_tokens": workload.new_tokens, "custom_generate": decode, **workload.sampling}
    target.generate(**workload.inputs[0], **options)
    return {"seconds": probes[0].seconds, "kernels": probes[0].kernels}


def _kernels(call: Callable[[], None], *, rounds: int = 10, shown: int = 40) -> list[dict[str, Any]]:
    """Microseconds and launches per round of the kernels that take longest, under the profiler, without a graph."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: event.self_device_time_total, reverse=True)
    return [
        {
            "name": event.key,
            "microseconds": event.self_device_time_total / rounds,
            "launches": event.count / rounds,
        }
        for event in events[:shown]
    ]


def dynamic_phases(target, draft, workload: Workload) -> dict[str, float]:
    """Mean seconds of a round of the dynamic tempo by phase; each phase waits for the device."""
    previous = os.environ.get("TRANSFORMERS_DFLASH2_TIMING")
    os.environ["TRANSFORMERS_DFLASH2_TIMING"] = "1"
    slots = {} if workload.slots is None else {"num_assistant_tokens": workload.slots}
    try:
        target.generate(
            **workload.inputs[0],
            max_new_tokens=workload.new_tokens,
            assistant_model=draft,
            cache_implementation="dynamic",
            **workload.sampling,
            **slots,
        )
    finally:
        if previous is None:
            del os.environ["TRANSFORMERS_DFLASH2_TIMING"]
        else:
            os.environ["TRANSFORMERS_DFLASH2_TIMING"] = previous
    passes = max(draft.last_stats.target_passes - 1, 1)
    return {name: spent / passes for name, spent in draft.last_stats.phase_seconds.items() if name != "prefill"}


__all__ = ["dynamic_phases", "static_phases"]

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
"""The static tempo: the same loop on fixed buffers, captured in a CUDA graph.

The target's prefill runs as in the dynamic tempo. Its keys and values then move into preallocated buffers, packed to
the left of each row, and every round is one call of a fixed body:

1. commit the last round: add each row's kept count to its length, and its kept features to the drafter's context;
2. draft a block behind the anchors;
3. run `[anchor, drafted tokens]` through the target, whose layers write at each row's own length.

Rejected entries stay in the buffers behind a row's length, where nothing reads them, and are overwritten by the next
block. On a CUDA device the body is captured once per combination of target, drafter, rows, capacity and block, and
replayed by later calls too; elsewhere it runs as it is. Accepting, processors, stopping rules and streaming are the
loop's own (`generation.py`), on the logits that the body leaves in its buffers, with one read of device memory per
round.
"""

import logging
import math
import threading
import weakref
from collections import OrderedDict
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from . import compat
from .candidate_generator import DraftSession
from .functional_dflash2 import accept_greedy
from .fused_modules import fused_norms
from .generation import SpeculativeDecoding, VerifiedBlock
from .graph_pieces import PiecewiseGraph, record_on_cuda
from .kernels.attention_interface import block_attention_lengths, unsupported_model_reason, use_block_attention
from .kernels.block_attention import block_attention_reference
from .kernels.dispatch import dispatch
from .modeling_dflash2 import DFlash2DraftModel, DFlash2Proposal
from .target import FeatureTap, TargetAdapter


logger = logging.getLogger("transformers_dflash2")

# Columns of the smallest buffer; larger ones double.
MIN_CAPACITY = 512
# Tensors among the model inputs that a round computes on its own or needs for the prefill only.
_STAGED_MODEL_INPUTS = ("attention_mask", "inputs_embeds", "position_ids")

# Captured rounds kept per target; the least recently used one goes first.
MAX_ROUNDS_PER_TARGET = 4


def _write_columns(columns: torch.Tensor, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write states of shape `(batch, kv_heads, entries, head_dim)` into buffers, at `(batch, entries)` columns."""
    index = columns[:, None, :, None]
    for buffer, states in pairs:
        buffer.scatter_(2, index.expand(-1, states.shape[1], -1, states.shape[3]), states)


class StaticTargetLayer(CacheLayerMixin):
    """Preallocated keys and values of one target layer; a block is written at each row's own length."""

    is_compileable = False
    is_sliding = False

    def __init__(self, columns: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.columns = columns
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.device, self.dtype = keys.device, keys.dtype

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to do: the buffers are there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write a block of shape `(batch, kv_heads, block, head_dim)`; returns the whole buffers."""
        _write_columns(self.columns, (self.keys, key_states), (self.values, value_states))
        return self.keys, self.values

    def get_mask_sizes(self, *args, **kwargs) -> tuple[int, int]:
        """Columns and offset; the attention function masks by length on its own."""
        return self.keys.shape[-2], 0

    def get_seq_length(self, *args, **kwargs) -> int:
        """Lengths differ from row to row and live on the device; positions are passed to the model explicitly."""
        return 0

    def get_max_length(self, *args, **kwargs) -> int:
        """Columns of the buffer."""
        return self.keys.shape[-2]

    get_max_cache_shape = get_max_length


class StaticContext:
    """
    The drafter's context in preallocated buffers; stands in for `DFlash2ContextCache` in a fixed body.

    Args:
        draft ([`DFlash2DraftModel`]): The drafter.
        batch_size (`int`): Rows.
        capacity (`int`): Committed entries per row, plus the longest block.
    """

    def __init__(self, draft: DFlash2DraftModel, *, batch_size: int, capacity: int):
        config = draft.config
        # One more column takes what must not be kept.
        shape = (batch_size, config.num_key_value_heads, capacity + 1, config.head_dim)
        self._discard = capacity
        options = {"device": draft.device, "dtype": draft.dtype}
        self.keys = [torch.zeros(shape, **options) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, **options) for _ in range(config.num_hidden_layers)]
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=draft.device)
        self._columns: torch.Tensor | None = None

    def begin_append(self, positions: torch.Tensor, counts: torch.Tensor) -> None:
        """As [`DFlash2ContextCache.begin_append`], with `counts` on the device."""
        index = torch.arange(positions.shape[1], device=positions.device)
        columns = self.lengths[:, None] + index
        self._columns = torch.where(index < counts[:, None], columns, self._discard)
        self.lengths += counts

    def append(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As [`DFlash2ContextCache.append`]."""
        _write_columns(self._columns, (self.keys[layer_idx], keys), (self.values[layer_idx], values))

    def with_block(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor):
        """Write the block behind each row's context; returns the whole buffers."""
        columns = self.lengths[:, None] + torch.arange(keys.shape[2], device=keys.device)
        _write_columns(columns, (self.keys[layer_idx], keys), (self.values[layer_idx], values))
        return self.keys[layer_idx], self.values[layer_idx]

    def block_mask(self, *args, **kwargs) -> None:
        """None: [`attend`] masks by length."""

    def attend(self, module, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention of a block over its row's context and itself; returns `(batch, block, heads, head_dim)`."""
        output = dispatch(
            "block_attention",
            block_attention_reference,
            queries,
            keys,
            values,
            self.lengths,
            scale=module.scaling,
            is_causal=module.block_is_causal,
            window=module.sliding_window,
        )
        return output.transpose(1, 2)


class StaticRound:
    """
    Buffers and, on CUDA, the captured graph of one round.

    Args:
        adapter ([`TargetAdapter`]): The target as its drafter sees it.
        draft ([`DFlash2DraftModel`]): The drafter.
        prefilled ([`~transformers.Cache`]): The target's cache after the prefill; tells shapes and dtypes.
        batch_size (`int`): Rows.
        capacity (`int`): Columns of the buffers.
        slots (`int`): Tokens drafted per round.
        features (`list[torch.Tensor]`): Features of the prefill; tell shapes and dtypes.
        device (`torch.device`): Where the rows' ids live.
    """

    def __init__(self, adapter, draft, prefilled, *, batch_size, capacity, slots, features, device):
        self.capacity, self.slots, self.block = capacity, slots, slots + 1
        self.in_use = False
        self.graph: PiecewiseGraph | None = None
        # Why the body could not be captured; it runs launch by launch then.
        self.capture_failure: str | None = None
        long = {"dtype": torch.long, "device": device}
        self.lengths = torch.zeros(batch_size, **long)
        self.counts = torch.zeros(batch_size, **long)
        self.anchors = torch.zeros(batch_size, **long)
        self.temperatures = torch.ones(batch_size, device=draft.device)
        self.greedy_mask = torch.ones(batch_size, dtype=torch.bool, device=draft.device)
        self.columns = torch.zeros(batch_size, self.block, **long)
        self.positions: torch.Tensor | None = None
        self.position_base: torch.Tensor | None = None
        self.context = StaticContext(draft, batch_size=batch_size, capacity=capacity)
        width = sum(tap.shape[-1] for tap in features)
        self.features = torch.zeros(batch_size, self.block, width, device=draft.device, dtype=draft.dtype)
        self.feature_dtype = features[0].dtype
        self.cache = Cache(layers=[self._layer(layer) for layer in prefilled.layers])
        # What the body leaves behind.
        self.proposal: DFlash2Proposal | None = None
        self.logits: torch.Tensor | None = None
        self.greedy_result: torch.Tensor | None = None

    def _layer(self, layer) -> StaticTargetLayer:
        buffers = [
            states.new_zeros(*states.shape[:2], self.capacity, states.shape[3])
            for states in (layer.keys, layer.values)
        ]
        return StaticTargetLayer(self.columns, *buffers)

    def load(self, prefilled, order: torch.Tensor, lengths: torch.Tensor) -> None:
        """
        Take over the prefill's keys and values.

        Args:
            prefilled ([`~transformers.Cache`]): The cache of the prefill, `columns` wide.
            order (`torch.LongTensor` of shape `(batch, columns)`): Columns of each row, the real tokens first.
            lengths (`torch.LongTensor` of shape `(batch,)`): Real tokens per row.
        """
        self.lengths.copy_(lengths)
        self.context.lengths.zero_()
        self.counts.zero_()
        columns = order.shape[1]
        for layer, static in zip(prefilled.layers, self.cache.layers, strict=True):
            for states, buffer in ((layer.keys, static.keys), (layer.values, static.values)):
                stored = states.shape[-2]
                # A sliding layer holds the last columns only. What it lacks is out of every query's window.
                source = (order - (columns - stored)).clamp(min=0)
                index = source[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                buffer[:, :, :columns] = states.gather(2, index)

    def body(self, target, adapter: TargetAdapter, session: DraftSession, kwargs: dict[str, Any], tap: FeatureTap):
        """One round; reads and writes only tensors of this object."""
        offsets = torch.arange(self.block, device=self.lengths.device)
        # 1. Commit the last round.
        session.draft.append_context(
            self.context,
            self.features,
            (self.lengths[:, None] + offsets).to(self.features.device),
            self.counts.to(self.features.device),
        )
        self.lengths += self.counts
        self.columns.copy_(self.lengths[:, None] + offsets)
        # 2. Draft.
        proposal = session.propose(
            self.anchors, self.lengths, slots=self.slots, temperature=self.temperatures, greedy=self.greedy_mask
        )
        # 3. Verify.
        block_ids = torch.cat([self.anchors[:, None], proposal.tokens.to(self.anchors.device)], dim=1)
        kwargs = dict(kwargs)
        if self.position_base is not None:
            kwargs["position_ids"] = self.position_base + (self.lengths[:, None] + offsets).to(self.position_base)
        kwargs[compat.CACHE_KEY] = self.cache
        inputs = compat.block_inputs(target, block_ids, kwargs)
        with tap.listen(), use_block_attention(target), block_attention_lengths(self.lengths):
            logits = target(**inputs, return_dict=True).logits[:, -self.block :]
        taken = [hidden.to(self.features.device) for hidden in tap.take()]
        self.features.copy_(torch.cat(taken, dim=-1))
        self.proposal, self.logits = proposal, logits
        predictions = logits.argmax(dim=-1).to(self.anchors.device)
        tokens, usable = proposal.tokens.to(self.anchors.device), proposal.usable.to(self.anchors.device)
        accepted, _ = accept_greedy(tokens, predictions)
        accepted = torch.where(usable, accepted, 0)
        following = predictions.gather(1, accepted[:, None])
        self.greedy_result = torch.cat([accepted[:, None], following, usable[:, None].long(), tokens], dim=1)

    def capture(self, target, adapter: TargetAdapter, session: DraftSession, kwargs: dict, tap: FeatureTap) -> None:
        """
        Record the body, or remember why it cannot be.

        `counts` are zero meanwhile, so that nothing is committed by the rehearsals.
        """
        counts = self.counts.clone()
        self.counts.zero_()
        rng_state = torch.cuda.get_rng_state(self.lengths.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with fused_norms(target, session.draft):
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.body(target, adapter, session, kwargs, tap)
            torch.cuda.current_stream().wait_stream(stream)
            try:
                self.graph = record_on_cuda(
                    lambda: self.body(target, adapter, session, kwargs, tap),
                    adapter.head,
                    self.features.new_zeros(
                        len(self.counts), self.slots, session.draft.config.hidden_size, dtype=self.feature_dtype
                    ),
                )
            except RuntimeError as error:
                self.capture_failure = str(error).splitlines()[0]
                logger.warning(
                    "%s cannot be captured in a CUDA graph (%s); its rounds run launch by launch.",
                    type(target).__name__,
                    self.capture_failure,
                )
        torch.cuda.set_rng_state(rng_state, self.lengths.device)
        self.counts.copy_(counts)


class StaticDecoding(SpeculativeDecoding):
    """
    One `generate` call in the static tempo; see [`SpeculativeDecoding`] for the arguments.

    Call [`static_ineligible_reason`] first.
    """

    static_round: StaticRound | None = None

    def run(self):
        """Generate, and return what plain `generate` would."""
        # A round draws its noise whether or not the call samples; a greedy call gives it back to the host's stream.
        device = self.draft.device
        on_cuda = device.type == "cuda"
        state = torch.cuda.get_rng_state(device) if on_cuda else torch.get_rng_state()
        try:
            return super().run()
        finally:
            if not self.do_sample and on_cuda:
                torch.cuda.set_rng_state(state, device)
            elif not self.do_sample:
                torch.set_rng_state(state)
            if self.static_round is not None:
                self.static_round.in_use = False

    def _take_back_unfinished_round(self) -> None:
        """Nothing to take back: the host's cache holds the prompt until the call is over."""

    def _prefill(self, tap: FeatureTap) -> None:
        super()._prefill(tap)
        if all(self.finished):
            return
        features, positions, counts = self._pending
        self._pending = None
        columns = self.valid.shape[1]
        capacity = MIN_CAPACITY
        while capacity < self.max_length - self.prompt_columns + columns + self.slots + 1:
            capacity *= 2
        prefilled = compat.get_cache(self.model_kwargs)
        round_ = _take_round(self, prefilled, features, capacity)
        self.static_round = round_
        order = torch.argsort((~self.valid).long(), dim=1, stable=True)
        committed = torch.tensor(self.committed, device=self.device)
        round_.load(prefilled, order, committed)
        if self._position_base is not None:
            base = self._position_base + 1 - committed[:, None]
            if round_.position_base is None:
                round_.position_base = base.clone()
            else:
                round_.position_base.copy_(base)
        round_.temperatures.fill_(self.temperature)
        round_.greedy_mask.fill_(not self.do_sample)
        fused = torch.cat([hidden.to(round_.features.device) for hidden in features], dim=-1).to(round_.features.dtype)
        self.draft.append_context(
            round_.context,
            fused,
            positions.to(fused.device),
            torch.tensor(counts, device=fused.device),
        )
        self.session.context = round_.context
        self.session.target_dtype = round_.feature_dtype
        self._kept = [0] * self.batch_size

    def _round(self, tap: FeatureTap) -> None:
        round_ = self.static_round
        with self._timer("draft and verify"):
            round_.counts.copy_(torch.tensor(self._kept, device=self.device))
            round_.anchors.copy_(self._anchors())
            arguments = (self.target, self.adapter, self.session, self._static_kwargs(), tap)
            if self.device.type == "cuda" and round_.graph is None and round_.capture_failure is None:
                round_.capture(*arguments)
            if round_.graph is not None:
                round_.graph.replay()
            else:
                round_.body(*arguments)
            self.stats.target_passes += 1
        with self._timer("accept"):
            verified = VerifiedBlock(round_.logits, self._on_host_device(round_.proposal), self.slots, None)
            self._kept = self._accept(verified)
        self.committed = [length + count for length, count in zip(self.committed, self._kept, strict=True)]
        self.columns = [length + count for length, count in zip(self.columns, self._kept, strict=True)]
        self._emit()

    def _decide_block(self, verified: VerifiedBlock, scores: torch.Tensor) -> torch.Tensor:
        if self.static_round is not None and self._takes_plain_argmax:
            return self.static_round.greedy_result
        return super()._decide_block(verified, scores)

    def _on_host_device(self, proposal: DFlash2Proposal) -> DFlash2Proposal:
        fields = (proposal.tokens, proposal.candidate_ids, proposal.q, proposal.usable)
        return DFlash2Proposal(*(field.to(self.device) for field in fields))

    def _static_kwargs(self) -> dict[str, Any]:
        kwargs = {
            key: value
            for key, value in self.model_kwargs.items()
            if key not in (*_STAGED_MODEL_INPUTS, "cache", "past_key_values")
        }
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = self.slots + 1
        return kwargs

    def _result(self):
        cache = compat.get_cache(self.model_kwargs)
        outlives = self.config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        if outlives and self.static_round is not None:
            self._hand_back(cache)
            # Every row now has the columns its tokens have in the returned sequences.
            self.columns = [max(self.columns)] * self.batch_size
        return super()._result()

    def _hand_back(self, cache) -> None:
        """Move the rows' entries from the static buffers into the host's cache, where plain decoding has them."""
        width = max(self.columns)
        columns = torch.tensor(self.columns, device=self.device)[:, None]
        committed = torch.tensor(self.committed, device=self.device)[:, None]
        index = torch.arange(width, device=self.device)[None]
        source = index - (columns - committed)
        outside = (source < 0) | (index >= columns)
        source = source.clamp(min=0, max=self.static_round.capacity - 1)
        for layer, static in zip(cache.layers, self.static_round.cache.layers, strict=True):
            window = compat.sliding_window_of(layer)
            first = 0 if window is None else max(width - (window - 1), 0)
            taken = []
            for buffer in (static.keys, static.values):
                selection = source[:, None, first:, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
                taken.append(buffer.gather(2, selection).masked_fill(outside[:, None, first:, None], 0))
            compat.set_layer_content(layer, *taken, width)


# Captured rounds by target; a target that is freed takes its rounds with it.
_rounds: "weakref.WeakKeyDictionary[Any, OrderedDict]" = weakref.WeakKeyDictionary()
_rounds_lock = threading.Lock()


def _take_round(decoding: StaticDecoding, prefilled, features, capacity: int) -> StaticRound:
    """A round of the wanted shape that no other call is using, from an earlier call or new."""
    target, draft = decoding.target, decoding.draft
    # A graph reads weights and buffers by address.
    weights = tuple(
        tensor.data_ptr()
        for model in (target, draft)
        for tensors in (model.parameters(), model.buffers())
        for tensor in tensors
    )
    key = (
        id(draft),
        decoding.batch_size,
        capacity,
        decoding.slots,
        decoding.device,
        features[0].dtype,
        hash(weights),
        decoding._position_base is None or decoding._position_base.shape,
    )
    with _rounds_lock:
        kept = _rounds.setdefault(target, OrderedDict())
        round_ = kept.pop(key, None)
        if round_ is None or round_.in_use:
            round_ = StaticRound(
                decoding.adapter,
                draft,
                prefilled,
                batch_size=decoding.batch_size,
                capacity=capacity,
                slots=decoding.slots,
                features=features,
                device=decoding.device,
            )
        round_.in_use = True
        kept[key] = round_
        while len(kept) > MAX_ROUNDS_PER_TARGET:
            kept.popitem(last=False)
        return round_


def release_static_rounds(target=None) -> None:
    """Free the captured rounds and buffers of one target, or of all."""
    with _rounds_lock:
        if target is None:
            _rounds.clear()
        else:
            _rounds.pop(target, None)


def static_ineligible_reason(decoding: SpeculativeDecoding) -> str | None:
    """Why a call cannot run in the static tempo, or `None` if it can."""
    target = decoding.target
    if not math.isfinite(decoding.max_length):
        return "the call has no length limit, and buffers need one"
    if decoding.wants_hidden or decoding.wants_attentions:
        return "hidden states or attentions of every token are asked for"
    reason = unsupported_model_reason(target)
    if reason is not None:
        return reason
    if decoding.ranks.size > 1:
        return f"the target is spread over {decoding.ranks.size} processes"
    config = target.config.get_text_config(decoder=True)
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None and config._attn_implementation == "sdpa":
        return f"attn_logit_softcapping={cap} is left out by sdpa and would be honoured; load with eager attention"
    if torch.is_autocast_enabled(decoding.device.type):
        return "autocast is on, and buffers have one dtype"
    tensors = [
        name
        for name, value in decoding.model_kwargs.items()
        if isinstance(value, torch.Tensor) and name not in _STAGED_MODEL_INPUTS
    ]
    if tensors:
        return f"the target gets model inputs that are not staged: {', '.join(sorted(tensors))}"
    if target.training:
        return "the target is in training mode"
    if any("lora" in name for name, _ in target.named_parameters()):
        return "the target carries adapters, which may change from call to call"
    for module in target.modules():
        if compat.has_active_hooks(module):
            return f"{type(module).__name__} has forward hooks, which a graph would skip"
    if len({parameter.device for parameter in target.parameters()}) > 1:
        return "the target is spread over several devices"
    if next(target.parameters()).device != decoding.draft.device:
        return "target and drafter are on different devices"
    if decoding.device != decoding.draft.device:
        return f"input_ids are on {decoding.device} and the models on {decoding.draft.device}"
    return None


__all__ = ["StaticDecoding", "StaticRound", "release_static_rounds", "static_ineligible_reason"]

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
"""One round of the static tempo: its buffers, its phases, and the graphs that hold them.

What changes from round to round or from call to call is in tensors that the phases read: lengths, counts, anchors,
positions, temperatures, greedy flags, noise and the rows that are still going. A graph of the first three phases
serves greedy and sampled calls alike. Accepting is a graph of its own, because its operations depend on the request:
one per kind of request, on the buffers of the same round.

**Noise** is drawn outside the graphs, once per sampled round and for all its uses, from the device's default generator
into a buffer that the graphs read. Replays then follow the host's seed like any other draw, no generator has to be
registered with a graph, and a greedy call leaves the host's random stream alone.
"""

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.generation import logits_process

from . import compat
from .candidate_generator import DraftSession
from .functional_dflash2 import accept_block_sampled, accept_greedy, committed_block
from .graph_pieces import PiecewiseGraph, record_on_cuda
from .kernels.attention_interface import block_attention_lengths, use_block_attention
from .kernels.dispatch import dispatch
from .modeling_dflash2 import DFlash2DraftModel, DFlash2Proposal
from .rollback import watch_recurrences
from .stacked_context import StackedContext, stacked_context_reason
from .static_buffers import StaticContext, StaticRecurrentLayer, StaticTargetLayer, commit_held_states, static_layer
from .target import FeatureTap


logger = logging.getLogger("transformers_dflash2")

# Captured rounds kept per pair of models; the least recently used one goes first.
MAX_ROUNDS_PER_PAIR = 4
# Graphs of the accept phase kept per round.
MAX_ACCEPT_GRAPHS = 4

# Score processors of the host that are a fixed sequence of device operations. The others that look at scores only read
# values back, which a graph cannot.
_RECORDABLE_PROCESSORS = (
    logits_process.EpsilonLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinPLogitsWarper,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)


def accept_key(processors: Iterable[logits_process.LogitsProcessor], *, do_sample: bool) -> Hashable | None:
    """
    What tells the accept phases of two requests apart, or `None` for a request whose processors cannot be recorded.

    Temperatures are staged, and not part of it.
    """
    parts: list[Hashable] = [do_sample]
    temperatures = 0
    for processor in processors:
        if type(processor) not in _RECORDABLE_PROCESSORS:
            return None
        settings: tuple = ()
        if type(processor) is logits_process.TemperatureLogitsWarper:
            temperatures += 1
        else:
            settings = tuple(sorted(vars(processor).items()))
            if not all(isinstance(value, int | float) for _, value in settings):
                return None
        parts.append((type(processor).__name__, settings))
    # One buffer holds one temperature per row.
    return tuple(parts) if temperatures <= 1 else None


def row_bucket(batch: int) -> int:
    """Rows of the buffers for a batch: a power of two up to 8, then a multiple of 8."""
    return 1 << (batch - 1).bit_length() if batch <= 8 else -(-batch // 8) * 8


def stage_accepted(
    tokens: torch.Tensor,
    usable: torch.Tensor,
    accepted: torch.Tensor,
    following: torch.Tensor,
    active: torch.Tensor,
    pad_token_id: torch.Tensor,
    decision: torch.Tensor,
    committed: torch.Tensor,
    counts: torch.Tensor,
    anchors: torch.Tensor,
) -> None:
    """Write down what a round decided, and stage the next one; see [`kernels.stage_accepted`]."""
    decision.copy_(torch.cat([accepted[:, None], following[:, None], usable[:, None].long(), tokens], dim=1))
    committed.copy_(committed_block(tokens, accepted, following, pad_token_id))
    counts.copy_(torch.where(active, accepted + 1, 0))
    anchors.copy_(torch.where(active, following, anchors))


class StaticRound:
    """
    Buffers, phases and graphs of a round.

    Args:
        draft ([`DFlash2DraftModel`]): The drafter.
        prefilled ([`~transformers.Cache`]): A target's cache after a prefill; tells shapes and dtypes.
        rows (`int`): Rows of the buffers.
        capacity (`int`): Columns of the buffers.
        slots (`int`): Tokens drafted per round.
        vocab_size (`int`): Ids that may be drafted.
        modules (`frozenset[str]`): What [`rollback.host_modules`] says of the target.
        features (`list[torch.Tensor]`): Features of the prefill; tell shapes and dtypes.
    """

    def __init__(
        self,
        draft: DFlash2DraftModel,
        prefilled: Cache,
        *,
        rows: int,
        capacity: int,
        slots: int,
        vocab_size: int,
        modules: frozenset[str],
        features: list[torch.Tensor],
    ):
        self.rows, self.capacity, self.slots, self.block = rows, capacity, slots, slots + 1
        self.device = draft.device
        self.in_use = False
        # Why the phases could not be recorded; they run launch by launch then.
        self.capture_failure: str | None = None
        self._graphs: OrderedDict[Hashable, tuple[PiecewiseGraph, DFlash2Proposal, torch.Tensor]] = OrderedDict()
        long = {"dtype": torch.long, "device": self.device}
        self.lengths = torch.zeros(rows, **long)
        self.counts = torch.zeros(rows, **long)
        self.anchors = torch.zeros(rows, **long)
        self.active = torch.zeros(rows, dtype=torch.bool, device=self.device)
        # The last position that a row's tokens may take.
        self.last_positions = torch.zeros(rows, 1, **long)
        self.temperatures = torch.ones(rows, device=self.device)
        self.greedy_mask = torch.ones(rows, dtype=torch.bool, device=self.device)
        self._draft_noise_arguments = (rows, slots, vocab_size)
        self.draft_noise = torch.ones(draft.noise_shape(*self._draft_noise_arguments), device=self.device)
        self._accept_noise = torch.zeros(rows * (slots + 1), device=self.device)
        test_noise, self.draw_uniforms = self._accept_noise.split([rows * slots, rows])
        self.test_uniforms = test_noise.view(rows, slots)
        pass_rows, _ = draft.block_rows(slots)
        # Columns behind every row's committed tokens, for the target's block and for the drafter's pass; either may be
        # the longer one.
        self._offsets = torch.arange(max(self.block, pass_rows), device=self.device)
        self._places = self._offsets.repeat(rows, 1)
        self.columns = self._places[:, : self.block]
        # All masks but for the anchors.
        self._pass_ids = torch.full((rows, pass_rows), draft.config.mask_token_id, **long)
        self._pass_positions = self._places[:, :pass_rows]
        self.position_base: torch.Tensor | None = None
        self.context = StaticContext(draft, rows=rows, capacity=capacity)
        self._stacked = StackedContext(draft, self.context) if stacked_context_reason(draft) is None else None
        width = sum(tap.shape[-1] for tap in features)
        self.features = torch.zeros(rows, self.block, width, device=self.device, dtype=draft.dtype)
        self.feature_dtype = features[0].dtype
        # The shape and type in which the head gets the drafter's rows.
        self._head_inputs = torch.zeros(
            rows, slots, draft.config.hidden_size, device=self.device, dtype=self.feature_dtype
        )
        self.cache = Cache(layers=[static_layer(layer, self.columns, capacity) for layer in prefilled.layers])
        self._host_modules = modules
        # What the phases leave behind.
        self.proposal: DFlash2Proposal | None = None
        self.logits: torch.Tensor | None = None
        # Accepted count, the token after them, whether the draft was usable, the drafted tokens.
        self.decision = torch.zeros(rows, 3 + slots, **long)
        # What the round adds to each row.
        self.committed = torch.zeros(rows, self.block, **long)
        self.pad_token_id = torch.zeros((), **long)

    # ------------------------------------------------------------------------------------------------ a new call

    def load(self, draft: DFlash2DraftModel, prefilled: Cache, order: torch.Tensor, lengths: torch.Tensor) -> None:
        """
        Take over the prefill's keys and values in the first rows; the other rows stay empty and inactive.

        Args:
            draft ([`DFlash2DraftModel`]): The drafter.
            prefilled ([`~transformers.Cache`]): The cache of the prefill, `columns` wide.
            order (`torch.LongTensor` of shape `(batch, columns)`): Columns of each row, the real tokens first.
            lengths (`torch.LongTensor` of shape `(batch,)`): Real tokens per row.
        """
        batch, columns = order.shape
        for tensor in (self.lengths, self.counts, self.anchors, self.active, self.context.lengths):
            tensor.zero_()
        if self._stacked is not None:
            self._stacked.refresh(draft)
        self.lengths[:batch] = lengths
        # The config may have changed since the round was built.
        self._pass_ids.fill_(draft.config.mask_token_id)
        self._place()
        for layer, static in zip(prefilled.layers, self.cache.layers, strict=True):
            if isinstance(static, StaticRecurrentLayer):
                static.load(layer)
            if not isinstance(static, StaticTargetLayer):
                continue
            for states, buffer in ((layer.keys, static.keys), (layer.values, static.values)):
                stored = states.shape[-2]
                # A sliding layer holds the last columns only. What it lacks is out of every query's window.
                source = (order - (columns - stored)).clamp(min=0)
                index = source[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                buffer[:batch, :, :columns] = states.gather(2, index)

    def stage_positions(self, base: torch.Tensor, last: torch.Tensor) -> None:
        """
        Args:
            base (`torch.LongTensor` of shape `(..., batch, 1)`): Position of a row's token less its index in the row.
            last (`torch.LongTensor` of shape `(batch, 1)`): Largest index that a token may take. What a block holds
                behind it is thrown away, and must not leave the model's table of positions.
        """
        missing = self.rows - base.shape[-2]
        base = nn.functional.pad(base, (0, 0, 0, missing))
        if self.position_base is None:
            self.position_base = base.clone()
        else:
            self.position_base.copy_(base)
        self.last_positions.copy_(nn.functional.pad(last, (0, 0, 0, missing)))

    def draw_noise(self, draft: DFlash2DraftModel) -> None:
        """New numbers for one round."""
        self.draft_noise.copy_(draft.draw_noise(*self._draft_noise_arguments))
        torch.rand(self._accept_noise.shape, out=self._accept_noise)

    # ------------------------------------------------------------------------------------------------ the phases

    def commit(self, session: DraftSession) -> None:
        """Add what the last round kept to every row's length, and its features to the drafter's context."""
        # The columns are still those of the block that was verified last.
        if self._stacked is not None:
            self._stacked.append(session.draft, self.features, self.columns, self.counts)
        else:
            session.draft.append_context(self.context, self.features, self.columns, self.counts)
        commit_held_states(self.cache.layers, self.counts)
        self.lengths += self.counts
        self._place()

    def _place(self) -> None:
        torch.add(self.lengths[:, None], self._offsets, out=self._places)

    def draft(self, session: DraftSession) -> None:
        """Draft a block behind the anchors."""
        self._pass_ids[:, 0] = self.anchors
        self.proposal = session.propose(
            self.anchors,
            self.lengths,
            slots=self.slots,
            temperature=self.temperatures,
            greedy=self.greedy_mask,
            noise=self.draft_noise,
            block=(self._pass_ids, self._pass_positions),
        )

    def verify(self, target, forward: Callable, kwargs: dict[str, Any], tap: FeatureTap) -> None:
        """Run the blocks through the target, whose layers write at each row's own length."""
        block_ids = torch.cat([self.anchors[:, None], self.proposal.tokens], dim=1)
        indices = torch.minimum(self.columns, self.last_positions)
        kwargs = {**kwargs, "position_ids": self.position_base + indices, compat.CACHE_KEY: self.cache}
        inputs = compat.block_inputs(target, block_ids, kwargs)
        attention = use_block_attention(target), block_attention_lengths(self.lengths)
        with tap.listen(), attention[0], attention[1], watch_recurrences(self._host_modules):
            self.logits = forward(**inputs, return_dict=True).logits[:, -self.block :]
        self.features.copy_(torch.cat(tap.take(), dim=-1))

    def accept(self, processors: Iterable[logits_process.LogitsProcessor], *, do_sample: bool) -> None:
        """Decide how much of each draft is kept, and stage the next round's counts and anchors."""
        proposal = self.proposal
        scores = self._processed(processors) if do_sample or list(processors) else self.logits
        if do_sample:
            accepted, following = dispatch(
                "accept_sampled",
                accept_block_sampled,
                scores,
                proposal.tokens,
                proposal.candidate_ids,
                proposal.q,
                proposal.usable,
                self.test_uniforms,
                self.draw_uniforms,
            )
        else:
            predictions = scores.argmax(dim=-1)
            accepted, following = dispatch(
                "accept_greedy", accept_greedy, proposal.tokens, predictions, usable=proposal.usable
            )
        dispatch(
            "stage_accepted",
            stage_accepted,
            proposal.tokens,
            proposal.usable,
            accepted,
            following,
            self.active,
            self.pad_token_id,
            self.decision,
            self.committed,
            self.counts,
            self.anchors,
        )

    def _processed(self, processors: Iterable[logits_process.LogitsProcessor]) -> torch.Tensor:
        scores = self.logits.to(torch.float32, copy=True).flatten(0, 1)
        # None of these processors looks at the prefix.
        prefix = self.anchors[:, None].repeat_interleave(self.block, dim=0)
        for processor in processors:
            if type(processor) is logits_process.TemperatureLogitsWarper:
                scores = scores / self.temperatures.repeat_interleave(self.block)[:, None]
            else:
                scores = processor(prefix, scores)
        return scores.view(self.logits.shape)

    # ------------------------------------------------------------------------------------------------ graphs

    def has_graph(self, key: Hashable) -> bool:
        """Whether [`play`] would replay."""
        return key in self._graphs

    def play(
        self,
        key: Hashable,
        call: Callable[[], None],
        *,
        record: bool,
        head: nn.Module | None = None,
        during_capture: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """
        Run phases: replay their graph, after recording it where there is none yet, or call them.

        Args:
            key (`Hashable`): Tells graphs of this round apart.
            call (`Callable`): Runs the phases; reads and writes tensors of this object only.
            record (`bool`): Whether a graph may be used.
            head (`torch.nn.Module`, *optional*): The target's output head, if the phases call it.
            during_capture (`Callable`): Makes the context in which the phases are recorded.
        """
        if not record or self.device.type != "cuda" or self.capture_failure is not None:
            call()
            return
        if key not in self._graphs:
            # Recordings put stand-ins into models that threads may share: one at a time.
            with _recording_lock, torch.cuda.device(self.device):
                self._capture(key, call, head, during_capture)
        if key not in self._graphs:
            call()
            return
        self._graphs.move_to_end(key)
        graph, self.proposal, self.logits = self._graphs[key]
        graph.replay()

    def _capture(
        self,
        key: Hashable,
        call: Callable[[], None],
        head: nn.Module | None,
        during_capture: Callable[[], AbstractContextManager],
    ) -> None:
        state = (self.lengths, self.counts, self.anchors, self.context.lengths)
        saved = [tensor.clone() for tensor in state]
        # So that rehearsals commit nothing.
        self.counts.zero_()
        try:
            with during_capture():
                stream = torch.cuda.Stream(self.device)
                stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        call()
                torch.cuda.current_stream(self.device).wait_stream(stream)
                graph = record_on_cuda(call, head, self._head_inputs)
            # What a replay writes to. Phases that run without a graph leave their results elsewhere.
            self._graphs[key] = graph, self.proposal, self.logits
            # The round's own graph is the first; of the others the least recently played one goes.
            while len(self._graphs) > 1 + MAX_ACCEPT_GRAPHS:
                del self._graphs[next(other for other in self._graphs if isinstance(other, tuple))]
        except Exception as error:
            # Whatever keeps kernels from being built or recorded; a fault of a model comes up again without them.
            self.capture_failure = (str(error).splitlines() or [type(error).__name__])[0]
            logger.warning(
                "A round cannot be captured in a CUDA graph (%s); it runs launch by launch.", self.capture_failure
            )
        finally:
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)


# Rounds by target and drafter; a model that is freed takes its rounds with it, so a round must not hold a model.
_rounds: "weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, OrderedDict]]" = weakref.WeakKeyDictionary()
_rounds_lock = threading.Lock()
_recording_lock = threading.Lock()


def take_round(target, draft, key: Hashable, build: Callable[[], StaticRound]) -> StaticRound:
    """
    A round that no other call is using, from an earlier call or new.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        draft ([`DFlash2DraftModel`]): The drafter.
        key (`Hashable`): What the round depends on besides the models' weights.
        build (`Callable`): Makes a new one.
    """
    # A graph reads weights and buffers by address.
    weights = tuple(
        tensor.data_ptr()
        for model in (target, draft)
        for tensors in (model.parameters(), model.buffers())
        for tensor in tensors
    )
    key = (key, hash(weights))
    with _rounds_lock:
        kept = _rounds.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, OrderedDict())
        # Calls that overlap have a round each, and find it again.
        place = next(place for n in count() if (place := (key, n)) not in kept or not kept[place].in_use)
        round_ = kept.pop(place, None) or build()
        round_.in_use = True
        kept[place] = round_
        while len(kept) > MAX_ROUNDS_PER_PAIR:
            kept.popitem(last=False)
        return round_


def kept_rounds(target, draft) -> list[StaticRound]:
    """The rounds kept for a pair of models."""
    with _rounds_lock:
        return list(_rounds.get(target, {}).get(draft, {}).values())


def release_static_rounds(target=None) -> None:
    """Free the captured rounds and buffers of one target, or of all."""
    with _rounds_lock:
        if target is None:
            _rounds.clear()
        else:
            _rounds.pop(target, None)


__all__ = [
    "StaticRound",
    "accept_key",
    "kept_rounds",
    "release_static_rounds",
    "row_bucket",
    "stage_accepted",
    "take_round",
]

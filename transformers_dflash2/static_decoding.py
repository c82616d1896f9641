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
"""The static tempo: the same loop on fixed buffers, recorded in CUDA graphs.

The target's prefill runs as in the dynamic tempo. Its keys and values then move into preallocated buffers, packed to
the left of each row, and every round plays two recordings (`static_round.py`): one commits the last round, drafts and
verifies; one accepts. The host draws the round's noise before and reads the decision after, once.

Buffers come in sizes: rows are padded to a bucket, columns to a power of two. Recordings are kept per combination of
target, drafter, buckets and block, and later calls use them again. Away from CUDA devices the same phases run as they
are.

**Processors.** Those of a plain sampled request (temperature, top-k, top-p, min-p, typical, epsilon) are part of the
recording. Processors that depend on the prefix, `eta_cutoff`, `top_h`, custom ones, and calls that return scores run
outside of it, on the logits that the verify phase leaves in its buffer, with the calls of the dynamic tempo: such a
round costs their launches, and one more read of device memory per token where the prefix matters. Stopping rules and
streaming are the loop's own in any case.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from . import compat
from .fused_modules import fused_modules, skinny_linears
from .generation import SpeculativeDecoding, VerifiedBlock
from .import_utils import unavailable_reason
from .kernels.attention_interface import unsupported_model_reason
from .kernels.dispatch import compiler_reason
from .modeling_dflash2 import DFlash2Proposal
from .rollback import SecondPass, host_modules
from .static_buffers import StaticRecurrentLayer, StaticTargetLayer, commit_held_states
from .static_round import StaticRound, accept_key, release_static_rounds, row_bucket, take_round
from .target import FeatureTap


logger = logging.getLogger("transformers_dflash2")

# Columns of the smallest buffer; larger ones double.
MIN_CAPACITY = 512
# Tensors among the model inputs that a round computes on its own or needs for the prefill only.
_STAGED_MODEL_INPUTS = ("attention_mask", "inputs_embeds", "position_ids")


class StaticDecoding(SpeculativeDecoding):
    """
    One `generate` call in the static tempo; see [`SpeculativeDecoding`] for the arguments.

    Call [`static_ineligible_reason`] first.

    Args:
        record (`bool`, *optional*, defaults to `True`): Whether CUDA graphs are used.
        compile_config ([`~transformers.CompileConfig`], *optional*): Compiles the target's forward before it is
            recorded. Blocks have one shape, so the compiler is told not to make shapes dynamic, and as graphs are
            recorded here it is told not to record its own.
    """

    def __init__(self, *args, record: bool = True, compile_config=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.record = record
        self.compile_options = None if compile_config is None else _compile_options(compile_config, self.device)
        # Runs the target on a block.
        self._forward = self.target
        self.static_round: StaticRound | None = None
        # Whether the device has been given the round that comes next.
        self._is_ahead = False
        # The accepted tokens alone tell how these rules will decide. A streamer gets tokens before the next round, and
        # a timer has to see one round at a time.
        self._looks_ahead = (
            self.streamer is None
            and not self._timer.enabled
            and all(type(criterion) in (EosTokenCriteria, MaxLengthCriteria) for criterion in self.criteria)
        )
        # What is accepted inside the recording; `None` accepts as the dynamic tempo does.
        self._accept_key = None
        if self.mode == "block" and not self._wants_steps:
            self._accept_key = accept_key(self.processors, do_sample=self.do_sample)

    def run(self):
        """Generate, and return what plain `generate` would."""
        try:
            return super().run()
        finally:
            if self.static_round is not None:
                self.static_round.in_use = False

    def _take_back_unfinished_round(self) -> None:
        """Nothing to take back: the host's cache holds the prompt until the call is over."""

    # ------------------------------------------------------------------------------------------ into the buffers

    def _prefill(self, tap: FeatureTap) -> None:
        super()._prefill(tap)
        if all(self.finished):
            return
        if isinstance(self.rollback, SecondPass):
            self._stay_dynamic(
                f"{type(self.target).__name__} writes its recurrence out inside a layer, and its state goes back by a "
                "second pass"
            )
            return
        features, positions, counts = self._pending
        columns = self.valid.shape[1]
        block = self.slots + 1
        capacity = MIN_CAPACITY
        # Target and drafter may put blocks of different lengths behind the committed entries, and a row that is done
        # commits its last round in full before another block is written.
        rows_of_a_pass = max(block, self.draft.block_rows(self.slots)[0])
        while capacity < self.max_length - self.prompt_columns + columns + block + rows_of_a_pass:
            capacity *= 2
        prefilled = compat.get_cache(self.model_kwargs)
        self._verify_kwargs = self._static_kwargs()
        key = (
            row_bucket(self.batch_size),
            capacity,
            self.slots,
            self.device,
            features[0].dtype,
            self._position_base.shape[:-2],
            None if self.compile_options is None else repr(sorted(self.compile_options.items())),
            # A graph has been recorded with these.
            repr(sorted(self._verify_kwargs.items())),
        )
        try:
            round_ = take_round(
                self.target,
                self.draft,
                key,
                lambda: StaticRound(
                    self.draft,
                    prefilled,
                    rows=row_bucket(self.batch_size),
                    capacity=capacity,
                    slots=self.slots,
                    vocab_size=self.adapter.candidate_limit,
                    modules=host_modules(self.target),
                    features=features,
                ),
            )
        except torch.cuda.OutOfMemoryError:
            self._stay_dynamic(f"its buffers of {capacity} columns do not fit")
            return
        self._pending = None
        self.static_round = round_
        order = torch.argsort((~self.valid).long(), dim=1, stable=True)
        committed = torch.tensor(self.committed, device=self.device)
        round_.load(self.draft, prefilled, order, committed)
        first, room = committed[:, None], int(self.max_length) - self.prompt_columns
        round_.stage_positions(self._position_base + 1 - first, first + room - 1)
        round_.temperatures.fill_(self.temperature)
        round_.greedy_mask.fill_(not self.do_sample)
        round_.pad_token_id.fill_(self.pad_token_id)
        round_.anchors[: self.batch_size] = self._anchors()
        self._stage_active()
        fused = torch.cat(features, dim=-1).to(round_.features.dtype)
        self.draft.append_context(round_.context, fused, positions, torch.tensor(counts, device=self.device))
        self.session.context = round_.context
        self.session.target_dtype = round_.feature_dtype
        self._kept = [0] * self.batch_size

    def _stay_dynamic(self, reason: str) -> None:
        self._accept_key = None
        logger.warning_once(f"The static tempo is not used: {reason}. The output is the same.")

    def _static_kwargs(self) -> dict[str, Any]:
        kwargs = _unstaged_inputs(self.model_kwargs)
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = self.slots + 1
        return kwargs

    def _stage_active(self) -> None:
        self._active = [not done for done in self.finished]
        self.static_round.active[: self.batch_size] = torch.tensor(self._active, device=self.device)

    # ------------------------------------------------------------------------------------------------ the round

    def phases(self, tap: FeatureTap) -> dict[str, Any]:
        """The phases of a round by name, in order; each is a call without arguments."""
        round_ = self.static_round
        return {
            "commit": lambda: round_.commit(self.session),
            "draft": lambda: round_.draft(self.session),
            "verify": lambda: round_.verify(self.target, self._forward, self._verify_kwargs, tap),
            "accept": lambda: round_.accept(self.processors, do_sample=self.do_sample),
        }

    def _round(self, tap: FeatureTap) -> None:
        round_ = self.static_round
        if round_ is None:
            super()._round(tap)
            return
        if not self._is_ahead:
            self._launch(tap)
        self._is_ahead = False
        with self._timer("accept"):
            if self._accept_key is not None:
                # The round's one read of device memory by the host.
                self._decision = round_.decision[: self.batch_size].to("cpu", copy=True)
                if self._goes_on(self._decision.tolist()):
                    # The device works on the next round while the host looks through this one; the tokens are
                    # written first, because that waits for the device.
                    super()._write_block(self._decision)
                    self._launch(tap)
                    self._is_ahead = True
            self._kept = self._accept(self._verified())
        self.committed = [length + count for length, count in zip(self.committed, self._kept, strict=True)]
        self.columns = [length + count for length, count in zip(self.columns, self._kept, strict=True)]
        if self._active != [not done for done in self.finished]:
            self._stage_active()
            # A row that is done may have kept less than was accepted.
            round_.counts[: self.batch_size] = torch.tensor(self._kept, device=self.device)
        self._emit()

    def _launch(self, tap: FeatureTap) -> None:
        """Give a round to the device, up to what the host has to read."""
        round_, phases = self.static_round, self.phases(tap)
        with self._timer("draft and verify"):
            if self._accept_key is None:
                round_.counts[: self.batch_size] = torch.tensor(self._kept, device=self.device)
                round_.anchors[: self.batch_size] = self._anchors()
            if self.do_sample:
                round_.draw_noise(self.draft)
            records = self.record and self.device.type == "cuda"
            if self.compile_options is not None and not records:
                self._compile(phases)

            def propose_and_verify():
                for name in ("commit", "draft", "verify"):
                    phases[name]()

            round_.play(
                "round",
                propose_and_verify,
                record=self.record,
                head=self.adapter.head,
                during_capture=lambda: self.recording(phases),
            )
            self.stats.target_passes += 1
        if self._accept_key is not None:
            with self._timer("accept"):
                round_.play(self._accept_key, phases["accept"], record=self.record)

    def _goes_on(self, decided: list[list[int]]) -> bool:
        """
        Whether a round that was decided so leaves every row as it is, unfinished rows unfinished: then the next round
        is certain, and what it starts from is on the device already.
        """
        if not self._looks_ahead:
            return False
        for row, (count, bonus, _, *drafted) in enumerate(decided):
            if self.finished[row]:
                continue
            reaches = self.prompt_columns + self.new[row] + count + 1
            if bonus < 0 or reaches >= self.max_length or not self._end_tokens.isdisjoint((*drafted[:count], bonus)):
                return False
        return True

    @contextmanager
    def recording(self, phases: dict[str, Any]) -> Iterator[None]:
        """The context in which phases are recorded: with fused modules, and the target's forward compiled if asked."""
        with ExitStack() as stack:
            stack.enter_context(fused_modules(self.draft))
            if self.compile_options is not None:
                # A compiler fuses what is around the target's matrix products, but not these.
                stack.enter_context(skinny_linears(self.target.get_decoder()))
                self._compile(phases)
            if self.compile_options is None:
                stack.enter_context(fused_modules(self.target))
            yield

    def _compile(self, phases: dict[str, Any]) -> None:
        """Compile the target's forward, once per call at most, and try it; a failure leaves it as it is."""
        if self._forward is not self.target:
            return
        logger.info("Compiling the forward of %s for blocks of %d.", type(self.target).__name__, self.slots + 1)
        try:
            self._forward = torch.compile(self.target.forward, **self.compile_options)
            # A rehearsal: in the first round there is nothing to commit, and the rest writes behind the rows' lengths.
            for name in ("commit", "draft", "verify"):
                phases[name]()
        except Exception as error:
            # Whatever a compiler stumbles over; a fault of the model itself comes up again without it.
            logger.warning(
                "compile_config is not honoured: %s cannot be compiled (%s: %s).",
                type(self.target).__name__,
                type(error).__name__,
                " ".join(str(error).split())[:200],
            )
            self._forward = self.target
            self.compile_options = None

    def _verified(self) -> VerifiedBlock:
        """The target's answer to the rows of the batch; the buffers may have more rows."""
        round_, proposal = self.static_round, self.static_round.proposal
        fields = (proposal.tokens, proposal.candidate_ids, proposal.q, proposal.usable)
        rows = DFlash2Proposal(*(field[: self.batch_size] for field in fields))
        return VerifiedBlock(round_.logits[: self.batch_size], rows, self.slots, None)

    def _accepts_inside(self, verified: VerifiedBlock) -> bool:
        return self._accept_key is not None and self.static_round is not None and verified.proposal is not None

    def _block_scores(self, verified: VerifiedBlock) -> tuple[torch.Tensor, torch.Tensor]:
        if self._accepts_inside(verified):
            # Nobody looks at them: the decision has been made, and no step is recorded.
            return verified.logits, verified.logits
        return super()._block_scores(verified)

    def _decide_block(self, verified: VerifiedBlock, scores: torch.Tensor) -> torch.Tensor:
        if self._accepts_inside(verified):
            return self._decision
        return super()._decide_block(verified, scores)

    def _write_block(self, decision: torch.Tensor) -> None:
        if not self._is_ahead:
            super()._write_block(decision)

    def _committed_block(self, decision: torch.Tensor) -> torch.Tensor:
        # A decision without drafted tokens is that of the prefill.
        if self._accept_key is not None and decision.shape[1] > 2:
            return self.static_round.committed[: self.batch_size]
        return super()._committed_block(decision)

    # ------------------------------------------------------------------------------------------- out of the buffers

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
        batch, width = self.batch_size, max(self.columns)
        columns = torch.tensor(self.columns, device=self.device)[:, None]
        committed = torch.tensor(self.committed, device=self.device)[:, None]
        index = torch.arange(width, device=self.device)[None]
        source = index - (columns - committed)
        outside = (source < 0) | (index >= columns)
        source = source.clamp(min=0, max=self.static_round.capacity - 1)
        commit_held_states(self.static_round.cache.layers, self.static_round.counts)
        for layer, static in zip(cache.layers, self.static_round.cache.layers, strict=True):
            if isinstance(static, StaticRecurrentLayer):
                static.hand_back(layer)
            if not isinstance(static, StaticTargetLayer):
                continue
            window = compat.sliding_window_of(layer)
            first = 0 if window is None else max(width - (window - 1), 0)
            taken = []
            for buffer in (static.keys[:batch], static.values[:batch]):
                selection = source[:, None, first:, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
                taken.append(buffer.gather(2, selection).masked_fill(outside[:, None, first:, None], 0))
            compat.set_layer_content(layer, *taken, width)


def _compile_options(compile_config, device: torch.device) -> dict[str, Any] | None:
    """Arguments of `torch.compile`, or `None` where the host would not compile either."""
    if device.type != "cuda" and not compile_config._compile_all_devices:
        logger.info("compile_config is not honoured on %s: it needs a CUDA device.", device)
        return None
    options = {**compile_config.to_dict(), "dynamic": False}
    without_graphs = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
    if options["mode"] in without_graphs:
        options["mode"] = without_graphs[options["mode"]]
    if options["options"] is not None:
        # The two exclude each other.
        del options["mode"]
    return options


def _unstaged_inputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a round hands on to the target as the call has it."""
    staged = (*_STAGED_MODEL_INPUTS, *compat.CACHE_KEYS)
    return {name: value for name, value in model_kwargs.items() if name not in staged}


def _is_setting(value: Any) -> bool:
    """Whether a model input is a plain value, which a recording may hold as long as its round is kept by it."""
    if isinstance(value, list | tuple):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


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
    if decoding.model_kwargs.get("position_ids") is None:
        return f"{type(target).__name__} takes no position_ids, and rows of fixed buffers differ in theirs"
    if decoding.device.type == "cuda":
        reason = unavailable_reason("triton") or compiler_reason(decoding.device)
        if reason is not None:
            return reason
    config = target.config.get_text_config(decoder=True)
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is not None and config._attn_implementation == "sdpa":
        return f"attn_logit_softcapping={cap} is left out by sdpa and would be honoured; load with eager attention"
    if torch.is_autocast_enabled(decoding.device.type):
        return "autocast is on, and buffers have one dtype"
    unstaged = [name for name, value in _unstaged_inputs(decoding.model_kwargs).items() if not _is_setting(value)]
    if unstaged:
        return f"the target gets model inputs that are not staged: {', '.join(sorted(unstaged))}"
    if target.training:
        return "the target is in training mode"
    if any("lora" in name for name, _ in target.named_parameters()):
        return "the target carries adapters, which may change from call to call"
    if compat.has_global_hooks():
        return "hooks are registered for all modules, which a graph would skip"
    for module in (*target.modules(), *decoding.draft.modules()):
        if compat.has_active_hooks(module):
            return f"{type(module).__name__} has forward hooks, which a graph would skip"
    if len({parameter.device for parameter in target.parameters()}) > 1:
        return "the target is spread over several devices"
    if next(target.parameters()).device != decoding.draft.device:
        return "target and drafter are on different devices"
    if decoding.device != decoding.draft.device:
        return f"input_ids are on {decoding.device} and the models on {decoding.draft.device}"
    return None


__all__ = ["StaticDecoding", "release_static_rounds", "static_ineligible_reason"]

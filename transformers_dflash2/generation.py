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
"""The decoding loop.

A round drafts a block behind every row's last committed token (the *anchor*), runs `[anchor, drafted tokens]` through
the target in one forward, commits the drafted tokens that the target agrees with plus one token of the target's own,
and makes both caches forget the rest. Committed tokens are those plain decoding would give: the target's logits pass
through the request's own processors, with the prefix plain decoding would show them, and every stopping rule is asked
after every token.

**Rows.** Each row of a batch advances by its own count. In the target's cache rows are kept aligned on the right, as
left-padded prompts are: after a round every row's entries are moved so that its last kept one is in the last column,
and a two-dimensional mask hides what lies before its first. Host masks, sliding windows and attention functions then
work as they do for left padding.

**Processors.** There are three ways to process a block's logits, chosen once per call:

* `block`: every processor looks at scores only (temperature, top-k, top-p, ...); all rows and slots at once.
* `rows`: the host's prefix-dependent processors (penalties, n-grams, forced tokens, ...); token by token, each call
  with the prefixes plain decoding would pass for the rows whose turn it is.
* `lockstep`: anything else in a batch, such as a custom processor or stopping rule that may keep state or count rows.
  Rows advance by the smallest accepted count, so that every call sees exactly the batch plain decoding would show it,
  once and in order. A custom class that only looks at the rows it is given can opt for `rows` by setting the
  attribute `is_row_independent = True`.
"""

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from . import compat
from .candidate_generator import DraftSession
from .functional_dflash2 import accept_greedy, accept_sampled, committed_block, residual_distribution
from .modeling_dflash2 import DFlash2DraftModel, DFlash2Proposal
from .rollback import SecondPass, StateReplay, make_rollback, rollback_reason
from .target import FeatureTap, TargetAdapter
from .verify_length import VerifyLength


logger = logging.getLogger("transformers_dflash2")

# Processors of the host whose result depends on the scores alone.
_SCORE_PROCESSORS = (
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinPLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)

# Processors of the host that look at one row's prefix and keep nothing between calls.
_ROW_PROCESSORS = (
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
)

# Stopping rules of the host that look at one row.
_ROW_CRITERIA = (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)


@dataclass
class DFlash2Stats:
    """
    Figures of one `generate` call.

    Args:
        rounds (`int`):
            Draft-and-verify rounds, summed over rows: a row that is finished takes part in no round.
        drafted (`int`): Tokens proposed to the target, summed over rounds.
        accepted (`int`): Proposed tokens that were committed.
        accepted_per_position (`list[int]`): How often the token at offset 1, 2, ... of a block was committed.
        drafted_per_position (`list[int]`): How often a token was proposed at that offset.
        fallback_rounds (`int`): Rounds of a row whose draft was not finite and that took a plain target step instead.
        target_passes (`int`): Forwards of the target, prefill included.
        new_tokens (`int`): Committed tokens, summed over rows.
        phase_seconds (`dict[str, float]`):
            Wall time of `prefill`, `draft`, `verify`, `accept` and `commit`, when the environment variable
            `TRANSFORMERS_DFLASH2_TIMING=1` asks for it; empty otherwise. In the static tempo `draft and verify` are
            one, and include the commit.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    fallback_rounds: int = 0
    target_passes: int = 0
    new_tokens: int = 0
    phase_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def mean_accepted_length(self) -> float:
        """Mean tokens committed per row and round, the target's own token included: 1 + accepted / rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    def _count(self, proposed: int, accepted: int) -> None:
        self.rounds += 1
        self.drafted += proposed
        self.accepted += accepted
        for counts, upto in ((self.drafted_per_position, proposed), (self.accepted_per_position, accepted)):
            counts.extend([0] * (max(proposed, accepted) - len(counts)))
            for position in range(upto):
                counts[position] += 1


@dataclass
class DFlash2GenerateDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """
    [`~transformers.generation.GenerateDecoderOnlyOutput`] with the figures of the call.

    Args:
        dflash2_stats ([`DFlash2Stats`]): Acceptance figures.
    """

    dflash2_stats: DFlash2Stats | None = None


@dataclass
class _Step:
    """What the caller wants to see of one committed token; shapes as for one row of plain decoding."""

    scores: torch.Tensor | None = None  # [vocab]
    logits: torch.Tensor | None = None  # [vocab]
    hidden_states: tuple[torch.Tensor, ...] | None = None  # [1, 1, hidden] per layer
    attentions: tuple[torch.Tensor, ...] | None = None  # [1, heads, 1, columns] per layer


@dataclass
class VerifiedBlock:
    """The target's answer to a block."""

    logits: torch.Tensor  # [batch, block, vocab]
    proposal: DFlash2Proposal | None
    slots: int
    outputs: Any
    block_ids: torch.Tensor | None = None  # [batch, block]


class SpeculativeDecoding:
    """
    One `generate` call: the request, the rows' progress and the phases of a round.

    Args:
        target: The target model.
        draft ([`DFlash2DraftModel`]): The drafter.
        input_ids (`torch.LongTensor` of shape `(batch, prompt)`): Left-padded prompts; `prompt` is 0 when only
            embeddings were given.
        logits_processor ([`~transformers.LogitsProcessorList`]): The request's processors, prepared by the host.
        stopping_criteria ([`~transformers.StoppingCriteriaList`]): The request's rules, prepared by the host.
        generation_config ([`~transformers.GenerationConfig`]): The request's resolved configuration.
        num_assistant_tokens (`int`, *optional*): Tokens to draft per round; by default as many as its block proposes.
        verify_length ([`VerifyLength`], *optional*): Decides how many drafted tokens are verified; by default all.
        streamer ([`~transformers.generation.BaseStreamer`], *optional*): Receives tokens as plain decoding would.
        model_kwargs (`dict`): Model inputs, prepared by the host.
    """

    def __init__(
        self,
        target,
        draft: DFlash2DraftModel,
        input_ids: torch.LongTensor,
        *,
        logits_processor: logits_process.LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config,
        num_assistant_tokens: int | None,
        verify_length: VerifyLength | None = None,
        streamer,
        model_kwargs: dict[str, Any],
    ):
        self.target, self.draft = target, draft
        self.adapter = TargetAdapter(target, draft.config)
        self.ranks = self.adapter.ranks
        self.processors, self.criteria = logits_processor, stopping_criteria
        self.config, self.streamer, self.model_kwargs = generation_config, streamer, model_kwargs
        self.verify_length = verify_length
        self.slots = draft.config.speculative_tokens if num_assistant_tokens is None else num_assistant_tokens
        self.device = input_ids.device
        self.batch_size, self.prompt_columns = input_ids.shape
        self.session = DraftSession(draft, self.adapter, batch_size=self.batch_size, block_size=self.slots + 1)
        self._check_cache()
        self.rollback: StateReplay | SecondPass | None = None

        self.do_sample = bool(generation_config.do_sample)
        self.temperature = _request_temperature(logits_processor) if self.do_sample else 1.0
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        limits = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
        self._end_tokens = {
            token
            for criterion in stopping_criteria
            if type(criterion) is EosTokenCriteria
            for token in criterion.eos_token_id.flatten().tolist()
        }
        self.max_length = min(limits) if limits else math.inf
        self.mode = self._choose_mode()

        wants = generation_config if generation_config.return_dict_in_generate else None
        self.wants_scores = bool(wants and wants.output_scores)
        self.wants_logits = bool(wants and wants.output_logits)
        self.wants_hidden = bool(wants and wants.output_hidden_states)
        self.wants_attentions = bool(wants and wants.output_attentions)
        self._wants_steps = self.wants_scores or self.wants_logits or self.wants_hidden or self.wants_attentions
        self._stacked_scores: tuple[torch.Tensor, ...] = ()
        self.steps: list[list[_Step]] = [[] for _ in range(self.batch_size)]

        # Padded on the right with the pad token, so that a finished row needs no further writes.
        pad = generation_config._pad_token_tensor
        self.pad_token_id = 0 if pad is None else int(pad)
        room = self.max_length - self.prompt_columns if math.isfinite(self.max_length) else 256
        self.ids = torch.full(
            # A block may reach past the limit before it is cut.
            (self.batch_size, self.prompt_columns + max(int(room), 1) + self.slots),
            self.pad_token_id,
            dtype=torch.long,
            device=self.device,
        )
        self.ids[:, : self.prompt_columns] = input_ids
        self.new = [0] * self.batch_size
        self.finished = [False] * self.batch_size
        self.streamed = 0
        self.stats = DFlash2Stats()
        self._timer = _PhaseTimer(self.stats, draft.device)

    # ------------------------------------------------------------------------------------------------ the request

    def _check_cache(self) -> None:
        """Before any work for a cache that the host has prepared, after the prefill for one that the model makes."""
        cache = compat.get_cache(self.model_kwargs)
        reason = rollback_reason(self.target, cache)
        if reason is not None:
            raise ValueError(
                f"{reason}, and cannot forget the rejected part of a block. Generate without assistant_model."
            )
        if cache is None:
            return
        reason = compat.unsupported_cache_layer(cache, batch_size=self.batch_size)
        if reason is not None:
            raise ValueError(
                f"The cache ({type(cache).__name__}) cannot be used with a DFlash2 drafter: {reason}. Pass a "
                "DynamicCache, or leave the cache to generate."
            )

    def _choose_mode(self) -> str:
        if all(type(processor) in _SCORE_PROCESSORS for processor in self.processors):
            mode = "block"
        else:
            mode = "rows"
        if self.batch_size == 1:
            return mode
        rows_suffice = all(
            type(processor) in _SCORE_PROCESSORS + _ROW_PROCESSORS or getattr(processor, "is_row_independent", False)
            for processor in self.processors
        ) and all(
            type(criterion) in _ROW_CRITERIA or getattr(criterion, "is_row_independent", False)
            for criterion in self.criteria
        )
        # Without an end token a row that has met its stopping rule keeps generating until all have.
        lengths_only = all(isinstance(c, MaxLengthCriteria) for c in self.criteria)
        if not rows_suffice or not (self.has_eos or lengths_only):
            return "lockstep"
        return mode

    # ------------------------------------------------------------------------------------------------ the loop

    @torch.no_grad()
    def run(self) -> DFlash2GenerateDecoderOnlyOutput | torch.LongTensor:
        """Generate, and return what plain `generate` would."""
        cache = None
        try:
            with self.adapter.tap() as tap:
                self._prefill(tap)
                cache = compat.get_cache(self.model_kwargs)
                compat.set_past_recording(cache, True)
                while not all(self.finished):
                    self.ranks.check()
                    self._round(tap)
                self.ranks.check()
        except BaseException as error:
            self.ranks.report(error)
            self._take_back_unfinished_round()
            raise
        finally:
            if cache is not None:
                compat.set_past_recording(cache, False)
        if self.streamer is not None:
            self.streamer.end()
        self.stats.new_tokens = sum(self.new)
        self.draft.last_stats = self.stats
        logger.debug(
            "generate: %d new tokens in %d target passes, %d rounds, mean accepted length %.2f, per position %s, "
            "%d fallback rounds, mode %s",
            self.stats.new_tokens,
            self.stats.target_passes,
            self.stats.rounds,
            self.stats.mean_accepted_length,
            self.stats.accepted_per_position,
            self.stats.fallback_rounds,
            self.mode,
        )
        return self._result()

    def _take_back_unfinished_round(self) -> None:
        """
        After an exception, leave one row's cache as plain decoding would: all tokens that went out but the last.

        A streamer that raises is how callers cancel, and they may go on with the cache they passed.
        """
        cache = compat.get_cache(self.model_kwargs)
        if self.batch_size > 1 or cache is None or not hasattr(self, "columns"):
            return
        given_out = self.new[0] if self.streamer is None else self.streamed
        wanted = self._prompt_cache_columns + max(given_out, 1) - 1
        if isinstance(self.rollback, SecondPass):
            self.rollback.abandon()
            # States that stand before the block go with keys and values that end there.
            wanted = min(wanted, self.width)
        elif self.rollback is not None:
            self.rollback.commit([min(max(wanted - self.width, 0), self.rollback.block)])
        compat.crop_attention_to(cache, wanted)

    def _prefill(self, tap: FeatureTap) -> None:
        with self._timer("prefill"):
            cache = compat.get_cache(self.model_kwargs)
            prompt_ids = self.ids[:, : self.prompt_columns]
            with tap.listen(), self.ranks.left_to_host():
                outputs = compat.prefill(self.target, prompt_ids, self.config, self.model_kwargs)
            self.stats.target_passes += 1
            cache = compat.get_cache(self.model_kwargs)
            if cache is None:
                raise ValueError(
                    f"{type(self.target).__name__} made no key-value cache; a DFlash2 drafter needs a model that uses "
                    "transformers' Cache classes."
                )
            self._check_cache()
            self.rollback = make_rollback(self.target, cache)
            if self.rollback is not None and self.rollback.needs_even_rows and self.batch_size > 1:
                self.mode = "lockstep"
            features = tap.take()

        # Columns of the cache. They differ from the prompt's when only embeddings were given.
        columns = cache.get_seq_length()
        self._prompt_cache_columns = columns
        self.columns = [columns] * self.batch_size
        self.width = columns
        self.valid = self._prompt_mask(columns)
        entries = features[0].shape[1]
        fresh = self.valid[:, columns - entries :]
        positions = (self.valid.long().cumsum(-1) - 1)[:, columns - entries :]
        counts = fresh.sum(-1).tolist()
        # Tokens in the target's cache, padding not counted: the position of the next one.
        self.committed = self.valid.sum(-1).tolist()
        self._position_base = self._last_positions()
        self._pending = self._pack(features, positions, counts, fresh)

        logits = outputs.logits[:, -1:]
        self._accept(VerifiedBlock(logits, None, 0, outputs))
        self._emit()

    def _round(self, tap: FeatureTap) -> None:
        unfinished = (row for row in range(self.batch_size) if not self.finished[row])
        room = max(self.max_length - self.prompt_columns - self.new[row] for row in unfinished)
        slots = int(min(self.slots, room - 1))
        proposal = self._draft(slots) if slots > 0 else None
        if proposal is not None and self.verify_length is not None:
            slots = self.verify_length.choose(
                proposal.confidence, [row for row in range(self.batch_size) if not self.finished[row]]
            )
            proposal = proposal.first(slots)
        verified = self._verify(tap, proposal, slots)
        with self._timer("accept"):
            kept = self._accept(verified)
        # Before the commit, so that a streamer that raises finds a block that can be taken back.
        self._emit()
        if proposal is not None and self.verify_length is not None:
            self._learn_from(proposal, kept)
        with self._timer("commit"):
            features = tap.take()
            self._commit(features, verified, kept)

    # ------------------------------------------------------------------------------------------------ draft

    def _draft(self, slots: int) -> DFlash2Proposal:
        with self._timer("draft"):
            if self._pending is not None:
                self.session.append(*self._pending)
                self._pending = None
            proposal = self.session.propose(
                self._anchors(),
                torch.tensor(self.committed, device=self.device),
                slots=slots,
                temperature=self.temperature,
                greedy=not self.do_sample,
                with_confidence=self.verify_length is not None,
            )
            return DFlash2Proposal(
                *(t.to(self.device) for t in (proposal.tokens, proposal.candidate_ids, proposal.q, proposal.usable)),
                proposal.confidence,
            )

    def _learn_from(self, proposal: DFlash2Proposal, kept: list[int]) -> None:
        """Tell the verify length what became of a block. In lockstep other rows cut it, which says nothing."""
        if self.mode == "lockstep":
            return
        usable = proposal.usable.tolist()
        for row, count in enumerate(kept):
            if count and usable[row] and not self.finished[row]:
                self.verify_length.observe(row, count - 1, proposal.tokens.shape[1])

    def _anchors(self) -> torch.Tensor:
        if len(set(self.new)) == 1:
            return self.ids[:, self.prompt_columns + self.new[0] - 1]
        last = torch.tensor(self.new, device=self.device) + self.prompt_columns - 1
        return self.ids.gather(1, last[:, None])[:, 0]

    # ------------------------------------------------------------------------------------------------ verify

    def _verify(self, tap: FeatureTap, proposal: DFlash2Proposal | None, slots: int) -> VerifiedBlock:
        with self._timer("verify"):
            block_ids = self._anchors()[:, None]
            if proposal is not None:
                block_ids = torch.cat([block_ids, proposal.tokens], dim=1)
            with tap.listen(), self._holding_states(slots + 1):
                outputs = self._run_block(block_ids, self.new)
            return VerifiedBlock(outputs.logits[:, -(slots + 1) :], proposal, slots, outputs, block_ids)

    def _holding_states(self, block: int):
        return nullcontext() if self.rollback is None else self.rollback.hold(block)

    def _run_block(self, block_ids: torch.Tensor, new: list[int]):
        """Run `(batch, block)` ids through the target behind rows that have `new[row]` tokens."""
        inputs = compat.block_inputs(self.target, block_ids, self._block_kwargs(block_ids.shape[1], new))
        self.stats.target_passes += 1
        with self.ranks.left_to_host():
            return self.target(**inputs, return_dict=True)

    def _block_kwargs(self, block: int, new: list[int]) -> dict[str, Any]:
        kwargs = dict(self.model_kwargs)
        for key in ("inputs_embeds", "attention_mask"):
            kwargs.pop(key, None)
        if not bool(self.valid.all()):
            ones = self.valid.new_ones(self.batch_size, block)
            kwargs["attention_mask"] = torch.cat([self.valid, ones], dim=1).long()
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = self._block_positions(block, new)
        if kwargs.get("token_type_ids") is not None:
            kwargs["token_type_ids"] = kwargs["token_type_ids"][:, -1:].expand(-1, block)
        for key in ("mm_token_type_ids", "moe_mm_token_type_ids"):
            if kwargs.get(key) is not None:
                kwargs[key] = kwargs[key].new_zeros(self.batch_size, block)
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = block
        return kwargs

    def _block_positions(self, block: int, new: list[int]) -> torch.Tensor:
        offsets = torch.tensor(new, device=self.device)[:, None] + torch.arange(block, device=self.device)
        if math.isfinite(self.max_length):
            # Rows that need no more tokens, or fewer than the block has, stay within the model's positions. What is
            # computed there is thrown away.
            offsets = offsets.clamp(max=self.max_length - self.prompt_columns)
        return self._position_base + offsets.to(self._position_base)

    # ------------------------------------------------------------------------------------------------ accept

    def _accept(self, verified: VerifiedBlock) -> list[int]:
        """Commit tokens to every unfinished row; returns how many each row took."""
        before = list(self.new)
        if self.mode == "block":
            self._accept_block(verified)
        else:
            self._accept_step_by_step(verified)
        return [now - then for now, then in zip(self.new, before, strict=True)]

    def _accept_block(self, verified: VerifiedBlock) -> None:
        """All rows and slots at once: the processors need no prefix."""
        scores, raw = self._block_scores(verified)
        decision = self._decide_block(verified, scores)
        # The round's one read of device memory by the host.
        decided = decision.tolist()
        self._write_block(decision)
        for row, (count, bonus, *draft) in enumerate(decided):
            if self.finished[row]:
                continue
            if bonus < 0:
                raise RuntimeError(
                    f"Row {row}: the target's processed scores are no distribution (a NaN, or no finite score). Load "
                    "the target in bfloat16 or float32, or pass remove_invalid_values=True."
                )
            usable, drafted = (bool(draft[0]), draft[1 : 1 + count]) if draft else (True, [])
            tokens = [*drafted, bonus]
            start = self.prompt_columns + self.new[row]
            taken = 0
            for index, token in enumerate(tokens):
                if self._wants_steps:
                    self._record(row, index, verified, scores=scores[row, index], raw=raw[row, index])
                self.new[row] += 1
                taken += 1
                self.finished[row] = self._row_is_done(row, token, start + taken)
                if self.finished[row]:
                    self.ids[row, start + taken : start + len(tokens)] = self.pad_token_id
                    break
            self._count_round(verified, usable=usable, accepted=min(taken, count))

    @property
    def _takes_plain_argmax(self) -> bool:
        return not self.do_sample and not self.processors and not self.wants_scores and not self.wants_logits

    def _block_scores(self, verified: VerifiedBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """Processed and raw scores, each `(batch, block, vocab)`."""
        logits = verified.logits
        if self._takes_plain_argmax:
            return logits, logits
        raw = logits.to(dtype=torch.float32, device=self.device, copy=True)
        flat = raw.reshape(-1, raw.shape[-1])
        # These processors do not look at the prefix.
        prefix = self.ids[:, :1].repeat_interleave(logits.shape[1], dim=0)
        scores = self.processors(prefix, flat.clone() if self.wants_logits else flat)
        return scores.view(raw.shape), raw

    def _decide_block(self, verified: VerifiedBlock, scores: torch.Tensor) -> torch.Tensor:
        """
        How many drafted tokens each row keeps and which token follows them.

        Returns:
            `torch.LongTensor` of shape `(batch, 2)`, or `(batch, 3 + slots)` with a draft: accepted count, the token
            after them, whether the draft was usable, the drafted tokens.
        """
        proposal, slots = verified.proposal, verified.slots
        if proposal is None:
            accepted = torch.zeros(self.batch_size, dtype=torch.long, device=self.device)
        if not self.do_sample:
            predictions = scores.argmax(dim=-1).to(self.device)
            if proposal is not None:
                accepted, _ = accept_greedy(proposal.tokens, predictions)
                accepted = torch.where(proposal.usable, accepted, 0)
            following = predictions.gather(1, accepted[:, None])
        else:
            probs = torch.softmax(scores, dim=-1)
            if proposal is not None:
                uniforms = torch.rand(self.batch_size, slots, device=self.device)
                passed = accept_sampled(
                    proposal.tokens, proposal.candidate_ids, proposal.q, probs[:, :slots], uniforms
                )
                passed = passed & proposal.usable[:, None]
                accepted = passed.long().cumprod(dim=-1).sum(dim=-1)
            rows = torch.arange(self.batch_size, device=self.device)
            law = probs[rows, accepted]
            if proposal is not None:
                refused = accepted.clamp(max=slots - 1)
                residual = residual_distribution(law, proposal.candidate_ids[rows, refused], proposal.q[rows, refused])
                use_residual = (accepted < slots) & proposal.usable
                law = torch.where(use_residual[:, None], residual, law)
            following = torch.multinomial(law, num_samples=1)
        parts = [accepted[:, None], following]
        if proposal is not None:
            parts += [proposal.usable[:, None].long(), proposal.tokens]
        return self.ranks.agree(torch.cat(parts, dim=1))[0]

    def _write_block(self, decision: torch.Tensor) -> None:
        """Write every unfinished row's accepted tokens and the following one, padding behind them."""
        block = self._committed_block(decision)
        starts = [self.prompt_columns + count for count in self.new]
        self._make_room(max(starts) + block.shape[1])
        if len(set(starts)) == 1 and not any(self.finished):
            self.ids[:, starts[0] : starts[0] + block.shape[1]] = block
            return
        rows = [row for row in range(self.batch_size) if not self.finished[row]]
        index = torch.tensor([rows, [starts[row] for row in rows]], device=self.device)[..., None]
        offsets = torch.arange(block.shape[1], device=self.device)
        self.ids[index[0], index[1] + offsets] = block[index[0, :, 0]]

    def _committed_block(self, decision: torch.Tensor) -> torch.Tensor:
        return committed_block(decision[:, 3:], decision[:, 0], decision[:, 1], self.pad_token_id)

    def _accept_step_by_step(self, verified: VerifiedBlock) -> None:
        """
        Token by token, with the calls plain decoding would make.

        Rows at the same length share a call, which gets the whole batch cut to that length: processors find each row
        at its own index. In lockstep all rows are at the same length, a finished one shows its padding, and the block
        ends for all rows where it ends for one.
        """
        unfinished = [row for row in range(self.batch_size) if not self.finished[row]]
        proposal, slots = verified.proposal, verified.slots
        usable = [False] * self.batch_size if proposal is None else proposal.usable.tolist()
        index = [0] * self.batch_size
        going = [row for row in range(self.batch_size) if not self._is_frozen(row)]
        while going:
            length = min(self.new[row] for row in going)
            group = [row for row in going if self.new[row] == length]
            at = torch.tensor(index, device=verified.logits.device).clamp(max=slots)
            rows = torch.arange(self.batch_size, device=verified.logits.device)
            raw = verified.logits[rows, at].to(dtype=torch.float32, device=self.device, copy=True)
            # Kept apart: a processor may write into what it is given.
            kept_raw = raw.clone() if self.wants_logits else raw
            scores = self.processors(self.ids[:, : self.prompt_columns + length], raw)
            offered = [row in group and usable[row] and index[row] < slots for row in range(self.batch_size)]
            tokens, agreed = self._choose(scores, proposal, at.to(self.device), offered)
            if self.ranks.size > 1:
                tokens, agreed = (t.tolist() for t in self.ranks.agree(torch.tensor(tokens), torch.tensor(agreed)))
            for row in group:
                if self._wants_steps:
                    self._record(row, index[row], verified, scores=scores[row], raw=kept_raw[row])
                index[row] += 1
            self._append(group, [tokens[row] for row in group])
            self._emit()
            going = [row for row in going if row not in group or (agreed[row] and not self._is_frozen(row))]
            if self.mode == "lockstep" and (
                all(self.finished) or any(not agreed[row] for row in group if not self._is_frozen(row))
            ):
                break
        for row in unfinished:
            # Every committed token but the one that ends the block was a drafted one; in lockstep the block may have
            # been cut behind a drafted token.
            drafted = proposal.tokens[row].tolist() if usable[row] else []
            start = self.prompt_columns + self.new[row] - index[row]
            committed = self.ids[row, start : start + index[row]].tolist()
            accepted = 0
            while accepted < min(len(drafted), len(committed)) and drafted[accepted] == committed[accepted]:
                accepted += 1
            self._count_round(verified, usable=proposal is None or usable[row], accepted=accepted)

    def _is_frozen(self, row: int) -> bool:
        # Without an end token, plain decoding keeps extending rows that have met their stopping rule.
        return self.finished[row] and (self.has_eos or self.mode != "lockstep")

    def _choose(
        self, scores: torch.Tensor, proposal: DFlash2Proposal | None, at: torch.Tensor, offered: list[bool]
    ) -> tuple[list[int], list[bool]]:
        """
        One token per row, and whether it is the drafted one.

        Args:
            scores (`torch.Tensor` of shape `(batch, vocab)`): Processed scores.
            proposal ([`DFlash2Proposal`], *optional*): The block's draft.
            at (`torch.LongTensor` of shape `(batch,)`): The slot each row is at.
            offered (`list[bool]`): Rows that have a drafted token there.
        """
        rows = torch.arange(self.batch_size, device=self.device)
        nothing = [False] * self.batch_size
        if not self.do_sample:
            chosen = scores.argmax(dim=-1)
            if not any(offered):
                return chosen.tolist(), nothing
            same = chosen == proposal.tokens[rows, at.clamp(max=proposal.tokens.shape[1] - 1)]
            return chosen.tolist(), [a and b for a, b in zip(same.tolist(), offered, strict=True)]
        probs = torch.softmax(scores, dim=-1)
        if not any(offered):
            return torch.multinomial(probs, num_samples=1)[:, 0].tolist(), nothing
        at = at.clamp(max=proposal.tokens.shape[1] - 1)
        drafted, candidate_ids, q = proposal.tokens[rows, at], proposal.candidate_ids[rows, at], proposal.q[rows, at]
        uniforms = torch.rand(self.batch_size, 1, device=self.device)
        passed = accept_sampled(drafted[:, None], candidate_ids[:, None], q[:, None], probs[:, None], uniforms)[:, 0]
        may_pass = torch.tensor(offered, device=self.device)
        passed = passed & may_pass
        law = torch.where(may_pass[:, None], residual_distribution(probs, candidate_ids, q), probs)
        replacement = torch.multinomial(law, num_samples=1)[:, 0]
        return torch.where(passed, drafted, replacement).tolist(), passed.tolist()

    def _count_round(self, verified: VerifiedBlock, *, usable: bool, accepted: int) -> None:
        if verified.proposal is None and self.stats.target_passes == 1:
            return  # the prefill is no round
        if not usable:
            self.stats.fallback_rounds += 1
        self.stats._count(verified.slots if usable else 0, accepted)

    def _append(self, rows: list[int], tokens: list[int]) -> None:
        """Write one token to each of the rows, which are at the same length, and ask the stopping rules."""
        length = self.prompt_columns + self.new[rows[0]]
        self._make_room(length + 1)
        self.ids[rows, length] = torch.tensor(tokens, dtype=torch.long, device=self.device)
        for row in rows:
            self.new[row] += 1
        if self.mode == "lockstep":
            done = self.ranks.agree(self.criteria(self.ids[:, : length + 1], self._scores_so_far()))[0]
            for row, is_done in enumerate(done.tolist()):
                self.finished[row] = self.finished[row] or is_done
        else:
            for row, token in zip(rows, tokens, strict=True):
                self.finished[row] = self._row_is_done(row, token, length + 1)

    def _make_room(self, length: int) -> None:
        if length > self.ids.shape[1]:
            more = self.ids.new_full((self.batch_size, length), self.pad_token_id)
            self.ids = torch.cat([self.ids, more], dim=1)

    def _row_is_done(self, row: int, token: int, length: int) -> bool:
        done = False
        for criterion in self.criteria:
            if type(criterion) is EosTokenCriteria:
                done = done or token in self._end_tokens
            elif type(criterion) is MaxLengthCriteria:
                done = done or length >= criterion.max_length
            else:
                # The host's own rules do not look at scores.
                scores = None if type(criterion) in _ROW_CRITERIA else self._scores_so_far()
                result = torch.as_tensor(criterion(self.ids[row : row + 1, :length], scores)).all()
                # Clocks, and whatever else a rule may look at, differ between ranks.
                done = bool(self.ranks.agree(result)[0]) or done
        return done

    # ------------------------------------------------------------------------------------------------ commit

    def _commit(self, features: list[torch.Tensor], verified: VerifiedBlock, kept: list[int]) -> None:
        """Keep the first `kept[row]` block entries of every row in the target's cache, and their features."""
        block = verified.slots + 1
        cache = compat.get_cache(self.model_kwargs)
        offsets = torch.arange(block, device=self.device)
        positions = torch.tensor(self.committed, device=self.device)[:, None] + offsets
        self._pending = (features, positions, kept) if any(kept) else None
        if isinstance(self.rollback, SecondPass) and max(kept) < block:
            block = self._run_second_pass(verified.block_ids, kept)
        elif self.rollback is not None:
            self.rollback.commit(kept)
        self.committed = [length + count for length, count in zip(self.committed, kept, strict=True)]
        self.columns = [length + count for length, count in zip(self.columns, kept, strict=True)]
        if len(set(kept)) == 1:
            compat.crop_attention(cache, block - kept[0])
            self.width += kept[0]
            self.valid = torch.cat([self.valid, self.valid.new_ones(self.batch_size, kept[0])], dim=1)
            return
        rejected = torch.tensor([block - count for count in kept], device=self.device)
        width = max(self.columns)
        _align_right(cache, rejected, width)
        index = self.width + block - rejected[:, None] - width + torch.arange(width, device=self.device)
        valid = torch.cat([self.valid, self.valid.new_ones(self.batch_size, block)], dim=1)
        self.valid = valid.gather(1, index.clamp(min=0)) & (index >= 0)
        self.width = width

    def _run_second_pass(self, block_ids: torch.Tensor, kept: list[int]) -> int:
        """Take the whole block out of the cache and run its kept part again; returns the entries that adds."""
        self.rollback.abandon()
        compat.crop_attention(compat.get_cache(self.model_kwargs), block_ids.shape[1])
        if max(kept) > 0:
            before = [now - count for now, count in zip(self.new, kept, strict=True)]
            self._run_block(block_ids[:, : max(kept)], before)
        return max(kept)

    def _pack(
        self, features: list[torch.Tensor], positions: torch.Tensor, counts: list[int], fresh: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, list[int]]:
        """Move the real tokens of each row to the front."""
        if not bool(fresh.all()):
            order = torch.argsort((~fresh).long(), dim=1, stable=True)
            positions = positions.gather(1, order)
            packed = []
            for tap in features:
                index = order.to(tap.device)[..., None].expand(-1, -1, tap.shape[-1])
                packed.append(tap.gather(1, index))
            features = packed
        return features, positions, counts

    def _prompt_mask(self, columns: int) -> torch.Tensor:
        mask = self.model_kwargs.get("attention_mask")
        ones = torch.ones(self.batch_size, columns, dtype=torch.bool, device=self.device)
        if mask is None:
            return ones
        mask = mask.to(self.device).bool()
        if mask.shape[1] < columns:
            mask = torch.cat([ones[:, : columns - mask.shape[1]], mask], dim=1)
        return mask[:, -columns:]

    def _last_positions(self) -> torch.Tensor | None:
        positions = self.model_kwargs.get("position_ids")
        return None if positions is None else positions[..., -1:].to(self.device)

    # ------------------------------------------------------------------------------------------------ what goes out

    def _emit(self) -> None:
        """Give the streamer every step that all rows have reached, in plain decoding's order and shape."""
        if self.streamer is None:
            return
        pending = [self.new[row] for row in range(self.batch_size) if not self.finished[row]]
        ready = min(pending) if pending else max(self.new)
        while self.streamed < ready:
            column = self.prompt_columns + self.streamed
            self.streamed += 1
            self.streamer.put(self.ids[:, column].cpu())

    def _scores_so_far(self) -> tuple[torch.Tensor, ...] | None:
        if not self.wants_scores:
            return None
        steps = min(len(row) for row in self.steps)
        if self.mode == "lockstep" or self.batch_size == 1:
            # All rows are at the same step: nothing that was stacked before changes.
            self._stacked_scores += tuple(
                torch.stack([row[step].scores for row in self.steps])
                for step in range(len(self._stacked_scores), steps)
            )
            return self._stacked_scores
        return self._stacked("scores")

    def _record(
        self,
        row: int,
        index: int,
        verified: VerifiedBlock,
        *,
        scores: torch.Tensor,
        raw: torch.Tensor,
    ) -> None:
        step = _Step()
        if self.wants_scores:
            step.scores = scores
        if self.wants_logits:
            step.logits = raw
        outputs = verified.outputs
        first = self.new[row] == 0
        if self.wants_hidden:
            at = slice(None) if first else slice(index, index + 1)
            step.hidden_states = tuple(layer[row : row + 1, at] for layer in outputs.hidden_states)
        if self.wants_attentions:
            if first:
                step.attentions = tuple(layer[row : row + 1] for layer in outputs.attentions)
            else:
                step.attentions = tuple(
                    self._attention_row(layer, row, index, verified.slots, layer_index)
                    for layer_index, layer in enumerate(outputs.attentions)
                )
        self.steps[row].append(step)

    def _attention_row(
        self, weights: torch.Tensor, row: int, index: int, slots: int, layer_index: int
    ) -> torch.Tensor:
        """One query's weights over as many columns as plain decoding has at that step, padding first."""
        cache_layers = compat.attention_layers(compat.get_cache(self.model_kwargs))
        window = compat.sliding_window_of(cache_layers[layer_index]) if layer_index < len(cache_layers) else None
        width = self.columns[row] + index + 1
        if window is not None:
            width = min(width, window)
        stop = weights.shape[-1] - (slots - index)
        seen = weights[row : row + 1, :, index : index + 1, max(stop - width, 0) : stop]
        return torch.nn.functional.pad(seen, (width - seen.shape[-1], 0))

    def _stacked(self, name: str) -> tuple[torch.Tensor, ...]:
        """`(batch, vocab)` per step; a row that ended before a step holds zeros there."""
        steps = max(len(row) for row in self.steps)
        filler = torch.zeros_like(getattr(self.steps[0][0], name))
        return tuple(
            torch.stack([getattr(row[step], name) if step < len(row) else filler for row in self.steps])
            for step in range(steps)
        )

    def _stacked_layers(self, name: str) -> tuple[tuple[torch.Tensor, ...], ...]:
        longest = max(self.steps, key=len)
        result = []
        for step in range(len(longest)):
            shapes = getattr(longest[step], name)
            rows = [getattr(row[step], name) if step < len(row) else None for row in self.steps]
            result.append(
                tuple(
                    torch.cat([row[layer] if row is not None else torch.zeros_like(like) for row in rows])
                    for layer, like in enumerate(shapes)
                )
            )
        return tuple(result)

    def _result(self) -> DFlash2GenerateDecoderOnlyOutput | torch.LongTensor:
        cache = compat.get_cache(self.model_kwargs)
        sequences = self.ids[:, : self.prompt_columns + max(self.new)].clone()
        outlives = self.config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        if outlives and len(set(self.columns)) > 1:
            _align_left(cache, torch.tensor(self.columns, device=self.device), self.width)
        if not self.config.return_dict_in_generate:
            return sequences
        return compat.make_output(
            DFlash2GenerateDecoderOnlyOutput,
            cache,
            sequences=sequences,
            scores=self._stacked("scores") if self.wants_scores else None,
            logits=self._stacked("logits") if self.wants_logits else None,
            attentions=self._stacked_layers("attentions") if self.wants_attentions else None,
            hidden_states=self._stacked_layers("hidden_states") if self.wants_hidden else None,
            dflash2_stats=self.stats,
        )


def _request_temperature(processors: logits_process.LogitsProcessorList) -> float:
    temperature = 1.0
    for processor in processors:
        if isinstance(processor, logits_process.TemperatureLogitsWarper):
            temperature *= processor.temperature
    return temperature


def _align_right(cache, rejected: torch.Tensor, width: int) -> None:
    """
    Drop each row's rejected entries and move the rest against the right edge.

    Args:
        cache ([`~transformers.Cache`]): Changed in place to `width` columns.
        rejected (`torch.LongTensor` of shape `(batch,)`): Entries to drop from the end of each row.
        width (`int`): Columns afterwards, the length of the longest row. A row shorter than that has copies of its
            first entry in the columns before it; the mask hides them.
    """
    for layer in compat.attention_layers(cache):
        window = compat.sliding_window_of(layer)
        stored = width if window is None else min(width, max(window - 1, 0))
        start = layer.keys.shape[-2] - rejected.to(layer.keys.device)[:, None] - stored
        _take_columns(layer, start + torch.arange(stored, device=layer.keys.device), width)


def _align_left(cache, columns: torch.Tensor, width: int) -> None:
    """
    Give every row's entries the columns their tokens have in the returned sequences; columns behind a row's end are 0.

    Args:
        cache ([`~transformers.Cache`]): A cache aligned on the right, changed in place.
        columns (`torch.LongTensor` of shape `(batch,)`): Entries of each row, its left padding included.
        width (`int`): Columns of the cache.
    """
    for layer in compat.attention_layers(cache):
        stored = layer.keys.shape[-2]
        shift = (width - columns).to(layer.keys.device)[:, None]
        _take_columns(layer, shift + torch.arange(stored, device=layer.keys.device), width)


def _take_columns(layer, index: torch.Tensor, width: int) -> None:
    behind = (index >= layer.keys.shape[-2])[:, None, :, None]
    index = index.clamp(min=0, max=layer.keys.shape[-2] - 1)[:, None, :, None]
    keys, values = (
        states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3])).masked_fill(behind, 0)
        for states in (layer.keys, layer.values)
    )
    compat.set_layer_content(layer, keys, values, width)


class _PhaseTimer:
    """Adds up wall time per phase when `TRANSFORMERS_DFLASH2_TIMING=1`; waits for the device at both ends then."""

    def __init__(self, stats: DFlash2Stats, device: torch.device):
        self._seconds = stats.phase_seconds
        self.enabled = os.environ.get("TRANSFORMERS_DFLASH2_TIMING", "0") == "1"
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    @contextmanager
    def __call__(self, phase: str):
        if not self.enabled:
            yield
            return
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start


__all__ = ["DFlash2GenerateDecoderOnlyOutput", "DFlash2Stats", "SpeculativeDecoding"]

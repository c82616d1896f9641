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
"""Drafting: target features in, candidates and the distribution they were drawn from out.

[`DraftSession`] is the engine. The library's own loop drives it for any number of rows; [`DFlash2CandidateGenerator`]
wraps it in the host's `CandidateGenerator` protocol for code that runs the host's assisted loop.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .modeling_dflash2 import DFlash2DraftModel, DFlash2Proposal
from .target import TargetAdapter, TargetHead


# What the host fills in for `num_assistant_tokens` when a call does not say.
_HOST_DEFAULT_ASSISTANT_TOKENS = 20


class DraftSession:
    """
    The drafter's side of one generate call.

    Args:
        draft ([`DFlash2DraftModel`]): The drafter.
        adapter ([`TargetAdapter`]): The target it drafts for.
        batch_size (`int`): Rows.
        block_size (`int`): The longest block, anchor included.

    Raises:
        `ValueError`: The drafter is in float16 and does not allow it, or reads scores that the target's ranks do not
            hold in one place.
    """

    def __init__(self, draft: DFlash2DraftModel, adapter: TargetAdapter, *, batch_size: int, block_size: int):
        if draft.dtype == torch.float16 and not draft.allow_fp16:
            raise ValueError(
                "The drafter is in float16, whose range its hidden states exceed. Move it with "
                "draft.to(torch.bfloat16), or set draft.allow_fp16 = True to use float16 all the same."
            )
        if draft.reads_whole_vocabulary and adapter.projection.is_sharded:
            raise ValueError(
                f"A {type(draft).__name__} reads the head's scores of all tokens, and the target's head is spread "
                "over ranks. Load the target without tp_plan, or use a DFlash2 drafter."
            )
        draft.validate_vocabulary(adapter.candidate_limit)
        self.draft = draft
        self.adapter = adapter
        self.device, self.dtype = draft.device, draft.dtype
        self.context = draft.make_context(batch_size, block_size=block_size)
        # That of the target's residual stream, known from the first features on.
        self.target_dtype = self.dtype

    def append(self, features: list[torch.Tensor], position_ids: torch.Tensor, counts: list[int]) -> None:
        """
        Take in the target's features of tokens that have been committed.

        Args:
            features (`list[torch.Tensor]` of shape `(batch, entries, target_hidden_size)`): One tensor per tap.
            position_ids (`torch.LongTensor` of shape `(batch, entries)`): Absolute positions, counted without padding.
            counts (`list[int]` of length `batch`): Only the first `counts[b]` entries of row `b` are committed.
        """
        self.target_dtype = features[0].dtype
        fused = torch.cat([tap.to(self.device) for tap in features], dim=-1).to(self.dtype)
        self.draft.append_context(self.context, fused, position_ids.to(self.device), counts)

    def make_block(
        self, anchor_ids: torch.Tensor, anchor_positions: torch.Tensor, slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Ids and positions of the drafter's pass.

        Args:
            anchor_ids, anchor_positions, slots: As of [`propose`], on the drafter's device.

        Returns:
            `(ids, positions)`: int64 tensors of shape `(batch, rows)`, `[anchor, mask, ..., mask]` and its positions;
            [`DFlash2DraftModel.block_rows`] says how many rows.
        """
        rows, _ = self.draft.block_rows(slots)
        mask = self.draft.config.mask_token_id
        ids = torch.full((anchor_ids.shape[0], rows), mask, dtype=torch.long, device=self.device)
        ids[:, 0] = anchor_ids
        return ids, anchor_positions[:, None] + torch.arange(rows, device=self.device)

    def propose(
        self,
        anchor_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        *,
        slots: int,
        temperature: float | torch.Tensor,
        greedy: bool | torch.Tensor,
        with_confidence: bool = False,
        noise: torch.Tensor | None = None,
        block: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> DFlash2Proposal:
        """
        Draft a block behind each row's anchor.

        Args:
            anchor_ids (`torch.LongTensor` of shape `(batch,)`): Last committed tokens.
            anchor_positions (`torch.LongTensor` of shape `(batch,)`): Their positions: tokens committed before them.
            slots (`int`): Tokens to propose.
            temperature (`float` or `torch.Tensor` of shape `(batch,)`): The request's temperature.
            greedy (`bool` or `torch.BoolTensor` of shape `(batch,)`): Whether the walk takes the best candidate.
            with_confidence (`bool`, *optional*, defaults to `False`): Whether to estimate each token's acceptance.
            noise (`torch.Tensor`, *optional*): What [`DFlash2DraftModel.draw_noise`] gave; drawn here by default.
            block (`tuple[torch.Tensor, torch.Tensor]`, *optional*): What [`make_block`] gives, from a caller that
                keeps it from round to round; made here by default.

        Returns:
            [`DFlash2Proposal`] on the drafter's device. Tokens of unusable rows are the anchor's, with `q = 0`.
        """
        device, config = self.device, self.draft.config
        # Kernels read rows by a stride of one.
        anchor_ids, anchor_positions = anchor_ids.to(device).contiguous(), anchor_positions.to(device)
        batch = anchor_ids.shape[0]
        block_ids, positions = self.make_block(anchor_ids, anchor_positions, slots) if block is None else block
        embeds = self.adapter.embed(block_ids).to(device=device, dtype=self.dtype)
        if config.input_embedding_scale != 1.0:
            embeds = embeds * config.input_embedding_scale
        _, first = self.draft.block_rows(slots)
        hidden = self.draft(embeds, positions, self.context).last_hidden_state[:, first : first + slots]
        head = TargetHead(self.adapter, self.target_dtype)
        if noise is None and greedy is not True:
            # A greedy draft leaves the host's random stream alone.
            noise = self.draft.draw_noise(batch, slots, head.vocab_size)
        proposal = self.draft.propose(
            hidden,
            anchor_ids,
            head,
            temperatures=torch.as_tensor(temperature, dtype=torch.float32, device=device).expand(batch).contiguous(),
            greedy_mask=torch.as_tensor(greedy, dtype=torch.bool, device=device).expand(batch).contiguous(),
            noise=noise,
            with_confidence=with_confidence,
        )
        usable = proposal.usable[:, None]
        tokens = torch.where(usable, proposal.tokens, anchor_ids[:, None])
        q = torch.where(usable[..., None], proposal.q, 0.0)
        agreed = self.adapter.ranks.agree(tokens, proposal.candidate_ids, q, proposal.usable)
        confidence = proposal.confidence
        if confidence is not None:
            (confidence,) = self.adapter.ranks.agree(confidence)
        return DFlash2Proposal(*agreed, confidence)


class DFlash2CandidateGenerator(CandidateGenerator):
    """
    A DFlash2 drafter behind the host's `CandidateGenerator` protocol, for one row.

    The host's assisted loop calls [`get_candidates`] before every target forward. The first call offers nothing, so
    that the target's prefill provides features; from then on each call takes in the features of the tokens accepted
    last and drafts a block. The outputs of the tapped layers are collected with forward hooks: call [`close`], or use
    the generator as a context manager, to remove them.

    Args:
        draft ([`DFlash2DraftModel`]): The drafter.
        target ([`~transformers.PreTrainedModel`]): The model the loop runs.
        generation_config ([`~transformers.GenerationConfig`]): The call's configuration: `do_sample`, `temperature`,
            `max_length` and the end tokens are read.
        num_assistant_tokens (`int`, *optional*): Tokens to draft per round; by default what a block proposes.
        logits_processor: Accepted for the host's sake. A drafter is shaped by the temperature alone.

    Raises:
        `ValueError`: The drafter does not fit the target.
    """

    requires_model_outputs = True
    # Nothing to ask of the target's forward: features come through hooks.
    model_kwargs_overrides: ClassVar[dict] = {}

    def __init__(
        self,
        draft: DFlash2DraftModel,
        target,
        generation_config,
        *,
        num_assistant_tokens: int | None = None,
        logits_processor=None,
    ):
        del logits_processor
        self._adapter = TargetAdapter(target, draft.config)
        self.slots = draft.config.speculative_tokens if num_assistant_tokens is None else num_assistant_tokens
        self._session = DraftSession(draft, self._adapter, batch_size=1, block_size=self.slots + 1)
        self._greedy = not generation_config.do_sample
        self._temperature = generation_config.temperature or 1.0
        self._max_length = generation_config.max_length
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self._eos_token_ids = [] if eos is None else eos.flatten().tolist()
        self._committed = 0
        self._offered = 0
        self._hooks = self._adapter.tap()
        self._tap = self._hooks.__enter__()
        # The host's loop makes the forwards, all through one generator's life.
        self._listening = self._tap.listen()
        self._listening.__enter__()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks from the target. The generator is of no use afterwards."""
        if self._hooks is not None:
            self._listening.__exit__(None, None, None)
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict | None = None,
        model_outputs=None,
        is_first_iteration: bool | None = None,
        n_last_matches: int | torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """
        Draft the next block.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): Prompt and committed tokens.
            model_kwargs (`dict`, *optional*): The loop's model inputs; a 2-D `attention_mask` tells padding.
            model_outputs (*optional*): The target's last output; `None` before the first forward.
            is_first_iteration (`bool`, *optional*): Whether the target has yet to run.
            n_last_matches (`int`, *optional*): Drafted tokens that the last round accepted.

        Returns:
            `(candidate_ids, candidate_logits)`: `input_ids` followed by the drafted tokens, and, per drafted token,
            the logarithm of the distribution it was drawn from, dense over the target's vocabulary
            (`(1, drafted, vocab)`, fp32). `(input_ids, None)` when nothing is offered.
        """
        if input_ids.shape[0] != 1:
            raise ValueError(
                f"The host's assisted loop drafts for one row, but input_ids has {input_ids.shape[0]}. Call "
                "generate(..., assistant_model=draft), which takes any number of rows."
            )
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        offer = self._draft(input_ids, model_kwargs or {}, model_outputs, n_last_matches)
        self._offered = offer[0].shape[1] - input_ids.shape[1]
        return offer

    def _draft(self, input_ids, model_kwargs: dict, model_outputs, n_last_matches):
        self._ingest(model_kwargs, input_ids.shape[1], n_last_matches)
        slots = self.slots
        if self._max_length is not None:
            slots = min(slots, self._max_length - input_ids.shape[1] - 1)
        if slots < 1:
            return input_ids, None
        position = torch.tensor([self._committed], device=input_ids.device)
        proposal = self._session.propose(
            input_ids[:, -1], position, slots=slots, temperature=self._temperature, greedy=self._greedy
        )
        if not bool(proposal.usable):
            return input_ids, None
        tokens = proposal.tokens.to(input_ids.device)
        # Early versions of the loop do not look for an end token inside a block.
        ends = [i for i, token in enumerate(tokens[0].tolist()) if token in self._eos_token_ids]
        kept = ends[0] + 1 if ends else slots
        logits = model_outputs.logits
        dense = torch.full((1, kept, logits.shape[-1]), -torch.inf, device=logits.device)
        ids, q = proposal.candidate_ids[:, :kept].to(logits.device), proposal.q[:, :kept].to(logits.device)
        dense.scatter_(-1, ids, q.log())
        return torch.cat([input_ids, tokens[:, :kept]], dim=-1), dense

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches) -> None:
        """The draft length is constant here; it adapts in the library's own loop, see `verify_length`."""

    def _ingest(self, model_kwargs: dict, length: int, n_last_matches) -> None:
        # The target's own forward comes first; a processor that runs the target as well comes after it.
        features = self._tap.take(length - 1 if self._committed == 0 else self._offered + 1)
        entries = features[0].shape[1]
        device = features[0].device
        if self._committed == 0:
            mask = model_kwargs.get("attention_mask")
            count = entries if mask is None else int(mask[0, :entries].sum())
            # Left padding: the committed tokens come last.
            features = [tap[:, entries - count :] for tap in features]
        else:
            count = int(n_last_matches) + 1
            features = [tap[:, :count] for tap in features]
        positions = self._committed + torch.arange(count, device=device)[None]
        self._session.append(features, positions, [count])
        self._committed += count


@contextmanager
def host_assisted_loop(target, draft: DFlash2DraftModel) -> Iterator[None]:
    """
    Let `target.generate(..., assistant_model=draft)` run the *host's* assisted loop instead of this library's.

    For comparisons and for code that is tied to that loop: one row, dynamic cache, no custom stopping rule inside a
    block. The target's factory of candidate generators is replaced on the instance while the context is open.
    `num_assistant_tokens` may be passed to `generate`; the host's default of 20 counts as not passed.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model to generate with.
        draft ([`DFlash2DraftModel`]): Its drafter.
    """
    generators: list[DFlash2CandidateGenerator] = []

    def close_generators():
        while generators:
            generators.pop().close()

    def make_generator(generation_config, logits_processor=None, **kwargs):
        close_generators()
        num_assistant_tokens = generation_config.num_assistant_tokens
        if num_assistant_tokens == _HOST_DEFAULT_ASSISTANT_TOKENS:
            num_assistant_tokens = None
        generator = DFlash2CandidateGenerator(
            draft, target, generation_config, num_assistant_tokens=num_assistant_tokens
        )
        generators.append(generator)
        return generator

    target._get_candidate_generator = make_generator
    draft.is_dflash2_assistant = False
    try:
        yield
    finally:
        del draft.is_dflash2_assistant
        del target._get_candidate_generator
        close_generators()


__all__ = ["DFlash2CandidateGenerator", "DraftSession", "host_assisted_loop"]

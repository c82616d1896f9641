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
"""Takes a `generate` call apart: what the drafter proposed and what became of it, round by round."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from .functional_dflash2 import top_candidates
from .modeling_dflash2 import DFlash2DraftModel, DFlash2Proposal
from .traces import Trace, TracedRound


# Drafters without a selector choose from the whole vocabulary; this many are shown.
_SHOWN_CANDIDATES = 8


@torch.no_grad()
def inspect(target, draft: DFlash2DraftModel, prompt, *, tokenizer=None, **generate_kwargs) -> Trace:
    """
    Generate with a drafter and take the call apart.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        draft ([`DFlash2DraftModel`]): Its drafter.
        prompt (`str`, `list[dict]`, `torch.LongTensor` of shape `(1, length)` or mapping):
            Text, chat messages (the tokenizer's chat template is applied), ids, or the tokenizer's output.
        tokenizer (*optional*): Needed for text and messages, and to show text instead of ids.
        generate_kwargs: What [`~transformers.GenerationMixin.generate`] takes.

    Returns:
        [`Trace`].

    Raises:
        `ValueError`: More than one row, or text without a tokenizer.

    Example:

    ```python
    >>> import torch
    >>> from transformers_dflash2 import inspect
    >>> from transformers_dflash2.testing import table_drafter, table_target

    >>> target = table_target()
    >>> trace = inspect(target, table_drafter(target), torch.tensor([[3, 7, 1]]), max_new_tokens=16)
    >>> len(trace.new_ids) == 1 + sum(trace.committed_by_round())
    True
    ```
    """
    inputs = _inputs(prompt, tokenizer, target.device)
    if inputs["input_ids"].shape[0] != 1:
        raise ValueError(f"inspect takes one row, got {inputs['input_ids'].shape[0]}; call it once for each.")
    with _recorded_proposals(draft) as proposals:
        output = target.generate(
            **inputs,
            **{
                # Every proposal passes through Python in this tempo only.
                "cache_implementation": "dynamic",
                **generate_kwargs,
                "assistant_model": draft,
                "return_dict_in_generate": True,
                "output_scores": True,
            },
        )
    length = inputs["input_ids"].shape[1]
    new_ids = output.sequences[0, length:].tolist()
    rounds = _rounds(proposals, new_ids, output.scores)
    return Trace(inputs["input_ids"][0].tolist(), new_ids, rounds, output.dflash2_stats, tokenizer)


def _inputs(prompt, tokenizer, device) -> dict[str, torch.Tensor]:
    if isinstance(prompt, torch.Tensor):
        return {"input_ids": prompt.to(device)}
    if isinstance(prompt, str | list):
        if tokenizer is None:
            raise ValueError("A prompt of text or messages needs the tokenizer: pass tokenizer=tokenizer.")
        if isinstance(prompt, str):
            encoded = tokenizer(prompt, return_tensors="pt")
        else:
            encoded = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        prompt = encoded
    return {name: value.to(device) for name, value in prompt.items()}


@contextmanager
def _recorded_proposals(draft: DFlash2DraftModel) -> Iterator[list[DFlash2Proposal]]:
    """Collects what the drafter proposes while the context is open."""
    proposals: list[DFlash2Proposal] = []
    propose = draft.propose

    def record(slot_hidden, anchor_ids, head, **kwargs):
        proposal = propose(slot_hidden, anchor_ids, head, **kwargs)
        proposals.append(_with_odds(draft, proposal, slot_hidden, anchor_ids, head))
        return proposal

    draft.propose = record
    try:
        yield proposals
    finally:
        del draft.propose


def _with_odds(
    draft: DFlash2DraftModel, proposal: DFlash2Proposal, slot_hidden: torch.Tensor, anchor_ids: torch.Tensor, head
) -> DFlash2Proposal:
    """
    A proposal with a few candidates of each slot; a greedy one, whose q is one-hot, with the probabilities that its
    choices were made by. Those of a Markov head are not known afterwards.
    """
    if draft.reads_whole_vocabulary:
        q, places = proposal.q.topk(min(_SHOWN_CANDIDATES, proposal.q.shape[-1]), dim=-1)
        return replace(proposal, candidate_ids=proposal.candidate_ids.gather(-1, places), q=q)
    if not bool(((proposal.q == 0) | (proposal.q == 1)).all()):
        return proposal
    config, selector = draft.config, draft.candidate_selector
    unary, candidate_ids = top_candidates(
        head(slot_hidden),
        top_k=min(config.selector_top_k or _SHOWN_CANDIDATES, config.vocab_size),
        multiplier=config.output_multiplier,
        softcap=config.final_logit_softcapping,
    )
    scores = unary
    if selector is not None:
        lattice = selector(slot_hidden, unary, candidate_ids, anchor_ids)
        chosen = (candidate_ids == proposal.tokens[..., None]).long().argmax(dim=-1)
        # Slot 0 follows the anchor, whatever the row.
        previous = torch.cat([chosen[:, :1], chosen[:, :-1]], dim=1)
        scores = lattice.gather(2, previous[..., None, None].expand(-1, -1, 1, lattice.shape[-1]))[:, :, 0]
    return replace(proposal, candidate_ids=candidate_ids, q=torch.softmax(scores.float(), dim=-1))


def _rounds(
    proposals: list[DFlash2Proposal], new_ids: list[int], scores: tuple[torch.Tensor, ...]
) -> list[TracedRound]:
    """
    Lines the proposals up with the text.

    A refused token never equals the one in its place, greedy or sampled, as the target's residual distribution gives
    it no weight. So the text itself tells how much of each block was kept.
    """
    rounds, position = [], 1
    for proposal in proposals:
        proposed = proposal.tokens[0].tolist()
        accepted, rest = 0, new_ids[position:]
        while bool(proposal.usable[0]) and accepted < min(len(proposed), len(rest)):
            if proposed[accepted] != rest[accepted]:
                break
            accepted += 1
        bonus = rest[accepted] if accepted < len(rest) else None
        candidates, asked = proposal.candidate_ids[0], scores[position : position + accepted + 1]
        rounds.append(
            TracedRound(
                proposed,
                accepted,
                bonus,
                candidates.tolist(),
                proposal.q[0].tolist(),
                [
                    torch.softmax(step[0].float(), dim=-1)[slot.to(step.device)].tolist()
                    for slot, step in zip(candidates, asked, strict=False)
                ],
            )
        )
        position += rounds[-1].committed
    # Next to a length limit a round drafts nothing.
    rounds += [TracedRound([], 0, token, [], []) for token in new_ids[position:]]
    return rounds


__all__ = ["inspect"]

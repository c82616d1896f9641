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
"""DSpark draft models: the backbone of DFlash, a Markov head and a confidence head.

The pass over a block is that of a DFlash drafter. What differs is what the rows mean (with `sample_from_anchor` every
row predicts the token *behind* its own, the anchor's included) and how rows become tokens: the slots are filled from
left to right, each with the head's logits plus a bias that follows from the token before, see `functional_dspark`.

The head is the target's, or the checkpoint's own, which may cover a part of the vocabulary: then `d2t` holds, per
draft token, the offset to its id in the target. Parameter names are those of the public checkpoints.
"""

import copy

import torch
from torch import nn

from .configuration_dspark import DSparkConfig
from .functional_dflash2 import finite_rows, largest_probability, top_candidates, transform_unary
from .functional_dspark import gated_code, markov_law, markov_step, recurrent_code
from .modeling_dflash2 import DFlash2DraftModel, DFlash2Proposal, UnsupportedTensorError, _fast


class DSparkMarkovHead(nn.Module):
    """Fills the slots of a block from left to right, see [`functional_dspark`]."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, hidden_size = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of `W1`; zeros for an id without one, which only a head wider than the table can produce."""
        rows = self.markov_w1.num_embeddings
        return self.markov_w1(token_ids.clamp(max=rows - 1)).masked_fill((token_ids >= rows).unsqueeze(-1), 0.0)

    def forward(
        self,
        hidden: torch.Tensor,
        base: torch.Tensor,
        candidate_ids: torch.Tensor,
        anchor_ids: torch.Tensor,
        noise: torch.Tensor | None,
        temperatures: torch.Tensor,
        greedy_mask: torch.Tensor,
        *,
        successor_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden (`torch.Tensor` of shape `(batch, slots, hidden_size)`): Final rows of the slots.
            base (`torch.Tensor` of shape `(batch, slots, candidates)`): Base logits of the candidates.
            candidate_ids (`torch.LongTensor` of shape `(batch, slots, candidates)`): Their ids in the target.
            anchor_ids (`torch.LongTensor` of shape `(batch,)`): The token before slot 0.
            noise (`torch.Tensor` of shape `(batch, slots, candidates)`, *optional*): Exponential variates.
            temperatures (`torch.Tensor` of shape `(batch,)`): fp32.
            greedy_mask (`torch.BoolTensor` of shape `(batch,)`): Rows that take the maximum.
            successor_rows (`torch.LongTensor` of shape `(batch, slots, candidates)`, *optional*): Rows of `W2`; by
                default candidate `c` has row `c`.

        Returns:
            `(tokens, logits, index)`: int64 `(batch, slots)`, the corrected logits, fp32
            `(batch, slots, candidates)`, and the candidates picked, int64 `(batch, slots)`.
        """
        embedding = self.embed(anchor_ids)
        state = hidden.new_zeros(hidden.shape[0], self.markov_w1.embedding_dim, dtype=torch.float32)
        tokens, logits, picked = [], [], []
        for slot in range(hidden.shape[1]):
            if slot > 0:
                # Drafted tokens have a row of their own.
                embedding = self.markov_w1(tokens[-1])
            code, state = self._code(hidden[:, slot], embedding, state)
            slot_logits, index = _fast(
                "markov_step",
                markov_step,
                base[:, slot],
                code,
                self.markov_w2.weight,
                None if noise is None else noise[:, slot],
                temperatures,
                greedy_mask,
                successor_rows=None if successor_rows is None else successor_rows[:, slot],
            )
            tokens.append(candidate_ids[:, slot].gather(1, index[:, None])[:, 0])
            logits.append(slot_logits)
            picked.append(index)
        return torch.stack(tokens, dim=1), torch.stack(logits, dim=1), torch.stack(picked, dim=1)

    def _code(
        self, hidden: torch.Tensor, embedding: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind == "gated":
            return gated_code(hidden, embedding, self.gate_proj.weight, self.gate_proj.bias), state
        if self.kind == "rnn":
            return recurrent_code(state, embedding, hidden, self.joint_proj.weight, self.joint_proj.bias)
        return embedding.float(), state


class DSparkConfidenceHead(nn.Module):
    """Estimates for each slot the probability that its token is accepted, given that all before it were. fp32."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor` of shape `(batch, slots, hidden_size)`): Final rows of the slots.
            embedding (`torch.Tensor` of shape `(batch, slots, rank)`): The Markov table's rows of the tokens before.

        Returns:
            fp32 `torch.Tensor` of shape `(batch, slots)`. The estimate of a slot does not look at its own token, see
            `verify_length`.
        """
        inputs = hidden.float()
        if self.with_markov:
            inputs = torch.cat([inputs, embedding.float()], dim=-1)
        weight, bias = self.proj.weight.float(), self.proj.bias.float()
        return torch.sigmoid(nn.functional.linear(inputs, weight, bias)).squeeze(-1)


class DSparkDraftModel(DFlash2DraftModel):
    """
    A DSpark drafter ready to be passed as `assistant_model` to `generate`.

    Two attributes may be set on an instance; neither changes the law of the output:

    * `draft_top_k` (`int`, *optional*): Correct and draw among that many of the best base logits of every slot instead
      of the whole draft vocabulary.
    * `drafts_greedily` (`bool`, defaults to `False`): Propose the best token also where the request samples.

    Args:
        config ([`DSparkConfig`]): The checkpoint's configuration.
    """

    config_class = DSparkConfig
    # Public checkpoints keep it in fp32 beside bf16 layers.
    _keep_in_fp32_modules_strict = ("confidence_head",)
    reads_whole_vocabulary = True

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.markov_head = DSparkMarkovHead(config)
        self.confidence_head = DSparkConfidenceHead(config) if config.enable_confidence_head else None
        self.lm_head = None
        if config.has_own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.draft_top_k: int | None = None
        self.drafts_greedily = False
        self.post_init()

    @property
    def has_trained_confidence(self) -> bool:
        """Whether there is a confidence head; otherwise the largest probability of each slot stands in for it."""
        return self.confidence_head is not None

    def block_rows(self, slots: int) -> tuple[int, int]:
        """
        As [`DFlash2DraftModel.block_rows`].

        Rows see each other, and were trained in blocks of one size; a shorter proposal is cut from a full block.
        """
        first = 0 if self.config.sample_from_anchor else 1
        return max(slots, self.config.block_size) + first, first

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """
        Load a public checkpoint, strictly; see [`DFlash2DraftModel.from_pretrained`].

        Whether the drafter has a head of its own is decided by the tensors: one that is there is used.

        Raises:
            `ValueError`: As of [`DFlash2DraftModel.from_pretrained`]; a table `d2t` with ids that the target cannot
            have, or that names one twice.
        """
        try:
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except UnsupportedTensorError as error:
            if error.key != "lm_head.weight":
                raise
            if "config" in kwargs:
                kwargs["config"] = copy.deepcopy(kwargs["config"])
                kwargs["config"].has_own_head = True
            else:
                kwargs["has_own_head"] = True
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.validate_vocabulary(model.config.vocab_size)
        return loaded

    def target_ids(self, vocab_size: int) -> torch.Tensor:
        """
        The ids that the drafter proposes from, in the order of its head.

        Args:
            vocab_size (`int`): Ids of the target that may be proposed.

        Returns:
            `torch.LongTensor` of shape `(candidates,)`.
        """
        rows = self.config.draft_vocab_size
        if hasattr(self, "d2t"):
            return torch.arange(rows, device=self.d2t.device) + self.d2t
        return torch.arange(min(rows, vocab_size), device=self.device)

    def validate_vocabulary(self, vocab_size: int) -> None:
        """Check that `d2t` names ids from 0 to `vocab_size - 1`, each once."""
        if not hasattr(self, "d2t"):
            return
        ids = self.target_ids(vocab_size)
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= vocab_size:
            raise ValueError(
                f"`d2t` maps draft tokens to ids {smallest} to {largest}, but the target has ids 0 to "
                f"{vocab_size - 1}. Use the target that the drafter was trained for; the table holds offsets, "
                "target id minus draft id."
            )
        if ids.unique().numel() != ids.numel():
            raise ValueError(
                f"`d2t` maps {ids.numel()} draft tokens to {ids.unique().numel()} ids. Each draft token needs an id "
                "of its own; the table holds offsets, target id minus draft id."
            )

    def noise_shape(self, batch: int, slots: int, vocab_size: int) -> tuple[int, ...]:
        """Shape of what [`draw_noise`] returns for the same arguments."""
        candidates = self.target_ids(vocab_size).numel()
        return batch, slots, candidates if self.draft_top_k is None else min(self.draft_top_k, candidates)

    def draw_noise(self, batch: int, slots: int, vocab_size: int) -> torch.Tensor:
        """
        Random numbers for [`propose`], from the global stream of the drafter's device.

        Returns:
            fp32 `torch.Tensor` of shape `(batch, slots, candidates)`: exponential variates.
        """
        return torch.empty(self.noise_shape(batch, slots, vocab_size), device=self.device).exponential_()

    def propose(
        self,
        slot_hidden: torch.Tensor,
        anchor_ids: torch.Tensor,
        head,
        *,
        temperatures: torch.Tensor,
        greedy_mask: torch.Tensor,
        noise: torch.Tensor | None,
        with_confidence: bool = False,
    ) -> DFlash2Proposal:
        """
        Turn final rows of the slots into drafted tokens.

        Args:
            slot_hidden, anchor_ids, temperatures, greedy_mask, noise, with_confidence:
                As of [`DFlash2DraftModel.propose`].
            head ([`target.TargetHead`]): The target's head, with the number of ids that may be drafted and the
                divisor of its hidden states.

        Returns:
            [`DFlash2Proposal`]. Without `draft_top_k` the candidates of every slot are the whole draft vocabulary.
        """
        config = self.config
        if self.lm_head is not None:
            logits = self.lm_head(slot_hidden)
        elif head.width_multiplier != 1.0:
            # The drafter was trained against a head with the division folded in. It concerns the base logits alone.
            logits = head(slot_hidden / head.width_multiplier)
        else:
            logits = head(slot_hidden)
        ids = self.target_ids(head.vocab_size)
        base = transform_unary(
            logits[..., : ids.numel()], multiplier=config.output_multiplier, softcap=config.final_logit_softcapping
        )
        successor_rows, candidate_ids = None, ids.expand(base.shape)
        if self.draft_top_k is not None:
            base, successor_rows = top_candidates(base, top_k=min(self.draft_top_k, ids.numel()))
            candidate_ids = ids[successor_rows]
        if self.drafts_greedily:
            greedy_mask = torch.ones_like(greedy_mask)
        tokens, corrected, index = self.markov_head(
            slot_hidden,
            base,
            candidate_ids,
            anchor_ids,
            noise,
            temperatures,
            greedy_mask,
            successor_rows=successor_rows,
        )
        q = markov_law(corrected, index, temperatures, greedy_mask)
        confidence = None
        if with_confidence and self.confidence_head is not None:
            previous = torch.cat([anchor_ids[:, None], tokens[:, :-1]], dim=1)
            confidence = self.confidence_head(slot_hidden, self.markov_head.embed(previous))
        elif with_confidence:
            confidence = largest_probability(corrected, temperatures)
        return DFlash2Proposal(tokens, candidate_ids, q, finite_rows(slot_hidden, q), confidence)


__all__ = ["DSparkConfidenceHead", "DSparkDraftModel", "DSparkMarkovHead"]

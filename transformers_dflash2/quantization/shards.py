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
"""An output head whose rows are spread over ranks.

The host's head gathers the scores of the whole vocabulary on every rank. Drafting needs a few of them: each rank takes
the best of its own rows, and only those travel. The best of the best are the candidates of the unsharded head, ties
included, because ranks hold ids in ascending order.
"""

from collections.abc import Callable

import torch
from torch import nn

from ..functional_dflash2 import order_candidates, top_candidates
from ..ranks import Ranks
from .projection import HeadProjection


class ShardedHeadProjection(HeadProjection):
    """
    [`HeadProjection`] onto this rank's rows of a head, see [`compat.vocabulary_shard`].

    Args:
        head (`torch.nn.Module`): The target's output head.
        vocab_size (`int`): Ids from here on are no tokens.
        first_id (`int`): Token id of this rank's first row.
        ranks ([`Ranks`]): The ranks that hold the other rows.
    """

    is_sharded = True

    def __init__(self, head: nn.Module, vocab_size: int, first_id: int, ranks: Ranks):
        super().__init__(head, vocab_size)
        self.first_id, self.ranks = first_id, ranks

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of this rank's rows: what the head computes before it gathers."""
        bias = None if self.head.bias is None else self.head.bias.to_local()
        return nn.functional.linear(hidden, self.head.weight.to_local(), bias)

    def select(
        self,
        logits: torch.Tensor,
        *,
        top_k: int,
        multiplier: float = 1.0,
        softcap: float | None = None,
        select: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] = torch.topk,
        order: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = order_candidates,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        [`functional_dflash2.top_candidates`] over all ranks.

        A rank with fewer rows than `top_k`, or with padding only, fills up with `-inf` and takes part like any other.
        """
        values, ids = top_candidates(logits, top_k=min(top_k, logits.shape[-1]), select=select, order=order)
        missing = (0, top_k - values.shape[-1])
        values = nn.functional.pad(values, missing, value=-torch.inf)
        # Padded rows score -inf and are no candidates, but an id has to be one that codebooks have.
        ids = nn.functional.pad(ids + self.first_id, missing).clamp(max=self.vocab_size - 1)
        values, ids = self.ranks.gather(values, ids)
        unary, index = top_candidates(values, top_k=top_k, multiplier=multiplier, softcap=softcap, order=order)
        return unary, ids.gather(-1, index)


__all__ = ["ShardedHeadProjection"]

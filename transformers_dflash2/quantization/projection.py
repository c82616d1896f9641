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
"""The target's output head as a drafter uses it.

Libraries store a quantised head each in their own way: packed bytes with a side table (bitsandbytes), codes and scales
without a `weight` until the first forward (compressed-tensors), a tensor subclass that knows `linear` and little else
(torchao). All of them agree on one thing, the module's forward, and its scores are those the target verifies with. So
the head is called, and nothing of it is read, sliced or cast. What has to be left out, rows past the real vocabulary,
is left out of the *scores*.
"""

import torch
from torch import nn

from ..functional_dflash2 import top_candidates


class HeadProjection:
    """
    Scores of the tokens that may be drafted.

    Args:
        head (`torch.nn.Module`): The target's output head.
        vocab_size (`int`): Ids from here on are no tokens, however high their rows score.
    """

    # Token id of the first row that is scored.
    first_id = 0
    is_sharded = False

    def __init__(self, head: nn.Module, vocab_size: int):
        self.head, self.vocab_size = head, vocab_size

    def __call__(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor` of shape `(batch, slots, hidden_size)`): Final rows of the drafter.
            dtype (`torch.dtype`): The dtype of the target's own hidden states.

        Returns:
            Contiguous `torch.Tensor` of shape `(batch, slots, head_rows)` on the device of `hidden`. Columns of ids
            that are no tokens hold `-inf`: cropping them would leave a view that fast top-k kernels refuse.
        """
        logits = self.score(move_to(self.head, hidden).to(dtype)).contiguous()
        real = max(self.vocab_size - self.first_id, 0)
        if logits.shape[-1] > real:
            excluded = torch.arange(logits.shape[-1], device=logits.device) >= real
            logits = logits.masked_fill(excluded, -torch.inf)
        return logits.to(hidden.device)

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's own scores, padding included."""
        return self.head(hidden)

    def select(self, logits: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates among the scores of a call, see [`functional_dflash2.top_candidates`]."""
        return top_candidates(logits, **options)


def move_to(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Bring inputs to where a module computes. An offloaded one, with weights on the meta device, does it alone."""
    for tensor in (*module.parameters(), *module.buffers()):
        return inputs if tensor.device.type == "meta" else inputs.to(tensor.device)
    return inputs


__all__ = ["HeadProjection", "move_to"]

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
"""The mathematics of DSpark in plain PyTorch; fp32 arithmetic, one rounding at the end, no state.

A DSpark drafter fills its slots from left to right. Slot `k` has *base logits* from the head and a low-rank *Markov
bias* that depends on the token before it, `d`, through that token's row `e = W1[d]`:

    logits[k] = base[k] + W2 code(e, h_k)

The three kinds of head differ in the code, a vector of `rank` numbers:

* vanilla: `e` itself;
* gated: `sigmoid(G [h; e] + g) * e`;
* rnn: with a state `s` that starts at zero, `(a, b, o) = split(J [s; e; h] + j)`, then
  `s <- sigmoid(a) * s + (1 - sigmoid(a)) * tanh(b)` and the code is `tanh(o)`.

A greedy row takes the first maximum. A sampled one takes `argmax(logits / T - log(E))` with one exponential variate
`E` per token (the Gumbel-max trick), which draws from `softmax(logits / T)`: the distribution `q` that is reported.
"""

import torch
from torch import nn

from .functional_dflash2 import MIN_TEMPERATURE


def gated_code(
    hidden: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """
    The code of the gated head.

    Args:
        hidden (`torch.Tensor` of shape `(batch, hidden_size)`): Final row of the slot.
        embedding (`torch.Tensor` of shape `(batch, rank)`): `e`, the row of the token before it.
        weight (`torch.Tensor` of shape `(rank, hidden_size + rank)`): `G`.
        bias (`torch.Tensor` of shape `(rank,)`): `g`.

    Returns:
        fp32 `torch.Tensor` of shape `(batch, rank)`.
    """
    inputs = torch.cat([hidden.float(), embedding.float()], dim=-1)
    return torch.sigmoid(nn.functional.linear(inputs, weight.float(), bias.float())) * embedding.float()


def recurrent_code(
    state: torch.Tensor, embedding: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The code of the rnn head, and its next state.

    Args:
        state (`torch.Tensor` of shape `(batch, rank)`): `s`; zeros in the first slot.
        embedding (`torch.Tensor` of shape `(batch, rank)`): `e`, the row of the token before the slot.
        hidden (`torch.Tensor` of shape `(batch, hidden_size)`): Final row of the slot.
        weight (`torch.Tensor` of shape `(3 * rank, 2 * rank + hidden_size)`): `J`.
        bias (`torch.Tensor` of shape `(3 * rank,)`): `j`.

    Returns:
        `(code, state)`: fp32 tensors of shape `(batch, rank)`.
    """
    inputs = torch.cat([state.float(), embedding.float(), hidden.float()], dim=-1)
    forget, update, output = nn.functional.linear(inputs, weight.float(), bias.float()).chunk(3, dim=-1)
    forget = torch.sigmoid(forget)
    return torch.tanh(output), forget * state.float() + (1.0 - forget) * torch.tanh(update)


def markov_step(
    base: torch.Tensor,
    code: torch.Tensor,
    successor: torch.Tensor,
    noise: torch.Tensor | None,
    temperatures: torch.Tensor,
    greedy_mask: torch.Tensor,
    *,
    successor_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Correct the logits of one slot and pick its token.

    Args:
        base (`torch.Tensor` of shape `(batch, candidates)`): Base logits of the slot; excluded tokens hold `-inf`.
        code (`torch.Tensor` of shape `(batch, rank)`): What the Markov head makes of the token before; fp32.
        successor (`torch.Tensor` of shape `(rows, rank)`): `W2`. Without `successor_rows` its first `candidates` rows
            belong to the candidates.
        noise (`torch.Tensor` of shape `(batch, candidates)`, *optional*): Exponential variates, fp32; `None` where
            every row is greedy.
        temperatures (`torch.Tensor` of shape `(batch,)`): fp32; values under 1e-5 count as 1e-5.
        greedy_mask (`torch.BoolTensor` of shape `(batch,)`): Rows that take the maximum.
        successor_rows (`torch.LongTensor` of shape `(batch, candidates)`, *optional*): The row of `W2` that belongs
            to each candidate.

    Returns:
        `(logits, index)`: fp32 `(batch, candidates)`, and the index of the token picked, int64 `(batch,)`. Like
        `argmax`, a row with NaN picks the first one.
    """
    if successor_rows is None:
        bias = nn.functional.linear(code.float(), successor[: base.shape[-1]].float())
    else:
        bias = (successor[successor_rows].float() @ code.float().unsqueeze(-1)).squeeze(-1)
    logits = base.float() + bias
    index = logits.argmax(dim=-1)
    if noise is None:
        return logits, index
    temperatures = temperatures.float().clamp(min=MIN_TEMPERATURE)[:, None]
    # A variate that was rounded to zero must not lift an excluded token: -inf + inf is NaN.
    gumbel = -noise.float().clamp(min=torch.finfo(torch.float32).tiny).log()
    return logits, torch.where(greedy_mask, index, (logits / temperatures + gumbel).argmax(dim=-1))


def markov_law(
    logits: torch.Tensor, index: torch.Tensor, temperatures: torch.Tensor, greedy_mask: torch.Tensor
) -> torch.Tensor:
    """
    The distribution from which each slot's token was drawn.

    Args:
        logits (`torch.Tensor` of shape `(batch, slots, candidates)`): Corrected logits.
        index (`torch.LongTensor` of shape `(batch, slots)`): The picked candidates.
        temperatures (`torch.Tensor` of shape `(batch,)`): As of [`markov_step`].
        greedy_mask (`torch.BoolTensor` of shape `(batch,)`): As of [`markov_step`].

    Returns:
        fp32 `torch.Tensor` of shape `(batch, slots, candidates)`: the softmax, or one-hot in a greedy row. A slot
        with NaN logits, or with no finite one, is NaN throughout: its token must not be used.
    """
    temperatures = temperatures.float().clamp(min=MIN_TEMPERATURE)[:, None, None]
    law = torch.softmax(logits.float() / temperatures, dim=-1)
    broken = law[..., :1].isnan()
    one_hot = torch.zeros_like(law).scatter_(-1, index.unsqueeze(-1), 1.0).masked_fill(broken, torch.nan)
    return torch.where(greedy_mask[:, None, None], one_hot, law)


def survival(confidence: torch.Tensor) -> torch.Tensor:
    """
    The probability that a slot is reached and accepted: the running product of `confidence`.

    Args:
        confidence (`torch.Tensor` of shape `(batch, slots)`): Probability that each slot's token is accepted, given
            that all before it were. What is not a number counts as 0.

    Returns:
        fp32 `torch.Tensor` of shape `(batch, slots)`; it never rises from one slot to the next.
    """
    return confidence.float().nan_to_num(nan=0.0).clamp(0.0, 1.0).cumprod(dim=-1)


__all__ = ["gated_code", "markov_law", "markov_step", "recurrent_code", "survival"]

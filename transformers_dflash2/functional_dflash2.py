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
"""The mathematics of DFlash2 in plain PyTorch.

Every function here is the reference of a fast operation with the same name and arguments: fp32 arithmetic, one
rounding at the end, no state. Symbols: `batch` rows, `block` = anchor + mask slots, `slots` = `block - 1` proposals,
`top_k` candidates of a slot, `rank` of the selector's codebooks.

**Grouped dynamic convolution.** Row `i` of a block mixes itself with up to `taps - 1` rows before it, never across the
block's start:

    out[i, c] = sum_t [t <= i] * (base[t, c] + dynamic[i, t, c // group_size]) * x[i - t, c]

**Candidate selector.** Slot `l` offers the `top_k` best tokens of the target's head. Going from token `p` to token `c`
scores `unary[l, c] + <A[p] * (W h_l), B[c]>`; a walk from the anchor picks one candidate per slot, greedily or by
inverse-CDF sampling, and reports the distribution each token was really drawn from.

**Speculative sampling** (Leviathan et al., 2023; Chen et al., 2023). A drafted token `d` drawn from `q` is kept with
probability `min(1, p(d) / q(d))`; the first token refused is replaced by a draw from `max(p - q, 0)`, normalised. The
law of the output is `p`, whatever `q` is.
"""

from collections.abc import Callable

import torch
from torch import nn


# The smallest temperature a walk divides by; below it sampling is greedy for every practical purpose.
MIN_TEMPERATURE = 1e-5


def grouped_conv(
    hidden: torch.Tensor,
    base_kernel: torch.Tensor,
    dynamic_kernel: torch.Tensor,
    *,
    group_size: int,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Grouped dynamic causal convolution over the rows of each block.

    Args:
        hidden (`torch.Tensor` of shape `(batch, block, hidden_size)`):
            Rows to mix. A non-finite row reaches no row before it and no other batch row.
        base_kernel (`torch.Tensor` of shape `(taps, hidden_size)`):
            Learned coefficients; tap 0 multiplies the row itself.
        dynamic_kernel (`torch.Tensor` of shape `(batch, block, taps, hidden_size // group_size)`):
            Coefficients of each *output* row, one per group of channels, added to `base_kernel`. With a dimension of
            parts before all others: fp32 sums whose total, rounded to the dtype of `hidden`, are the coefficients.
        group_size (`int`):
            Channels per group; divides `hidden_size`.
        residual (`torch.Tensor` of shape `(batch, block, hidden_size)`, *optional*):
            Added to the rounded result, in the dtype of `hidden`.

    Returns:
        `torch.Tensor` of shape `(batch, block, hidden_size)` in the dtype of `hidden`, rounded once from fp32.
    """
    if dynamic_kernel.dim() == 5:
        dynamic_kernel = dynamic_kernel.sum(dim=0).to(hidden.dtype)
    batch, block, hidden_size = hidden.shape
    taps = base_kernel.shape[0]
    groups = hidden_size // group_size
    values = hidden.float().view(batch, block, groups, group_size)
    base = base_kernel.float().view(taps, groups, group_size)
    dynamic = dynamic_kernel.float().unsqueeze(-1)  # [batch, block, taps, groups, 1]
    output = (base[0] + dynamic[:, :, 0]) * values
    # Slicing leaves the taps that would reach over the block's start out of the sum, where a 0/1 factor would let a
    # NaN through.
    for tap in range(1, min(taps, block)):
        output[:, tap:] += (base[tap] + dynamic[:, tap:, tap]) * values[:, :-tap]
    output = output.view(batch, block, hidden_size).to(hidden.dtype)
    return output if residual is None else residual + output


def transform_unary(logits: torch.Tensor, *, multiplier: float = 1.0, softcap: float | None = None) -> torch.Tensor:
    """
    The logit transform of the checkpoint: `softcap * tanh(multiplier * logits / softcap)`, in fp32.

    Args:
        logits (`torch.Tensor` of any shape): Raw values of the target's head.
        multiplier (`float`, *optional*, defaults to 1.0): `output_multiplier` of the config.
        softcap (`float`, *optional*): `final_logit_softcapping` of the config; `None` leaves the values uncapped.

    Returns:
        fp32 `torch.Tensor` of the same shape.
    """
    logits = logits.float()
    if multiplier != 1.0:
        logits = logits * multiplier
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits


def order_candidates(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The candidates of each row by value descending and, among equals, by id ascending.

    Args:
        values (`torch.Tensor` of shape `(..., top_k)`): Values in any order. NaN counts as larger than every number.
        ids (`torch.LongTensor` of shape `(..., top_k)`): Their ids, distinct within a row.

    Returns:
        `(values, ids)`: fp32 and int64 tensors of shape `(..., top_k)`.
    """
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).float().sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def top_candidates(
    logits: torch.Tensor,
    *,
    top_k: int,
    multiplier: float = 1.0,
    softcap: float | None = None,
    select: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] = torch.topk,
    order: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = order_candidates,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The best `top_k` tokens of each slot, by value descending and, among equals, by token id.

    Of tokens that tie for the last place any may be kept; the order among those kept is by id all the same.

    Args:
        logits (`torch.Tensor` of shape `(batch, slots, vocab)`): Raw head logits; excluded ids hold `-inf`.
        top_k (`int`): Candidates per slot, `1 <= top_k <= vocab`.
        multiplier (`float`, *optional*, defaults to 1.0): See [`transform_unary`]. Must be positive, so that the raw
            order is the transformed order.
        softcap (`float`, *optional*): See [`transform_unary`].
        select (`Callable`, *optional*, defaults to `torch.topk`): Finds the largest values of each row and their
            places, in any order.
        order (`Callable`, *optional*, defaults to [`order_candidates`]): Puts what was selected in order.

    Returns:
        `(unary, candidate_ids)`: fp32 and int64 tensors of shape `(batch, slots, top_k)`.
    """
    values, ids = order(*select(logits, top_k))
    return transform_unary(values, multiplier=multiplier, softcap=softcap), ids


def selector_lattice(
    unary: torch.Tensor,
    candidate_ids: torch.Tensor,
    projected_hidden: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    anchor_ids: torch.Tensor,
) -> torch.Tensor:
    """
    Scores of every transition between candidates of adjacent slots.

    Args:
        unary (`torch.Tensor` of shape `(batch, slots, top_k)`): Transformed head logits of the candidates.
        candidate_ids (`torch.LongTensor` of shape `(batch, slots, top_k)`): Their token ids.
        projected_hidden (`torch.Tensor` of shape `(batch, slots, rank)`): `W h` of each slot.
        predecessor_codebook (`torch.Tensor` of shape `(rows, rank)`): `A`. A predecessor id without a row of its own
            (a head wider than the codebook) contributes nothing.
        successor_codebook (`torch.Tensor` of shape `(rows, rank)`): `B`; candidates must have a row.
        anchor_ids (`torch.LongTensor` of shape `(batch,)`): The token before slot 0.

    Returns:
        fp32 `torch.Tensor` of shape `(batch, slots, top_k, top_k)`: entry `[b, l, p, c]` scores candidate `c` of slot
        `l` after candidate `p` of slot `l - 1`; for slot 0 every row `p` stands for the anchor.
    """
    top_k = candidate_ids.shape[-1]
    anchors = anchor_ids[:, None, None].expand(-1, 1, top_k)
    predecessors = torch.cat([anchors, candidate_ids[:, :-1]], dim=1)
    rows = predecessor_codebook.shape[0]
    left = nn.functional.embedding(predecessors.clamp(max=rows - 1), predecessor_codebook).float()
    left = left.masked_fill((predecessors >= rows).unsqueeze(-1), 0.0)
    right = nn.functional.embedding(candidate_ids, successor_codebook).float()
    pair = (left * projected_hidden.float().unsqueeze(2)) @ right.transpose(-1, -2)
    return unary.float().unsqueeze(2) + pair


def selector_walk(
    scores: torch.Tensor,
    candidate_ids: torch.Tensor,
    uniforms: torch.Tensor,
    temperatures: torch.Tensor,
    greedy_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Walk one path through the candidates of every slot.

    A greedy row takes the first maximum and reports a one-hot `q`. A sampled row draws from `softmax(score / T)` by
    inverse CDF: the index is the number of cumulative masses that are `<= u`, at most `top_k - 1`.

    Args:
        scores (`torch.Tensor` of shape `(batch, slots, top_k, top_k)`): See [`selector_lattice`].
        candidate_ids (`torch.LongTensor` of shape `(batch, slots, top_k)`): Token ids of the candidates.
        uniforms (`torch.Tensor` of shape `(batch, slots)`): One number in `[0, 1)` per token, fp32.
        temperatures (`torch.Tensor` of shape `(batch,)`): fp32; values under 1e-5 count as 1e-5.
        greedy_mask (`torch.BoolTensor` of shape `(batch,)`): Rows that take the maximum.

    Returns:
        `(tokens, q)`: int64 `(batch, slots)`, and fp32 `(batch, slots, top_k)`, the distribution over
        `candidate_ids` from which each token was drawn. A row with NaN scores, or with no finite score, has NaN in
        `q`: its proposals must not be used.
    """
    batch, slots, top_k, _ = scores.shape
    scores = scores.float()
    temperatures = temperatures.float().clamp(min=MIN_TEMPERATURE)[:, None]
    rows = torch.arange(batch, device=scores.device)
    previous = torch.zeros(batch, dtype=torch.long, device=scores.device)
    tokens, realised = [], []
    for slot in range(slots):
        row = scores[rows, slot, previous]  # [batch, top_k]
        law = torch.softmax(row / temperatures, dim=-1)
        broken = law.isnan().any(dim=-1, keepdim=True)
        sampled = (uniforms[:, slot, None] >= law.cumsum(dim=-1)).sum(dim=-1).clamp(max=top_k - 1)
        previous = torch.where(greedy_mask, row.argmax(dim=-1), sampled)
        one_hot = nn.functional.one_hot(previous, top_k).float().masked_fill(broken, torch.nan)
        tokens.append(candidate_ids[rows, slot, previous])
        realised.append(torch.where(greedy_mask[:, None], one_hot, law))
    return torch.stack(tokens, dim=1), torch.stack(realised, dim=1)


def selector_path(
    unary: torch.Tensor,
    candidate_ids: torch.Tensor,
    projected_hidden: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    anchor_ids: torch.Tensor,
    uniforms: torch.Tensor,
    temperatures: torch.Tensor,
    greedy_mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    [`selector_lattice`] and [`selector_walk`] in one: arguments of both, results of the walk.

    Returns:
        `(tokens, q)`: int64 `(batch, slots)` and fp32 `(batch, slots, top_k)`.
    """
    scores = selector_lattice(
        unary, candidate_ids, projected_hidden, predecessor_codebook, successor_codebook, anchor_ids
    )
    return selector_walk(scores, candidate_ids, uniforms, temperatures, greedy_mask)


def path_scores(
    unary: torch.Tensor,
    candidate_ids: torch.Tensor,
    projected_hidden: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    predecessors: torch.Tensor,
) -> torch.Tensor:
    """
    Scores of the candidates behind one given path: of the lattice, the rows that a walk really met.

    Args:
        unary, candidate_ids, projected_hidden, predecessor_codebook, successor_codebook: As of [`selector_lattice`].
        predecessors (`torch.LongTensor` of shape `(batch, slots)`): The token before each slot.

    Returns:
        fp32 `torch.Tensor` of shape `(batch, slots, top_k)`.
    """
    # Each slot is the first one behind its own anchor.
    first = (unary, candidate_ids, projected_hidden)
    lattice = selector_lattice(
        *(tensor.flatten(0, 1).unsqueeze(1) for tensor in first),
        predecessor_codebook,
        successor_codebook,
        predecessors.flatten(),
    )
    return lattice[:, 0, 0].view(unary.shape)


def largest_probability(scores: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """
    The largest entry of each slot's law `softmax(score / T)`.

    Args:
        scores (`torch.Tensor` of shape `(batch, slots, candidates)`): Scores of the slot's candidates.
        temperatures (`torch.Tensor` of shape `(batch,)`): fp32; values under 1e-5 count as 1e-5.

    Returns:
        fp32 `torch.Tensor` of shape `(batch, slots)`; NaN where a score is, or none is finite.
    """
    scaled = scores.float() / temperatures.float().clamp(min=MIN_TEMPERATURE)[:, None, None]
    return (scaled.amax(dim=-1) - scaled.logsumexp(dim=-1)).exp()


def finite_rows(hidden: torch.Tensor, evidence: torch.Tensor) -> torch.Tensor:
    """
    Which rows of a batch come from a pass that was finite all through.

    Args:
        hidden (`torch.Tensor` of shape `(batch, slots, hidden_size)`): Final rows of the slots.
        evidence (`torch.Tensor` of shape `(batch, slots, candidates)`): What came of them: fp32 numbers from -1 to 1,
            such as probabilities, or NaN.

    Returns:
        `torch.BoolTensor` of shape `(batch,)`: `True` where no entry of `hidden` is infinite or NaN, and none of
        `evidence` is NaN.
    """
    # Both reductions hand a NaN on, which compares with nothing. Numbers up to 1 add up to too little to make a finite
    # maximum overflow.
    largest = torch.linalg.vector_norm(hidden, ord=torch.inf, dim=(1, 2))
    return largest + evidence.sum(dim=(1, 2)) < torch.inf


def drawn_probability(tokens: torch.Tensor, candidate_ids: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """
    The probability with which each token was drawn.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, slots)`): The drafted tokens.
        candidate_ids (`torch.LongTensor` of shape `(batch, slots, top_k)`): Candidates, distinct within a slot.
        q (`torch.Tensor` of shape `(batch, slots, top_k)`): Distribution over the candidates.

    Returns:
        fp32 `torch.Tensor` of shape `(batch, slots)`; 0 for a token that is not among the candidates.
    """
    return q.float().masked_fill(candidate_ids != tokens.unsqueeze(-1), 0.0).sum(dim=-1)


def accept_greedy(
    tokens: torch.Tensor, predictions: torch.Tensor, *, usable: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The longest prefix of a draft that the target agrees with, and the token that follows it.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, slots)`): Drafted tokens.
        predictions (`torch.LongTensor` of shape `(batch, slots + 1)`): The target's choice after the anchor and after
            each drafted token.
        usable (`torch.BoolTensor` of shape `(batch,)`, *optional*): `False` for rows whose draft must be ignored.

    Returns:
        `(accepted, bonus)`: int64 tensors of shape `(batch,)`.
    """
    matches = tokens == predictions[:, :-1]
    if usable is not None:
        matches = matches & usable[:, None]
    accepted = matches.long().cumprod(dim=-1).sum(dim=-1)
    return accepted, predictions.gather(1, accepted[:, None])[:, 0]


def accept_sampled(
    tokens: torch.Tensor, candidate_ids: torch.Tensor, q: torch.Tensor, probs: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """
    The rejection test of speculative sampling: keep token `d` iff `q(d) > 0` and `u * q(d) < p(d)`.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, slots)`): Drafted tokens.
        candidate_ids (`torch.LongTensor` of shape `(batch, slots, top_k)`): Support of `q`.
        q (`torch.Tensor` of shape `(batch, slots, top_k)`): The distribution each token was drawn from.
        probs (`torch.Tensor` of shape `(batch, slots, vocab)`): The target's processed distribution at each slot.
        uniforms (`torch.Tensor` of shape `(batch, slots)`): Numbers in `[0, 1)`, independent of those that drew
            `tokens`.

    Returns:
        `torch.BoolTensor` of shape `(batch, slots)`: the outcome of each test on its own; the accepted length is the
        number of leading `True`. A token with a zero or non-finite `q` fails.
    """
    drawn = drawn_probability(tokens, candidate_ids, q)
    target = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
    return (drawn > 0) & (uniforms * drawn < target)


def committed_block(
    tokens: torch.Tensor, accepted: torch.Tensor, following: torch.Tensor, pad_token_id: int | torch.Tensor
) -> torch.Tensor:
    """
    What a round adds to each row: the accepted tokens, the one that follows them, and padding.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, slots)`): Drafted tokens.
        accepted (`torch.LongTensor` of shape `(batch,)`): How many of them are kept.
        following (`torch.LongTensor` of shape `(batch,)`): The target's own token behind them.
        pad_token_id (`int` or `torch.LongTensor` of shape `()`): What the rest is filled with.

    Returns:
        `torch.LongTensor` of shape `(batch, slots + 1)`.
    """
    offsets = torch.arange(tokens.shape[1] + 1, device=tokens.device)
    block = torch.cat([tokens, following[:, None]], dim=1)
    block = torch.where(offsets == accepted[:, None], following[:, None], block)
    # Not `masked_fill`, which reads a value that is a tensor back to the host.
    return torch.where(offsets > accepted[:, None], pad_token_id, block)


def residual_distribution(probs: torch.Tensor, candidate_ids: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """
    `max(p - q, 0)`, normalised: the law of the token that replaces a refused one.

    Args:
        probs (`torch.Tensor` of shape `(batch, vocab)`): The target's distribution `p`.
        candidate_ids (`torch.LongTensor` of shape `(batch, top_k)`): Support of `q`, distinct ids.
        q (`torch.Tensor` of shape `(batch, top_k)`): The draft's distribution; non-finite entries count as 0.

    Returns:
        fp32 `torch.Tensor` of shape `(batch, vocab)`. Where no mass is left, which exact arithmetic rules out after a
        refusal, the row is `p` itself.
    """
    probs = probs.float()
    mass = torch.where(torch.isfinite(q), q.float(), 0.0)
    residual = probs.scatter_add(-1, candidate_ids, -mass).clamp(min=0.0)
    total = residual.sum(dim=-1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(total > tiny, residual / total.clamp(min=tiny), probs)


def accept_block_sampled(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    candidate_ids: torch.Tensor,
    q: torch.Tensor,
    usable: torch.Tensor,
    uniforms: torch.Tensor,
    draw_uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Speculative sampling of whole blocks: the accepted length of each draft and the token that follows it.

    The token comes from the residual after a refusal, and from `p` itself after a draft that was accepted whole or was
    not usable. It is found by inverse CDF, so that the noise is an argument.

    Args:
        scores (`torch.Tensor` of shape `(batch, slots + 1, vocab)`): The target's processed scores after the anchor
            and after each drafted token; excluded tokens hold `-inf`.
        tokens (`torch.LongTensor` of shape `(batch, slots)`): Drafted tokens; one outside the vocabulary is refused.
        candidate_ids (`torch.LongTensor` of shape `(batch, slots, top_k)`): Support of `q`, distinct within a slot.
        q (`torch.Tensor` of shape `(batch, slots, top_k)`): The distribution each token was drawn from.
        usable (`torch.BoolTensor` of shape `(batch,)`): `False` for rows whose draft must be ignored.
        uniforms (`torch.Tensor` of shape `(batch, slots)`): Numbers in `[0, 1)` for the tests.
        draw_uniforms (`torch.Tensor` of shape `(batch,)`): Numbers in `[0, 1)` for the token that follows. All three
            kinds of noise, those that drew `tokens` included, must be independent.

    Returns:
        `(accepted, following)`: int64 tensors of shape `(batch,)`. `following` is -1 where the scores give no
        distribution: a NaN, or no finite score.
    """
    slots = tokens.shape[1]
    rows = torch.arange(scores.shape[0], device=scores.device)
    probs = torch.softmax(scores.float(), dim=-1)
    vocab = probs.shape[-1]
    in_vocab = (tokens >= 0) & (tokens < vocab)
    passed = accept_sampled(tokens.clamp(0, vocab - 1), candidate_ids, q, probs[:, :slots], uniforms)
    accepted = (passed & in_vocab & usable[:, None]).long().cumprod(dim=-1).sum(dim=-1)
    law = probs[rows, accepted]
    if slots:
        slot = accepted.clamp(max=slots - 1)
        residual = residual_distribution(law, candidate_ids[rows, slot], q[rows, slot])
        law = torch.where(((accepted < slots) & usable)[:, None], residual, law)
    law = law.double()
    cumulative = law.cumsum(dim=-1)
    ids = torch.arange(vocab, device=scores.device)
    reached = (law > 0) & (cumulative > draw_uniforms.double()[:, None] * cumulative[:, -1:])
    first = torch.where(reached, ids, vocab).amin(dim=-1)
    last = torch.where(law > 0, ids, -1).amax(dim=-1)
    return accepted, torch.where(first < vocab, first, last)


__all__ = [
    "MIN_TEMPERATURE",
    "accept_block_sampled",
    "accept_greedy",
    "accept_sampled",
    "committed_block",
    "drawn_probability",
    "finite_rows",
    "grouped_conv",
    "largest_probability",
    "order_candidates",
    "path_scores",
    "residual_distribution",
    "selector_lattice",
    "selector_path",
    "selector_walk",
    "top_candidates",
    "transform_unary",
]

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
"""The recurrences of linear-attention layers, over the tokens of a block.

One form covers the gated delta rule (Yang et al., 2024; Qwen3-Next, Qwen3.5), its variant with a decay per channel
(Kimi Linear) and the state-space recurrence of Mamba-2 (Dao and Gu, 2024). With decay `a = exp(log_decay)`, key `k`,
value `v` and gate `b` of a token, the state `S` of a head, `(key channels, value channels)`, becomes

    S <- a * S                          the decay, a number per head or per key channel
    S <- S + k (x) b * (v - k^T S)      delta rule
    S <- S + k (x) b * v                otherwise

and the token's output is `scale * q^T S` for its query `q`. [`run_recurrence`] gives the outputs of a block. They have
left with the target's forward when [`replay_recurrence`] moves the state behind the tokens that are kept of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class RecurrenceInputs:
    """
    What a recurrence reads of the tokens of a block.

    Args:
        keys (`torch.Tensor` of shape `(batch, block, key_heads, key_channels)`):
            Keys. Each of fewer key heads than heads serves as many consecutive heads.
        values (`torch.Tensor` of shape `(batch, block, heads, value_channels)`):
            Values.
        log_decay (`torch.Tensor` of shape `(batch, block, heads, key_channels or 1)`):
            Logarithm of the decay.
        beta (`torch.Tensor` of shape `(batch, block, heads)`):
            Gate of what is added.
        is_delta_rule (`bool`, *optional*, defaults to `False`):
            Whether the value that the state already predicts is subtracted.
        is_transposed (`bool`, *optional*, defaults to `False`):
            Whether the state is stored as `(value_channels, key_channels)`.
        norm_eps (`float`, *optional*):
            When given, keys and queries are brought to unit length first; this is added to their squared length.
    """

    keys: torch.Tensor
    values: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    is_delta_rule: bool = False
    is_transposed: bool = False
    norm_eps: float | None = None


def window_after(inputs: torch.Tensor, counts: torch.Tensor, width: int) -> torch.Tensor:
    """
    A short convolution's window after the first tokens of a block.

    Args:
        inputs (`torch.Tensor` of shape `(batch, channels, width + block)`):
            The window before the block, followed by the block's inputs.
        counts (`torch.LongTensor` of shape `(batch,)`):
            Tokens to take in per row, from 0 to `block`.
        width (`int`):
            Length of the window.

    Returns:
        `torch.Tensor` of shape `(batch, channels, width)`: the inputs that end with the last token taken in.
    """
    index = counts[:, None, None] + torch.arange(width, device=inputs.device)
    return inputs.gather(-1, index.expand(-1, inputs.shape[1], -1))


def run_recurrence(
    state: torch.Tensor | None,
    queries: torch.Tensor,
    inputs: RecurrenceInputs,
    *,
    scale: float = 1.0,
    skip: torch.Tensor | None = None,
    wants_state: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Run a recurrence over a block, token by token in fp32.

    Args:
        state (`torch.Tensor` of shape `(batch, heads, key_channels, value_channels)`, *optional*):
            The state before the block, or with the last two dimensions exchanged, see [`RecurrenceInputs`]. Zeros when
            not given.
        queries (`torch.Tensor` of shape `(batch, block, key_heads, key_channels)`):
            What reads the state after each token.
        inputs ([`RecurrenceInputs`]):
            The block.
        scale (`float`, *optional*, defaults to 1.0):
            Factor of the queries, after they have been brought to unit length.
        skip (`torch.Tensor` of shape `(heads,)`, *optional*):
            Share of a token's own values that is added to its output; Mamba-2's `D`.
        wants_state (`bool`, *optional*, defaults to `True`):
            Whether the state after the block is returned.
        output_dtype (`torch.dtype`, *optional*):
            That of the outputs; that of the queries when not given.

    Returns:
        `(outputs, state)`: outputs of shape `(batch, block, heads, value_channels)`, and the state after the block in
        fp32, laid out like `state`, or `None`.
    """
    batch, _, heads, value_channels = inputs.values.shape
    if state is None:
        before = torch.zeros(batch, heads, queries.shape[-1], value_channels, device=queries.device)
    else:
        before = (state.transpose(-1, -2) if inputs.is_transposed else state).float()
    columns = _per_head(queries, inputs.norm_eps, heads) * scale
    outputs = []
    for token, after in enumerate(_states(before, inputs)):
        outputs.append((after * columns[:, token]).sum(dim=-2))
    outputs = torch.stack(outputs, dim=1)
    if skip is not None:
        outputs = outputs + skip.float()[:, None] * inputs.values.float()
    outputs = outputs.to(queries.dtype if output_dtype is None else output_dtype)
    if not wants_state:
        return outputs, None
    return outputs, (after.transpose(-1, -2) if inputs.is_transposed else after).contiguous()


def replay_recurrence(state: torch.Tensor, inputs: RecurrenceInputs, counts: torch.Tensor) -> torch.Tensor:
    """
    Move a state behind the first tokens of a block.

    Args:
        state (`torch.Tensor` of shape `(batch, heads, key_channels, value_channels)`):
            The state before the block, or with the last two dimensions exchanged, see [`RecurrenceInputs`].
        inputs ([`RecurrenceInputs`]):
            The block.
        counts (`torch.LongTensor` of shape `(batch,)`):
            Tokens to take in per row, from 0 to `block`.

    Returns:
        `torch.Tensor` of the shape and dtype of `state`, computed in fp32.
    """
    dtype = state.dtype
    kept = (state.transpose(-1, -2) if inputs.is_transposed else state).float()
    for taken, current in enumerate(_states(kept, inputs), start=1):
        kept = torch.where((counts == taken)[:, None, None, None], current, kept)
    return (kept.transpose(-1, -2) if inputs.is_transposed else kept).to(dtype)


def _states(state: torch.Tensor, inputs: RecurrenceInputs) -> Iterator[torch.Tensor]:
    """The fp32 state, key channels first, after each token of a block."""
    keys = _per_head(inputs.keys, inputs.norm_eps, state.shape[1])
    values, beta = inputs.values.float(), inputs.beta.float()[..., None]
    decay = inputs.log_decay.float().exp()[..., None]
    for token in range(keys.shape[1]):
        state = state * decay[:, token]
        added = values[:, token]
        if inputs.is_delta_rule:
            added = added - (state * keys[:, token]).sum(dim=-2)
        state = state + keys[:, token] * (beta[:, token] * added)[..., None, :]
        yield state


def _per_head(vectors: torch.Tensor, norm_eps: float | None, heads: int) -> torch.Tensor:
    """Keys or queries in fp32, as columns `(batch, block, heads, key_channels, 1)`."""
    vectors = vectors.float()
    if norm_eps is not None:
        vectors = vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + norm_eps)
    return vectors.repeat_interleave(heads // vectors.shape[2], dim=2)[..., None]


def commit_states(
    windows: list[tuple[torch.Tensor, torch.Tensor]],
    recurrences: list[tuple[torch.Tensor, RecurrenceInputs]],
    counts: torch.Tensor,
) -> None:
    """
    Move the states of all layers behind the first tokens of a block, in place.

    Args:
        windows (`list` of pairs of `torch.Tensor`):
            Per short convolution its window, `(rows, channels, width)`, and the window before the block followed by
            the block's inputs, `(rows, channels, width + block)`.
        recurrences (`list` of `(torch.Tensor, RecurrenceInputs)`):
            Per recurrence its state, `(rows, heads, key_channels, value_channels)`, and the block.
        counts (`torch.LongTensor` of shape `(rows,)`):
            Tokens to take in per row.
    """
    for window, inputs in windows:
        window.copy_(window_after(inputs, counts, window.shape[-1]))
    for state, inputs in recurrences:
        state.copy_(replay_recurrence(state, inputs, counts))


__all__ = ["RecurrenceInputs", "commit_states", "replay_recurrence", "run_recurrence", "window_after"]

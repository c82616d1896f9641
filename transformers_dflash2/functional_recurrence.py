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
"""The recurrences of linear-attention layers, as far as their state is concerned.

One form covers the gated delta rule (Yang et al., 2024; Qwen3-Next, Qwen3.5), its variant with a decay per channel
(Kimi Linear) and the state-space recurrence of Mamba-2 (Dao and Gu, 2024). With decay `a = exp(log_decay)`, key `k`,
value `v` and gate `b` of a token, the state `S` of a head, `(key channels, value channels)`, becomes

    S <- a * S                          the decay, a number per head or per key channel
    S <- S + k (x) b * (v - k^T S)      delta rule
    S <- S + k (x) b * v                otherwise

No outputs are computed: they left with the target's own forward.
"""

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
    """

    keys: torch.Tensor
    values: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    is_delta_rule: bool = False
    is_transposed: bool = False


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


def replay_recurrence(state: torch.Tensor, inputs: RecurrenceInputs, counts: torch.Tensor) -> torch.Tensor:
    """
    Run a recurrence over the first tokens of a block.

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
    state = (state.transpose(-1, -2) if inputs.is_transposed else state).float()
    heads = state.shape[1]
    keys = inputs.keys.float().repeat_interleave(heads // inputs.keys.shape[2], dim=2)[..., None]
    values, beta = inputs.values.float(), inputs.beta.float()[..., None]
    decay = inputs.log_decay.float().exp()[..., None]
    for token in range(keys.shape[1]):
        decayed = state * decay[:, token]
        added = values[:, token]
        if inputs.is_delta_rule:
            added = added - (decayed * keys[:, token]).sum(dim=-2)
        updated = decayed + keys[:, token] * (beta[:, token] * added)[..., None, :]
        state = torch.where((counts > token)[:, None, None, None], updated, state)
    return (state.transpose(-1, -2) if inputs.is_transposed else state).to(dtype)


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


__all__ = ["RecurrenceInputs", "commit_states", "replay_recurrence", "window_after"]

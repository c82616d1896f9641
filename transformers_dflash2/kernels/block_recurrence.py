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
"""The recurrence of a linear-attention layer over a block, in one launch.

One program keeps a tile of one head's state in registers over all tokens, reads it with each token's query and writes
it once at the end, if at all. Everything is fp32 and in the order of one token after another, as the hosts' functions
for single tokens compute: a verified block rounds as plain decoding does, where their functions for many tokens solve
for a padded chunk of 64 in dozens of launches.
"""

import torch
import triton
import triton.language as tl

from ..functional_recurrence import RecurrenceInputs
from .dispatch import FLOAT_DTYPES, device_reason, next_power_of_2, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = ["advance_state", "block_recurrence_ineligible_reason", "block_recurrence_triton", "unit_length"]

# A program's tokens follow each other: over a prompt the hosts' chunks, which run side by side, are faster.
_MAX_BLOCK = 64
# All key channels of a state's tile are in one warp, which keeps the sums over them free of barriers.
_MAX_KEY_CHANNELS = 256
_VALUE_BLOCK = 8


@triton.jit
def unit_length(vector, eps):
    """A vector over the root of its squared length plus `eps`."""
    return vector * tl.rsqrt(tl.sum(vector * vector, axis=0) + eps)


@triton.jit
def advance_state(state, key, value, log_decay, beta, IS_DELTA_RULE: tl.constexpr):
    """A tile of a state, `(key channels, value channels)`, after one token; see `functional_recurrence`."""
    state = state * tl.exp(log_decay)
    if IS_DELTA_RULE:
        value = value - tl.sum(state * key[:, None], axis=0)
    return state + key[:, None] * (beta * value)[None, :]


@triton.jit
def _block_recurrence_kernel(
    output_ptr,
    final_ptr,
    state_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    decay_ptr,
    beta_ptr,
    skip_ptr,
    tokens,
    heads,
    group,
    scale,
    state_row_stride,
    state_head_stride,
    state_key_stride,
    state_value_stride,
    final_key_stride,
    final_value_stride,
    query_row_stride,
    query_token_stride,
    query_head_stride,
    query_channel_stride,
    key_row_stride,
    key_token_stride,
    key_head_stride,
    key_channel_stride,
    value_row_stride,
    value_token_stride,
    value_head_stride,
    value_channel_stride,
    decay_row_stride,
    decay_token_stride,
    decay_head_stride,
    decay_channel_stride,
    beta_row_stride,
    beta_token_stride,
    beta_head_stride,
    skip_stride,
    KEY_CHANNELS: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr,
    DECAYS: tl.constexpr,
    IS_DELTA_RULE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    WANTS_STATE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    channels = tl.arange(0, KEY_BLOCK)
    columns = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    has_key, has_value = channels < KEY_CHANNELS, columns < VALUE_CHANNELS
    inside = has_key[:, None] & has_value[None, :]
    query_ptr += row * query_row_stride + head // group * query_head_stride + channels * query_channel_stride
    key_ptr += row * key_row_stride + head // group * key_head_stride + channels * key_channel_stride
    value_ptr += row * value_row_stride + head * value_head_stride + columns * value_channel_stride
    decay_ptr += row * decay_row_stride + head * decay_head_stride
    beta_ptr += row * beta_row_stride + head * beta_head_stride
    output_ptr += (row * tokens * heads + head) * VALUE_CHANNELS + columns
    if HAS_STATE:
        entries = channels[:, None] * state_key_stride + columns[None, :] * state_value_stride
        entries += row * state_row_stride + head * state_head_stride
        state = tl.load(state_ptr + entries, mask=inside, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((KEY_BLOCK, VALUE_BLOCK), dtype=tl.float32)
    for token in range(0, tokens):
        query = tl.load(query_ptr + token * query_token_stride, mask=has_key, other=0.0).to(tl.float32)
        key = tl.load(key_ptr + token * key_token_stride, mask=has_key, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + token * value_token_stride, mask=has_value, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token * beta_token_stride).to(tl.float32)
        decays = decay_ptr + token * decay_token_stride
        if DECAYS == 1:
            log_decay = tl.load(decays).to(tl.float32)
        else:
            log_decay = tl.load(decays + channels * decay_channel_stride, mask=has_key, other=0.0)
            log_decay = log_decay.to(tl.float32)[:, None]
        if NORM_EPS is not None:
            query, key = unit_length(query, NORM_EPS), unit_length(key, NORM_EPS)
        state = advance_state(state, key, value, log_decay, beta, IS_DELTA_RULE)
        output = tl.sum(state * (query * scale)[:, None], axis=0)
        if HAS_SKIP:
            output += tl.load(skip_ptr + head * skip_stride).to(tl.float32) * value
        output = output.to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + token * heads * VALUE_CHANNELS, output, mask=has_value)
    if WANTS_STATE:
        entries = channels[:, None] * final_key_stride + columns[None, :] * final_value_stride
        entries += (row * heads + head) * KEY_CHANNELS * VALUE_CHANNELS
        tl.store(final_ptr + entries, state, mask=inside)


def block_recurrence_ineligible_reason(
    state: torch.Tensor | None,
    queries: torch.Tensor,
    inputs: RecurrenceInputs,
    *,
    scale: float = 1.0,
    skip: torch.Tensor | None = None,
    wants_state: bool = True,
    output_dtype: torch.dtype | None = None,
) -> str | None:
    """Why [`block_recurrence_triton`] cannot take these arguments, or `None`."""
    keys, values, log_decay, beta = inputs.keys, inputs.values, inputs.log_decay, inputs.beta
    reason = device_reason(
        queries=queries, keys=keys, values=values, log_decay=log_decay, beta=beta, state=state, skip=skip
    )
    if reason is not None:
        return reason
    if queries.dim() != 4 or not 1 <= queries.shape[1] <= _MAX_BLOCK:
        return f"queries have shape {tuple(queries.shape)}; blocks of 1 to {_MAX_BLOCK} tokens are supported"
    batch, block, key_heads, key_channels = queries.shape
    if not 1 <= key_channels <= _MAX_KEY_CHANNELS:
        return f"queries have {key_channels} channels; 1 to {_MAX_KEY_CHANNELS} are supported"
    if values.dim() != 4 or not key_heads or values.shape[2] % key_heads:
        return (
            f"values have shape {tuple(values.shape)}; {key_heads} heads of queries should each serve as many of them"
        )
    heads, value_channels = values.shape[2:]
    decays = 1 if log_decay.shape[-1:] == (1,) else key_channels
    shape = (value_channels, key_channels) if inputs.is_transposed else (key_channels, value_channels)
    for name, tensor, expected in (
        ("queries", queries, queries.shape),
        ("keys", keys, queries.shape),
        ("values", values, (batch, block, heads, value_channels)),
        ("log_decay", log_decay, (batch, block, heads, decays)),
        ("beta", beta, (batch, block, heads)),
        ("state", state, (batch, heads, *shape)),
        ("skip", skip, (heads,)),
    ):
        if tensor is not None:
            reason = reason or tensor_reason(name, tensor, shape=expected, dtypes=FLOAT_DTYPES, unit_stride=False)
    if reason is None and output_dtype not in (None, *FLOAT_DTYPES):
        reason = f"output_dtype is {output_dtype}; use torch.float32, torch.float16 or torch.bfloat16"
    return reason


def block_recurrence_triton(
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
    Run a recurrence over a block of 1 to 64 tokens; arguments and results of `functional_recurrence.run_recurrence`.

    Tensors may have any strides: the hosts' keys, queries and values are channels of a convolution's output, whose
    neighbours in memory are tokens.
    """
    reason = block_recurrence_ineligible_reason(
        state, queries, inputs, scale=scale, skip=skip, wants_state=wants_state, output_dtype=output_dtype
    )
    if reason is not None:
        raise ValueError(f"block_recurrence_triton: {reason}")
    batch, block, key_heads, key_channels = queries.shape
    heads, value_channels = inputs.values.shape[2:]
    dtype = queries.dtype if output_dtype is None else output_dtype
    outputs = torch.empty((batch, block, heads, value_channels), dtype=dtype, device=queries.device)
    shape = (value_channels, key_channels) if inputs.is_transposed else (key_channels, value_channels)
    final = torch.empty((batch, heads, *shape), device=queries.device) if wants_state else None
    if outputs.numel() == 0:
        return outputs, final
    # Without one of them, the kernel does not look at what stands in its place.
    before, after = outputs if state is None else state, outputs if final is None else final
    if inputs.is_transposed:
        before, after = before.transpose(-1, -2), after.transpose(-1, -2)
    skip_stride = 0 if skip is None else skip.stride(0)
    with torch.cuda.device_of(queries):
        _block_recurrence_kernel[(batch * heads, triton.cdiv(value_channels, _VALUE_BLOCK))](
            outputs,
            after,
            before,
            queries,
            inputs.keys,
            inputs.values,
            inputs.log_decay,
            inputs.beta,
            queries if skip is None else skip,
            block,
            heads,
            heads // key_heads,
            scale,
            *before.stride(),
            *after.stride()[-2:],
            *queries.stride(),
            *inputs.keys.stride(),
            *inputs.values.stride(),
            *inputs.log_decay.stride(),
            *inputs.beta.stride(),
            skip_stride,
            KEY_CHANNELS=key_channels,
            VALUE_CHANNELS=value_channels,
            DECAYS=inputs.log_decay.shape[-1],
            IS_DELTA_RULE=inputs.is_delta_rule,
            NORM_EPS=inputs.norm_eps,
            HAS_STATE=state is not None,
            HAS_SKIP=skip is not None,
            WANTS_STATE=wants_state,
            KEY_BLOCK=next_power_of_2(key_channels),
            VALUE_BLOCK=_VALUE_BLOCK,
            num_warps=1,
            **overlap_options(queries.device),
        )
    return outputs, final

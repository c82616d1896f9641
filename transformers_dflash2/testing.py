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
"""
Tiny models with a chosen acceptance, for tests of code that uses this package.

A random drafter is almost never accepted by a random target, so nothing that happens after an accepted token can be
tested with one. The models of this module are built from a config and from weights alone, nothing is patched:

- a *table target* is an ordinary causal language model whose embedding is the identity and whose head is a permutation
  matrix (the "table"). It mostly says `table[last token]`; a little attention and feed-forward output is mixed in, so
  that the rest of the prefix matters too.
- a *table drafter* proposes the walk `anchor -> table[anchor] -> table[table[anchor]] -> ...`. It is accepted exactly
  where the target follows the table. Changing one entry of its table forces a rejection at that token.
- a *random drafter* is hardly ever accepted, but its proposals depend on target features, positions and its own
  cache.

How the table drafter gets its walk: with the output projections of attention and feed-forward at zero, the hidden
state of every mask slot is `h = norm(embedding[mask])`. The hidden projection `W` is chosen so that `W h` is all ones,
the predecessor codebook is `sharpness * I` and the successor codebook holds `1` at `[table[t], t]`, hence the pair
score `<A[pred] * (W h), B[cand]>` is `sharpness` when `cand == table[pred]` and zero otherwise.

Example:

```python
>>> import torch
>>> import transformers_dflash2
>>> from transformers_dflash2.testing import assert_same_tokens, table_drafter, table_target

>>> target = table_target()
>>> draft = table_drafter(target)
>>> plain, drafted = assert_same_tokens(target, draft, torch.tensor([[3, 7, 1]]), max_new_tokens=40)
>>> draft.last_stats.mean_accepted_length > 1.5
True
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from . import compat
from .configuration_dflash2 import DFlash2Config
from .modeling_dflash2 import DFlash2DraftModel


__all__ = [
    "assert_same_tokens",
    "broken_table",
    "cycle_table",
    "draft_config",
    "fill_table_weights",
    "hybrid_target",
    "left_pad",
    "random_drafter",
    "random_table",
    "read_table",
    "returned_cache",
    "table_drafter",
    "table_target",
    "walk_table",
]


def random_table(vocab_size: int, seed: int = 0) -> torch.LongTensor:
    """
    Draws a random permutation of the vocabulary without a fixed point.

    Args:
        vocab_size (`int`):
            Number of tokens.
        seed (`int`, *optional*, defaults to 0):
            Seed of the draw.

    Returns:
        `torch.LongTensor` of shape `(vocab_size,)`: the token that follows each token.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        table = torch.randperm(vocab_size, generator=generator)
        if vocab_size < 2 or not (table == torch.arange(vocab_size)).any():
            return table


def cycle_table(vocab_size: int, seed: int = 0, *, length: int | None = None, start: int = 0) -> torch.LongTensor:
    """
    Draws a permutation that is one cycle through `length` tokens; every other token leads into it.

    Args:
        vocab_size (`int`):
            Number of tokens.
        seed (`int`, *optional*, defaults to 0):
            Seed of the draw.
        length (`int`, *optional*, defaults to `vocab_size`):
            Number of tokens in the cycle.
        start (`int`, *optional*, defaults to 0):
            A token that is part of the cycle.

    Returns:
        `torch.LongTensor` of shape `(vocab_size,)`: the token that follows each token.
    """
    length = vocab_size if length is None else length
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    order = torch.cat([torch.tensor([start]), order[order != start]])[:length]
    table = torch.full((vocab_size,), start, dtype=torch.long)
    table[order] = order.roll(-1)
    return table


def walk_table(table: torch.LongTensor, start: int, steps: int) -> list[int]:
    """
    Follows a table.

    Args:
        table (`torch.LongTensor` of shape `(vocab_size,)`):
            The token that follows each token.
        start (`int`):
            Token to start from; it is not part of the result.
        steps (`int`):
            Number of tokens to return.

    Returns:
        `list[int]`: the next `steps` tokens.
    """
    tokens = []
    for _ in range(steps):
        start = int(table[start])
        tokens.append(start)
    return tokens


def broken_table(
    table: torch.LongTensor,
    tokens: Iterable[int] | None = None,
    *,
    start: int | None = None,
    accept: int | None = None,
) -> torch.LongTensor:
    """
    Copies a table and makes chosen entries wrong, so that a drafter with the copy is rejected there.

    Args:
        table (`torch.LongTensor` of shape `(vocab_size,)`):
            The table of the target.
        tokens (`Iterable[int]`, *optional*):
            Tokens whose successor becomes wrong. Without it and without `accept` every entry becomes wrong.
        start (`int`, *optional*):
            With `accept`: the first anchor of the drafter.
        accept (`int`, *optional*):
            Breaks the entries that a walk from `start` meets after each `accept` right tokens, so that on a target
            that follows the table every block is accepted for `accept` tokens, as long as the walk meets no token
            twice.

    Returns:
        `torch.LongTensor` of shape `(vocab_size,)`: the broken copy.
    """
    vocab_size = table.numel()
    if accept is not None:
        if start is None:
            raise ValueError("`accept` needs `start`, the token that the first draft begins from.")
        walk = [start, *walk_table(table, start, vocab_size - 1)]
        tokens = walk[accept :: accept + 1]
    elif tokens is None:
        tokens = range(vocab_size)
    broken = table.clone()
    for token in tokens:
        broken[token] = (int(table[token]) + 1) % vocab_size
    return broken


def fill_table_weights(
    model: PreTrainedModel,
    table: torch.LongTensor,
    *,
    mix: float = 0.02,
    logit_scale: float = 1.0,
    seed: int = 0,
) -> PreTrainedModel:
    """
    Turns a tiny causal language model into a table target, in place.

    The input embedding becomes the identity, the output head a permutation matrix, queries, keys and values are random
    with a standard deviation of 0.5, and the output projections of attention and feed-forward are random times `mix`.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            A decoder-only model with an untied head whose hidden size is at least the size of the table.
        table (`torch.LongTensor` of shape `(vocab_size,)`):
            The token that follows each token.
        mix (`float`, *optional*, defaults to 0.02):
            How much the prefix matters. 0 follows the table only, 0.1 hides it.
        logit_scale (`float`, *optional*, defaults to 1.0):
            Factor on the head: smaller values give flatter distributions.
        seed (`int`, *optional*, defaults to 0):
            Seed of the random weights.

    Returns:
        [`~transformers.PreTrainedModel`]: the same model, in evaluation mode.
    """
    generator = torch.Generator().manual_seed(seed)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if head is embedding:
        raise ValueError("A table target needs an untied head: set `tie_word_embeddings=False` in its config.")
    vocab_size = table.numel()
    if embedding.shape[1] < vocab_size:
        raise ValueError(f"`hidden_size={embedding.shape[1]}` is below the {vocab_size} tokens of the table.")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "qkv_proj.weight")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            elif any(part in name for part in ("o_proj.weight", "down_proj")):
                parameter.copy_(mix * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim > 1 and parameter is not embedding and parameter is not head:
                std = getattr(model.config.get_text_config(), "initializer_range", 0.02)
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
        embedding.copy_(torch.eye(*embedding.shape))
        head.zero_()
        head[table, torch.arange(vocab_size)] = logit_scale
    return model.eval()


def table_target(
    seed: int = 0,
    vocab_size: int = 32,
    *,
    table: torch.LongTensor | None = None,
    mix: float = 0.02,
    logit_scale: float = 1.0,
    model_type: str = "qwen3",
    num_hidden_layers: int = 4,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    **config_kwargs: Any,
) -> PreTrainedModel:
    """
    Builds a tiny causal language model that mostly follows a table.

    Args:
        seed (`int`, *optional*, defaults to 0):
            Seed of the table and of the weights.
        vocab_size (`int`, *optional*, defaults to 32):
            Number of tokens. The hidden size is 32, or the vocabulary size where that is larger.
        table (`torch.LongTensor` of shape `(vocab_size,)`, *optional*):
            The token that follows each token. Defaults to `random_table(vocab_size, seed)`.
        mix (`float`, *optional*, defaults to 0.02):
            How much the rest of the prefix matters, see [`fill_table_weights`].
        logit_scale (`float`, *optional*, defaults to 1.0):
            Factor on the head: smaller values give flatter distributions.
        model_type (`str`, *optional*, defaults to `"qwen3"`):
            Any decoder-only family of `transformers`.
        num_hidden_layers (`int`, *optional*, defaults to 4):
            Number of decoder layers.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Data type of the weights.
        attn_implementation (`str`, *optional*):
            Attention function of the model.
        config_kwargs (`dict`, *optional*):
            Further arguments of the config.

    Returns:
        [`~transformers.PreTrainedModel`]: the model in evaluation mode, without an end token and with padding token 0.
    """
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": max(32, vocab_size),
        "intermediate_size": 64,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        **config_kwargs,
    }
    config = AutoConfig.for_model(model_type, **settings)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    table = random_table(vocab_size, seed) if table is None else table
    model = fill_table_weights(model, table, mix=mix, logit_scale=logit_scale, seed=seed + 1).to(dtype)
    model.generation_config.pad_token_id = settings["pad_token_id"]
    model.generation_config.eos_token_id = settings["eos_token_id"]
    return model


def hybrid_target(seed: int = 0, vocab_size: int = 64, **config_kwargs: Any) -> PreTrainedModel:
    """
    Builds a tiny Qwen3.5 text model: three layers of linear attention and one of full attention, random weights.

    Args:
        seed (`int`, *optional*, defaults to 0):
            Seed of the weights.
        vocab_size (`int`, *optional*, defaults to 64):
            Number of tokens.
        config_kwargs (`dict`, *optional*):
            Further arguments of the config.

    Returns:
        [`~transformers.PreTrainedModel`]: the model in evaluation mode.
    """
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        **config_kwargs,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **settings)).eval()


def read_table(target: PreTrainedModel) -> torch.LongTensor:
    """
    Reads the table back from the head of a table target.

    Args:
        target ([`~transformers.PreTrainedModel`]):
            A model made by [`table_target`] or [`fill_table_weights`].

    Returns:
        `torch.LongTensor` of shape `(vocab_size,)`: the token that follows each token.
    """
    vocab_size = target.config.get_text_config().vocab_size
    head = target.get_output_embeddings().weight.detach().float()
    return head[:vocab_size, :vocab_size].argmax(dim=0).cpu()


def draft_config(target: PreTrainedModel, **kwargs: Any) -> DFlash2Config:
    """
    Makes the config of a tiny two-layer drafter that fits a target.

    Args:
        target ([`~transformers.PreTrainedModel`]):
            The model to draft for.
        kwargs (`dict`, *optional*):
            Settings that replace the defaults: block size 8, taps `[0, 2]`, a convolution of two taps in groups of 8,
            selector rank 8 and top-k 4, and the last token as mask.

    Returns:
        [`DFlash2Config`]: the config.
    """
    text_config = target.config.get_text_config()
    settings = {
        "architectures": ["DFlash2DraftModel"],
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_target_layers": text_config.num_hidden_layers,
        "block_size": 8,
        "target_layer_ids": [0, 2],
        "mask_token_id": text_config.vocab_size - 1,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 8,
        "selector_top_k": 4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "is_causal": False,
    }
    if kwargs.get("draft_family") == "dflash":
        off = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        settings.update(architectures=["DFlashDraftModel"], **dict.fromkeys(off, 0))
    settings.update(kwargs)
    # A setting of `None` leaves the key out of the config.
    optional = ("target_layer_ids", "mask_token_id", "block_size", "num_target_layers", "is_causal")
    settings = {key: value for key, value in settings.items() if value is not None or key not in optional}
    return DFlash2Config(**settings)


def random_drafter(target: PreTrainedModel, seed: int = 0, *, std: float = 0.3, **config_kwargs: Any):
    """
    Builds a drafter with ordinary random weights. It is hardly ever accepted, and its proposals depend on the target's
    features, on positions and on its own cache.

    Args:
        target ([`~transformers.PreTrainedModel`]):
            The model to draft for.
        seed (`int`, *optional*, defaults to 0):
            Seed of the weights.
        std (`float`, *optional*, defaults to 0.3):
            Standard deviation of every matrix, codebooks and convolution kernels included.
        config_kwargs (`dict`, *optional*):
            Settings of [`draft_config`].

    Returns:
        [`DFlash2DraftModel`]: the drafter in evaluation mode, in the data type of the target.
    """
    config = draft_config(target, **config_kwargs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = DFlash2DraftModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = std * torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                noise = 1 + noise
            elif name.endswith("base_kernel"):
                # The identity is tap 0 of both sides.
                noise[:, 0] += 1
            parameter.copy_(noise)
    return draft.to(dtype=target.dtype, device=target.device).eval()


def table_drafter(
    target: PreTrainedModel,
    table: torch.LongTensor | None = None,
    *,
    seed: int = 0,
    sharpness: float = 30.0,
    **config_kwargs: Any,
):
    """
    Builds a drafter that proposes the walk of a table.

    Args:
        target ([`~transformers.PreTrainedModel`]):
            The model to draft for; only its embedding and config are read when `table` is given.
        table (`torch.LongTensor` of shape `(vocab_size,)`, *optional*):
            The token that the drafter proposes after each token. Defaults to the table of the target.
        seed (`int`, *optional*, defaults to 0):
            Seed of the weights that do not matter for the proposals.
        sharpness (`float`, *optional*, defaults to 30.0):
            Score of the proposed token over the others. With 30 the drafter is sure; with sampling, smaller values
            give a spread-out draft distribution.
        config_kwargs (`dict`, *optional*):
            Settings of [`draft_config`]. Selector rank and top-k default to the vocabulary size.

    Returns:
        [`DFlash2DraftModel`]: the drafter in evaluation mode, in the data type of the target.
    """
    table = read_table(target) if table is None else table
    vocab_size = table.numel()
    config_kwargs = {"selector_rank": vocab_size, "selector_top_k": vocab_size, **config_kwargs}
    draft = random_drafter(target, seed, std=0.1, **config_kwargs).float()
    config = draft.config
    embedding = target.get_input_embeddings().weight.detach().to(device="cpu", dtype=torch.float32)
    mask = embedding[config.mask_token_id] * config.input_embedding_scale
    with torch.no_grad():
        for layer in draft.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        draft.norm.weight.fill_(1.0)
        hidden = mask * torch.rsqrt(mask.square().mean() + config.rms_norm_eps)
        selector = draft.candidate_selector
        selector.hidden_projection.weight.copy_(
            (hidden / hidden.square().sum()).expand_as(selector.hidden_projection.weight)
        )
        selector.predecessor_codebook.zero_()
        selector.successor_codebook.zero_()
        # Rows of a vocabulary that is padded, or cut, by a few tokens.
        tokens = torch.arange(vocab_size)
        tokens = tokens[(tokens < config.vocab_size) & (table < config.vocab_size)]
        selector.predecessor_codebook[tokens, tokens] = sharpness
        selector.successor_codebook[table[tokens], tokens] = 1.0
    return draft.to(dtype=target.dtype, device=target.device)


def left_pad(rows: Sequence[Sequence[int]], pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """
    Makes a left-padded batch.

    Args:
        rows (`Sequence[Sequence[int]]`):
            Prompts of any length.
        pad_token_id (`int`, *optional*, defaults to 0):
            Token to pad with.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask` of shape `(batch, longest prompt)`.
    """
    width = max(len(row) for row in rows)
    input_ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": input_ids, "attention_mask": mask}


def returned_cache(output: Any):
    """
    Takes the key-value cache out of what `generate` returns, under the name the installed `transformers` gives it.

    Args:
        output ([`~transformers.utils.ModelOutput`]):
            What `generate(..., return_dict_in_generate=True)` returned.

    Returns:
        [`~transformers.Cache`] or `None`: the cache.
    """
    for name in compat.CACHE_KEYS:
        if name in output:
            return output[name]
    return None


def assert_same_tokens(
    target: PreTrainedModel,
    draft: Any,
    input_ids: torch.LongTensor | None = None,
    *,
    draft_kwargs: dict[str, Any] | None = None,
    **generate_kwargs: Any,
) -> tuple[Any, Any]:
    """
    Runs `generate` without and with a drafter and requires the same ids.

    Args:
        target ([`~transformers.PreTrainedModel`]):
            The target.
        draft ([`DFlash2DraftModel`]):
            The drafter.
        input_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*):
            Prompts.
        draft_kwargs (`dict[str, Any]`, *optional*):
            Arguments for the call with the drafter only, for instance `num_assistant_tokens`.
        generate_kwargs (`dict`, *optional*):
            Arguments of both calls. Sampling is off unless asked for.

    Returns:
        `tuple`: what the two calls returned, plain first.
    """
    inputs = dict(generate_kwargs)
    inputs.setdefault("do_sample", False)
    if input_ids is not None:
        inputs["input_ids"] = input_ids
    plain = target.generate(**inputs)
    drafted = target.generate(**inputs, assistant_model=draft, **(draft_kwargs or {}))
    expected = plain if isinstance(plain, torch.Tensor) else plain.sequences
    actual = drafted if isinstance(drafted, torch.Tensor) else drafted.sequences
    if not torch.equal(expected, actual):
        raise AssertionError(
            f"Tokens differ with the drafter.\nplain:   {expected.tolist()}\ndrafted: {actual.tolist()}\n"
            f"arguments: { {key: value for key, value in generate_kwargs.items() if key != 'input_ids'} }, "
            f"{draft_kwargs or {}}"
        )
    return plain, drafted

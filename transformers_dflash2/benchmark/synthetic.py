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
"""Models of a given shape, with random weights and a chosen acceptance.

Timing needs no trained weights, but it needs drafts that are accepted. Here the *weights* see to that, and the
decoding loops run as they always do: nothing is scripted, skipped or patched, and every loop that takes these weights
meets the same acceptance.

The target mostly says `successor[last token]`: its head holds the embedding of the predecessor of each token, and what
attention and feed-forward add to the residual stream is small. The prompt ends on a cycle of a few tokens, so the text
goes round it. The drafter's mask embedding is the mean of the cycle's embeddings, which makes the cycle its candidate
set; its codebooks (or Markov tables) give each token its successor, except at chosen places, where they give a wrong
one. A block is accepted up to the first such place. All matrices hold dense random numbers, so every product costs
what it would in a trained model.

Such a text repeats itself. Methods that copy from the text (prompt lookup) would look better than they are on it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..configuration_dflash2 import DFlash2Config
from ..configuration_dspark import DSparkConfig
from ..modeling_dflash2 import DFlash2DraftModel
from ..modeling_dspark import DSparkDraftModel


# Norm of what all layers together add to a residual stream of norm 1.
_MIX = 0.05
# The target's score of the successor over other tokens, and the drafter's.
_TARGET_MARGIN = 30.0
_DRAFT_MARGIN = 30.0
# What a Markov table adds for the token that is to be proposed. The anchor's own row scores the right one as the
# target does, and has to be outbid.
_MARKOV_MARGIN = 100.0
# Most tokens of the cycle.
_CYCLE = 16


@dataclass(frozen=True)
class Shape:
    """
    Sizes of a target and its drafter, as arguments of their configurations.

    Args:
        model_type (`str`): The target's.
        shared (`dict`): What both have.
        target (`dict`): What the target has besides, or otherwise than its drafter.
        draft (`dict`): The same for the drafter's layers and block.
    """

    model_type: str
    shared: dict[str, Any]
    target: dict[str, Any]
    draft: dict[str, Any]


def _sizes(vocab: int, hidden: int, intermediate: int, positions: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": positions,
    }


def _attention(heads: int, key_value_heads: int, head_dim: int, theta: float, **rope: float) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **rope},
    }


def _linear_attention(key_heads: int, value_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
    }


def _sliding(layers: int) -> dict[str, Any]:
    """The drafter's layers and block, as in published drafters."""
    return {
        "num_hidden_layers": layers,
        "sliding_window": 2048,
        "layer_types": ["sliding_attention"] * layers,
        "block_size": 8,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int) -> Shape:
    shared = _sizes(151936, hidden, intermediate, 131072) | _attention(heads, 8, 128, 1e6)
    return Shape("qwen3", shared, {"num_hidden_layers": layers}, _sliding(5))


_SHARED_27B = _sizes(248320, 5120, 17408, 262144)
_DRAFT_27B = {**_sliding(5), **_attention(32, 8, 128, 1e7), "target_layer_ids": [5, 19, 33, 47, 61]}
_SHARED_TINY = _sizes(96, 128, 192, 4096)
_ATTENTION_TINY = _attention(4, 2, 32, 1e4)
_DRAFT_TINY = {
    "num_hidden_layers": 2,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "block_size": 8,
    **_ATTENTION_TINY,
}

SHAPES = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    # Linear attention, and full attention in every fourth layer.
    "qwen3.8-27b": Shape(
        "qwen3_5_text",
        _SHARED_27B,
        {
            "num_hidden_layers": 64,
            **_attention(24, 4, 256, 1e7, partial_rotary_factor=0.25),
            **_linear_attention(16, 48, 128),
        },
        _DRAFT_27B,
    ),
    # As many parameters to half a layer, full attention throughout; layers as in Qwen3-14B, which is as wide.
    "dense-27b": Shape("qwen3", _SHARED_27B, {"num_hidden_layers": 74, **_attention(40, 8, 128, 1e6)}, _DRAFT_27B),
    # These run on a CPU in seconds.
    "tiny": Shape("qwen3", _SHARED_TINY, {"num_hidden_layers": 6, **_ATTENTION_TINY}, _DRAFT_TINY),
    "tiny-hybrid": Shape(
        "qwen3_5_text",
        _SHARED_TINY,
        {"num_hidden_layers": 8, **_ATTENTION_TINY, **_linear_attention(2, 4, 32)},
        _DRAFT_TINY,
    ),
}

# What each family of drafters has on top of a shape: model, configuration and its settings.
_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "dflash2": (
        DFlash2DraftModel,
        DFlash2Config,
        {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
    ),
    "dspark": (DSparkDraftModel, DSparkConfig, {"markov_rank": 256, "markov_head_type": "vanilla"}),
}
DRAFTERS = tuple(_FAMILIES)


@dataclass
class SyntheticPair:
    """
    Args:
        target ([`~transformers.PreTrainedModel`]): The target, in evaluation mode.
        draft ([`DFlash2DraftModel`]): Its drafter.
        cycle (`torch.LongTensor` of shape `(tokens,)`): The tokens the text goes through, in order. A prompt should
            end on the last one.
        mean_accepted_length (`float`): Tokens per round that the weights bring about, away from the length limit.
    """

    target: PreTrainedModel
    draft: DFlash2DraftModel
    cycle: torch.Tensor
    mean_accepted_length: float


def random_prompts(pair: SyntheticPair, batch: int, length: int) -> dict[str, torch.Tensor]:
    """
    Prompts after which the text goes round the cycle.

    Args:
        pair ([`SyntheticPair`]): The models.
        batch (`int`): Rows.
        length (`int`): Tokens per row.

    Returns:
        `dict`: `input_ids` and `attention_mask`, int64 of shape `(batch, length)`, on the target's device.
    """
    vocab = pair.target.config.vocab_size
    ids = torch.randint(1, vocab - 1, (batch, length), generator=torch.Generator().manual_seed(0))
    # The drafter knows the way from here.
    ids[:, -1] = pair.cycle[-1]
    ids = ids.to(pair.target.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def plan_rounds(mean_accepted_length: float, *, block: int, tokens: int) -> list[int]:
    """
    Tokens that consecutive rounds commit, so that their mean is as near as possible to the wanted one.

    Args:
        mean_accepted_length (`float`): Wanted tokens per round, 1 to `block`.
        block (`int`): Most that a round can commit.
        tokens (`int`): The rounds together may commit this many.

    Returns:
        `list[int]`: one entry per round, two tokens or more in total.
    """
    if not 1 <= mean_accepted_length <= min(block, tokens):
        raise ValueError(
            f"mean_accepted_length={mean_accepted_length} cannot be had with blocks of {block} and {tokens} "
            f"candidates; choose 1 to {min(block, tokens)}."
        )
    totals = {rounds: round(mean_accepted_length * rounds) for rounds in range(1, tokens + 1)}
    fitting = {rounds: total for rounds, total in totals.items() if 2 <= total <= tokens}
    # The nearest mean; among equals the most rounds.
    rounds = min(fitting, key=lambda count: (abs(fitting[count] / count - mean_accepted_length), -count))
    total = fitting[rounds]
    ends = [total * (index + 1) // rounds for index in range(rounds)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def synthetic_pair(shape: Shape, *, drafter: str = "dflash2", **options) -> SyntheticPair:
    """
    Build a target and one drafter; see [`synthetic_pairs`].

    Args:
        shape ([`Shape`]): The sizes.
        drafter (`str`, *optional*, defaults to `"dflash2"`): One of `DRAFTERS`.
        options (`dict`, *optional*): As for [`synthetic_pairs`].
    """
    return synthetic_pairs(shape, [drafter], **options)[drafter]


@torch.no_grad()
def synthetic_pairs(
    shape: Shape,
    drafters: Sequence[str],
    *,
    mean_accepted_length: float,
    block: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, SyntheticPair]:
    """
    Build a target of a shape, and drafters that propose the same tokens for it.

    Args:
        shape ([`Shape`]): The sizes.
        drafters (`Sequence[str]`): Names out of `DRAFTERS`.
        mean_accepted_length (`float`): Tokens per round, the target's own included.
        block (`int`, *optional*): The drafters' `block_size`, the shape's by default. DFlash2 counts the anchor in it,
            DSpark only what is proposed.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of all models.
        device (`torch.device`, *optional*, defaults to `"cpu"`): Where they are built.
        seed (`int`, *optional*, defaults to 0): Seed of the weights.

    Returns:
        `dict[str, SyntheticPair]`: one pair per drafter, all with the same target.

    Raises:
        `ValueError`: The acceptance cannot be had with this block.
    """
    mask = shape.shared["vocab_size"] - 1
    configs = {name: _draft_config(shape, name, block, mask) for name in dict.fromkeys(drafters)}
    longest = min(config.speculative_tokens for config in configs.values()) + 1
    rounds = plan_rounds(mean_accepted_length, block=longest, tokens=_CYCLE)
    generator = torch.Generator(device=device).manual_seed(seed)
    target = _random_target(shape, dtype, device, generator)
    successor, cycle = _successors(mask + 1, sum(rounds), mask, generator)
    _write_table(target, successor, cycle, mask, generator)
    pairs = {}
    for name, config in configs.items():
        with torch.device(target.device):
            draft = _FAMILIES[name][0](config).to(target.dtype).eval()
        _fill([draft], config.num_hidden_layers, generator)
        drafted = _drafted(successor, cycle, rounds, config.speculative_tokens)
        if name == "dspark":
            _write_markov(draft, drafted, cycle, generator)
        else:
            _write_walk(draft, target, drafted, cycle, mask, generator)
        pairs[name] = SyntheticPair(target, draft, cycle.cpu(), sum(rounds) / len(rounds))
    return pairs


def _draft_config(shape: Shape, drafter: str, block: int | None, mask: int) -> DFlash2Config:
    model_class, config_class, settings = _FAMILIES[drafter]
    depth, taps = shape.target["num_hidden_layers"], shape.draft["num_hidden_layers"]
    values = {
        "architectures": [model_class.__name__],
        "num_target_layers": depth,
        # Spread over the target as in published drafters.
        "target_layer_ids": [round(1 + index * (depth - 4) / (taps - 1)) for index in range(taps)],
        "mask_token_id": mask,
        "is_causal": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        # Configurations write into what they are given.
        **copy.deepcopy({**shape.shared, **shape.draft}),
        **settings,
    }
    if block is not None:
        values["block_size"] = block
    return config_class(**values)


def _random_target(shape: Shape, dtype, device, generator) -> PreTrainedModel:
    config = AutoConfig.for_model(
        shape.model_type,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **copy.deepcopy({**shape.shared, **shape.target}),
    )
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    _fill(target.get_decoder().layers, config.num_hidden_layers, generator)
    return target


def _drafted(successor, cycle, rounds: list[int], slots: int) -> torch.Tensor:
    """The token that a drafter proposes behind each token, the right one but where a round is to end."""
    drafted = successor.clone()
    position = 0
    for count in rounds:
        position += count
        if count <= slots:
            # The token after the right one.
            drafted[cycle[position - 1]] = cycle[(position + 1) % len(cycle)]
    return drafted


def _fill(modules, layers: int, generator) -> None:
    """Random matrices that keep the size of their input, but for those that write to the residual stream."""
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.ndim < 2 or name.endswith("base_kernel"):
                continue
            std = parameter.shape[-1] ** -0.5
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                std *= _MIX * (2 * layers) ** -0.5
            elif "kernel_projection" in name:
                std *= _MIX
            parameter.normal_(std=std, generator=generator)


def _successors(vocab: int, length: int, mask: int, generator) -> tuple[torch.Tensor, torch.Tensor]:
    device = generator.device
    order = torch.randperm(vocab, generator=generator, device=device)
    # Token 0 pads, and the mask is never part of a text.
    order = order[(order != 0) & (order != mask)]
    successor = torch.arange(vocab, device=device)
    for part in (order[:length], order[length:]):
        successor[part] = part.roll(-1)
    return successor, order[:length]


def _write_table(target, successor, cycle, mask: int, generator) -> None:
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    vocab, hidden = embedding.shape
    rows = torch.empty(vocab, hidden, device=embedding.device)
    if vocab <= hidden:
        torch.nn.init.orthogonal_(rows, gain=hidden**0.5, generator=generator)
    else:
        rows.normal_(generator=generator)
    # Rows of length sqrt(hidden): a residual stream of root mean square 1.
    rows *= hidden**0.5 / rows.norm(dim=-1, keepdim=True)
    head[successor] = (rows * (_TARGET_MARGIN / hidden)).to(head.dtype)
    head[mask].normal_(std=_TARGET_MARGIN / hidden, generator=generator)
    mean = rows[cycle].sum(dim=0)
    rows[mask] = mean * (hidden**0.5 / mean.norm())
    embedding.copy_(rows)


def _write_walk(draft, target, drafted, cycle, mask: int, generator) -> None:
    config, selector = draft.config, draft.candidate_selector
    embedding = target.get_input_embeddings().weight[mask].float()
    hidden = embedding * torch.rsqrt(embedding.square().mean() + config.rms_norm_eps)
    projection = selector.hidden_projection.weight
    # Every component of the projected mask row is close to 1.
    projection.copy_((hidden / hidden.square().sum()).expand_as(projection))
    rank = config.selector_rank
    signs = torch.randint(0, 2, (len(cycle), rank), generator=generator, device=embedding.device) * 2.0 - 1.0
    selector.predecessor_codebook[cycle] = (_DRAFT_MARGIN * signs * rank**-0.5).to(draft.dtype)
    columns = {token: row for row, token in enumerate(cycle.tolist())}
    # Several tokens may propose the same one: its row answers to all of them.
    rows = torch.zeros(len(cycle), rank, device=embedding.device)
    for row, token in enumerate(cycle.tolist()):
        rows[columns[int(drafted[token])]] += signs[row] * rank**-0.5
    selector.successor_codebook[cycle] = rows.to(draft.dtype)


def _write_markov(draft, drafted, cycle, generator) -> None:
    predecessor, successor = draft.markov_head.markov_w1.weight, draft.markov_head.markov_w2.weight
    codes = torch.empty(len(cycle), draft.config.markov_rank, device=cycle.device)
    torch.nn.init.orthogonal_(codes, generator=generator)
    predecessor[cycle] = (_MARKOV_MARGIN * codes).to(draft.dtype)
    # Several tokens may propose the same one: its row answers to all of them.
    for code, token in zip(codes, cycle, strict=True):
        successor[drafted[token]] += code.to(draft.dtype)


__all__ = [
    "DRAFTERS",
    "SHAPES",
    "Shape",
    "SyntheticPair",
    "plan_rounds",
    "random_prompts",
    "synthetic_pair",
    "synthetic_pairs",
]

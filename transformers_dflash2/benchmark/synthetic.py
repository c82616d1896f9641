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
set; its codebooks give each token its successor, except at chosen places, where they give a wrong one. A block is
accepted up to the first such place. All matrices hold dense random numbers, so every product costs what it would in a
trained model.

Such a text repeats itself. Methods that copy from the text (prompt lookup) would look better than they are on it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..configuration_dflash2 import DFlash2Config
from ..modeling_dflash2 import DFlash2DraftModel


# Norm of what all layers together add to a residual stream of norm 1.
_MIX = 0.05
# The target's score of the successor over other tokens, and the drafter's.
_TARGET_MARGIN = 30.0
_DRAFT_MARGIN = 30.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of a drafter that differ from the target's."""

    model_type: str
    target: dict[str, Any]
    draft: dict[str, Any]


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, draft_layers: int = 5) -> Shape:
    return Shape(
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {
            "num_hidden_layers": draft_layers,
            "sliding_window": 2048,
            "layer_types": ["sliding_attention"] * draft_layers,
            "block_size": 8,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    )


SHAPES = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    # Runs on a CPU in seconds.
    "tiny": Shape(
        "qwen3",
        {
            "vocab_size": 96,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        {
            "num_hidden_layers": 2,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "block_size": 8,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 64,
            "selector_top_k": 16,
        },
    ),
}


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


@torch.no_grad()
def synthetic_pair(
    shape: Shape,
    *,
    mean_accepted_length: float,
    block: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> SyntheticPair:
    """
    Build a target and a drafter of a shape.

    Args:
        shape ([`Shape`]): The sizes.
        mean_accepted_length (`float`): Tokens per round, the target's own included.
        block (`int`, *optional*): Block length, anchor included; the shape's by default.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of both models.
        device (`torch.device`, *optional*, defaults to `"cpu"`): Where they are built.
        seed (`int`, *optional*, defaults to 0): Seed of the weights.

    Raises:
        `ValueError`: The acceptance cannot be had with this block.
    """
    block = shape.draft["block_size"] if block is None else block
    top_k, vocab = shape.draft["selector_top_k"], shape.target["vocab_size"]
    rounds = plan_rounds(mean_accepted_length, block=block, tokens=top_k)
    generator = torch.Generator(device=device).manual_seed(seed)
    target = _random_target(shape, dtype, device, generator)
    mask = vocab - 1
    successor, cycle = _successors(vocab, sum(rounds), mask, generator)
    _write_table(target, successor, cycle, mask, generator)
    draft = _random_drafter(shape, target, block, mask, generator)
    drafted = successor.clone()
    position = 0
    for count in rounds:
        position += count
        if count < block:
            # The token after the right one.
            drafted[cycle[position - 1]] = cycle[(position + 1) % len(cycle)]
    _write_walk(draft, target, drafted, cycle, mask, generator)
    return SyntheticPair(target, draft, cycle.cpu(), sum(rounds) / len(rounds))


def _random_target(shape: Shape, dtype, device, generator) -> PreTrainedModel:
    config = AutoConfig.for_model(
        shape.model_type,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **shape.target,
    )
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    _fill(target.get_decoder().layers, config.num_hidden_layers, generator)
    return target


def _random_drafter(shape: Shape, target, block: int, mask: int, generator) -> DFlash2DraftModel:
    depth, taps = shape.target["num_hidden_layers"], shape.draft["num_hidden_layers"]
    config = DFlash2Config(
        architectures=["DFlash2DraftModel"],
        num_target_layers=depth,
        # Spread over the target as in published drafters.
        target_layer_ids=[round(1 + index * (depth - 4) / (taps - 1)) for index in range(taps)],
        mask_token_id=mask,
        is_causal=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **{**shape.target, **shape.draft, "block_size": block},
    )
    with torch.device(target.device):
        draft = DFlash2DraftModel(config).to(target.dtype).eval()
    _fill([draft], config.num_hidden_layers, generator)
    return draft


def _fill(modules, layers: int, generator) -> None:
    """Random matrices that keep the size of their input, but for those that write to the residual stream."""
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.ndim < 2 or name.endswith("base_kernel"):
                continue
            std = parameter.shape[-1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
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


__all__ = ["SHAPES", "Shape", "SyntheticPair", "plan_rounds", "synthetic_pair"]

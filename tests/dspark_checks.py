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
"""Tiny DSpark drafters, and the Markov head computed slowly in float64."""

import functools
import math

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from transformers_dflash2 import DSparkConfig, DSparkDraftModel
from transformers_dflash2.compat import CACHE_KEY
from transformers_dflash2.testing import fill_table_weights, random_table, read_table


HEADS = ("vanilla", "gated", "rnn")


def dspark_config(target, **kwargs):
    text_config = target.config.get_text_config()
    settings = {
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "num_target_layers": text_config.num_hidden_layers,
        "block_size": 7,
        "target_layer_ids": [0, 2],
        "mask_token_id": text_config.vocab_size - 1,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "is_causal": False,
        "pad_token_id": 0,
        **kwargs,
    }
    return DSparkConfig(**{key: value for key, value in settings.items() if value is not None})


def random_dspark(target, seed=0, *, std=0.3, d2t=None, **kwargs):
    """Ordinary random weights: hardly ever accepted, but every input of the drafter matters."""
    if d2t is not None:
        kwargs["draft_vocab_size"] = len(d2t)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = DSparkDraftModel(dspark_config(target, **kwargs))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = std * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
        if d2t is not None:
            draft.d2t.copy_(torch.tensor(d2t) - torch.arange(len(d2t)))
    return draft.to(target.dtype).eval()


def table_dspark(target, table=None, *, sharpness=30.0, d2t=None, **kwargs):
    """
    A drafter that proposes the walk of a table: the Markov bias of every kind of head is `sharpness` at the token that
    follows, and the base logits are small beside it.
    """
    table = read_table(target) if table is None else table
    vocab_size = table.numel()
    draft = random_dspark(target, std=0.1, d2t=d2t, **{"markov_rank": vocab_size, **kwargs}).float()
    head = draft.markov_head
    ids = torch.arange(vocab_size) if d2t is None else torch.tensor(d2t)
    with torch.no_grad():
        for layer in draft.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        if draft.lm_head is not None:
            draft.lm_head.weight.zero_()
        # The code is the token's own unit vector: as it is, times an open gate, or through a saturated tanh.
        head.markov_w1.weight.zero_()[:vocab_size].fill_diagonal_(1.0)
        head.markov_w2.weight.zero_()
        for row, token in enumerate(ids.tolist()):
            head.markov_w2.weight[row, table == token] = sharpness
        if head.kind == "gated":
            head.gate_proj.weight.zero_()
            head.gate_proj.bias.fill_(20.0)
        elif head.kind == "rnn":
            rank = head.markov_w1.embedding_dim
            head.joint_proj.weight.zero_()
            head.joint_proj.bias.zero_()
            head.joint_proj.weight[2 * rank :, rank : 2 * rank].fill_diagonal_(20.0)
    return draft.to(target.dtype)


class WidthScaledTarget(Qwen3ForCausalLM):
    """
    A dense target with the output rule of Inkling: hidden states are divided before the head, and logits past the real
    vocabulary are cut off.
    """

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, logits_to_keep=0, **kwargs):
        kwargs.pop("return_dict", None)
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **kwargs
        )
        hidden = outputs.last_hidden_state[:, -logits_to_keep:] / self.config.logits_mup_width_multiplier
        logits = self.lm_head(hidden)[..., : self.config.unpadded_vocab_size]
        return CausalLMOutputWithPast(logits=logits, **{CACHE_KEY: outputs[CACHE_KEY]})


def width_scaled_target(seed=0, *, multiplier=4.0, logit_scale=4.0, vocab_size=24, padded=32, table=None, mix=0.02):
    """A table target of `vocab_size` tokens whose embedding and head have `padded` rows, the last of them loud."""
    config = Qwen3Config(
        vocab_size=padded,
        unpadded_vocab_size=vocab_size,
        logits_mup_width_multiplier=multiplier,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = WidthScaledTarget(config)
    table = random_table(vocab_size, seed) if table is None else table
    fill_table_weights(target, table, mix=mix, logit_scale=logit_scale, seed=seed + 1)
    with torch.no_grad():
        target.lm_head.weight[vocab_size:] = 9.0
    target.generation_config.pad_token_id = 0
    return target


def exact_markov(head, hidden, base, ids, anchor, *, noise=None, temperature=1.0):
    """
    One row, number by number in float64; `noise` is `None` for a greedy row.

    Returns:
        Tokens, corrected logits and distributions, one entry per slot.
    """

    def values(parameter):
        return parameter.detach().double().tolist()

    def dot(left, right):
        return math.fsum(a * b for a, b in zip(left, right, strict=True))

    def sigmoid(value):
        return 1 / (1 + math.exp(-value))

    table, successors = values(head.markov_w1.weight), values(head.markov_w2.weight)
    rank = len(table[0])
    state, previous = [0.0] * rank, int(anchor)
    tokens, logits, laws = [], [], []
    for slot, row in enumerate(base.double().tolist()):
        embedding = table[previous]
        h = hidden[slot].double().tolist()
        if head.kind == "vanilla":
            code = embedding
        elif head.kind == "gated":
            weight, bias = values(head.gate_proj.weight), values(head.gate_proj.bias)
            code = [sigmoid(dot(weight[i], h + embedding) + bias[i]) * embedding[i] for i in range(rank)]
        else:
            weight, bias = values(head.joint_proj.weight), values(head.joint_proj.bias)
            joint = [dot(line, state + embedding + h) + add for line, add in zip(weight, bias, strict=True)]
            code = [math.tanh(value) for value in joint[2 * rank :]]
            keep = [sigmoid(value) for value in joint[:rank]]
            state = [
                k * s + (1 - k) * math.tanh(b) for k, s, b in zip(keep, state, joint[rank : 2 * rank], strict=True)
            ]
        scores = [value + dot(line, code) for value, line in zip(row, successors, strict=True)]
        largest = max(scores)
        weights = [math.exp((score - largest) / temperature) for score in scores]
        law = [weight / math.fsum(weights) for weight in weights]
        if noise is None:
            choice = scores.index(largest)
            law = [float(i == choice) for i in range(len(law))]
        else:
            perturbed = [
                score / temperature - math.log(e) for score, e in zip(scores, noise[slot].tolist(), strict=True)
            ]
            choice = perturbed.index(max(perturbed))
        previous = int(ids[choice])
        tokens.append(previous)
        logits.append(scores)
        laws.append(law)
    return tokens, torch.tensor(logits, dtype=torch.float64), torch.tensor(laws, dtype=torch.float64)


@functools.cache
def markov_head(kind, rank=5, hidden_size=6, vocab_size=11, draft_vocab_size=11):
    """A Markov head alone, with weights that make every term matter."""
    from transformers_dflash2.modeling_dspark import DSparkMarkovHead

    class Config:
        markov_rank, markov_head_type = rank, kind

    config = Config()
    config.hidden_size, config.vocab_size, config.draft_vocab_size = hidden_size, vocab_size, draft_vocab_size
    head = DSparkMarkovHead(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head

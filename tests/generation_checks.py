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
"""What several test files use to look at a `generate` call from outside."""

import contextlib
import functools

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

from transformers_dflash2.testing import cycle_table, random_drafter, returned_cache, table_drafter, table_target


# The host renamed `past_key_values` to `cache` in 5.24.
CACHE_KEY = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
PROMPT = torch.tensor([[3, 7, 1]])
# Largest difference between one pass over several tokens and several passes over one, in logits of about 6.
LOGITS_TOLERANCE = 1e-5
# The same for final hidden states of a drafter with large random weights.
HIDDEN_TOLERANCE = 1e-4
# Fixed seeds: a right sampler stays above this in every case, a wrong one falls far below.
SMALLEST_P_VALUE = 1e-3


@functools.cache
def t0(seed=0):
    """The table target whose prefix matters; shared, so a test that changes weights builds its own."""
    return table_target(seed)


@functools.cache
def d0(seed=0):
    return table_drafter(t0(seed))


@functools.cache
def d1(seed=0):
    return random_drafter(t0(seed), seed)


@functools.cache
def pure_target(seed=0):
    """A table target that follows one cycle through all 32 tokens."""
    return table_target(seed, table=cycle_table(32, seed), mix=0.0)


@functools.cache
def pure_drafter(seed=0):
    return table_drafter(pure_target(seed))


def cache_kwargs(cache):
    return {CACHE_KEY: cache}


def new_cache(model):
    return DynamicCache(config=model.config)


def cache_tensors(cache):
    """Keys and values of every layer."""
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@contextlib.contextmanager
def target_inputs(target):
    """Collects the token ids of every call of the target, in order; the drafter's use of its modules is left out."""
    calls = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].detach().clone()), with_kwargs=True
    )
    try:
        yield calls
    finally:
        handle.remove()


@contextlib.contextmanager
def target_passes(target):
    """Collects the (batch, length) of every decoder pass of the target, at its first layer."""
    calls = []
    layer = decoder_layers(target)[0]
    handle = layer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(tuple((args[0] if args else kwargs["hidden_states"]).shape[:2])),
        with_kwargs=True,
    )
    try:
        yield calls
    finally:
        handle.remove()


@contextlib.contextmanager
def module_inputs(module):
    """Collects the first argument of every call of a module."""
    calls = []

    def record(module, args, kwargs):
        calls.append((args[0] if args else next(iter(kwargs.values()))).detach().clone())

    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@contextlib.contextmanager
def module_outputs(module):
    """Collects the (first) output of every call of a module."""
    calls = []

    def record(module, args, output):
        calls.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    handle = module.register_forward_hook(record)
    try:
        yield calls
    finally:
        handle.remove()


def decoder_layers(target):
    base = target.get_decoder() if hasattr(target, "get_decoder") else target.model
    return base.layers


def hook_count(*models):
    """Number of hooks on all modules, and instance attributes that shadow a method."""
    count = 0
    for model in models:
        for module in model.modules():
            count += len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            count += int("forward" in module.__dict__)
    return count


def module_count(*models):
    return sum(1 for model in models for _ in model.modules())


def taps_of(target, sequence, layer_ids):
    """Outputs of decoder layers in one fresh forward over a sequence, concatenated: `(length, taps * hidden)`."""
    layers = decoder_layers(target)
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(module_outputs(layers[index])) for index in layer_ids]
        with torch.no_grad():
            target(sequence)
    return torch.cat([output[0] for output in outputs], dim=-1)[0]


def is_hooked():
    """Whether the package's `generate` is installed."""
    return GenerationMixin.generate.__module__.startswith("transformers_dflash2") or hasattr(
        GenerationMixin.generate, "__wrapped__"
    )


def assert_drafts_as_if_rebuilt(target, draft, prompt, **generate_kwargs):
    """
    Check Q, for one row: each round the drafter's hidden states and proposals are those of a drafter that is handed
    the committed prefix in one piece. Returns the proposals, one list per round.
    """
    config = draft.config
    with module_outputs(draft.norm) as hidden, target_inputs(target) as blocks:
        mask = torch.ones_like(prompt)
        sequence = target.generate(
            prompt, attention_mask=mask, assistant_model=draft, do_sample=False, **generate_kwargs
        )
    # Chunks of the prompt come first; the first block starts with the first new token.
    seen = 0
    while seen < prompt.shape[1]:
        seen += blocks.pop(0).shape[1]
    taps = taps_of(target, sequence, config.target_layer_ids)[None]
    proposals, committed = [], prompt.shape[1]
    blocks = [block for block in blocks if block.shape[1] > 1]
    assert len(blocks) == len(hidden)
    for block, states in zip(blocks, hidden, strict=True):
        assert block[0, 0] == sequence[0, committed]
        context = draft.make_context(1)
        positions = torch.arange(committed + block.shape[1])[None]
        with torch.no_grad():
            draft.append_context(context, taps[:, :committed], positions[:, :committed], [committed])
            ids = torch.tensor([[int(block[0, 0])] + [config.mask_token_id] * (block.shape[1] - 1)])
            embeds = target.get_input_embeddings().weight[ids] * config.input_embedding_scale
            rebuilt = draft(embeds, positions[:, committed:], context).last_hidden_state
        torch.testing.assert_close(states, rebuilt, atol=HIDDEN_TOLERANCE, rtol=0)
        proposals.append(block[0, 1:].tolist())
        following = sequence[0, committed + 1 : committed + block.shape[1]].tolist()
        accepted = 0
        while accepted < len(following) and proposals[-1][accepted] == following[accepted]:
            accepted += 1
        committed += accepted + 1
    return proposals


def chi_square_p_value(counts, law):
    """Cells that are expected less than five times are taken together."""
    from scipy import stats

    expected = law * counts.sum()
    assert counts[law == 0].sum() == 0, "a continuation of probability zero was drawn"
    rare = (expected < 5) & (law > 0)
    observed, wanted = counts[expected >= 5], expected[expected >= 5]
    if expected[rare].sum() >= 5:
        observed = torch.cat([observed, counts[rare].sum()[None]])
        wanted = torch.cat([wanted, expected[rare].sum()[None]])
    else:
        # Too rare for a cell of its own: with the smallest one.
        smallest = int(wanted.argmin())
        observed[smallest] += counts[rare].sum()
        wanted[smallest] += expected[rare].sum()
    return float(stats.chisquare(observed.numpy(), (wanted * observed.sum() / wanted.sum()).numpy()).pvalue)


def returned_scores_gap(plain, actual, width):
    """
    Gap between the two best scores of plain decoding at the first place where another result differs, smallest of the
    rows that differ there. Infinite when no step's scores explain the difference.
    """
    expected, gap = plain.sequences, float("inf")
    length = min(expected.shape[1], actual.shape[1])
    differs = (expected[:, :length] != actual[:, :length]).any(0).nonzero()
    if not len(differs):
        return gap
    column = int(differs[0])
    for row in (expected[:, column] != actual[:, column]).nonzero()[:, 0].tolist():
        best = plain.scores[column - width][row].topk(2).values
        gap = min(gap, float(best[0] - best[1]))
    return gap


def first_turn_cache(target, prompt=PROMPT, **kwargs):
    """Text and cache of a first turn of ten tokens."""
    out = target.generate(prompt, max_new_tokens=10, do_sample=False, return_dict_in_generate=True, **kwargs)
    return out.sequences, returned_cache(out)


@contextlib.contextmanager
def assert_hooks_unchanged(*models):
    before = hook_count(*models)
    yield
    assert hook_count(*models) == before, "hooks were left behind"

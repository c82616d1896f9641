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
"""What every family of targets has to do: forget rejected tokens wherever they stand, row by row."""

import functools
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, support_table
from generation_checks import cache_kwargs
from quantized_targets import quantize
from torch import nn
from transformers import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from transformers_dflash2 import compat
from transformers_dflash2.candidate_generator import DraftSession
from transformers_dflash2.generation import SpeculativeDecoding
from transformers_dflash2.modeling_dflash2 import DFlash2Proposal
from transformers_dflash2.rollback import watch_recurrences
from transformers_dflash2.static_round import StaticRound
from transformers_dflash2.testing import random_drafter, returned_cache


NEW_TOKENS = 64
BLOCK = 8
# Largest difference between logits of one pass over a block and of passes over single tokens.
LOGITS_TOLERANCE = 1e-4
# Relative root mean square between a cache after speculation and one filled by a single pass, in float32.
CACHE_TOLERANCE = 1e-5
# The same with weights that make texts lively, and between tempos.
STATIC_CACHE_TOLERANCE = 1e-3
ONE = (torch.tensor([[3, 7, 1, 5]]), torch.ones(1, 4, dtype=torch.long))
PADDED = (
    torch.tensor([[3, 7, 1, 9, 4], [0, 0, 5, 6, 2], [0, 8, 8, 1, 1]]),
    torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
)

# Weights with which no token is so ill-conditioned that rounding alone moves its keys by more.
CALM_STD = 0.1

# One family per kind of state; the others run them with the slow tests.
KINDS_OF_STATE = ("Qwen3", "Gemma 3", "Qwen3.5", "Kimi Linear", "Falcon-H1", "LFM2", "Inkling", "MiniMax")

every_family = pytest.mark.parametrize("family", FAMILIES)
every_kind = pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in KINDS_OF_STATE else pytest.mark.slow) for name in FAMILIES],
)


class ScriptedProposals:
    """
    Proposes the known continuation with one wrong token, whose offset moves through the block from round to round.

    Args:
        continuation (`torch.LongTensor` of shape `(batch, new_tokens)`): What plain decoding gives.
        prompt_lengths (`torch.LongTensor` of shape `(batch,)`): Real tokens of each prompt.
    """

    def __init__(self, continuation, prompt_lengths, vocab_size):
        self.continuation, self.prompt_lengths, self.vocab_size = continuation, prompt_lengths, vocab_size
        self.wrong_offsets = set()
        self.rounds = 0

    def replace_drafting(self, monkeypatch):
        """Propose instead of whatever drafter a call is given."""
        monkeypatch.setattr(DraftSession, "propose", lambda session, *args, **kwargs: self(session, *args, **kwargs))

    def __call__(self, session, anchor_ids, anchor_positions, *, slots, **kwargs):
        tokens = torch.zeros(len(anchor_ids), slots, dtype=torch.long)
        # The static tempo may have more rows than the batch.
        for row, position in enumerate(anchor_positions.tolist()[: len(self.continuation)]):
            start = position - int(self.prompt_lengths[row]) + 1
            known = self.continuation[row, start : start + slots]
            tokens[row, : len(known)] = known
            wrong = (self.rounds + 3 * row) % BLOCK
            if wrong < slots:
                tokens[row, wrong] = (tokens[row, wrong] + 1) % self.vocab_size
                self.wrong_offsets.add(wrong)
        self.rounds += 1
        usable = torch.ones(len(anchor_ids), dtype=torch.bool)
        return DFlash2Proposal(tokens, tokens[..., None], torch.ones(*tokens.shape, 1), usable)


@functools.cache
def build(family, std=0.3):
    return FAMILIES[family].build(std)


@functools.cache
def quantized(family):
    """The target after bitsandbytes has put every linear layer into nf4, computing in float32."""
    return quantize(build(family), "bnb-nf4")


def plain_and_script(target, prompt, mask, new_tokens=NEW_TOKENS):
    vocab_size = target.config.get_text_config().vocab_size
    plain = target.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    return plain, ScriptedProposals(plain[:, prompt.shape[1] :], mask.sum(dim=1), vocab_size)


@every_family
@pytest.mark.parametrize(
    "request_", [pytest.param(ONE, id="one", marks=pytest.mark.slow), pytest.param(PADDED, id="padded")]
)
def test_rejections_at_every_offset(family, request_, monkeypatch):
    """A state or an entry that outlives its rejected token changes what follows it."""
    assert_rejections_are_forgotten(build(family), request_, NEW_TOKENS, monkeypatch)


@every_kind
@pytest.mark.parametrize("request_", [pytest.param(ONE, id="one"), pytest.param(PADDED, id="padded")])
def test_rejections_of_a_quantized_target(family, request_, monkeypatch):
    """Catches a rollback that takes a layer for one of the host's where the library has put in its own."""
    target = quantized(family)
    # The head too; what the library leaves dense is no linear layer.
    assert {type(module).__name__ for module in target.modules() if isinstance(module, nn.Linear)} == {"Linear4bit"}
    dense_experts = [name for name, weight in target.named_parameters() if "experts" in name and weight.dim() == 3]
    assert bool(dense_experts) == FAMILIES[family].has_experts
    # Enough for a single row to be wrong at every offset.
    assert_rejections_are_forgotten(target, request_, NEW_TOKENS // 2, monkeypatch)


def assert_rejections_are_forgotten(target, request_, new_tokens, monkeypatch):
    drafter = random_drafter(target, block_size=BLOCK)
    plain, script = plain_and_script(target, *request_, new_tokens)
    assert plain.unique().numel() > 10, "a text that repeats itself would hide a stale state"
    script.replace_drafting(monkeypatch)

    output = target.generate(
        request_[0],
        attention_mask=request_[1],
        max_new_tokens=new_tokens,
        do_sample=False,
        assistant_model=drafter,
    )

    assert torch.equal(output, plain)
    assert script.wrong_offsets == set(range(BLOCK - 1))
    assert drafter.last_stats.mean_accepted_length > 2


@every_kind
def test_static_tempo(family, monkeypatch):
    """Catches a state that fixed buffers move by another row's count, or hand back before the last block."""
    target = build(family)
    reason = FAMILIES[family].dynamic_only
    drafter = random_drafter(target, block_size=BLOCK)
    plain, script = plain_and_script(target, *PADDED)
    script.replace_drafting(monkeypatch)
    rounds = []
    accept = StaticRound.commit
    monkeypatch.setattr(StaticRound, "commit", lambda *args: rounds.append(accept(*args)))

    output = target.generate(
        PADDED[0],
        attention_mask=PADDED[1],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        assistant_model=drafter,
        cache_implementation="static",
        return_dict_in_generate=True,
    )

    assert torch.equal(output.sequences, plain)
    assert bool(rounds) == (reason is None)
    if rounds:
        dynamic = target.generate(
            PADDED[0],
            attention_mask=PADDED[1],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
        )
        for ours, theirs in zip(
            compat.cache_states(returned_cache(output)), compat.cache_states(returned_cache(dynamic)), strict=True
        ):
            assert_near(ours, theirs, STATIC_CACHE_TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}, {"num_assistant_tokens": 1}], ids=str)
def test_one_row_that_stays_dynamic(options, fresh_reports):
    """Catches a round without buffers that decides as if it had them, and a reason that is given with every call."""
    target = build("MiniMax")
    drafter = random_drafter(target, block_size=BLOCK)
    plain = target.generate(ONE[0], max_new_tokens=12, do_sample=False)
    for _ in range(2):
        output = target.generate(
            ONE[0],
            **{"max_new_tokens": 12, "do_sample": False, **options},
            assistant_model=drafter,
            cache_implementation="static",
        )
        assert torch.equal(output, plain)
    assert ["second pass" in record.getMessage() for record in fresh_reports.records].count(True) == 1


@every_kind
def test_two_drafters_give_the_same_text(family):
    target = build(family)
    plain = target.generate(ONE[0], max_new_tokens=NEW_TOKENS // 2, do_sample=False)
    for seed in (0, 1):
        drafter = random_drafter(target, seed, block_size=BLOCK)
        output = target.generate(ONE[0], max_new_tokens=NEW_TOKENS // 2, do_sample=False, assistant_model=drafter)
        assert torch.equal(output, plain)


@every_kind
def test_block_logits_equal_single_token_logits(family):
    """Verification reads a block's logits, plain decoding one token's."""
    target = build(family, CALM_STD)
    text = torch.randint(1, 64, (1, 12), generator=torch.Generator().manual_seed(0))

    def continued(pieces):
        kwargs, logits = {}, []
        for piece in pieces:
            start = sum(done.shape[1] for done in logits)
            positions = torch.arange(start, start + piece.shape[1])[None]
            output = target(piece, position_ids=positions, use_cache=True, **kwargs)
            kwargs = cache_kwargs(output[compat.CACHE_KEY])
            logits.append(output.logits)
        return torch.cat(logits, dim=1)[:, 4:]

    with torch.no_grad():
        block = continued([text[:, :4], text[:, 4:]])
        single = continued([text[:, :4], *text[:, 4:].split(1, dim=1)])
    torch.testing.assert_close(block, single, rtol=0, atol=LOGITS_TOLERANCE)


@every_kind
def test_cache_after_each_round_equals_a_fresh_one(family, monkeypatch):
    target = build(family, CALM_STD)
    drafter = random_drafter(target, block_size=BLOCK)
    prompt, mask = PADDED
    _, script = plain_and_script(target, prompt, mask)
    script.replace_drafting(monkeypatch)
    commit = SpeculativeDecoding._commit
    checked = []

    def commit_and_check(decoding, features, verified, kept):
        commit(decoding, features, verified, kept)
        cache = compat.get_cache(decoding.model_kwargs)
        for row in range(len(prompt)):
            length = decoding.prompt_columns + decoding.new[row] - 1
            committed = decoding.ids[row : row + 1, int((mask[row] == 0).sum()) : length]
            assert_row_is_fresh(target, cache, row, committed)
        checked.append(kept)

    monkeypatch.setattr(SpeculativeDecoding, "_commit", commit_and_check)
    target.generate(
        prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS // 2, do_sample=False, assistant_model=drafter
    )
    assert len(checked) >= BLOCK


def assert_row_is_fresh(target, cache, row, committed):
    with torch.no_grad():
        # One token in the last pass, so that both caches are cut to their windows.
        output = target(committed[:, :-1], use_cache=True)
        kwargs = cache_kwargs(output[compat.CACHE_KEY])
        fresh = target(committed[:, -1:], position_ids=torch.tensor([[committed.shape[1] - 1]]), **kwargs)[
            compat.CACHE_KEY
        ]
    for mine, theirs in zip(compat.attention_layers(cache), compat.attention_layers(fresh), strict=True):
        for ours, expected in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            shared = min(ours.shape[2], expected.shape[2])
            assert shared == min(expected.shape[2], committed.shape[1])
            assert_near(ours[row, :, -shared:], expected[0, :, -shared:])
    for ours, expected in zip(compat.cache_states(cache), compat.cache_states(fresh), strict=True):
        assert_near(ours[row], expected[0])


def assert_near(ours, expected, tolerance=CACHE_TOLERANCE):
    error = (ours - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < tolerance


def test_the_readme_lists_what_is_tested():
    readme = Path(__file__).parents[1] / "README.md"
    assert support_table() in readme.read_text(encoding="utf-8")


@pytest.mark.parametrize("tempo", ["dynamic", "static"])
def test_pictures_and_multi_axis_positions(tempo, monkeypatch):
    """Catches pictures sent with every block, and positions of a block that leave out what a picture takes up."""
    target = FAMILIES["Qwen3.5 with vision"].build()
    image, start, end = (target.config.image_token_id, target.config.vision_start_token_id, 62)
    # Two rows, pictures of 4 x 4 and 4 x 8 patches; 2 x 2 patches make a token.
    rows = [[3, start, *[image] * 4, end, 7, 1], [5, start, *[image] * 8, end, 2]]
    width = max(map(len, rows))
    prompt = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    channels = 3 * target.config.vision_config.patch_size**2 * target.config.vision_config.temporal_patch_size
    inputs = {
        "input_ids": prompt,
        "attention_mask": (prompt != 0).long(),
        "pixel_values": torch.randn(16 + 32, channels, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]]),
        "mm_token_type_ids": (prompt == image).long(),
        "max_new_tokens": 24,
        "do_sample": False,
    }
    plain = target.generate(**inputs)
    blind = target.generate(**{**inputs, "pixel_values": torch.zeros(48, channels)})
    assert not torch.equal(plain, blind), "the pictures must matter"
    script = ScriptedProposals(plain[:, width:], inputs["attention_mask"].sum(dim=1), 64)
    script.replace_drafting(monkeypatch)
    drafter = random_drafter(target, block_size=BLOCK)
    seen = []
    target.model.visual.register_forward_pre_hook(lambda *args: seen.append(1))

    output = target.generate(**inputs, assistant_model=drafter, cache_implementation=tempo)

    assert torch.equal(output, plain)
    assert len(seen) == 1
    assert drafter.last_stats.mean_accepted_length > 2


class Cancelled(Exception):
    pass


class CancellingStreamer:
    """Takes the prompt and `tokens` tokens, then raises."""

    def __init__(self, tokens):
        self.left = tokens + 1

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise Cancelled

    def end(self):
        pass


@pytest.mark.parametrize("tokens", [1, 4, 9])
@pytest.mark.parametrize("family", ["Qwen3.5", "Falcon-H1", "MiniMax"])
def test_a_cancelled_call_leaves_states_that_can_be_continued(family, tokens, monkeypatch):
    """Catches states that hold tokens of the block in which the caller gave up."""
    target = build(family)
    drafter = random_drafter(target, block_size=BLOCK)
    plain, script = plain_and_script(target, *ONE)
    script.replace_drafting(monkeypatch)
    cache = DynamicCache(config=target.config) if family != "MiniMax" else MiniMaxCache()
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **cache_kwargs(cache)}
    with pytest.raises(Cancelled):
        target.generate(ONE[0], assistant_model=drafter, streamer=CancellingStreamer(tokens), **kwargs)
    monkeypatch.undo()

    # The token on which the streamer raised has been chosen, and has not been through the target.
    said = ONE[0].shape[1] + tokens + 1
    assert cache.get_seq_length() <= said - 1
    continued = target.generate(plain[:, :said], **{**kwargs, "max_new_tokens": NEW_TOKENS - tokens - 1})
    assert torch.equal(continued, plain)


@every_kind
def test_a_second_turn_continues_from_the_returned_cache(family, monkeypatch):
    """Catches states in a returned cache that are a token ahead of its keys, or behind."""
    target = build(family)
    drafter = random_drafter(target, block_size=BLOCK)
    _, script = plain_and_script(target, *PADDED)
    script.replace_drafting(monkeypatch)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    more = torch.tensor([[9, 2], [8, 8], [3, 1]])

    def two_turns(**assistant):
        first = target.generate(PADDED[0], attention_mask=PADDED[1], **options, **assistant)
        text = torch.cat([first.sequences, more], dim=1)
        mask = torch.cat([PADDED[1], torch.ones(3, 14, dtype=torch.long)], dim=1)
        cache = cache_kwargs(returned_cache(first))
        return target.generate(text, attention_mask=mask, max_new_tokens=12, do_sample=False, **cache)

    assert torch.equal(two_turns(assistant_model=drafter), two_turns())


def test_the_hosts_functions_are_put_back():
    """Catches a watched function that stays behind, after a call or after one that was broken off."""
    target = build("Qwen3.5")
    module = sys.modules[type(target).__module__]
    before = module.torch_chunk_gated_delta_rule
    drafter = random_drafter(target, block_size=BLOCK)
    kwargs = {"max_new_tokens": 9, "do_sample": False, "assistant_model": drafter}
    target.generate(ONE[0], **kwargs)
    assert module.torch_chunk_gated_delta_rule is before
    with pytest.raises(Cancelled):
        target.generate(ONE[0], streamer=CancellingStreamer(3), **kwargs)
    assert module.torch_chunk_gated_delta_rule is before
    watched = []
    with pytest.raises(Cancelled), watch_recurrences(frozenset({module.__name__})):
        watched.append(module.torch_chunk_gated_delta_rule)
        raise Cancelled
    assert watched[0] is not before
    assert module.torch_chunk_gated_delta_rule is before

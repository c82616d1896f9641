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
"""The drafter behind the host's own assisted loop: parity, features, q, and what is left behind."""

import copy

import pytest
import torch
from generation_checks import PROMPT, d0, d1, hook_count, t0, taps_of, target_passes
from transformers import GenerationConfig
from transformers.generation import BaseStreamer, LogitsProcessor

from transformers_dflash2 import DFlash2CandidateGenerator
from transformers_dflash2.candidate_generator import DraftSession, host_assisted_loop
from transformers_dflash2.testing import (
    broken_table,
    cycle_table,
    left_pad,
    random_drafter,
    table_drafter,
    table_target,
)


# Largest difference between taps of one pass and taps of several, of order 1, in float32.
FEATURE_TOLERANCE = 1e-5
# Rounding of log, softmax and their inverse in float32.
PROBABILITY_TOLERANCE = 1e-6

PROMPTS = {1: [[5]], 2: [[9, 4]], 3: [[3, 7, 1]], 17: [[(7 * i + 3) % 31 for i in range(17)]]}


def host_generate(target, draft, input_ids=PROMPT, **kwargs):
    kwargs.setdefault("do_sample", False)
    kwargs.setdefault("max_new_tokens", 24)
    kwargs.setdefault("attention_mask", torch.ones_like(input_ids))
    with host_assisted_loop(target, draft):
        return target.generate(input_ids, assistant_model=draft, **kwargs)


def plain_generate(target, input_ids=PROMPT, **kwargs):
    kwargs.setdefault("attention_mask", torch.ones_like(input_ids))
    return target.generate(input_ids, **{"do_sample": False, "max_new_tokens": 24, **kwargs})


def request(target, **kwargs):
    """A generation config as the loop hands it to the factory."""
    config = copy.deepcopy(target.generation_config)
    config.update(**{"max_length": 64, "do_sample": False, **kwargs})
    return config


@pytest.fixture
def record(monkeypatch):
    """Everything that passes through generators: feature writes, proposals and offers, in order."""

    class Record:
        def __init__(self):
            self.appends, self.proposals, self.offers, self.generators = [], [], [], []

    seen = Record()
    append, propose = DraftSession.append, DraftSession.propose
    get_candidates = DFlash2CandidateGenerator.get_candidates

    def recording_append(self, features, position_ids, counts):
        seen.appends.append((torch.cat(features, dim=-1).clone(), position_ids.clone(), list(counts)))
        return append(self, features, position_ids, counts)

    def recording_propose(self, *args, **kwargs):
        proposal = propose(self, *args, **kwargs)
        seen.proposals.append((args, kwargs, proposal))
        return proposal

    def recording_get_candidates(self, input_ids, *args, **kwargs):
        ids, logits = get_candidates(self, input_ids, *args, **kwargs)
        seen.offers.append((input_ids.clone(), ids.clone(), logits))
        if self not in seen.generators:
            seen.generators.append(self)
        return ids, logits

    monkeypatch.setattr(DraftSession, "append", recording_append)
    monkeypatch.setattr(DraftSession, "propose", recording_propose)
    monkeypatch.setattr(DFlash2CandidateGenerator, "get_candidates", recording_get_candidates)
    return seen


# -------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("length", PROMPTS, ids="prompt{}".format)
@pytest.mark.parametrize("make_draft", [d0, d1], ids=["table", "random"])
def test_host_loop_greedy_parity(make_draft, length):
    """Catches any slip in positions, features or crop that shows as other tokens than plain greedy."""
    target, prompt = t0(), torch.tensor(PROMPTS[length])
    assert torch.equal(host_generate(target, make_draft(), prompt), plain_generate(target, prompt))


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({"model_type": "llama"}, id="llama"),
        pytest.param({"model_type": "mistral", "sliding_window": 6}, id="mistral-sliding"),
        pytest.param({"model_type": "qwen2"}, id="qwen2"),
    ],
)
def test_host_loop_other_targets(kwargs):
    """Catches a generator that knows one family's layers only, or a target whose window is cropped too early."""
    target = table_target(1, **kwargs)
    with target_passes(target) as passes:
        output = host_generate(target, table_drafter(target))
    assert torch.equal(output, plain_generate(target))
    assert len(passes) < 24


def test_host_loop_saves_passes(record):
    """Catches a generator that never offers anything: parity alone would not show it."""
    table = cycle_table(32)
    target = table_target(table=table, mix=0.0)
    with target_passes(target) as passes:
        output = host_generate(target, table_drafter(target), max_new_tokens=25)
    # The prefill's token and three full blocks of eight.
    assert [columns for _, columns in passes] == [3, 8, 8, 8]
    assert torch.equal(output, plain_generate(target, max_new_tokens=25))


@pytest.mark.parametrize("new_tokens", range(1, 19), ids="new{}".format)
def test_host_loop_length_limit_at_every_offset(new_tokens):
    """Catches a block that runs over the limit, or that stops short of it."""
    target = t0()
    output = host_generate(target, d0(), max_new_tokens=new_tokens)
    assert torch.equal(output, plain_generate(target, max_new_tokens=new_tokens))


@pytest.mark.parametrize("offset", range(12), ids="eos{}".format)
def test_host_loop_end_token_at_every_offset(offset, record):
    """Catches text that goes on after an accepted end token: early hosts leave that to the generator."""
    target, draft = t0(), d0()
    plain = plain_generate(target)
    eos = int(plain[0, PROMPT.shape[1] + offset])
    expected = plain_generate(target, eos_token_id=[eos, 31])
    assert torch.equal(host_generate(target, draft, eos_token_id=[eos, 31]), expected)
    for before, after, _ in record.offers:
        offered = after[0, before.shape[1] :].tolist()
        assert not any(token in (eos, 31) for token in offered[:-1])


@pytest.mark.parametrize("drafts", [1, 2, 5, 12], ids="drafts{}".format)
def test_host_loop_draft_length_of_the_call(drafts, record):
    """Catches a call's draft length that is ignored, or the host's default of 20 taken for the drafter's block."""
    target = t0()
    output = host_generate(target, d0(), num_assistant_tokens=drafts)
    assert torch.equal(output, plain_generate(target))
    assert max(after.shape[1] - before.shape[1] for before, after, _ in record.offers) == drafts


def test_host_loop_default_draft_length(record):
    """Catches a draft length other than the block less its anchor when the call says nothing."""
    host_generate(t0(), d0())
    assert max(after.shape[1] - before.shape[1] for before, after, _ in record.offers) == d0().config.block_size - 1


def test_host_loop_left_padded_row(record):
    """Catches padding taken for context, and positions counted from the padding."""
    target = t0()
    padded = left_pad([[0] * 4, PROMPT[0].tolist()])
    row = {name: tensor[1:] for name, tensor in padded.items()}
    assert row["attention_mask"].sum() == 3
    output = host_generate(target, d0(), row["input_ids"], attention_mask=row["attention_mask"])
    expected = plain_generate(target, row["input_ids"], attention_mask=row["attention_mask"])
    assert torch.equal(output, expected)
    assert record.appends[0][1].tolist() == [[0, 1, 2]] and record.appends[0][2] == [3]


def test_host_loop_two_calls_in_one_context():
    """Catches a second call that reads the first one's features."""
    target, draft = t0(), d0()
    with host_assisted_loop(target, draft):
        for length in (17, 3):
            prompt = torch.tensor(PROMPTS[length])
            arguments = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 12}
            drafted = target.generate(prompt, assistant_model=draft, **arguments)
            assert torch.equal(drafted, target.generate(prompt, **arguments))


# ------------------------------------------------------------------------------------------------------------ features


@pytest.mark.parametrize("length", PROMPTS, ids="prompt{}".format)
@pytest.mark.parametrize("accept", [0, 3, 7, None], ids=["none", "three", "all", "mixed"])
def test_faults_17_23_features_never_skip_or_repeat(length, accept, record):
    """Catches taps of the wrong layer, a position twice or missing, and features of rejected or future tokens."""
    prompt = torch.tensor(PROMPTS[length])
    if accept is None:
        target = t0()
        draft = random_drafter(target, 3)
    else:
        table = cycle_table(32, start=int(prompt[0, -1]))
        target = table_target(table=table, mix=0.0)
        draft = table_drafter(target, broken_table(table) if accept == 0 else table)
        if accept == 3:
            draft = table_drafter(target, broken_table(table, start=int(table[prompt[0, -1]]), accept=3))
    output = host_generate(target, draft, prompt, max_new_tokens=24)
    taps = taps_of(target, output, draft.config.target_layer_ids)
    expected_position = 0
    for features, positions, counts in record.appends:
        (count,) = counts
        span = torch.arange(expected_position, expected_position + count)
        assert torch.equal(positions[0, :count], span)
        torch.testing.assert_close(features[0, :count], taps[span], atol=FEATURE_TOLERANCE, rtol=0)
        expected_position += count
    # The anchor is one behind what has been taken in.
    for (anchor, position), _, _ in [(args[:2], kwargs, proposal) for args, kwargs, proposal in record.proposals]:
        assert int(anchor) == int(output[0, int(position)])
    sizes = [counts[0] for _, _, counts in record.appends[1:]]
    assert len(sizes) > 1
    if accept is not None:
        # The length limit may cut the last block.
        assert set(sizes[:-1]) <= {accept + 1}


def test_round_without_an_offer_keeps_the_features_in_step(record):
    """Catches features lost or read twice after a round whose draft was not finite and that offered nothing."""
    target = table_target(table=cycle_table(32), mix=0.0)
    draft = table_drafter(target)
    calls = []

    def poison(module, args, output):
        calls.append(None)
        return output * float("nan") if len(calls) in (1, 3) else output

    handle = draft.norm.register_forward_hook(poison)
    output = host_generate(target, draft, max_new_tokens=24)
    handle.remove()
    assert torch.equal(output, plain_generate(target, max_new_tokens=24))
    offered = [after.shape[1] - before.shape[1] for before, after, _ in record.offers]
    assert offered[:5] == [0, 0, 7, 0, 7]
    assert [counts[0] for _, _, counts in record.appends[:5]] == [3, 1, 8, 1, 8]


class _RunsTheTarget(LogitsProcessor):
    """Stands for guidance: it calls the target on other ids and gives the scores back."""

    def __init__(self, target):
        self.target = target

    def __call__(self, input_ids, scores):
        with torch.no_grad():
            self.target(torch.tensor([[1, 2, 3, 4, 5]]))
        return scores


def test_forwards_of_a_processor_are_not_features(record):
    """Catches a tap that takes every forward of the target for the loop's: positions would be off from then on."""
    target, draft = t0(), random_drafter(t0(), 3)
    output = host_generate(target, draft, logits_processor=[_RunsTheTarget(target)], max_new_tokens=8)
    assert torch.equal(output, plain_generate(target, max_new_tokens=8))
    taps = taps_of(target, output, draft.config.target_layer_ids)
    done = 0
    for features, positions, (count,) in record.appends:
        assert positions[0, :count].tolist() == list(range(done, done + count))
        torch.testing.assert_close(features[0, :count], taps[done : done + count], atol=FEATURE_TOLERANCE, rtol=0)
        done += count


# ----------------------------------------------------------------------------------------------------------- offers, q


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7], ids="t{}".format)
def test_sampled_offer_carries_the_distribution_it_was_drawn_from(temperature, record):
    """Catches logits whose softmax is not q: the host's accept test would be wrong for every token."""
    target = t0()
    draft = table_drafter(target, sharpness=2.0, selector_top_k=16)
    torch.manual_seed(5)
    host_generate(target, draft, do_sample=True, temperature=temperature, top_k=0, max_new_tokens=16)
    assert len(record.proposals) > 1
    offers = [offer for offer in record.offers if offer[2] is not None]
    assert len(offers) == len(record.proposals)
    for (before, after, logits), (_, kwargs, proposal) in zip(offers, record.proposals, strict=True):
        assert kwargs["temperature"] == temperature and kwargs["greedy"] is False
        kept = after.shape[1] - before.shape[1]
        assert logits.shape == (1, kept, target.config.vocab_size) and logits.dtype == torch.float32
        assert torch.equal(after[:, -kept:], proposal.tokens[:, :kept])
        dense = torch.zeros_like(logits).scatter(-1, proposal.candidate_ids[:, :kept], proposal.q[:, :kept])
        torch.testing.assert_close(torch.softmax(logits, dim=-1), dense, atol=PROBABILITY_TOLERANCE, rtol=0)
        assert (torch.softmax(logits, dim=-1)[dense == 0] == 0).all()
        # Nothing of the draft is one-hot here, and it is no plain copy of the head either.
        assert (proposal.q.amax(dim=-1) < 1).all()


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "v1-sampled"])
def test_deterministic_offer_is_one_hot(do_sample, record):
    """Catches a soft q for an argmax draft: sampling would no longer follow the target."""
    target = t0()
    draft = random_drafter(target, draft_family="dflash") if do_sample else d0()
    host_generate(target, draft, do_sample=do_sample, max_new_tokens=12)
    offers = [offer for offer in record.offers if offer[2] is not None]
    assert offers
    for before, after, logits in offers:
        drafted = after[:, before.shape[1] :]
        expected = torch.zeros_like(logits).scatter(-1, drafted[..., None], 1.0)
        assert torch.equal(torch.softmax(logits, dim=-1), expected)


def test_sampling_runs_and_is_seeded():
    """Catches a sampled call that fails on minus infinity, and a draft that draws from a stream of its own."""
    target, draft = t0(), table_drafter(t0(), sharpness=3.0)
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(host_generate(target, draft, do_sample=True, temperature=1.5, top_k=0))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_greedy_draft_leaves_the_random_stream_alone():
    """Catches noise drawn for a greedy walk: the caller's later draws would change with the drafter."""
    torch.manual_seed(11)
    expected = torch.rand(4)
    torch.manual_seed(11)
    host_generate(t0(), d0())
    assert torch.equal(torch.rand(4), expected)


def test_first_call_offers_nothing():
    """Catches a draft before the target has run: there is nothing to draft from."""
    target = t0()
    with DFlash2CandidateGenerator(d0(), target, request(target)) as generator:
        assert generator.requires_model_outputs
        ids, logits = generator.get_candidates(
            PROMPT, model_kwargs={}, model_outputs=None, is_first_iteration=True, n_last_matches=0
        )
    assert torch.equal(ids, PROMPT) and logits is None


def test_batch_is_refused():
    """Catches rows of a batch that share one row's features; the message names the way that takes batches."""
    target = t0()
    with DFlash2CandidateGenerator(d0(), target, request(target)) as generator:
        with pytest.raises(ValueError, match=r"one row.*has 2.*assistant_model"):
            generator.get_candidates(PROMPT.repeat(2, 1), model_kwargs={}, is_first_iteration=True)


def test_batch_is_refused_in_the_host_loop():
    """Catches a batch that slips past, and a hook or override that the refusal leaves behind."""
    target, draft = t0(), d0()
    hooks = hook_count(target, draft)
    with pytest.raises(ValueError):
        host_generate(target, draft, PROMPT.repeat(2, 1))
    assert hook_count(target, draft) == hooks


@pytest.mark.parametrize("allow", [False, True], ids=["refused", "allowed"])
def test_fp16_drafter(allow):
    """Catches a drafter moved to float16 that the host's loop runs although the library's own loop refuses it."""
    target = t0()
    draft = table_drafter(target).half()
    draft.allow_fp16 = allow
    if allow:
        assert torch.equal(host_generate(target, draft), plain_generate(target))
    else:
        with pytest.raises(ValueError, match=r"float16.*allow_fp16"):
            host_generate(target, draft)


def test_generator_takes_a_plain_generation_config():
    """Catches attributes that only a config prepared by `generate` has."""
    target = t0()
    DFlash2CandidateGenerator(d0(), target, GenerationConfig(do_sample=True, temperature=0.5)).close()


# ----------------------------------------------------------------------------------------------------------- after use


def test_hooks_are_removed_by_close_and_by_the_context():
    """Catches a hook that keeps every later forward's hidden states alive."""
    target, draft = t0(), d0()
    hooks = hook_count(target, draft)
    generator = DFlash2CandidateGenerator(draft, target, request(target))
    assert hook_count(target, draft) == hooks + len(draft.config.target_layer_ids)
    generator.close()
    generator.close()
    assert hook_count(target, draft) == hooks
    with pytest.raises(RuntimeError, match="on purpose"):
        with DFlash2CandidateGenerator(draft, target, request(target)):
            raise RuntimeError("on purpose")
    assert hook_count(target, draft) == hooks


def test_refused_pair_leaves_no_hook():
    """Catches hooks that are set before the drafter has been checked against the target."""
    target = t0()
    draft = table_drafter(table_target(num_hidden_layers=3))
    hooks = hook_count(target, draft)
    with pytest.raises(ValueError, match="num_target_layers"):
        DFlash2CandidateGenerator(draft, target, request(target))
    assert hook_count(target, draft) == hooks


class _FailingStreamer(BaseStreamer):
    def __init__(self):
        self.calls = 0

    def put(self, value):
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("on purpose")

    def end(self):
        pass


class _FailingProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 8:
            raise RuntimeError("on purpose")
        return scores


@pytest.mark.parametrize("where", ["streamer", "processor", "nowhere"])
def test_host_loop_leaves_target_and_drafter_as_they_were(where):
    """Catches hooks, the factory override or the hidden mark that outlive the context, after an error most of all."""
    target, draft = t0(), d0()
    hooks, target_attributes, draft_attributes = hook_count(target, draft), set(vars(target)), set(vars(draft))
    kwargs = {}
    if where == "streamer":
        kwargs["streamer"] = _FailingStreamer()
    elif where == "processor":
        kwargs["logits_processor"] = [_FailingProcessor()]
    if kwargs:
        with pytest.raises(RuntimeError, match="on purpose"):
            host_generate(target, draft, **kwargs)
    else:
        host_generate(target, draft)
    assert hook_count(target, draft) == hooks
    assert set(vars(target)) == target_attributes and set(vars(draft)) == draft_attributes
    assert draft.is_dflash2_assistant is True
    # The library's own loop is back.
    drafted = target.generate(PROMPT, assistant_model=draft, do_sample=False, max_new_tokens=8)
    assert torch.equal(drafted, plain_generate(target, max_new_tokens=8))
    assert draft.last_stats.rounds > 0


def test_hooks_do_not_pile_up_over_calls():
    """Catches generators of finished calls that stay hooked while the context is open and hoard hidden states."""
    target, draft = t0(), d0()
    hooks = hook_count(target, draft)
    with host_assisted_loop(target, draft):
        for _ in range(3):
            target.generate(PROMPT, assistant_model=draft, do_sample=False, max_new_tokens=6)
        taps = len(draft.config.target_layer_ids)
        # The factory override is an attribute, no hook.
        assert hook_count(target, draft) <= hooks + taps

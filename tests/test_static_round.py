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
"""What a round of the static tempo draws, decides and keeps."""

import contextlib
import math
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from dspark_checks import table_dspark
from generation_checks import PROMPT, d0, d1, t0
from test_distribution import BATCH, DRAFTERS, LAWS, SMALLEST_P_VALUE, chi_square_p_value, joint_law
from test_distribution import PROMPT as LAW_PROMPT
from test_distribution import VOCAB as LAW_VOCAB
from test_distribution import target as law_target
from test_static import half_right, static
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from transformers_dflash2 import static_decoding, static_round
from transformers_dflash2.candidate_generator import DraftSession
from transformers_dflash2.static_decoding import StaticDecoding
from transformers_dflash2.static_round import StaticRound, accept_key, row_bucket, take_round
from transformers_dflash2.testing import left_pad, table_target


pytest.importorskip("scipy")

SAMPLED = {"do_sample": True, "temperature": 3.0, "top_k": 0}


@pytest.fixture
def noise(monkeypatch):
    """All numbers that rounds read, one tensor per round."""
    drawn = []
    original = StaticRound.draw_noise

    def draw_noise(self, draft):
        original(self, draft)
        drawn.append((self.draft_noise.clone(), self.test_uniforms.clone(), self.draw_uniforms.clone()))

    monkeypatch.setattr(StaticRound, "draw_noise", draw_noise)
    return drawn


@pytest.fixture
def accepts(monkeypatch):
    """Counts the rounds that accept in their own buffers."""
    calls = []
    original = StaticRound.accept

    def accept(self, *args, **kwargs):
        calls.append(kwargs["do_sample"])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StaticRound, "accept", accept)
    return calls


@pytest.mark.parametrize(
    ("law", "drafter"),
    [
        ("temperature", "spread-out"),
        ("all", "sure-and-wrong"),
        pytest.param("hot", "random", marks=pytest.mark.slow),
        pytest.param("top-k", "spread-out", marks=pytest.mark.slow),
        pytest.param("top-p", "sure-and-wrong", marks=pytest.mark.slow),
        pytest.param("min-p", "v1", marks=pytest.mark.slow),
        pytest.param("all", "sure-and-right", marks=pytest.mark.slow),
    ],
)
def test_law_of_rounds_that_accept_in_their_buffers(law, drafter, accepts, monkeypatch):
    """Catches a residual, a processor or a temperature of the recording that is not the request's."""
    # The reference of attention reads whole buffers.
    monkeypatch.setattr(static_decoding, "MIN_CAPACITY", 32)
    draft = DRAFTERS[drafter]()
    torch.manual_seed(5)
    counts = torch.zeros(LAW_VOCAB**3)
    places = LAW_VOCAB ** torch.arange(2, -1, -1)
    prompt = torch.tensor([LAW_PROMPT]).expand(BATCH, -1)
    for _ in range(2):
        out = static(law_target(), draft, inputs=prompt, do_sample=True, max_new_tokens=4, **LAWS[law][0])
        new = out[:, len(LAW_PROMPT) : len(LAW_PROMPT) + 3]
        counts += torch.bincount((new * places).sum(-1), minlength=LAW_VOCAB**3)
    assert all(accepts) and accepts
    assert chi_square_p_value(counts.double(), joint_law(law)) >= SMALLEST_P_VALUE


def test_no_two_rounds_share_noise(noise):
    """Catches numbers that are drawn once and replayed, within a call, between calls, or between uses."""
    for _ in range(2):
        static(t0(), d1(), inputs=PROMPT, max_new_tokens=15, **SAMPLED)
    assert len(noise) >= 20
    drawn = torch.cat([torch.cat([part.flatten() for part in parts]) for parts in noise])
    assert drawn.unique().numel() == drawn.numel()
    assert 0 <= drawn.min() and drawn.max() < 1


def test_noise_follows_the_hosts_seed(noise):
    """Catches a generator of the rounds' own."""
    starts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        starts.append(len(noise))
        static(t0(), d1(), inputs=PROMPT, max_new_tokens=4, **SAMPLED)
    first, second, third = (noise[start][0] for start in starts)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_a_greedy_call_draws_nothing(noise):
    """Catches a greedy call that changes what the caller samples next."""
    state = torch.get_rng_state()
    static(t0(), d0(), inputs=PROMPT, max_new_tokens=15, do_sample=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert noise == []


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_calls_decide_only_what_they_need(do_sample, accepts):
    """Catches a greedy decision that is made for sampled calls as well, or the reverse."""
    static(t0(), d0(), inputs=PROMPT, max_new_tokens=9, **(SAMPLED if do_sample else {"do_sample": False}))
    assert set(accepts) == {do_sample}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"repetition_penalty": 1.3}, id="prefix"),
        pytest.param({"return_dict_in_generate": True, "output_scores": True}, id="scores"),
        pytest.param({"do_sample": True, "eta_cutoff": 1e-3}, id="reads-values-back"),
    ],
)
def test_what_cannot_be_recorded_is_accepted_outside(options, accepts):
    """Catches a processor in a recording that would see one prefix for ever."""
    static(t0(), d0(), inputs=PROMPT, max_new_tokens=9, **{"do_sample": False, **options})
    assert accepts == []


PROCESSORS = [
    logits_process.TemperatureLogitsWarper(0.7),
    logits_process.TopKLogitsWarper(5),
    logits_process.TopPLogitsWarper(0.8),
    logits_process.MinPLogitsWarper(0.05),
    logits_process.TypicalLogitsWarper(0.9),
    logits_process.EpsilonLogitsWarper(0.01),
    logits_process.LogitNormalization(),
    logits_process.InfNanRemoveLogitsProcessor(),
]


@pytest.mark.parametrize("processors", [*([p] for p in PROCESSORS), PROCESSORS], ids=lambda p: f"{len(p)}")
def test_processed_scores_are_the_hosts(processors):
    """Catches an order, a dtype or a shape of the recording that is not the host's."""
    logits = torch.randn(2, 3, 20).bfloat16()
    round_ = SimpleNamespace(
        logits=logits, block=3, anchors=torch.zeros(2, dtype=torch.long), temperatures=torch.full((2,), 0.7)
    )
    mine = StaticRound._processed(round_, LogitsProcessorList(processors))
    theirs = LogitsProcessorList(processors)(torch.zeros(6, 1, dtype=torch.long), logits.float().view(6, 20))
    assert torch.equal(mine.view(6, 20), theirs)


def test_accept_keys_tell_requests_apart():
    """Catches a recording with constants of an earlier request, or one per temperature."""
    warm, warmer = (logits_process.TemperatureLogitsWarper(value) for value in (0.5, 0.9))
    keys = [
        accept_key(processors, do_sample=do_sample)
        for processors, do_sample in (
            ([], False),
            ([], True),
            ([warm], True),
            ([logits_process.TopKLogitsWarper(5)], True),
            ([logits_process.TopKLogitsWarper(6)], True),
            ([warm, logits_process.TopKLogitsWarper(6)], True),
            ([logits_process.TopKLogitsWarper(6), warm], True),
            ([logits_process.TopPLogitsWarper(0.6)], True),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert accept_key([warm], do_sample=True) == accept_key([warmer], do_sample=True)
    assert accept_key([warm, warmer], do_sample=True) is None
    assert accept_key([logits_process.RepetitionPenaltyLogitsProcessor(1.2)], do_sample=True) is None

    class Mine(logits_process.TopKLogitsWarper):
        pass

    assert accept_key([Mine(5)], do_sample=True) is None


def test_row_buckets():
    """Catches a bucket that is too small, or a graph per batch size."""
    assert [row_bucket(batch) for batch in (1, 2, 3, 4, 5, 8, 9, 16, 17, 64)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 64]


def test_batches_of_a_bucket_share_a_round():
    """Catches rows of an earlier, larger batch that go on in a smaller one."""
    target = table_target(9)
    draft = half_right(target)
    rows = [[3, 7, 1], [4, 9, 2, 8, 11], [6, 1, 30], [2, 2]]
    for batch in (4, 3, 4):
        inputs = {**left_pad(rows[:batch]), "max_new_tokens": 20, "do_sample": False}
        assert torch.equal(static(target, draft, **inputs), target.generate(**inputs))
    assert len(static_round.kept_rounds(target, draft)) == 1


@pytest.mark.parametrize("pass_rows", ["block", "longer"])
def test_a_round_keeps_the_block_it_drafts(pass_rows, monkeypatch):
    """Catches ids or positions of an earlier round or call, and those of a pass longer than what is verified."""
    target = table_target(9)
    draft = half_right(target) if pass_rows == "block" else table_dspark(target)
    slots, longer = 3, set()
    propose, append = DraftSession.propose, type(draft).append_context

    def checking_propose(self, anchors, positions, **kwargs):
        for kept, made in zip(kwargs["block"], self.make_block(anchors, positions, kwargs["slots"]), strict=True):
            assert torch.equal(kept, made)
        longer.add(kwargs["block"][0].shape[1] > slots + 1)
        return propose(self, anchors, positions, **kwargs)

    def checking_append(self, context, features, positions, counts):
        if isinstance(counts, torch.Tensor):
            expected = context.lengths[: positions.shape[0], None] + torch.arange(positions.shape[1])
            kept = torch.arange(positions.shape[1]) < counts[:, None]
            assert torch.equal(positions[kept], expected[kept])
        return append(self, context, features, positions, counts)

    monkeypatch.setattr(DraftSession, "propose", checking_propose)
    monkeypatch.setattr(type(draft), "append_context", checking_append)
    for rows in ([[3, 7, 1], [4, 9, 2, 8, 11], [6, 1, 30]], [[2, 2], [5], [8, 9, 4, 1, 3, 2, 7]]):
        inputs = {**left_pad(rows), "max_new_tokens": 20, "do_sample": False}
        assert torch.equal(static(target, draft, **inputs, num_assistant_tokens=slots), target.generate(**inputs))
        draft.config.mask_token_id -= 1
    assert len(static_round.kept_rounds(target, draft)) == 1
    assert longer == {pass_rows == "longer"}


def test_rows_that_are_done_stay_put(monkeypatch):
    """Catches a finished row whose length goes on growing, out of its buffer in the end."""
    target = table_target(9)
    draft = half_right(target)
    inputs = {**left_pad([[3, 7, 1], [4, 9, 2, 8, 11], [6, 1, 30]]), "max_new_tokens": 40, "do_sample": False}
    plain = target.generate(**inputs)
    options = {"eos_token_id": int(plain[1, 9]), "pad_token_id": 0}
    lengths = []
    original = StaticDecoding._round

    def _round(self, tap):
        done = list(self.finished)
        original(self, tap)
        lengths.append((done, self.static_round.lengths[:3].tolist()))

    monkeypatch.setattr(StaticDecoding, "_round", _round)
    assert torch.equal(static(target, draft, **inputs, **options), target.generate(**inputs, **options))
    frozen = [after[1] for (done, after) in lengths if done[1]]
    # The round after the last one still commits what that one kept.
    assert len(frozen) > 2 and len(set(frozen[1:])) == 1


def test_scores_without_a_distribution_are_an_error():
    """Catches the id -1 in a text."""
    target, draft = table_target(9), half_right(table_target(9))

    head = target.get_output_embeddings()
    calls = []

    def forward(hidden):
        calls.append(None)
        logits = torch.nn.functional.linear(hidden, head.weight)
        # The prefill is right; the first verify pass is not.
        return logits if len(calls) < 3 else logits * math.nan

    head.forward = forward
    with pytest.raises(RuntimeError, match=r"Row 0: .*no distribution"):
        static(target, draft, inputs=PROMPT, max_new_tokens=9, **SAMPLED)


def test_buffers_that_do_not_fit_leave_the_call_dynamic(monkeypatch, caplog):
    """Catches a call that fails in a default tempo for want of memory, where the other tempo has room."""

    def no_room(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError("no room")

    target = table_target(9)
    draft = half_right(target)
    monkeypatch.setattr(static_decoding, "StaticRound", no_room)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 1}):
        inputs = {**left_pad([[3, 7, 1], [4, 9, 2, 8, 11]]), "max_new_tokens": 20, **options}
        assert torch.equal(static(target, draft, **inputs), target.generate(**inputs))
    assert "do not fit" in caplog.text


def test_a_replay_shows_what_it_wrote(monkeypatch):
    """Catches results of phases that ran without a graph, taken for those of a later replay of the same round."""
    monkeypatch.setattr(static_round.torch.cuda, "device", lambda device: contextlib.nullcontext())
    round_ = object.__new__(StaticRound)
    round_.device, round_.capture_failure, round_._graphs = SimpleNamespace(type="cuda"), None, OrderedDict()
    results = iter("abcd")

    def phases():
        round_.proposal = round_.logits = next(results)

    def capture(key, call, *others):
        call()
        round_._graphs[key] = SimpleNamespace(replay=lambda: None), round_.proposal, round_.logits

    monkeypatch.setattr(round_, "_capture", capture, raising=False)
    for record, shown in ((True, "a"), (False, "b"), (True, "a")):
        round_.play("round", phases, record=record)
        assert round_.proposal == round_.logits == shown


def test_calls_that_overlap_have_rounds_of_their_own():
    """Catches a round that two calls share, and one that is built anew whenever two calls overlap."""
    target, draft, built = t0(), d0(), []

    def build():
        built.append(SimpleNamespace(in_use=False))
        return built[-1]

    for _ in range(3):
        first, second = (take_round(target, draft, "overlap", build) for _ in range(2))
        assert first is not second and len(built) == 2
        first.in_use = second.in_use = False
    static_round.release_static_rounds(target)

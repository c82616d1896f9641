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
"""Rejection sampling by kernels against the reference, golden numbers and the exact law of the output."""

import math

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import FP16, FP32, opcheck  # noqa: E402

from transformers_dflash2.functional_dflash2 import accept_block_sampled  # noqa: E402
from transformers_dflash2.kernels import accept_sampled as module  # noqa: E402
from transformers_dflash2.kernels.accept_sampled import (  # noqa: E402
    accept_sampled_ineligible_reason,
    accept_sampled_op,
    accept_sampled_triton,
)


# Probabilities of order 1 in fp32, summed over a few tokens.
LAW_TOLERANCE = 1e-6
NAN, INF = math.nan, math.inf


def draft_inputs(device, batch, slots, top_k, vocab, dtype=torch.float32):
    """Drafts of a drafter that knows the target roughly: every accepted length occurs."""
    scores = (2 * torch.randn(batch, slots + 1, vocab)).to(dtype)
    guess = scores[:, :slots].float() + 0.5 * torch.randn(batch, slots, vocab)
    candidate_ids = guess.topk(top_k, dim=-1).indices
    q = torch.softmax(guess.gather(-1, candidate_ids), dim=-1)
    index = torch.multinomial(q.flatten(0, 1), 1).view(batch, slots, 1) if batch * slots else candidate_ids[..., :1]
    tokens = candidate_ids.gather(-1, index).view(batch, slots)
    inputs = {
        "scores": scores,
        "tokens": tokens,
        "candidate_ids": candidate_ids,
        "q": q,
        "usable": torch.ones(batch, dtype=torch.bool),
        "uniforms": torch.rand(batch, slots),
        "draw_uniforms": torch.rand(batch),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def assert_same(actual, expected):
    for tensor, wanted in zip(actual, expected, strict=True):
        assert tensor.dtype == torch.int64
        assert torch.equal(tensor, wanted)


@pytest.fixture(autouse=True)
def small_parts(device, monkeypatch):
    """The interpreter spends its time on lanes past the vocabulary otherwise."""
    if device.type == "cpu":
        monkeypatch.setattr(module, "_PART", 32)


@pytest.fixture(params=[64, 16], ids=["one-part", "several-parts"])
def part(request, small_parts, monkeypatch):
    """Vocabulary entries per program."""
    monkeypatch.setattr(module, "_PART", request.param)
    return request.param


@pytest.mark.parametrize(
    ("batch", "slots", "top_k", "vocab"),
    [
        pytest.param(3, 1, 1, 3, id="smallest"),
        pytest.param(5, 3, 3, 21, id="odd"),
        pytest.param(2, 7, 8, 64, id="powers-of-two"),
        pytest.param(2, 4, 17, 33, id="wide"),
    ],
)
def test_equals_the_reference(device, part, batch, slots, top_k, vocab):
    """Catches a part, slot or candidate that is left out or read twice, and a position other than the refused one."""
    inputs = draft_inputs(device, batch, slots, top_k, vocab)
    inputs["usable"][-1] = False
    assert_same(accept_sampled_triton(**inputs), accept_block_sampled(**inputs))


@pytest.mark.parametrize("dtype", [FP16, pytest.param(torch.bfloat16, id="bf16")])
def test_scores_in_a_half_type(device, dtype):
    """Catches exponentials in the type of the scores; bf16 is only read here, so the interpreter can do it too."""
    inputs = draft_inputs(device, 4, 3, 3, 21, dtype)
    assert_same(accept_sampled_triton(**inputs), accept_block_sampled(**inputs))


def test_every_accepted_length(device, part):
    """Catches an acceptance after the first refusal that counts, and the wrong position at either end."""
    slots = 4
    inputs = draft_inputs(device, slots + 1, slots, 3, 20)
    lengths = torch.arange(slots + 1, device=device)
    # A test passes for certain at 0; a drawn probability of 0 fails for certain.
    inputs["uniforms"].zero_()
    refused = torch.arange(slots, device=device) >= lengths[:, None]
    inputs["q"] = torch.where(
        refused[..., None] & (inputs["candidate_ids"] == inputs["tokens"][..., None]), 0.0, inputs["q"]
    )
    accepted, following = accept_sampled_triton(**inputs)
    assert torch.equal(accepted, lengths)
    assert torch.equal(following, accept_block_sampled(**inputs)[1])


def golden(device, rows):
    probs = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1, 0.0])
    return {
        "scores": probs.log().expand(rows, 2, 6).contiguous().to(device),
        "candidate_ids": torch.tensor([0, 2]).expand(rows, 1, 2).contiguous().to(device),
        "q": torch.tensor([0.6, 0.4]).expand(rows, 1, 2).contiguous().to(device),
        "usable": torch.ones(rows, dtype=torch.bool, device=device),
    }


def test_golden_law(device):
    """Catches any loss: over all drafts, tests and draws the first token has the target's law, exactly."""
    # Drafted token, probability of drawing it, of passing the test, and uniforms on either side of that.
    cases = [(0, 0.6, 5 / 6, (0.833, 0.834)), (2, 0.4, 1 / 4, (0.249, 0.251))]
    draws = [0.125, 0.375, 0.625, 0.875]
    rows = [
        (draft, uniform, draw, weight / len(draws) * (passing if uniform < passing else 1 - passing))
        for draft, weight, passing, uniforms in cases
        for uniform in uniforms
        for draw in draws
    ]
    drafts, uniforms, draw_uniforms, weights = (
        torch.tensor(column, device=device) for column in zip(*rows, strict=True)
    )
    accepted, following = accept_sampled_triton(
        **golden(device, len(rows)), tokens=drafts[:, None], uniforms=uniforms[:, None], draw_uniforms=draw_uniforms
    )
    assert accepted.tolist() == [1, 1, 1, 1, 0, 0, 0, 0] * 2
    first = torch.where(accepted == 1, drafts, following)
    law = torch.zeros(6, device=device).index_add(0, first, weights)
    torch.testing.assert_close(law.cpu(), torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1, 0.0]), atol=LAW_TOLERANCE, rtol=0)


@pytest.mark.parametrize("part_size", [2, 8], ids="part{}".format)
def test_golden_residual(device, monkeypatch, part_size):
    """Catches a draw from `p` after a refusal, `p - q` that is not cut at 0, and a total that is not normalised."""
    monkeypatch.setattr(module, "_PART", part_size)
    draws = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2**-24, 1.0], device=device)
    inputs = golden(device, len(draws))
    tokens = torch.zeros(len(draws), 1, dtype=torch.int64, device=device)
    uniforms = torch.full((len(draws), 1), 0.9, device=device)
    accepted, following = accept_sampled_triton(**inputs, tokens=tokens, uniforms=uniforms, draw_uniforms=draws)
    assert accepted.tolist() == [0] * len(draws)
    assert following.tolist() == [1, 1, 3, 3, 4, 4, 4]


@pytest.mark.parametrize("part_size", [1, 2, 4], ids="part{}".format)
def test_draws_at_the_boundaries(device, monkeypatch, part_size):
    """Catches `>=` in place of `>`, over the parts or inside one: a draw of 0.25 belongs to the second quarter."""
    monkeypatch.setattr(module, "_PART", part_size)
    inputs = draft_inputs(device, 4, 0, 1, 4)
    inputs["scores"][:] = 3.0
    inputs["draw_uniforms"][:] = torch.tensor([0.0, 0.25, 0.5, 0.75], device=device)
    assert accept_sampled_triton(**inputs)[1].tolist() == [0, 1, 2, 3]


def test_the_test_is_strict(device):
    """Catches `<=`: a token outside the target's support would pass at `u = 0`."""
    inputs = golden(device, 1)
    inputs["candidate_ids"][0, 0, 1] = 5
    zeros = torch.zeros(1, 1, device=device)
    tokens = torch.full((1, 1), 5, device=device)
    accepted, _ = accept_sampled_triton(**inputs, tokens=tokens, uniforms=zeros, draw_uniforms=zeros[0])
    assert accepted.tolist() == [0]


def test_only_the_support_is_drawn(device, part):
    """Catches a token without mass that rounding of the running sums hands a draw to."""
    batch, vocab = 7, 50
    inputs = draft_inputs(device, batch, 1, 2, vocab)
    excluded = torch.rand(batch, 2, vocab, device=device) < 0.9
    excluded[..., 17] = False
    inputs["scores"] = inputs["scores"].masked_fill(excluded, -INF)
    inputs["draw_uniforms"] = torch.linspace(0, 1, batch, device=device)
    accepted, following = accept_sampled_triton(**inputs)
    rows = torch.arange(batch, device=device)
    assert torch.isfinite(inputs["scores"][rows, accepted, following]).all()
    assert_same((accepted, following), accept_block_sampled(**inputs))


def test_unusable_rows_draw_from_the_target(device, part):
    """Catches a draft that counts although it must be ignored, here with a `q` that would shift the draw."""
    inputs = draft_inputs(device, 4, 2, 3, 20)
    inputs["usable"][:] = torch.tensor([True, False] * 2, device=device)
    inputs["uniforms"].zero_()
    inputs["q"][1] = NAN
    accepted, following = accept_sampled_triton(**inputs)
    assert accepted.tolist() == [2, 0] * 2
    law = torch.softmax(inputs["scores"][:, 0], dim=-1).cumsum(dim=-1)
    expected = (law <= inputs["draw_uniforms"][:, None]).sum(dim=-1)
    assert torch.equal(following[1::2], expected[1::2])


def test_no_residual_mass(device, part):
    """Catches a division by zero, or the last token of the vocabulary, where `q` covers all of `p`."""
    inputs = golden(device, 3)
    inputs["scores"][:] = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0, 0.0], device=device).log()
    inputs["q"][:] = 1.0
    tokens = torch.ones(3, 1, dtype=torch.int64, device=device)
    draws = torch.tensor([0.25, 0.75, 0.999], device=device)
    accepted, following = accept_sampled_triton(
        **inputs, tokens=tokens, uniforms=torch.zeros(3, 1, device=device), draw_uniforms=draws
    )
    assert accepted.tolist() == [0, 0, 0]
    assert following.tolist() == [0, 2, 2]


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -1.0], ids=["nan", "inf", "zero", "negative"])
def test_q_that_is_no_probability(device, value):
    """Catches a token accepted by division by zero, and a NaN that spreads over the residual."""
    inputs = draft_inputs(device, 4, 2, 3, 20)
    drawn = inputs["candidate_ids"] == inputs["tokens"][..., None]
    inputs["q"] = torch.where(drawn, value, inputs["q"])
    inputs["uniforms"].zero_()
    accepted, following = accept_sampled_triton(**inputs)
    assert accepted.tolist() == [0] * 4
    assert torch.equal(following, accept_block_sampled(**inputs)[1])


def test_tokens_outside_the_vocabulary(device):
    """Catches a placeholder that becomes an address, or is accepted."""
    inputs = draft_inputs(device, 3, 2, 3, 20)
    inputs["tokens"][:, 0] = torch.tensor([-1, 20, 2**40], device=device)
    inputs["candidate_ids"][:, 0, 0] = inputs["tokens"][:, 0]
    inputs["uniforms"].zero_()
    accepted, following = accept_sampled_triton(**inputs)
    assert accepted.tolist() == [0, 0, 0]
    assert ((following >= 0) & (following < 20)).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])
def test_scores_without_a_distribution(device, part, value):
    """Catches a broken target row that yields some token, and one that reaches its neighbours."""
    inputs = draft_inputs(device, 3, 2, 3, 20)
    clean = accept_sampled_triton(**inputs)
    inputs["scores"][1] = value
    accepted, following = accept_sampled_triton(**inputs)
    assert (accepted[1].item(), following[1].item()) == (0, -1)
    for actual, expected in zip((accepted, following), clean, strict=True):
        assert torch.equal(actual[[0, 2]], expected[[0, 2]])


def test_one_nan_among_the_scores(device, part):
    """Catches a maximum or sum that skips NaN."""
    inputs = draft_inputs(device, 2, 1, 2, 20)
    inputs["scores"][0, 0, 13] = NAN
    accepted, following = accept_sampled_triton(**inputs)
    assert (accepted[0].item(), following[0].item()) == (0, -1)


def test_extreme_scores(device, part):
    """Catches exponentials without the maximum taken off, and parts whose sums vanish against others."""
    inputs = draft_inputs(device, 4, 2, 3, 40)
    inputs["scores"] = 40 * inputs["scores"] + 1e4
    assert_same(accept_sampled_triton(**inputs), accept_block_sampled(**inputs))


def test_strided_inputs(device, part):
    """Catches contiguous addressing: scores are often a slice of a padded head's columns."""
    inputs = draft_inputs(device, 3, 2, 3, 20)
    expected = accept_sampled_triton(**inputs)
    strided = dict(inputs)
    for name in ("scores", "candidate_ids", "q"):
        batch, rows, columns = inputs[name].shape
        wide = torch.zeros(batch, rows + 3, columns + 4, dtype=inputs[name].dtype, device=device)
        strided[name] = wide[:, 1:-2, 1:-3].copy_(inputs[name])
    for name in ("tokens", "uniforms"):
        wide = torch.zeros(3, 7, dtype=inputs[name].dtype, device=device)
        strided[name] = wide[:, 2:4].copy_(inputs[name])
    assert_same(accept_sampled_triton(**strided), expected)


def test_writes_into_buffers(device):
    """Catches output buffers that are ignored, as a captured graph would not."""
    inputs = draft_inputs(device, 3, 2, 3, 20)
    out = tuple(torch.full((3,), -7, device=device) for _ in range(2))
    returned = accept_sampled_triton(**inputs, out=out)
    assert returned[0] is out[0] and returned[1] is out[1]
    assert_same(out, accept_block_sampled(**inputs))


def test_nothing_drafted(device):
    """Catches a launch without lanes or programs; without a draft the token comes from the only position."""
    assert [tensor.shape for tensor in accept_sampled_triton(**draft_inputs(device, 0, 2, 3, 20))] == [(0,), (0,)]
    inputs = draft_inputs(device, 3, 0, 2, 20)
    accepted, following = accept_sampled_triton(**inputs)
    assert accepted.tolist() == [0, 0, 0]
    assert torch.equal(following, accept_block_sampled(**inputs)[1])


@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        pytest.param("scores", lambda x: x[:, 1:], "scores has shape", id="no-bonus-row"),
        pytest.param("scores", lambda x: x.double(), "scores is float64", id="double"),
        pytest.param("scores", lambda x: x[..., :0], "scores has an empty vocabulary", id="no-vocabulary"),
        pytest.param("scores", lambda x: x[..., ::2], "scores has stride", id="columns-apart"),
        pytest.param("tokens", lambda x: x.int(), "tokens is int32", id="tokens"),
        pytest.param("candidate_ids", lambda x: x[0], "candidate_ids has shape", id="candidates"),
        pytest.param("candidate_ids", lambda x: x[..., :0], "candidate_ids has no candidates", id="no-candidates"),
        pytest.param("q", lambda x: x.half(), "q is float16", id="q-dtype"),
        pytest.param("q", lambda x: x[..., 1:], "q has shape", id="q-shape"),
        pytest.param("usable", lambda x: x.long(), "usable is int64", id="usable"),
        pytest.param("uniforms", lambda x: x[:, 1:], "uniforms has shape", id="uniforms"),
        pytest.param("draw_uniforms", lambda x: x[:, None], "draw_uniforms has shape", id="draw"),
    ],
)
def test_reasons(device, name, edit, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    inputs = draft_inputs(device, 2, 3, 4, 20)
    assert accept_sampled_ineligible_reason(**inputs) is None
    inputs[name] = edit(inputs[name])
    assert reason in accept_sampled_ineligible_reason(**inputs)
    with pytest.raises(ValueError, match="accept_sampled_triton: "):
        accept_sampled_triton(**inputs)


def test_reasons_of_buffers(device):
    """Catches a buffer of the wrong type, which would be filled with the bits of another."""
    inputs = draft_inputs(device, 2, 3, 4, 20)
    out = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    assert "out[1] is int32" in accept_sampled_ineligible_reason(**inputs, out=out)


def test_operator(device):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    inputs = tuple(draft_inputs(device, 2, 3, 4, 20).values())
    opcheck(accept_sampled_op, *inputs)
    compiled = torch.compile(lambda *args: accept_sampled_op(*args), fullgraph=True, backend="aot_eager")
    assert_same(compiled(*inputs), accept_sampled_triton(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, pytest.param(torch.bfloat16, id="bf16")])
def test_at_a_real_size(device, dtype):
    """Catches offsets that overflow and registers that run out, at the size of a published target."""
    inputs = draft_inputs(device, 64, 7, 16, 151936, dtype)
    accepted, following = accept_sampled_triton(**inputs)
    expected_accepted, expected_following = accept_block_sampled(**inputs)
    # Sums of 151,936 terms round; a test or draw within 1e-6 of a boundary may go the other way.
    assert (accepted == expected_accepted).float().mean() > 0.98
    assert (following == expected_following).float().mean() > 0.95


@pytest.mark.gpu
def test_capture(device):
    """Catches a launch that synchronises or allocates in a way that a CUDA graph cannot replay."""
    inputs = draft_inputs(device, 8, 7, 16, 1000)
    out = tuple(torch.full((8,), -7, device=device) for _ in range(2))
    accept_sampled_triton(**inputs, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accept_sampled_triton(**inputs, out=out)
    for _ in range(3):
        fresh = draft_inputs(device, 8, 7, 16, 1000)
        for name, tensor in inputs.items():
            tensor.copy_(fresh[name])
        graph.replay()
        assert_same(out, accept_block_sampled(**inputs))

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
"""The fused selector kernel against the lattice and the walk of the reference, and a float64 walk."""

import math

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import DTYPES, PROBABILITY_TOLERANCE, opcheck  # noqa: E402

from transformers_dflash2.functional_dflash2 import selector_path  # noqa: E402
from transformers_dflash2.kernels import selector_walk as module  # noqa: E402
from transformers_dflash2.kernels.selector_walk import (  # noqa: E402
    selector_walk_ineligible_reason,
    selector_walk_op,
    selector_walk_triton,
)


# Golden probabilities are written with six decimals.
GOLDEN_TOLERANCE = 1e-6
NAN, INF = math.nan, math.inf
NAMES = (
    "unary",
    "candidate_ids",
    "projected_hidden",
    "predecessor_codebook",
    "successor_codebook",
    "anchor_ids",
    "uniforms",
    "temperatures",
    "greedy_mask",
)


def walk_inputs(device, batch, slots, top_k, rank=5, vocab=70, dtype=torch.float32):
    """Every other row is greedy; temperatures differ."""
    inputs = (
        torch.randn(batch, slots, top_k).sort(dim=-1, descending=True).values,
        torch.rand(batch, slots, vocab).argsort(dim=-1)[..., :top_k].contiguous(),
        torch.randn(batch, slots, rank).to(dtype),
        torch.randn(vocab, rank).to(dtype),
        torch.randn(vocab, rank).to(dtype),
        torch.randint(0, vocab, (batch,)),
        torch.rand(batch, slots),
        torch.rand(batch) + 0.5,
        torch.arange(batch) % 2 == 1,
    )
    return {name: tensor.to(device) for name, tensor in zip(NAMES, inputs, strict=True)}


def assert_same_walk(actual, expected, **kwargs):
    tokens, q = actual
    assert tokens.dtype == torch.int64 and q.dtype == torch.float32
    assert torch.equal(tokens, expected[0])
    kwargs = {"atol": PROBABILITY_TOLERANCE, "rtol": 0, **kwargs}
    torch.testing.assert_close(q.double(), expected[1].double(), equal_nan=True, **kwargs)


def exact_walk(unary, candidate_ids, projected_hidden, predecessors, successors, anchors, uniforms, temps, greedy):
    """Row by row and slot by slot in float64."""
    batch, slots, top_k = unary.shape
    tokens, q = torch.zeros(batch, slots, dtype=torch.int64), torch.zeros(batch, slots, top_k, dtype=torch.float64)
    for row in range(batch):
        previous = int(anchors[row])
        for slot in range(slots):
            ids = candidate_ids[row, slot]
            gate = predecessors[previous].double() * projected_hidden[row, slot].double()
            score = unary[row, slot].double() + successors[ids].double() @ gate
            if greedy[row]:
                index = int(score.argmax())
                q[row, slot, index] = 1
            else:
                law = torch.softmax(score / temps[row].double(), dim=-1)
                index = min(int((uniforms[row, slot] >= law.cumsum(dim=-1)).sum()), top_k - 1)
                q[row, slot] = law
            tokens[row, slot] = previous = int(ids[index])
    return tokens, q


GOLDEN = {
    "unary": [[[2, 1.5, 1], [1, 0.75, 0.5]]],
    "projected_hidden": [[[1, 2], [2, -1]]],
    "predecessor_codebook": [[1, 0], [0, 1], [1, 1], [2, 0], [0, 2], [-1, 1]],
    "successor_codebook": [[0.5, 0], [0, 0.5], [1, -1], [0.25, 0.25], [-0.5, 1], [1, 1]],
}


@pytest.mark.parametrize(
    ("temperature", "uniforms", "tokens", "q"),
    [
        pytest.param(None, [0.0, 0.0], [5, 4], [[0, 0, 1], [0, 0, 1]], id="greedy"),
        pytest.param(
            1.0, [0.10, 0.90], [3, 2], [[0.189784, 0.147804, 0.662412], [0.147804, 0.850554, 0.001642]], id="t1"
        ),
        pytest.param(
            0.5, [0.999999, 0.5], [5, 4], [[0.072521, 0.043986, 0.883492], [0.231224, 0.140244, 0.628532]], id="t0.5"
        ),
        pytest.param(
            1.0, [0.95, 0.0], [5, 0], [[0.189784, 0.147804, 0.662412], [0.291756, 0.227220, 0.481024]], id="t1-u0"
        ),
    ],
)
def test_golden_walk(device, temperature, uniforms, tokens, q):
    """Catches swapped codebooks, a predecessor of the wrong slot, and a temperature that is not applied."""
    inputs = {name: torch.tensor(values, dtype=torch.float32, device=device) for name, values in GOLDEN.items()}
    inputs["candidate_ids"] = torch.tensor([[[3, 1, 5], [0, 2, 4]]], device=device)
    inputs["anchor_ids"] = torch.tensor([2], device=device)
    inputs["uniforms"] = torch.tensor([uniforms], device=device)
    inputs["temperatures"] = torch.tensor([temperature or 1.0], device=device)
    inputs["greedy_mask"] = torch.tensor([temperature is None], device=device)
    expected = torch.tensor([tokens], device=device), torch.tensor([q], device=device)
    assert_same_walk(selector_walk_triton(**inputs), expected, atol=GOLDEN_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "slots", "top_k", "rank"),
    [
        pytest.param(1, 1, 1, 1, id="one-of-everything"),
        pytest.param(3, 2, 3, 5, id="odd"),
        pytest.param(2, 7, 16, 8, id="powers-of-two"),
        pytest.param(2, 4, 33, 7, id="wide"),
        pytest.param(5, 3, 5, 33, id="high-rank"),
    ],
)
def test_equals_the_reference(device, dtype, batch, slots, top_k, rank):
    """Catches lanes past the candidates or the rank, a row that reads another's, and scores in a half type."""
    inputs = walk_inputs(device, batch, slots, top_k, rank, dtype=dtype)
    actual = selector_walk_triton(**inputs)
    assert_same_walk(actual, selector_path(**inputs))
    exact = exact_walk(*(tensor.cpu() for tensor in inputs.values()))
    assert_same_walk([tensor.cpu() for tensor in actual], exact)


def test_rank_in_several_pieces(device, monkeypatch):
    """Catches a partial sum over the rank that is overwritten or read from the first piece again."""
    monkeypatch.setattr(module, "_TILE", 1)
    inputs = walk_inputs(device, 2, 3, 3, rank=37)
    assert_same_walk(selector_walk_triton(**inputs), selector_path(**inputs))


def test_greedy_takes_the_first_of_equals(device):
    """Catches a last-maximum rule, and a padded lane that wins."""
    inputs = walk_inputs(device, 2, 3, 5)
    inputs["projected_hidden"].zero_()
    inputs["unary"][:] = torch.tensor([-3.0, -2.0, -2.0, -5.0, -2.0], device=device)
    inputs["greedy_mask"][:] = True
    tokens, q = selector_walk_triton(**inputs)
    assert torch.equal(tokens, inputs["candidate_ids"][..., 1])
    assert q.tolist() == [[[0, 1, 0, 0, 0]] * 3] * 2


@pytest.mark.parametrize("top_k", [3, 4], ids="k{}".format)
@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.999999, 1 - 2**-24, 1.0])
def test_ends_of_the_unit_interval(device, uniform, top_k):
    """Catches `>` in place of `>=`, and a padded lane taken where rounded masses sum to less than 1."""
    inputs = walk_inputs(device, 1, 2, top_k)
    inputs["projected_hidden"].zero_()
    inputs["unary"].zero_()
    inputs["uniforms"][:] = uniform
    inputs["temperatures"][:] = 1.0
    # A quarter is exact in fp32, and 0.25 belongs to the second one.
    index = {0.0: 0, 0.25: int(top_k == 4)}.get(uniform, top_k - 1)
    tokens, _ = selector_walk_triton(**inputs)
    assert torch.equal(tokens, inputs["candidate_ids"][..., index])


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])
def test_rows_that_are_not_finite(device, value):
    """Catches a NaN that is lost on the way to q, where it marks a row not to be used, or reaches another row."""
    inputs = walk_inputs(device, 6, 3, 5)
    clean = selector_walk_triton(**inputs)
    inputs["unary"][2:4, 1] = value
    inputs["projected_hidden"][4, 1] = value
    tokens, q = selector_walk_triton(**inputs)
    assert_same_walk((tokens, q), selector_path(**inputs))
    assert torch.equal(q[[0, 1, 5]], clean[1][[0, 1, 5]]) and torch.equal(tokens[[0, 1, 5]], clean[0][[0, 1, 5]])
    assert q[2:4, 1].isnan().all()
    assert not q[:4, 0].isnan().any()


def test_infinite_scores_of_rank_one(device):
    """Catches `0 * inf` on lanes past the candidates, which would win a broken row with an id that nobody offered."""
    inputs = walk_inputs(device, 4, 2, 3, rank=1)
    inputs["projected_hidden"][:, 1] = INF
    tokens, q = selector_walk_triton(**inputs)
    assert_same_walk((tokens, q), selector_path(**inputs))
    assert (tokens[..., None] == inputs["candidate_ids"]).any(dim=-1).all()


def test_one_nan_among_the_scores(device):
    """Catches a maximum that skips NaN: a greedy row with one would look usable."""
    inputs = walk_inputs(device, 2, 2, 5)
    inputs["unary"][:, 1, 3] = NAN
    tokens, q = selector_walk_triton(**inputs)
    assert_same_walk((tokens, q), selector_path(**inputs))
    assert q[:, 1].isnan().all()


def test_some_scores_are_minus_infinity(device):
    """Catches `-inf - -inf` for an excluded candidate, which is legal while one is finite."""
    inputs = walk_inputs(device, 4, 3, 5)
    inputs["unary"][:, :, 1:4] = -INF
    tokens, q = selector_walk_triton(**inputs)
    assert_same_walk((tokens, q), selector_path(**inputs))
    assert (q[..., 1:4] == 0).all()


def test_predecessor_without_a_row(device):
    """Catches a read past the codebook for an anchor that only the target's padded head can produce."""
    inputs = walk_inputs(device, 3, 3, 4)
    inputs["predecessor_codebook"][-1] = NAN
    inputs["candidate_ids"].clamp_(max=60)
    inputs["anchor_ids"][:] = torch.tensor([70, 77, 2**40], device=device)
    tokens, q = selector_walk_triton(**inputs)
    assert torch.isfinite(q).all()
    assert_same_walk((tokens, q), selector_path(**inputs))


def test_ids_that_no_table_has_are_not_read(device):
    """Catches an address made of a placeholder id: it contributes nothing."""
    inputs = walk_inputs(device, 2, 2, 4)
    inputs["anchor_ids"][0] = -1
    inputs["candidate_ids"][:, :, 2] = 2**40
    tokens, q = selector_walk_triton(**inputs)
    assert torch.isfinite(q).all()
    assert (tokens[..., None] == inputs["candidate_ids"]).any(dim=-1).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5], ids="t{}".format)
def test_smallest_temperature(device, temperature):
    """Catches a division by zero: temperatures under 1e-5 count as 1e-5."""
    inputs = walk_inputs(device, 2, 3, 4)
    inputs["temperatures"][:] = temperature
    assert_same_walk(selector_walk_triton(**inputs), selector_path(**inputs))


def test_strided_inputs(device):
    """Catches contiguous addressing: slots are a slice of the block, codebooks may be rows of a wider table."""
    inputs = walk_inputs(device, 3, 4, 5)
    expected = selector_walk_triton(**inputs)
    strided = dict(inputs)
    for name in ("unary", "candidate_ids", "projected_hidden"):
        wide = torch.zeros(3, 6, inputs[name].shape[-1] + 3, dtype=inputs[name].dtype, device=device)
        strided[name] = wide[:, 1:5, 2:-1].copy_(inputs[name])
    for name in ("predecessor_codebook", "successor_codebook"):
        strided[name] = torch.zeros(70, 9, device=device)[:, 1:6].copy_(inputs[name])
    strided["uniforms"] = torch.zeros(3, 8, device=device)[:, 3:7].copy_(inputs["uniforms"])
    # Another alignment may sum in another order.
    assert_same_walk(selector_walk_triton(**strided), expected)


def test_writes_into_buffers(device):
    """Catches output buffers that are ignored or only partly written."""
    inputs = walk_inputs(device, 3, 2, 5)
    out = torch.full((3, 2), -1, device=device), torch.full((3, 2, 5), NAN, device=device)
    returned = selector_walk_triton(**inputs, out=out)
    assert returned[0] is out[0] and returned[1] is out[1]
    assert_same_walk(out, selector_path(**inputs))


@pytest.mark.parametrize(("batch", "slots"), [(0, 3), (2, 0)], ids=["no-rows", "no-slots"])
def test_nothing_to_walk(device, batch, slots):
    """Catches an empty grid, which a launch refuses."""
    tokens, q = selector_walk_triton(**walk_inputs(device, batch, slots, 3))
    assert tokens.shape == (batch, slots) and q.shape == (batch, slots, 3)


@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        pytest.param("unary", lambda x: x[0], "unary has shape", id="unary-shape"),
        pytest.param("unary", lambda x: x[..., :0], "unary has no candidates", id="no-candidates"),
        pytest.param("candidate_ids", lambda x: x.int(), "candidate_ids is int32", id="ids-dtype"),
        pytest.param("candidate_ids", lambda x: x[:, :1], "candidate_ids has shape", id="ids-shape"),
        pytest.param("projected_hidden", lambda x: x[:, :1], "projected_hidden has shape", id="hidden-shape"),
        pytest.param(
            "predecessor_codebook", lambda x: x[:, :4], "predecessor_codebook has shape", id="predecessor-rank"
        ),
        pytest.param(
            "successor_codebook", lambda x: x.T.contiguous().T, "successor_codebook has stride", id="successor-stride"
        ),
        pytest.param(
            "successor_codebook", lambda x: x.double(), "successor_codebook is float64", id="successor-dtype"
        ),
        pytest.param("anchor_ids", lambda x: x[:, None], "anchor_ids has shape", id="anchor"),
        pytest.param("uniforms", lambda x: x.double(), "uniforms is float64", id="uniforms"),
        pytest.param("temperatures", lambda x: x[:1], "temperatures has shape", id="temperatures"),
        pytest.param("greedy_mask", lambda x: x.long(), "greedy_mask is int64", id="greedy"),
    ],
)
def test_reasons(device, name, edit, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    inputs = walk_inputs(device, 2, 3, 4)
    assert selector_walk_ineligible_reason(**inputs) is None
    inputs[name] = edit(inputs[name])
    assert reason in selector_walk_ineligible_reason(**inputs)
    with pytest.raises(ValueError, match="selector_walk_triton: "):
        selector_walk_triton(**inputs)


def test_reasons_of_buffers(device):
    """Catches a buffer of the wrong type, which would be filled with the bits of another."""
    inputs = walk_inputs(device, 2, 3, 4)
    tokens, q = selector_walk_triton(**inputs)
    assert "out[0] is int32" in selector_walk_ineligible_reason(**inputs, out=(tokens.int(), q))
    assert "out[1] is not contiguous" in selector_walk_ineligible_reason(**inputs, out=(tokens, q.mT.contiguous().mT))


def test_operator(device):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    inputs = tuple(walk_inputs(device, 2, 3, 4).values())
    opcheck(selector_walk_op, *inputs)
    compiled = torch.compile(lambda *args: selector_walk_op(*args), fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(*inputs), selector_walk_triton(*inputs), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("slots", "top_k"), [(7, 16), (15, 64)], ids=["s7k16", "s15k64"])
def test_at_a_real_size(device, slots, top_k):
    """Catches offsets that overflow, and registers that run out, at the sizes of published drafters."""
    inputs = walk_inputs(device, 64, slots, top_k, rank=256, vocab=152000, dtype=torch.bfloat16)
    inputs["projected_hidden"] /= 16
    tokens, q = selector_walk_triton(**inputs)
    expected_tokens, expected_q = selector_path(**inputs)
    # A row whose walk met a tie goes another way from there on; at most one in a hundred does.
    same = (tokens == expected_tokens).all(dim=-1)
    assert same.float().mean() > 0.98
    torch.testing.assert_close(q[same], expected_q[same], atol=1e-5, rtol=0)

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
"""The mathematics against golden vectors, slow float64 loops and exact probabilities."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from transformers_dflash2.functional_dflash2 import (
    MIN_TEMPERATURE,
    accept_greedy,
    accept_sampled,
    committed_block,
    drawn_probability,
    finite_rows,
    grouped_conv,
    residual_distribution,
    selector_lattice,
    selector_walk,
    top_candidates,
    transform_unary,
)


# Golden probabilities are written with six decimals.
GOLDEN_TOLERANCE = 1e-6
# Relative RMS of a float32 result against the float64 loop; a few roundings of 6e-8 each.
FP32_RELATIVE_RMS = 1e-6
# Largest difference of a float32 probability or score of order 1 from its float64 value.
FP32_TOLERANCE = 2e-6
# A correct sampler falls below this once in a thousand seeds; the seed is fixed.
CHI_SQUARE_LEVEL = 1e-3
# The last float32 below 1, the largest value a uniform generator returns.
ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
NAN, INF = math.nan, math.inf


def relative_rms(actual, expected):
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30))


# ------------------------------------------------------------------------------------------------------ convolution

GOLDEN_ROWS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [1, 0, 0, 1], [0, 1, 1, 0], [2, 2, 2, 2]]
GOLDEN_BASE = [[1, 1, 1, 1], [0.5, 0.25, -0.5, 0]]
# Per row: tap 0 of both groups, tap 1 of both groups.
GOLDEN_DYNAMIC = [
    [[0, 0], [9, 9]],
    [[1, 0], [0.5, 1]],
    [[0, -1], [0, 0.25]],
    [[0, 0], [9, 9]],
    [[0, 0], [1, -1]],
    [[-1, 0.5], [0, 0]],
]
GOLDEN_BLOCKS_OF_3 = [
    [1, 2, 3, 4],
    [11, 13.5, 8.5, 12],
    [11.5, 11.5, -1.75, 2],
    [1, 0, 0, 1],
    [1.5, 1, 1, -1],
    [0, 0.25, 2.5, 3],
]
GOLDEN_BLOCK_OF_6 = [*GOLDEN_BLOCKS_OF_3[:3], [86.5, 92.5, 93.5, 109], *GOLDEN_BLOCKS_OF_3[4:]]


@pytest.mark.parametrize(
    ("block", "expected"),
    [pytest.param(3, GOLDEN_BLOCKS_OF_3, id="two-blocks"), pytest.param(6, GOLDEN_BLOCK_OF_6, id="one-block")],
)
def test_conv_golden(block, expected):
    """Catches a tap that reaches over a block's start, swapped taps or groups, and coefficients of the wrong row."""
    hidden = torch.tensor(GOLDEN_ROWS).float().view(-1, block, 4)
    dynamic = torch.tensor(GOLDEN_DYNAMIC).float().view(-1, block, 2, 2)
    output = grouped_conv(hidden, torch.tensor(GOLDEN_BASE), dynamic, group_size=2)
    assert torch.equal(output.view(-1, 4), torch.tensor(expected).float())


def conv_inputs(batch, block, taps, hidden_size=6, group_size=2, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, block, hidden_size), (taps, hidden_size), (batch, block, taps, hidden_size // group_size)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def slow_conv(hidden, base, dynamic, group_size):
    """The formula, element by element, in Python floats."""
    batch, block, hidden_size = hidden.shape
    x, b, d = hidden.double().tolist(), base.double().tolist(), dynamic.double().tolist()
    output = torch.zeros(batch, block, hidden_size, dtype=torch.float64)
    for n, i, c in itertools.product(range(batch), range(block), range(hidden_size)):
        total = 0.0
        for t in range(min(len(b), i + 1)):
            total += (b[t][c] + d[n][i][t][c // group_size]) * x[n][i - t][c]
        output[n, i, c] = total
    return output


@pytest.mark.parametrize("taps", [1, 2, 3, 4], ids="taps{}".format)
@pytest.mark.parametrize("block", [1, 2, 3, 5, 7, 8, 16], ids="block{}".format)
def test_conv_equals_slow_loop(block, taps):
    """Catches block lengths that are odd, no power of two or shorter than the taps, and one batch row of another."""
    for batch, group_size in ((1, 2), (3, 3), (3, 1), (2, 6)):
        hidden, base, dynamic = conv_inputs(batch, block, taps, group_size=group_size)
        output = grouped_conv(hidden, base, dynamic, group_size=group_size)
        assert output.dtype == torch.float32
        assert relative_rms(output, slow_conv(hidden, base, dynamic, group_size)) < FP32_RELATIVE_RMS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conv_rounds_once(dtype):
    """Catches sums kept in a half type: the result is the exact value, rounded to the input's type once."""
    hidden, base, dynamic = conv_inputs(2, 8, 4, dtype=dtype)
    output = grouped_conv(hidden, base, dynamic, group_size=2)
    assert output.dtype == dtype
    assert torch.equal(output, grouped_conv(hidden.float(), base.float(), dynamic.float(), group_size=2).to(dtype))
    exact = slow_conv(hidden, base, dynamic, 2)
    # Half a unit in the last place, and a little for the fp32 sum.
    unit = torch.finfo(dtype).eps
    assert ((output.double() - exact).abs() <= 0.51 * unit * exact.abs().clamp(min=unit)).all()


def test_conv_takes_strided_inputs():
    """Catches a `view` that only works for contiguous tensors: the coefficients are a slice of one projection."""
    hidden, base, _ = conv_inputs(2, 5, 2)
    both = torch.randn(2, 5, 2, 2, 3)
    wide = torch.randn(2, 5, 12)
    wide[..., ::2] = hidden
    output = grouped_conv(wide[..., ::2], base, both[:, :, 1], group_size=2)
    assert torch.equal(output, grouped_conv(hidden, base, both[:, :, 1].contiguous(), group_size=2))


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("taps", [1, 2, 4], ids="taps{}".format)
def test_conv_confines_what_is_not_finite(taps, poison):
    """Catches a 0/1 factor in place of a choice: a poisoned value crosses into the next block or an earlier row."""
    hidden, base, dynamic = conv_inputs(3, 6, taps)
    clean = grouped_conv(hidden, base, dynamic, group_size=2)
    hidden[1] = poison
    neighbour = grouped_conv(hidden, base, dynamic, group_size=2)
    assert torch.equal(neighbour[[0, 2]], clean[[0, 2]])

    hidden, base, dynamic = conv_inputs(3, 6, taps)
    hidden[1, 3] = poison
    later = grouped_conv(hidden, base, dynamic, group_size=2)
    untouched = [row for row in range(6) if not 3 <= row < 3 + taps]
    assert torch.equal(later[1, untouched], clean[1, untouched])
    assert not torch.isfinite(later[1, 3]).any()


def test_conv_ignores_coefficients_of_taps_that_do_not_fire():
    """Catches `coefficient * 0`: the first rows' coefficients for rows before the block may hold anything."""
    hidden, base, dynamic = conv_inputs(2, 4, 3)
    clean = grouped_conv(hidden, base, dynamic, group_size=2)
    dynamic[:, 0, 1:] = NAN
    dynamic[:, 1, 2:] = INF
    assert torch.equal(grouped_conv(hidden, base, dynamic, group_size=2), clean)


# -------------------------------------------------------------------------------------------------- unary, candidates


@pytest.mark.parametrize(
    ("multiplier", "softcap"),
    [
        pytest.param(1.0, None, id="identity"),
        pytest.param(0.25, None, id="multiplier"),
        pytest.param(1.0, 20.0, id="softcap"),
        pytest.param(0.19611613513818404, 20.0, id="both"),
    ],
)
def test_transform_unary(multiplier, softcap):
    """Catches the cap before the multiplier, and a transform that is carried out in the head's half type."""
    logits = (50 * torch.randn(4, 7)).bfloat16()
    expected = multiplier * logits.double()
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    actual = transform_unary(logits, multiplier=multiplier, softcap=softcap)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=0, rtol=FP32_TOLERANCE)


@pytest.mark.parametrize("top_k", [1, 3, 16], ids="k{}".format)
def test_top_candidates_values_and_order(top_k):
    """Catches unsorted candidates, ids that do not belong to their values, and a transform that is left out."""
    logits = torch.randn(3, 5, 40)
    unary, ids = top_candidates(logits, top_k=top_k, multiplier=0.5, softcap=3.0)
    assert unary.shape == ids.shape == (3, 5, top_k)
    assert unary.dtype == torch.float32 and ids.dtype == torch.int64
    expected_ids = logits.argsort(dim=-1, descending=True)[..., :top_k]
    assert torch.equal(ids, expected_ids)
    assert torch.equal(unary, transform_unary(logits.gather(-1, ids), multiplier=0.5, softcap=3.0))


@pytest.mark.parametrize("top_k", [1, 3, 16], ids="k{}".format)
def test_top_candidates_with_ties(top_k):
    """Catches candidates twice in a slot, values under the k-th best, and equal values that are not in order of id."""
    logits = torch.randint(0, 4, (20, 5, 40)).float()
    unary, ids = top_candidates(logits, top_k=top_k)
    expected = logits.sort(dim=-1, descending=True).values[..., :top_k]
    assert torch.equal(unary, expected)
    assert torch.equal(unary, logits.gather(-1, ids))
    assert (ids.sort(dim=-1).values.diff(dim=-1) > 0).all()
    equal = unary[..., 1:] == unary[..., :-1]
    assert (ids.diff(dim=-1)[equal] > 0).all()


def test_top_candidates_leave_excluded_columns_out():
    """Catches a padding column, which holds minus infinity, offered while real tokens are left."""
    logits = torch.randn(2, 3, 30)
    logits[..., 20:] = -INF
    logits[..., :4] = -INF
    unary, ids = top_candidates(logits, top_k=16)
    assert torch.isfinite(unary).all()
    assert ((ids >= 4) & (ids < 20)).all()


def test_top_candidates_of_the_whole_vocabulary():
    """Catches an off-by-one at `top_k == vocab`."""
    logits = torch.randn(2, 2, 5)
    _, ids = top_candidates(logits, top_k=5)
    assert torch.equal(ids, logits.argsort(dim=-1, descending=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("value", [INF, -INF, math.nan], ids=str)
@pytest.mark.parametrize("largest", [False, True], ids=["near-1", "near-the-largest"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_finite_rows(device, dtype, value, largest):
    """Catches a flaw that a reduction loses in some place, beside an infinity or a large number, and false alarms."""
    batch, slots, size = 40, 3, 37
    hidden = torch.randn(batch, slots, size).to(device, dtype)
    if largest:
        hidden[:, ::2] = torch.finfo(dtype).max * hidden[:, ::2].sign()
    evidence = torch.rand(batch, slots, 50, device=device)
    # Seen as a view, like the rows of a block behind the anchor's.
    hidden = torch.cat([torch.full_like(hidden[:, :1], math.nan), hidden], dim=1)[:, 1:]
    assert finite_rows(hidden, evidence).all()
    for row in range(1, batch - 1):
        hidden[row].view(-1)[(row * 3) % (slots * size)] = value
        if row % 3 == 0:
            hidden[row, -1, -1] = INF
    assert finite_rows(hidden, evidence).tolist() == [True] + [False] * (batch - 2) + [True]


def test_finite_rows_of_evidence():
    """Catches a NaN of the laws that is lost, and evidence that is mistaken for a law: signs may cancel."""
    hidden, evidence = torch.randn(4, 3, 8), torch.tensor([1.0, -1.0]).repeat(4, 3, 5)
    assert finite_rows(hidden, evidence).all()
    evidence[1, 2, 9] = math.nan
    evidence[2, 0, 0] = math.nan
    assert finite_rows(hidden, evidence).tolist() == [True, False, False, True]


# ----------------------------------------------------------------------------------------------------------- selector

PREDECESSORS = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 0], [0, 2], [-1, 1]]).float()
SUCCESSORS = torch.tensor([[0.5, 0], [0, 0.5], [1, -1], [0.25, 0.25], [-0.5, 1], [1, 1]])
PROJECTED = torch.tensor([[[1, 2], [2, -1]]]).float()
UNARY = torch.tensor([[[2, 1.5, 1], [1, 0.75, 0.5]]])
CANDIDATES = torch.tensor([[[3, 1, 5], [0, 2, 4]]])
ANCHOR = torch.tensor([2])
LATTICE = torch.tensor([[[[2.75, 2.5, 4]] * 3, [[3, 4.75, -1.5], [1, 1.75, -0.5], [0, -0.25, 0.5]]]])


def walk(scores, candidate_ids, uniforms, temperatures=1.0, greedy=False):
    batch = scores.shape[0]
    return selector_walk(
        scores,
        candidate_ids,
        torch.as_tensor(uniforms, dtype=torch.float32).expand(batch, scores.shape[1]),
        torch.as_tensor(temperatures, dtype=torch.float32).expand(batch),
        torch.as_tensor(greedy).expand(batch),
    )


def test_selector_golden_lattice():
    """Catches swapped codebooks, the predecessor of the wrong slot, and an anchor that does not fill slot 0."""
    lattice = selector_lattice(UNARY, CANDIDATES, PROJECTED, PREDECESSORS, SUCCESSORS, ANCHOR)
    assert torch.equal(lattice, LATTICE)


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
def test_selector_golden_walk(temperature, uniforms, tokens, q):
    """Catches an independent choice per slot, a temperature that is not applied, and a one-hot q for a sampled row."""
    greedy = temperature is None
    actual_tokens, actual_q = walk(LATTICE, CANDIDATES, [uniforms], 1.0 if greedy else temperature, greedy)
    assert actual_tokens.tolist() == [tokens]
    torch.testing.assert_close(actual_q, torch.tensor([q]).float(), atol=GOLDEN_TOLERANCE, rtol=0)


def selector_inputs(batch, slots, top_k, vocab=32, rank=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    candidate_ids = torch.rand(batch, slots, vocab, generator=generator).argsort(dim=-1)[..., :top_k]
    unary = torch.randn(batch, slots, top_k, generator=generator).sort(dim=-1, descending=True).values
    projected = torch.randn(batch, slots, rank, generator=generator)
    codebooks = torch.randn(2, vocab, rank, generator=generator)
    anchors = torch.randint(0, vocab, (batch,), generator=generator)
    return unary, candidate_ids, projected, codebooks[0], codebooks[1], anchors


def slow_walk(inputs, uniforms, temperature):
    """One row, slot by slot with the predecessor really taken, in float64. `temperature=None` is greedy."""
    unary, candidate_ids, projected, predecessors, successors, anchor = inputs
    previous, tokens, laws, scores = int(anchor), [], [], []
    for slot in range(unary.shape[0]):
        gate = predecessors[previous].double() * projected[slot].double()
        score = unary[slot].double() + successors[candidate_ids[slot]].double() @ gate
        scores.append(score)
        if temperature is None:
            index = int(score.argmax())
            law = torch.zeros_like(score)
            law[index] = 1.0
        else:
            law = torch.softmax(score / temperature, dim=-1)
            index, total = 0, float(law[0])
            while uniforms[slot] >= total and index < len(law) - 1:
                index += 1
                total += float(law[index])
        previous = int(candidate_ids[slot, index])
        tokens.append(previous)
        laws.append(law)
    return tokens, torch.stack(laws), torch.stack(scores)


@pytest.mark.parametrize("temperature", [None, 0.7, 1.0, 1.5], ids=["greedy", "t0.7", "t1", "t1.5"])
@pytest.mark.parametrize("top_k", [1, 3, 16], ids="k{}".format)
@pytest.mark.parametrize("slots", [1, 2, 7], ids="slots{}".format)
def test_lattice_and_walk_equal_the_sequential_walk(slots, top_k, temperature):
    """Catches a lattice row that is not the realised predecessor's, and a row of the batch that reads another's."""
    inputs = selector_inputs(4, slots, top_k)
    lattice = selector_lattice(*inputs)
    assert lattice.shape == (4, slots, top_k, top_k) and lattice.dtype == torch.float32
    uniforms = torch.rand(4, slots)
    tokens, q = walk(lattice, inputs[1], uniforms, temperature or 1.0, temperature is None)
    assert tokens.dtype == torch.int64 and q.dtype == torch.float32
    for row in range(4):
        row_inputs = [*(tensor[row] for tensor in inputs[:3]), *inputs[3:5], inputs[5][row]]
        expected_tokens, expected_q, _ = slow_walk(row_inputs, uniforms[row].tolist(), temperature)
        assert tokens[row].tolist() == expected_tokens
        torch.testing.assert_close(q[row].double(), expected_q, atol=FP32_TOLERANCE, rtol=0)


def test_lattice_sums_in_fp32():
    """Catches bf16 scores, whose three digits make near ties everywhere."""
    inputs = selector_inputs(2, 3, 8)
    half = [tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in inputs]
    half[0] = inputs[0]
    lattice = selector_lattice(*half)
    exact = selector_lattice(*(t.float() if t.is_floating_point() else t for t in half))
    assert lattice.dtype == torch.float32
    torch.testing.assert_close(lattice, exact, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE)


def test_lattice_predecessor_without_a_row():
    """Catches an index error for an anchor that the target's padded head can produce but no codebook row has."""
    unary, candidate_ids, projected, predecessors, successors, _ = selector_inputs(1, 3, 4)
    predecessors = predecessors.clone()
    predecessors[-1] = NAN
    anchors = torch.tensor([predecessors.shape[0] + 7])
    candidate_ids = candidate_ids.clamp(max=30)
    lattice = selector_lattice(unary, candidate_ids, projected, predecessors, successors, anchors)
    assert torch.equal(lattice[:, 0], unary[:, 0, None].expand(-1, 4, -1))
    assert torch.isfinite(lattice).all()


def test_walk_mixes_greedy_and_sampled_rows():
    """Catches a flag, temperature or uniform that is read for the whole batch instead of per row."""
    inputs = selector_inputs(6, 4, 5)
    lattice = selector_lattice(*inputs)
    uniforms = torch.rand(6, 4)
    temperatures = torch.tensor([1.0, 0.3, 2.0, 1.0, 0.9, 1.0])
    greedy = torch.tensor([True, False, False, True, False, True])
    tokens, q = selector_walk(lattice, inputs[1], uniforms, temperatures, greedy)
    for row in range(6):
        part = slice(row, row + 1)
        alone = selector_walk(lattice[part], inputs[1][part], uniforms[part], temperatures[part], greedy[part])
        assert torch.equal(tokens[part], alone[0])
        assert torch.equal(q[part], alone[1])
    assert torch.equal(q[greedy].sort(dim=-1).values[..., -1], torch.ones(3, 4))
    assert (q[~greedy].sort(dim=-1).values[..., -1] < 1).all()


def test_greedy_walk_takes_the_first_of_equals():
    """Catches a last-maximum rule, which would differ between the sequential and the lattice form."""
    scores = torch.tensor([[[[1.0, 2.0, 2.0, 0.0]] * 4]])
    tokens, q = walk(scores, torch.tensor([[[9, 8, 7, 6]]]), [[0.99]], greedy=True)
    assert tokens.tolist() == [[8]]
    assert q.tolist() == [[[0, 1, 0, 0]]]


@pytest.mark.parametrize(
    ("uniform", "index"),
    [
        pytest.param(0.0, 0, id="u0"),
        pytest.param(0.25, 1, id="boundary"),
        pytest.param(0.999999, 3, id="u0.999999"),
        pytest.param(ALMOST_ONE, 3, id="last-below-1"),
        pytest.param(1.0, 3, id="u1"),
    ],
)
def test_walk_at_the_ends_of_the_unit_interval(uniform, index):
    """Catches `>` in place of `>=`, and an index one past the end where rounded masses sum to less than 1."""
    scores = torch.zeros(1, 3, 4, 4)
    candidate_ids = torch.arange(12).view(1, 3, 4)
    tokens, _ = walk(scores, candidate_ids, uniform)
    assert tokens.tolist() == [[index, 4 + index, 8 + index]]


@pytest.mark.parametrize("top_k", [3, 7, 16], ids="k{}".format)
def test_walk_never_leaves_the_candidates(top_k):
    """Catches an index past the end for laws whose float32 sum is under the largest uniform."""
    scores = torch.randn(2000, 1, 1, top_k).expand(-1, -1, top_k, -1)
    candidate_ids = torch.arange(top_k).expand(2000, 1, top_k)
    tokens, _ = walk(scores, candidate_ids, ALMOST_ONE)
    assert tokens.max() < top_k


@pytest.mark.parametrize("temperature", [0.0, 1e-9, MIN_TEMPERATURE], ids=["zero", "tiny", "limit"])
def test_walk_clamps_the_temperature(temperature):
    """Catches a division by zero: a sampled row at T = 0 is a greedy walk in all but name, with a finite q."""
    tokens, q = walk(LATTICE, CANDIDATES, 0.5, temperature)
    assert tokens.tolist() == [[5, 4]]
    assert torch.equal(q, torch.tensor([[[0.0, 0, 1], [0, 0, 1]]]))


def test_walk_with_large_scores():
    """Catches a softmax without the maximum subtracted."""
    tokens, q = walk(LATTICE + 3e4, CANDIDATES, [[0.10, 0.90]])
    assert tokens.tolist() == [[3, 2]]
    assert torch.isfinite(q).all()


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_walk_gives_no_mass_to_minus_infinity(greedy):
    """Catches a token of probability 0 that is drawn, at u = 0 most of all, and a NaN q although a score is finite."""
    scores = torch.full((5, 1, 3, 3), -INF)
    scores[..., 1] = -4.0
    uniforms = torch.tensor([[0.0], [0.3], [0.999999], [ALMOST_ONE], [0.5]])
    tokens, q = walk(scores, torch.tensor([[[4, 5, 6]]]).expand(5, -1, -1), uniforms, greedy=greedy)
    assert tokens.tolist() == [[5]] * 5
    assert torch.equal(q, torch.tensor([[[0.0, 1, 0]]]).expand(5, -1, -1))


@pytest.mark.parametrize(
    "poison",
    [
        pytest.param([-INF, -INF, -INF], id="all-minus-inf"),
        pytest.param([NAN, NAN, NAN], id="all-nan"),
        pytest.param([1.0, NAN, 2.0], id="one-nan"),
        pytest.param([INF, 0.0, INF], id="plus-inf"),
    ],
)
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_walk_marks_scores_that_make_no_distribution(poison, greedy):
    """Catches a broken row that looks like a proposal: argmax of NaN is an index, and a one-hot q hides it."""
    scores = torch.zeros(3, 2, 3, 3)
    scores[1, 1] = torch.tensor(poison)
    candidate_ids = torch.arange(6).view(1, 2, 3).expand(3, -1, -1)
    tokens, q = walk(scores, candidate_ids, 0.5, greedy=greedy)
    assert q[1, 1].isnan().all()
    assert torch.isfinite(q[[0, 2]]).all() and torch.isfinite(q[1, 0]).all()
    assert ((tokens >= 0) & (tokens < 6)).all()


def test_walk_draws_from_the_q_it_reports():
    """Catches a sampler whose law is not q: chi-square of the joint counts of three slots, 27 cells."""
    draws = 40_000
    generator = torch.Generator().manual_seed(1)
    scores = 0.7 * torch.randn(1, 3, 3, 3, generator=generator)
    uniforms = torch.rand(draws, 3, generator=generator)
    candidate_ids = torch.arange(9).view(1, 3, 3)
    temperature = 0.8
    tokens, q = walk(scores.expand(draws, -1, -1, -1), candidate_ids.expand(draws, -1, -1), uniforms, temperature)
    choices = tokens - torch.tensor([0, 3, 6])
    counts = torch.bincount(choices @ torch.tensor([9, 3, 1]), minlength=27)
    law = torch.softmax(scores[0].double() / temperature, dim=-1)
    expected = torch.zeros(27, dtype=torch.float64)
    for path in itertools.product(range(3), repeat=3):
        probability = law[0, 0, path[0]] * law[1, path[0], path[1]] * law[2, path[1], path[2]]
        expected[9 * path[0] + 3 * path[1] + path[2]] = draws * probability
    assert expected.min() > 5
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > CHI_SQUARE_LEVEL
    # The reported q of a slot is the law given the slot before it.
    torch.testing.assert_close(q[:, 1].double(), law[1, choices[:, 0]], atol=FP32_TOLERANCE, rtol=0)


# --------------------------------------------------------------------------------------------------------- acceptance


def test_drawn_probability():
    """Catches the k-th probability read in place of the token's, and a NaN elsewhere in the slot that spreads."""
    candidate_ids = torch.tensor([[[4, 9, 2], [7, 0, 1]], [[3, 1, 8], [5, 6, 2]]])
    q = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.7, 0.2]], [[0.6, NAN, 0.4], [0.25, 0.25, 0.5]]])
    tokens = torch.tensor([[9, 5], [8, 2]])
    expected = torch.tensor([[0.3, 0.0], [0.4, 0.5]])
    assert torch.equal(drawn_probability(tokens, candidate_ids, q), expected)
    assert drawn_probability(torch.tensor([[9, 5], [1, 2]]), candidate_ids, q)[1, 0].isnan()


@pytest.mark.parametrize("slots", [0, 1, 2, 3, 4], ids="slots{}".format)
def test_accept_greedy_exhaustively(slots):
    """Catches an off-by-one in the accepted length or the bonus, and a match after a miss that is counted."""
    cases = list(
        itertools.product(itertools.product(range(2), repeat=slots), itertools.product((0, 1), repeat=slots + 1))
    )
    tokens = torch.tensor([case[0] for case in cases], dtype=torch.long).view(len(cases), slots)
    predictions = torch.tensor([case[1] for case in cases])
    accepted, bonus = accept_greedy(tokens, predictions)
    for row, (draft, target) in enumerate(cases):
        length = next((i for i in range(slots) if draft[i] != target[i]), slots)
        assert accepted[row] == length
        assert bonus[row] == target[length]


def test_accept_sampled_is_the_strict_test():
    """Catches `<=` in place of `<`, p and q swapped, and tests that depend on their neighbours."""
    q_values, p_values = [0.25, 0.5, 1.0], [0.0, 0.125, 0.25, 0.5, 1.0]
    u_values = [0.0, 0.125, 0.25, 0.5, 0.75, ALMOST_ONE]
    cases = torch.tensor(list(itertools.product(q_values, p_values, u_values)))
    count = len(cases)
    candidate_ids = torch.tensor([2, 0]).expand(1, count, 2)
    q = torch.stack([cases[:, 0], 1 - cases[:, 0]], dim=-1)[None]
    probs = torch.zeros(1, count, 4)
    probs[0, :, 2] = cases[:, 1]
    passed = accept_sampled(torch.full((1, count), 2), candidate_ids, q, probs, cases[None, :, 2])
    assert passed.dtype == torch.bool
    assert passed[0].tolist() == [u * q < p for q, p, u in cases.tolist()]


@pytest.mark.parametrize("drawn", [0.0, NAN, INF, -0.5], ids=["zero", "nan", "inf", "negative"])
@pytest.mark.parametrize("uniform", [0.0, 0.5], ids="u{}".format)
def test_accept_sampled_refuses_an_impossible_q(drawn, uniform):
    """Catches `0 < p`, which keeps a token that q says was never drawn, and NaN that compares its way through."""
    q = torch.tensor([[[drawn, 0.5]]])
    passed = accept_sampled(
        torch.tensor([[3]]), torch.tensor([[[3, 1]]]), q, torch.ones(1, 1, 5), torch.tensor([[uniform]])
    )
    assert not passed.any()


def test_accept_sampled_refuses_a_token_that_is_no_candidate():
    """Catches a stale token beside fresh candidates: its q is 0, so it is refused although p is large."""
    passed = accept_sampled(
        torch.tensor([[4]]),
        torch.tensor([[[3, 1]]]),
        torch.full((1, 1, 2), 0.5),
        torch.ones(1, 1, 5),
        torch.zeros(1, 1),
    )
    assert not passed.any()


# ----------------------------------------------------------------------------------------------------------- residual

GOLDEN_P = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1, 0.0]])
GOLDEN_Q_IDS, GOLDEN_Q = torch.tensor([[0, 2]]), torch.tensor([[0.6, 0.4]])


def test_residual_golden():
    """Catches an absolute difference, a residual that is not normalised, and q scattered to the wrong ids."""
    residual = residual_distribution(GOLDEN_P, GOLDEN_Q_IDS, GOLDEN_Q)
    torch.testing.assert_close(residual, torch.tensor([[0, 0.5, 0, 0.25, 0.25, 0]]), atol=GOLDEN_TOLERANCE, rtol=0)
    # The limit of the accept test is the ratio: 5/6 for token 0, 1/4 for token 2.
    for token, ratio in ((0, 5 / 6), (2, 1 / 4)):
        for uniform, kept in ((ratio - 1e-4, True), (ratio + 1e-4, False)):
            passed = accept_sampled(
                torch.tensor([[token]]),
                GOLDEN_Q_IDS[None],
                GOLDEN_Q[None],
                GOLDEN_P[None],
                torch.tensor([[uniform]]),
            )
            assert bool(passed) is kept


def test_residual_of_a_one_hot_q_removes_the_token():
    """Catches a refused token that comes back as its own replacement."""
    probs = torch.softmax(torch.randn(8, 12), dim=-1)
    refused = torch.randint(0, 12, (8, 1))
    residual = residual_distribution(probs, refused, torch.ones(8, 1))
    expected = probs.scatter(1, refused, 0.0)
    torch.testing.assert_close(residual, expected / expected.sum(-1, keepdim=True), atol=FP32_TOLERANCE, rtol=0)
    assert (residual.gather(1, refused) == 0).all()


@pytest.mark.parametrize(
    ("p", "ids", "q"),
    [
        pytest.param([0.25, 0.75, 0.0], [0, 1], [0.25, 0.75], id="q-is-p"),
        pytest.param([0.0, 1.0, 0.0], [1, 2], [1.0, 0.0], id="one-hot"),
        pytest.param([0.5, 0.5, 0.0], [0, 1], [0.75, 0.5], id="q-above-p"),
    ],
)
def test_residual_without_mass_is_p(p, ids, q):
    """Catches 0 / 0, which ends in an error of the sampler, and a fallback to the last id of the vocabulary."""
    probs = torch.tensor([p])
    assert torch.equal(residual_distribution(probs, torch.tensor([ids]), torch.tensor([q])), probs)


def test_residual_counts_what_is_not_finite_as_zero():
    """Catches a NaN of the drafter that reaches the target's distribution."""
    probs = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    residual = residual_distribution(probs, torch.tensor([[0, 1, 2]]), torch.tensor([[NAN, INF, 0.25]]))
    torch.testing.assert_close(residual, torch.tensor([[2 / 3, 1 / 3, 0, 0]]), atol=FP32_TOLERANCE, rtol=0)


def test_residual_leaves_its_inputs_alone():
    """Catches an in-place subtraction from the target's distribution, which the accept step reads again."""
    probs, q = GOLDEN_P.clone(), GOLDEN_Q.clone()
    residual_distribution(probs, GOLDEN_Q_IDS, q)
    assert torch.equal(probs, GOLDEN_P) and torch.equal(q, GOLDEN_Q)


def random_p_and_q(rows, vocab, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, vocab, generator=generator)
    # Zeros as a target's top-k leaves them, some of them where q has mass.
    logits = logits.masked_fill(torch.rand(rows, vocab, generator=generator) < 0.3, -INF)
    probs = torch.softmax(logits, dim=-1)
    ids = torch.rand(rows, vocab, generator=generator).argsort(dim=-1)[:, :top_k]
    return probs, ids, torch.softmax(2 * torch.randn(rows, top_k, generator=generator), dim=-1)


@pytest.mark.parametrize("top_k", [1, 3, 16], ids="k{}".format)
def test_speculative_sampling_is_exact(top_k):
    """Catches any slip in accept or residual: q min(1, p/q) + P(refused) residual is p, token by token, in float64."""
    probs, ids, q = random_p_and_q(200, 20, top_k)
    p64 = probs.double()
    dense_q = torch.zeros_like(p64).scatter(1, ids, q.double())
    kept = torch.minimum(dense_q, p64)
    refused = 1 - kept.sum(dim=-1, keepdim=True)
    total = kept + refused * residual_distribution(probs, ids, q).double()
    torch.testing.assert_close(total, p64, atol=FP32_TOLERANCE, rtol=0)


def test_draw_accept_and_replace_follow_p():
    """Catches a correlation between the draw and its test, or ops that do not fit together: chi-square against p."""
    draws = 60_000
    generator = torch.Generator().manual_seed(2)
    probs, ids, _ = random_p_and_q(1, 8, 4, seed=3)
    scores = torch.randn(1, 1, 1, 4, generator=generator).expand(draws, 1, 4, 4)
    candidate_ids = ids[None].expand(draws, 1, 4)
    tokens, q = walk(scores, candidate_ids, torch.rand(draws, 1, generator=generator))
    law = probs.expand(draws, 1, -1)
    passed = accept_sampled(tokens, candidate_ids, q, law, torch.rand(draws, 1, generator=generator))
    residual = residual_distribution(probs, ids, q[0, :1])
    replacements = torch.multinomial(residual[0], draws, replacement=True, generator=generator)
    output = torch.where(passed[:, 0], tokens[:, 0], replacements)
    counts = torch.bincount(output, minlength=8)
    support = probs[0] > 0
    assert counts[~support].sum() == 0
    expected = draws * probs[0, support].double()
    expected *= draws / expected.sum()
    assert 0.1 < passed.double().mean() < 0.9
    assert stats.chisquare(counts[support].numpy(), expected.numpy()).pvalue > CHI_SQUARE_LEVEL
    # The rate of acceptance is the overlap of p and q, within four standard errors.
    overlap = float(torch.minimum(probs[0], torch.zeros(8).scatter(0, ids[0], q[0, 0])).sum())
    assert abs(float(passed.double().mean()) - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / draws)


def test_committed_block():
    """Catches a drafted token that is kept too many, a following token at the wrong place, and missing padding."""
    tokens = torch.tensor([[11, 12, 13]]).repeat(4, 1)
    accepted, following = torch.tensor([0, 1, 2, 3]), torch.tensor([21, 22, 23, 24])
    expected = [[21, 9, 9, 9], [11, 22, 9, 9], [11, 12, 23, 9], [11, 12, 13, 24]]
    assert committed_block(tokens, accepted, following, 9).tolist() == expected
    assert committed_block(tokens, accepted, following, torch.tensor(9)).tolist() == expected
    assert committed_block(tokens[:, :0], torch.zeros(4, dtype=torch.long), following, 9).tolist() == [
        [21],
        [22],
        [23],
        [24],
    ]

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
"""The kernel of one DSpark slot against its reference and float64, and whole blocks through it."""

import math

import pytest
import torch


pytest.importorskip("triton")

from dspark_checks import HEADS, exact_markov, markov_head  # noqa: E402
from kernel_checks import DTYPES, opcheck, relative_rms  # noqa: E402

from transformers_dflash2 import modeling_dspark  # noqa: E402
from transformers_dflash2.functional_dspark import markov_step  # noqa: E402
from transformers_dflash2.kernels import dispatch as dispatch_module  # noqa: E402
from transformers_dflash2.kernels import markov_step as module  # noqa: E402
from transformers_dflash2.kernels.markov_step import (  # noqa: E402
    markov_step_ineligible_reason,
    markov_step_op,
    markov_step_triton,
)


# Relative RMS of float32 sums over the rank, in any input type: nothing is rounded in between.
LOGITS_RELATIVE_RMS = 1e-6
NAN, INF = math.nan, math.inf
NAMES = ("base", "code", "successor", "noise", "temperatures", "greedy_mask")


def step_inputs(device, batch=3, candidates=70, rank=5, dtype=torch.float32, rows=None):
    """Every other row is greedy; temperatures differ."""
    inputs = (
        3 * torch.randn(batch, candidates),
        torch.randn(batch, rank),
        torch.randn(rows or candidates, rank).to(dtype),
        torch.empty(batch, candidates).exponential_(),
        torch.rand(batch) + 0.5,
        torch.arange(batch) % 2 == 1,
    )
    return {name: tensor.to(device) for name, tensor in zip(NAMES, inputs, strict=True)}


def assert_same_step(actual, expected):
    for logits, index in (actual, expected):
        assert logits.dtype == torch.float32 and index.dtype == torch.int64
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0], expected[0], atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("noise", [True, False], ids=["noise", "all-greedy"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "candidates", "rank"),
    [
        pytest.param(1, 1, 1, id="one-of-everything"),
        pytest.param(3, 5, 3, id="less-than-a-tile"),
        pytest.param(2, 64, 8, id="one-tile"),
        pytest.param(2, 333, 33, id="several-tiles"),
    ],
)
def test_equals_the_reference(device, dtype, batch, candidates, rank, noise):
    """Catches lanes past the candidates or the rank, a row that reads another's, and a bias in a half type."""
    inputs = step_inputs(device, batch, candidates, rank, dtype)
    if not noise:
        inputs["noise"] = None
    actual = markov_step_triton(**inputs)
    assert_same_step(actual, markov_step(**inputs))
    exact = inputs["base"].double() + inputs["code"].double() @ inputs["successor"].double().T
    assert relative_rms(actual[0], exact) < LOGITS_RELATIVE_RMS


@pytest.mark.parametrize("rows", [70, 40], ids=["whole-table", "fewer-rows"])
def test_chosen_rows_of_the_table(device, rows):
    """Catches a bias of the candidate's place instead of its row."""
    inputs = step_inputs(device, 3, 17, rows=rows)
    chosen = torch.stack([torch.randperm(rows)[:17] for _ in range(3)]).to(device)
    assert_same_step(markov_step_triton(**inputs, successor_rows=chosen), markov_step(**inputs, successor_rows=chosen))


def test_rows_that_the_table_does_not_have_are_not_read(device):
    """Catches an address made of a placeholder id: it contributes nothing."""
    inputs = step_inputs(device, 2, 3, rows=9)
    rows = torch.tensor([[0, -1, 2**40], [8, 9, 1]], device=device)
    logits, _ = markov_step_triton(**inputs, successor_rows=rows)
    assert torch.equal(logits[0, 1:], inputs["base"][0, 1:]) and logits[1, 1] == inputs["base"][1, 1]


def test_rank_in_several_pieces(device, monkeypatch):
    """Catches a partial sum over the rank that is overwritten or read from the first piece again."""
    monkeypatch.setattr(module, "_TILE", 1)
    inputs = step_inputs(device, 2, 70, rank=37)
    assert_same_step(markov_step_triton(**inputs), markov_step(**inputs))


def test_first_of_equals_across_tiles(device):
    """Catches a last-maximum rule inside a tile or between tiles."""
    inputs = step_inputs(device, 4, 300)
    inputs["code"].zero_()
    inputs["base"][:] = -1.0
    for row, places in enumerate(([3, 5], [70, 200], [0, 299], [64, 63])):
        inputs["base"][row, places] = 2.0
    inputs["noise"] = None
    assert markov_step_triton(**inputs)[1].tolist() == [3, 70, 0, 63]


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])
def test_rows_that_are_not_finite(device, value):
    """Catches a NaN that loses against a number, and one that reaches another row."""
    inputs = step_inputs(device, 4, 150)
    clean = markov_step_triton(**inputs)
    inputs["base"][0:2, [20, 90, 149]] = value
    actual = markov_step_triton(**inputs)
    assert_same_step(actual, markov_step(**inputs))
    for before, after in zip(clean, actual, strict=True):
        assert torch.equal(before[2:], after[2:])


def test_all_excluded(device):
    """Catches an index past the candidates where no entry is a maximum."""
    inputs = step_inputs(device, 2, 100)
    inputs["base"][:] = -INF
    assert markov_step_triton(**inputs)[1].tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5], ids="t{}".format)
def test_smallest_temperature_and_noise(device, temperature):
    """Catches a division by zero, and a variate of zero that lifts an excluded token to NaN."""
    inputs = step_inputs(device, 2, 70)
    inputs["temperatures"][:] = temperature
    inputs["noise"][:, ::2] = 0.0
    inputs["base"][:, :4] = -INF
    actual = markov_step_triton(**inputs)
    assert_same_step(actual, markov_step(**inputs))
    assert (actual[1] > 3).all()


def test_strided_inputs(device):
    """Catches contiguous addressing: a slot is a slice of the block's logits and noise."""
    inputs = step_inputs(device, 3, 70)
    expected = markov_step_triton(**inputs)
    strided = dict(inputs)
    for name in ("base", "noise"):
        block = torch.zeros(3, 4, 80, device=device)
        block[:, 2, 5:75] = inputs[name]
        strided[name] = block[:, 2, 5:75]
    strided["successor"] = torch.zeros(70, 9, device=device)[:, 1:6].copy_(inputs["successor"])
    strided["code"] = torch.zeros(3, 8, device=device)[:, 2:7].copy_(inputs["code"])
    assert_same_step(markov_step_triton(**strided), expected)


def test_writes_into_buffers(device):
    """Catches output buffers that are ignored or only partly written."""
    inputs = step_inputs(device)
    out = torch.full((3, 70), NAN, device=device), torch.full((3,), -1, device=device)
    returned = markov_step_triton(**inputs, out=out)
    assert returned[0] is out[0] and returned[1] is out[1]
    assert_same_step(out, markov_step(**inputs))


def test_nothing_to_do(device):
    """Catches an empty grid, which a launch refuses."""
    logits, index = markov_step_triton(**step_inputs(device, batch=0))
    assert logits.shape == (0, 70) and index.shape == (0,)


@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        pytest.param("base", lambda x: x[0], "base has shape", id="base-shape"),
        pytest.param("base", lambda x: x[:, :0], "base has no candidates", id="no-candidates"),
        pytest.param("base", lambda x: x.double(), "base is float64", id="base-dtype"),
        pytest.param("base", lambda x: x.mT.contiguous().mT, "base has stride", id="base-stride"),
        pytest.param("code", lambda x: x[:1], "code has shape", id="code-shape"),
        pytest.param("successor", lambda x: x[:, :4], "successor has shape", id="rank"),
        pytest.param("successor", lambda x: x[:60], "successor has 60 rows for 70 candidates", id="rows"),
        pytest.param("noise", lambda x: x[:, :1], "noise has shape", id="noise-shape"),
        pytest.param("noise", lambda x: x.half(), "noise is float16", id="noise-dtype"),
        pytest.param("temperatures", lambda x: x[:1], "temperatures has shape", id="temperatures"),
        pytest.param("greedy_mask", lambda x: x.long(), "greedy_mask is int64", id="greedy"),
    ],
)
def test_reasons(device, name, edit, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    inputs = step_inputs(device)
    assert markov_step_ineligible_reason(**inputs) is None
    inputs[name] = edit(inputs[name])
    assert reason in markov_step_ineligible_reason(**inputs)
    with pytest.raises(ValueError, match="markov_step_triton: "):
        markov_step_triton(**inputs)


def test_reasons_of_optional_tensors(device):
    """Catches row numbers or buffers of another type, whose bits would be read as something else."""
    inputs = step_inputs(device)
    rows = torch.zeros(3, 70, dtype=torch.int32, device=device)
    assert "successor_rows is int32" in markov_step_ineligible_reason(**inputs, successor_rows=rows)
    logits, index = markov_step_triton(**inputs)
    assert "out[0] is float16" in markov_step_ineligible_reason(**inputs, out=(logits.half(), index))
    assert "out[1] is int32" in markov_step_ineligible_reason(**inputs, out=(logits, index.int()))


@pytest.mark.parametrize("options", ["noise", "greedy", "rows"])
def test_operator(device, options):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    inputs = step_inputs(device, 2, 9)
    if options == "greedy":
        inputs["noise"] = None
    arguments = tuple(inputs.values())
    if options == "rows":
        arguments += (torch.arange(9, device=device).expand(2, -1).contiguous(),)
    opcheck(markov_step_op, *arguments)
    compiled = torch.compile(lambda *args: markov_step_op(*args), fullgraph=True, backend="aot_eager")
    expected = markov_step_triton(**inputs)
    for actual, wanted in zip(compiled(*arguments), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", HEADS)
def test_whole_blocks_through_the_kernel(device, kind, sampled, monkeypatch):
    """Catches a slot that is given another slot's logits or noise: eager, kernel and float64 draft one block."""
    head, batch, slots = markov_head(kind).to(device), 2, 4
    hidden, base = torch.randn(batch, slots, 6, device=device), 3 * torch.randn(batch, slots, 11, device=device)
    noise = torch.empty(batch, slots, 11, device=device).exponential_() if sampled else None
    ids = torch.arange(11, device=device).expand(base.shape)
    anchors, greedy = torch.tensor([0, 9], device=device), torch.full((batch,), not sampled, device=device)
    arguments = (hidden, base, ids, anchors, noise, torch.full((batch,), 0.7, device=device), greedy)
    taken = []

    def through_the_kernel(op, reference, *args, **kwargs):
        assert dispatch_module.ineligible_reason(op, *args, **kwargs) is None
        taken.append(op)
        return dispatch_module.dispatch(op, reference, *args, **kwargs)

    monkeypatch.setattr(modeling_dspark, "_fast", lambda op, reference, *args, **kwargs: reference(*args, **kwargs))
    eager = head(*arguments)
    monkeypatch.setattr(modeling_dspark, "_fast", through_the_kernel)
    fast = head(*arguments)
    assert taken == ["markov_step"] * slots
    assert torch.equal(fast[0], eager[0]) and torch.equal(fast[2], eager[2])
    torch.testing.assert_close(fast[1], eager[1], atol=1e-5, rtol=1e-5)
    for row in range(batch):
        tokens, logits, _ = exact_markov(
            head.cpu(),
            hidden[row].cpu(),
            base[row].cpu(),
            range(11),
            anchors[row],
            noise=noise[row].cpu() if sampled else None,
            temperature=0.7,
        )
        assert fast[0][row].tolist() == tokens
        torch.testing.assert_close(fast[1][row].double().cpu(), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 16])
def test_at_a_real_size(device, batch):
    """Catches offsets that overflow, and registers that run out, at the sizes of published drafters."""
    inputs = step_inputs(device, batch, 151_936, 256, torch.bfloat16)
    inputs["code"] /= 16
    assert_same_step(markov_step_triton(**inputs), markov_step(**inputs))

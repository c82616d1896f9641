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
"""The gated norm kernel against the reference, the host's module and float64."""

import math

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated


pytest.importorskip("triton")

from kernel_checks import DTYPES, assert_as_exact_as, opcheck, relative_rms  # noqa: E402

from transformers_dflash2.kernels.gated_rms_norm import (  # noqa: E402
    gated_rms_norm_ineligible_reason,
    gated_rms_norm_op,
    gated_rms_norm_reference,
    gated_rms_norm_triton,
)


EPS = 1e-6


def gated_norm_inputs(device, shape, dtype=torch.float32):
    tensors = torch.randn(shape), 3 * torch.randn(shape), 1 + 0.1 * torch.randn(shape[-1])
    return [tensor.to(device, dtype) for tensor in tensors]


def exact_gated_norm(hidden, gate, weight):
    hidden, gate, weight = hidden.double(), gate.double(), weight.double()
    normed = weight * hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + EPS)
    return normed * gate * torch.sigmoid(gate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 32), (4, 1, 100)], ids=str)
def test_equals_the_reference(device, dtype, shape):
    """Catches lanes past the row in the mean, and a row that is gated by another."""
    inputs = gated_norm_inputs(device, shape, dtype)
    assert_as_exact_as(
        gated_rms_norm_triton(*inputs, eps=EPS), gated_rms_norm_reference(*inputs, eps=EPS), exact_gated_norm(*inputs)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Qwen3_5RMSNormGated, Qwen3NextRMSNormGated])
def test_reference_equals_the_host(device, dtype, kind):
    """Catches another rounding order than the modules that the kernel stands in for."""
    hidden, gate, weight = gated_norm_inputs(device, (3, 7, 24), dtype)
    module = kind(24, eps=EPS).to(device, dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        assert torch.equal(gated_rms_norm_reference(hidden, gate, weight, eps=EPS), module(hidden, gate))


def test_rounds_as_often_as_the_host(device):
    """Catches one rounding in place of the host's three: most outputs would differ in the last place."""
    inputs = gated_norm_inputs(device, (40, 64), torch.float16)
    actual, expected = gated_rms_norm_triton(*inputs, eps=EPS), gated_rms_norm_reference(*inputs, eps=EPS)
    # A mean in another order can still move a value across a rounding boundary.
    assert (actual == expected).float().mean() > 0.99


def test_rows_are_independent(device):
    """Catches a NaN that reaches a neighbouring row, or through its gate a neighbouring value."""
    hidden, gate, weight = gated_norm_inputs(device, (4, 6))
    clean = gated_rms_norm_triton(hidden, gate, weight, eps=EPS)
    hidden[1, 2] = math.nan
    gate[2, 0] = math.nan
    actual = gated_rms_norm_triton(hidden, gate, weight, eps=EPS)
    assert torch.equal(actual[[0, 3]], clean[[0, 3]]) and torch.equal(actual[2, 1:], clean[2, 1:])
    assert actual[1].isnan().all() and actual[2, 0].isnan()


def test_epsilon_and_extreme_gates(device):
    """Catches an epsilon of the wrong size, and an exponential that overflows where the result is 0."""
    hidden, gate, weight = gated_norm_inputs(device, (3, 5))
    inputs = 1e-3 * hidden, gate, weight
    assert relative_rms(gated_rms_norm_triton(*inputs, eps=EPS), exact_gated_norm(*inputs)) < 1e-5
    closed = gated_rms_norm_triton(hidden, torch.full_like(gate, -1e4), weight, eps=EPS)
    assert torch.equal(closed, torch.zeros_like(closed))


def test_in_place_and_empty(device):
    """Catches a row that is overwritten before it is read, and an empty grid, which a launch refuses."""
    hidden, gate, weight = gated_norm_inputs(device, (5, 33))
    expected = gated_rms_norm_triton(hidden, gate, weight, eps=EPS)
    for index in range(2):
        inputs = [hidden.clone(), gate.clone()]
        assert gated_rms_norm_triton(*inputs, weight, eps=EPS, out=inputs[index]) is inputs[index]
        assert torch.equal(inputs[index], expected)
    assert gated_rms_norm_triton(hidden[:0], gate[:0], weight, eps=EPS).shape == (0, 33)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"hidden": lambda x: x.double()}, "hidden is float64", id="double"),
        pytest.param({"hidden": lambda x: x.transpose(0, 1)}, "hidden has strides", id="rows-apart"),
        pytest.param({"hidden": lambda x: x[0, 0, 0]}, "rows of 1 to", id="scalar"),
        pytest.param({"gate": lambda x: x.half()}, "gate is float16", id="gate-dtype"),
        pytest.param({"gate": lambda x: x[:1]}, "gate has shape", id="gate-shape"),
        pytest.param({"weight": lambda x: x.half()}, "weight is float16", id="weight-dtype"),
        pytest.param({"weight": lambda x: x[1:]}, "weight has shape", id="weight-shape"),
        pytest.param({"out": lambda x: torch.empty(3, 3, 5)}, "out has shape", id="out"),
    ],
)
def test_reasons(device, change, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    hidden, gate, weight = gated_norm_inputs(device, (3, 3, 4))
    arguments = {"hidden": hidden, "gate": gate, "weight": weight, "out": torch.empty_like(hidden)}
    assert gated_rms_norm_ineligible_reason(**arguments, eps=EPS) is None
    for name, edit in change.items():
        arguments[name] = edit(arguments[name]).to(device)
    assert reason in gated_rms_norm_ineligible_reason(**arguments, eps=EPS)
    with pytest.raises(ValueError, match="gated_rms_norm_triton: "):
        gated_rms_norm_triton(**arguments, eps=EPS)


def test_operator(device):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    inputs = gated_norm_inputs(device, (2, 3, 8))
    opcheck(gated_rms_norm_op, *inputs, EPS)
    compiled = torch.compile(lambda *args: gated_rms_norm_op(*args, EPS), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), gated_rms_norm_triton(*inputs, eps=EPS))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [48, 8 * 16 * 48], ids="r{}".format)
def test_at_a_real_size(device, rows):
    """Catches rounding and rows that only the type and sizes of published models show."""
    inputs = gated_norm_inputs(device, (rows, 128), torch.bfloat16)
    actual, expected = gated_rms_norm_triton(*inputs, eps=EPS), gated_rms_norm_reference(*inputs, eps=EPS)
    assert_as_exact_as(actual, expected, exact_gated_norm(*inputs))
    assert (actual == expected).float().mean() > 0.99

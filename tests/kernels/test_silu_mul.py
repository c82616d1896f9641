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
"""The gated activation by a kernel against the reference and float64."""

import math

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import DTYPES, assert_as_exact_as, opcheck  # noqa: E402

from transformers_dflash2.kernels.silu_mul import (  # noqa: E402
    silu_mul_ineligible_reason,
    silu_mul_op,
    silu_mul_reference,
    silu_mul_triton,
)


def gated_inputs(device, shape, dtype=torch.float32):
    return [(3 * torch.randn(shape)).to(device, dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 512), (2, 700)], ids=str)
def test_equals_the_reference(device, dtype, shape):
    """Catches lanes past the end, gate and up that are swapped, and another rounding than the host's two."""
    gate, up = gated_inputs(device, shape, dtype)
    values = gate.double()
    assert_as_exact_as(
        silu_mul_triton(gate, up), silu_mul_reference(gate, up), values * torch.sigmoid(values) * up.double()
    )


def test_extreme_values(device):
    """Catches an exponential that overflows where the result is 0, and a NaN that reaches its neighbours."""
    gate = torch.tensor([-1e4, 1e4, 0.0, math.nan, -math.inf, 1.0], device=device)
    actual = silu_mul_triton(gate, torch.ones_like(gate))
    expected = silu_mul_reference(gate, torch.ones_like(gate))
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.allclose(actual[[0, 1, 2, 5]], expected[[0, 1, 2, 5]])


def test_in_place_and_empty(device):
    """Catches a buffer that is ignored, and an empty grid, which a launch refuses."""
    gate, up = gated_inputs(device, (4, 6))
    expected = silu_mul_triton(gate, up)
    assert silu_mul_triton(gate, up, out=up) is up and torch.equal(up, expected)
    assert silu_mul_triton(gate[:0], up[:0]).shape == (0, 6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"gate": lambda x: x.double()}, "gate is float64", id="double"),
        pytest.param({"gate": lambda x: x.t(), "up": lambda x: x.t()}, "gate has strides", id="transposed"),
        pytest.param({"up": lambda x: x.half()}, "up is float16", id="up-dtype"),
        pytest.param({"up": lambda x: x[1:]}, "up has shape", id="up-shape"),
    ],
)
def test_reasons(device, change, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    gate, up = gated_inputs(device, (3, 4))
    arguments = {"gate": gate, "up": up}
    assert silu_mul_ineligible_reason(**arguments) is None
    for name, edit in change.items():
        arguments[name] = edit(arguments[name])
    # A square has the same shape both ways round.
    assert reason.split(" has strides")[0] in silu_mul_ineligible_reason(**arguments)
    with pytest.raises(ValueError, match="silu_mul_triton: "):
        silu_mul_triton(**arguments)


def test_operator(device):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    gate, up = gated_inputs(device, (2, 3, 8))
    opcheck(silu_mul_op, gate, up)
    compiled = torch.compile(silu_mul_op, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(gate, up), silu_mul_triton(gate, up))

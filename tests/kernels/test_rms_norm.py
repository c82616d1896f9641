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
"""The norm kernel against the reference, the host's module and float64."""

import math

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm


pytest.importorskip("triton")

from kernel_checks import DTYPES, assert_as_exact_as, opcheck, relative_rms  # noqa: E402

from transformers_dflash2.kernels.rms_norm import (  # noqa: E402
    add_rms_norm_op,
    rms_norm_ineligible_reason,
    rms_norm_op,
    rms_norm_reference,
    rms_norm_triton,
)


EPS = 1e-6
OFFSETS = pytest.mark.parametrize("unit_offset", [False, True], ids=["weight", "one-plus-weight"])


def norm_inputs(device, shape, dtype=torch.float32):
    tensors = torch.randn(shape), torch.randn(shape), 1 + 0.1 * torch.randn(shape[-1])
    return [tensor.to(device, dtype) for tensor in tensors]


def exact_norm(hidden, weight, residual=None, unit_offset=False):
    summed = hidden.double() if residual is None else hidden.double() + residual.double()
    return (weight.double() + unit_offset) * summed * torch.rsqrt(summed.square().mean(dim=-1, keepdim=True) + EPS)


@OFFSETS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 32), (4, 1, 100)], ids=str)
def test_equals_the_reference(device, dtype, with_residual, shape, unit_offset):
    """Catches lanes past the row in the mean, a sum that is not returned or not rounded, and an offset left out."""
    hidden, residual, weight = norm_inputs(device, shape, dtype)
    options = {"eps": EPS, "unit_offset": unit_offset, "residual": residual if with_residual else None}
    normed, summed = rms_norm_triton(hidden, weight, **options)
    expected_normed, expected_summed = rms_norm_reference(hidden, weight, **options)
    assert torch.equal(summed, expected_summed)
    assert_as_exact_as(normed, expected_normed, exact_norm(hidden, weight, options["residual"], unit_offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Qwen3_5RMSNorm, Qwen3NextRMSNorm, Gemma3RMSNorm])
def test_reference_equals_the_host(device, dtype, kind):
    """Catches another rounding order than the modules that the kernel stands in for."""
    hidden, residual, weight = norm_inputs(device, (3, 7, 24), dtype)
    module = kind(24, eps=EPS).to(device, dtype)
    options = {"eps": EPS, "unit_offset": kind is not Qwen3RMSNorm, "residual": residual}
    with torch.no_grad():
        module.weight.copy_(weight)
        normed, summed = rms_norm_reference(hidden, weight, **options)
        assert torch.equal(normed, module(hidden + residual))
    assert torch.equal(summed, hidden + residual)


@OFFSETS
def test_rounds_as_often_as_the_host(device, unit_offset):
    """Catches one rounding in place of two, or the reverse: half of all outputs would differ in the last place."""
    hidden, residual, weight = norm_inputs(device, (40, 64), torch.float16)
    options = {"eps": EPS, "unit_offset": unit_offset, "residual": residual}
    normed, _ = rms_norm_triton(hidden, weight, **options)
    expected, _ = rms_norm_reference(hidden, weight, **options)
    # A mean in another order can still move a value across a rounding boundary.
    assert (normed == expected).float().mean() > 0.99


def test_rows_are_independent(device):
    """Catches a NaN that reaches a neighbouring row."""
    hidden, residual, weight = norm_inputs(device, (4, 6))
    clean, _ = rms_norm_triton(hidden, weight, eps=EPS, residual=residual)
    residual[1, 2] = math.nan
    hidden[2, 0] = math.inf
    normed, _ = rms_norm_triton(hidden, weight, eps=EPS, residual=residual)
    assert torch.equal(normed[[0, 3]], clean[[0, 3]])
    assert normed[1].isnan().all() and not torch.isfinite(normed[2, 0])


def test_row_of_zeros(device):
    """Catches an epsilon that is left out."""
    normed, _ = rms_norm_triton(torch.zeros(2, 5, device=device), torch.ones(5, device=device), eps=EPS)
    assert torch.equal(normed, torch.zeros(2, 5, device=device))


def test_epsilon_counts(device):
    """Catches an epsilon outside the root, or of the wrong size."""
    hidden, _, weight = norm_inputs(device, (3, 5))
    normed, _ = rms_norm_triton(1e-3 * hidden, weight, eps=EPS)
    assert relative_rms(normed, exact_norm(1e-3 * hidden, weight)) < 1e-5


def test_strided_rows(device):
    """Catches contiguous addressing of rows that are a slice of wider ones."""
    hidden, residual, weight = norm_inputs(device, (2, 3, 8))
    wide = torch.randn(2, 3, 20, device=device)
    view = wide[..., 4:12].copy_(hidden)
    expected, _ = rms_norm_triton(hidden, weight, eps=EPS, residual=residual)
    normed, summed = rms_norm_triton(view, weight, eps=EPS, residual=residual)
    # Another alignment may sum in another order.
    assert relative_rms(normed, expected) < 1e-6 and torch.equal(summed, hidden + residual)
    first = torch.randn(2, 5, 8, device=device)[:, :1].copy_(hidden[:, :1])
    normed, _ = rms_norm_triton(first, weight, eps=EPS)
    assert relative_rms(normed, rms_norm_triton(hidden[:, :1].contiguous(), weight, eps=EPS)[0]) < 1e-6


def test_in_place(device):
    """Catches a row that is overwritten before it is read: the sum may replace the residual, the norm the input."""
    hidden, residual, weight = norm_inputs(device, (5, 33))
    expected = rms_norm_triton(hidden, weight, eps=EPS, residual=residual)
    normed, summed = rms_norm_triton(hidden, weight, eps=EPS, residual=residual, out=(hidden, residual))
    assert normed is hidden and summed is residual
    assert torch.equal(normed, expected[0]) and torch.equal(summed, expected[1])


def test_empty(device):
    """Catches an empty grid, which a launch refuses."""
    hidden, residual, weight = norm_inputs(device, (0, 4))
    assert rms_norm_triton(hidden, weight, eps=EPS, residual=residual)[1].shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"hidden": lambda x: x.double()}, "hidden is float64", id="double"),
        pytest.param({"hidden": lambda x: x[..., ::2]}, "hidden has stride", id="values-apart"),
        pytest.param({"hidden": lambda x: x.transpose(0, 1)}, "no sequence of rows", id="rows-out-of-order"),
        pytest.param({"weight": lambda x: x.half()}, "weight is float16", id="weight-dtype"),
        pytest.param({"weight": lambda x: x[1:]}, "weight has shape", id="weight-shape"),
        pytest.param({"residual": lambda x: x[:1]}, "residual has shape", id="residual-shape"),
        pytest.param({"out": lambda x: (torch.zeros(3, 3, 4), torch.zeros(1))}, "out[1] has shape", id="out"),
    ],
)
def test_reasons(device, change, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    hidden, residual, weight = norm_inputs(device, (3, 3, 4))
    arguments = {"hidden": hidden, "weight": weight, "residual": residual, "out": None}
    assert rms_norm_ineligible_reason(**arguments, eps=EPS) is None
    for name, edit in change.items():
        arguments[name] = edit(arguments[name])
    if "out" in change:
        arguments["out"] = tuple(buffer.to(device) for buffer in arguments["out"])
    elif reason.startswith("hidden has stride"):
        arguments["weight"], arguments["residual"] = weight[::2].contiguous(), None
    assert reason in rms_norm_ineligible_reason(**arguments, eps=EPS)
    with pytest.raises(ValueError, match="rms_norm_triton: "):
        rms_norm_triton(**arguments, eps=EPS)


def test_operators(device):
    """Catches a schema, fake or compiled form of the operations that disagrees with the real one."""
    hidden, residual, weight = norm_inputs(device, (2, 3, 8))
    opcheck(rms_norm_op, hidden, weight, EPS, True)
    opcheck(add_rms_norm_op, hidden, residual, weight, EPS)
    assert torch.equal(
        rms_norm_op(hidden, weight, EPS, True), rms_norm_triton(hidden, weight, eps=EPS, unit_offset=True)[0]
    )
    compiled = torch.compile(lambda *args: add_rms_norm_op(*args, EPS, True), fullgraph=True, backend="aot_eager")
    expected = rms_norm_triton(hidden, weight, eps=EPS, unit_offset=True, residual=residual)
    for actual, wanted in zip(compiled(hidden, residual, weight), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.gpu
@OFFSETS
@pytest.mark.parametrize("hidden_size", [4096, 5120, 6656], ids="h{}".format)
def test_at_a_real_size(device, hidden_size, unit_offset):
    """Catches rows that do not fit one program, in the type and sizes of published models."""
    hidden, residual, weight = norm_inputs(device, (512, hidden_size), torch.bfloat16)
    options = {"eps": EPS, "unit_offset": unit_offset, "residual": residual}
    normed, summed = rms_norm_triton(hidden, weight, **options)
    expected = rms_norm_reference(hidden, weight, **options)
    assert torch.equal(summed, expected[1])
    assert_as_exact_as(normed, expected[0], exact_norm(hidden, weight, residual, unit_offset))
    assert (normed == expected[0]).float().mean() > 0.99

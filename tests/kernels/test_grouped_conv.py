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
"""The grouped convolution kernel against the reference and a float64 sum."""

import math

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import DTYPES, assert_as_exact_as, opcheck, relative_rms, rounding_of  # noqa: E402

from transformers_dflash2.functional_dflash2 import grouped_conv  # noqa: E402
from transformers_dflash2.kernels import grouped_conv as module  # noqa: E402
from transformers_dflash2.kernels.grouped_conv import (  # noqa: E402
    grouped_conv_ineligible_reason,
    grouped_conv_op,
    grouped_conv_triton,
)


NAN, INF = math.nan, math.inf


def conv_inputs(device, batch, block, taps, hidden_size=6, group_size=2, dtype=torch.float32):
    shapes = (batch, block, hidden_size), (taps, hidden_size), (batch, block, taps, hidden_size // group_size)
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def exact_conv(hidden, base, dynamic, group_size):
    hidden, base, dynamic = hidden.double(), base.double(), dynamic.double()
    kernel = base + dynamic.repeat_interleave(group_size, dim=-1)  # [batch, block, taps, hidden_size]
    output = torch.zeros_like(hidden)
    for row in range(hidden.shape[1]):
        for tap in range(min(base.shape[0], row + 1)):
            output[:, row] += kernel[:, row, tap] * hidden[:, row - tap]
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "block", "taps", "hidden_size", "group_size"),
    [
        pytest.param(1, 1, 2, 6, 2, id="anchor-only"),
        pytest.param(2, 3, 1, 6, 1, id="one-tap"),
        pytest.param(3, 2, 4, 6, 3, id="more-taps-than-rows"),
        pytest.param(2, 7, 3, 10, 5, id="odd-everything"),
        pytest.param(1, 8, 2, 32, 16, id="powers-of-two"),
        pytest.param(2, 5, 2, 7, 7, id="one-group"),
        pytest.param(1, 1, 1, 1, 1, id="one-number"),
    ],
)
def test_equals_the_reference(device, dtype, batch, block, taps, hidden_size, group_size):
    """Catches taps that cross a block's start, lanes past the last channel, and coefficients of another row."""
    inputs = conv_inputs(device, batch, block, taps, hidden_size, group_size, dtype)
    output = grouped_conv_triton(*inputs, group_size=group_size)
    reference = grouped_conv(*inputs, group_size=group_size)
    assert_as_exact_as(output, reference, exact_conv(*inputs, group_size))


def test_several_programs_per_row(device, monkeypatch):
    """Catches a channel offset that is missing in the second program of a row."""
    monkeypatch.setattr(module, "_MAX_BLOCK_CHANNELS", 4)
    inputs = conv_inputs(device, 2, 3, 2, hidden_size=10, group_size=5)
    output = grouped_conv_triton(*inputs, group_size=5)
    assert relative_rms(output, exact_conv(*inputs, 5)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounds_once(device, dtype):
    """Catches sums kept in a half type."""
    inputs = conv_inputs(device, 2, 8, 4, dtype=dtype)
    output = grouped_conv_triton(*inputs, group_size=2).double()
    exact = exact_conv(*inputs, 2)
    unit = torch.finfo(dtype).eps
    assert ((output - exact).abs() <= 0.51 * unit * exact.abs().clamp(min=unit)).all()


def test_mixed_dtypes(device):
    """Catches a kernel that reads fp32 parameters of a half-type activation in the wrong width."""
    hidden, base, dynamic = conv_inputs(device, 2, 4, 2)
    output = grouped_conv_triton(hidden.half(), base, dynamic.half(), group_size=2)
    assert output.dtype == torch.float16
    exact = exact_conv(hidden.half(), base, dynamic.half(), 2)
    assert relative_rms(output, exact) < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3])
def test_coefficients_in_parts(device, dtype, count):
    """Catches a part that is left out or counted twice, and a total that is not rounded as a product is."""
    hidden, base, _ = conv_inputs(device, 2, 5, 2, dtype=dtype)
    parts = torch.randn(count, 2, 5, 2, 2, 3, device=device)[..., 1, :, :]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    total = total.to(dtype)
    output = grouped_conv_triton(hidden, base, parts, group_size=2)
    assert torch.equal(output, grouped_conv_triton(hidden, base, total, group_size=2))
    assert relative_rms(grouped_conv(hidden, base, parts, group_size=2), output) < 2 * torch.finfo(dtype).eps


# Up to 16 rows, and more: channels are dealt out to programs of two widths.
@pytest.mark.parametrize("batch", [2, 4])
def test_channels_of_several_programs(device, batch):
    """Catches channels that no program writes, or that read the coefficients of another program's groups."""
    hidden, base = torch.randn(batch, 5, 1040, device=device), torch.randn(2, 1040, device=device)
    parts = torch.randn(3, batch, 5, 2, 520, device=device)
    output = grouped_conv_triton(hidden, base, parts, group_size=2)
    assert torch.equal(output, grouped_conv_triton(hidden, base, parts[0] + parts[1] + parts[2], group_size=2))
    assert relative_rms(output, grouped_conv(hidden, base, parts, group_size=2)) < 1e-6


def test_strided_inputs(device):
    """Catches contiguous addressing: `prepare` and `finish` pass slices of one projection."""
    hidden, base, _ = conv_inputs(device, 2, 5, 2)
    rows = torch.randn(2, 9, 12, device=device)
    rows[:, 2:7, 4:10] = hidden
    projection = torch.randn(2, 5, 2, 2, 3, device=device)
    bases = torch.randn(2, 2, 6, device=device)
    for side in range(2):
        view = rows[:, 2:7, 4:10]
        output = grouped_conv_triton(view, bases[side], projection[:, :, side], group_size=2)
        expected = grouped_conv(hidden, bases[side], projection[:, :, side].contiguous(), group_size=2)
        assert relative_rms(output, expected) < 1e-6


@pytest.mark.parametrize("poison", [NAN, INF], ids=["nan", "inf"])
def test_what_is_not_finite_stays_where_it_is(device, poison):
    """Catches a 0/1 factor in place of a mask: a poisoned row or coefficient reaches a neighbour."""
    hidden, base, dynamic = conv_inputs(device, 3, 6, 3)
    clean = grouped_conv_triton(hidden, base, dynamic, group_size=2)
    dynamic[:, 0, 1:] = poison
    dynamic[:, 1, 2:] = poison
    assert torch.equal(grouped_conv_triton(hidden, base, dynamic, group_size=2), clean)
    hidden[1, 3:] = poison
    poisoned = grouped_conv_triton(hidden, base, dynamic, group_size=2)
    assert torch.equal(poisoned[[0, 2]], clean[[0, 2]])
    assert torch.equal(poisoned[1, :3], clean[1, :3])
    assert not torch.isfinite(poisoned[1, 3:]).any()


def test_writes_into_a_buffer(device):
    """Catches an output buffer that is ignored or only partly written."""
    inputs = conv_inputs(device, 2, 3, 2)
    out = torch.full((2, 3, 6), NAN, device=device)
    assert grouped_conv_triton(*inputs, group_size=2, out=out) is out
    assert torch.equal(out, grouped_conv_triton(*inputs, group_size=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_residual(device, dtype, in_place):
    """Catches a residual that is read by another tensor's strides, left out, or added before the rounding."""
    inputs = conv_inputs(device, 2, 5, 2, dtype=dtype)
    residual = torch.randn(2, 6, 8, device=device).to(dtype)[:, 1:, 2:]
    residual = residual.contiguous() if in_place else residual
    expected = residual + grouped_conv_triton(*inputs, group_size=2)
    assert torch.equal(
        grouped_conv(*inputs, group_size=2, residual=residual), residual + grouped_conv(*inputs, group_size=2)
    )
    out = residual if in_place else None
    assert torch.equal(grouped_conv_triton(*inputs, group_size=2, residual=residual, out=out), expected)


def test_empty_batch(device):
    """Catches an empty grid, which a launch refuses."""
    inputs = conv_inputs(device, 0, 3, 2)
    assert grouped_conv_triton(*inputs, group_size=2).shape == (0, 3, 6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"hidden": lambda x: x[0]}, "hidden has shape", id="two-dimensions"),
        pytest.param({"hidden": lambda x: x.double()}, "hidden is float64", id="double"),
        pytest.param({"hidden": lambda x: x.mT.contiguous().mT}, "hidden has stride", id="channels-apart"),
        pytest.param({"base_kernel": lambda x: x[:, 1:]}, "base_kernel has shape", id="base-width"),
        pytest.param({"base_kernel": lambda x: x[:0]}, "base_kernel has no taps", id="no-taps"),
        pytest.param({"dynamic_kernel": lambda x: x[:, :, :1]}, "dynamic_kernel has shape", id="taps"),
        pytest.param({"dynamic_kernel": lambda x: x[None].half()}, "dynamic_kernel is float16", id="half-parts"),
        pytest.param({"group_size": lambda x: 4}, "group_size=4 does not divide hidden_size=6", id="group-size"),
        pytest.param({"group_size": lambda x: 0}, "group_size=0", id="group-size-0"),
        pytest.param({"out": lambda x: torch.zeros(1)}, "out has shape", id="out"),
    ],
)
def test_reasons(device, change, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    hidden, base, dynamic = conv_inputs(device, 2, 3, 2)
    arguments = {"hidden": hidden, "base_kernel": base, "dynamic_kernel": dynamic, "group_size": 2, "out": None}
    assert grouped_conv_ineligible_reason(**arguments) is None
    for name, edit in change.items():
        value = edit(arguments[name])
        arguments[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    assert reason in grouped_conv_ineligible_reason(**arguments)
    with pytest.raises(ValueError, match="grouped_conv_triton: "):
        grouped_conv_triton(**arguments)


def test_operator(device):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    inputs = conv_inputs(device, 2, 3, 2)
    opcheck(grouped_conv_op, *inputs, 2)
    opcheck(grouped_conv_op, *inputs, 2, torch.randn_like(inputs[0]))
    compiled = torch.compile(lambda *args: grouped_conv_op(*args, 2), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), grouped_conv_triton(*inputs, group_size=2))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [8, 16], ids="block{}".format)
def test_at_a_real_size(device, block):
    """Catches overflowing offsets and a width of several programs, in the type and size of a published drafter."""
    inputs = rounding_of(torch.bfloat16, conv_inputs(device, 64, block, 2, hidden_size=5120, group_size=16))
    output = grouped_conv_triton(*inputs, group_size=16)
    assert_as_exact_as(output, grouped_conv(*inputs, group_size=16), exact_conv(*inputs, 16))

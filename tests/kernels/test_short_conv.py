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
"""The short convolution kernel against the reference, the host's function and float64."""

import math

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn


pytest.importorskip("triton")

from kernel_checks import DTYPES, assert_as_exact_as, opcheck  # noqa: E402

from transformers_dflash2.kernels.short_conv import (  # noqa: E402
    short_conv_ineligible_reason,
    short_conv_op,
    short_conv_reference,
    short_conv_triton,
)


def conv_inputs(device, shape=(2, 6, 9), taps=4, dtype=torch.float32):
    tensors = torch.randn(shape), torch.randn(shape[1], taps), torch.randn(shape[1])
    return [tensor.to(device, dtype) for tensor in tensors]


def exact_conv(hidden, weight, bias, activation):
    hidden, weight = hidden.double().cpu(), weight.double().cpu()
    taps, width = weight.shape[1], hidden.shape[2]
    out = torch.zeros_like(hidden)
    for column in range(width):
        for tap in range(taps):
            source = column - (taps - 1) + tap
            if source >= 0:
                out[:, :, column] += weight[:, tap] * hidden[:, :, source]
    if bias is not None:
        out += bias.double().cpu()[:, None]
    return out if activation is None else out * torch.sigmoid(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_bias", "activation"), [(False, "silu"), (True, None)], ids=["silu", "bias"])
@pytest.mark.parametrize(
    ("shape", "taps"), [((1, 1, 1), 1), ((2, 6, 9), 4), ((3, 70, 5), 3), ((1, 5, 33), 4), ((2, 3, 2), 4)], ids=str
)
def test_equals_the_reference(device, dtype, shape, taps, with_bias, activation):
    """Catches taps in reverse, a look ahead, lanes past an edge, and a tile that starts its columns anew."""
    hidden, weight, bias = conv_inputs(device, shape, taps, dtype)
    bias = bias if with_bias else None
    actual = short_conv_triton(hidden, weight, bias, activation=activation)
    expected = short_conv_reference(hidden, weight, bias, activation=activation)
    assert_as_exact_as(actual, expected, exact_conv(hidden, weight, bias, activation))
    # What a layer does next.
    assert actual.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_reference_equals_the_host(device, dtype, activation):
    """Catches another padding or rounding order than the function that the kernel stands in for."""
    hidden, weight, bias = conv_inputs(device, dtype=dtype)
    expected = causal_conv1d_fn(hidden, weight, bias, activation=activation)
    assert torch.equal(short_conv_reference(hidden, weight, bias, activation=activation), expected)


def test_columns_see_their_past_only(device):
    """Catches a value that reaches earlier columns, columns beyond the taps, other channels or other rows."""
    hidden, weight, bias = conv_inputs(device)
    clean = short_conv_triton(hidden, weight, bias, activation="silu")
    hidden[1, 2, 3] = math.nan
    actual = short_conv_triton(hidden, weight, bias, activation="silu")
    reached = torch.zeros_like(hidden, dtype=torch.bool)
    reached[1, 2, 3:7] = True
    assert torch.equal(actual.isnan(), reached)
    assert torch.equal(actual[~reached], clean[~reached])


def test_layouts_and_empty(device):
    """Catches contiguous addressing of tokens in front of channels, and an empty grid, which a launch refuses."""
    hidden, weight, bias = conv_inputs(device)
    expected = short_conv_triton(hidden, weight, bias)
    wide = torch.randn(2, 9, 20, device=device)
    view = wide[:, :, 4:10].transpose(1, 2).copy_(hidden)
    assert torch.equal(short_conv_triton(view, weight, bias), expected)
    assert torch.equal(short_conv_triton(hidden[:1].expand(2, -1, -1), weight, bias)[1], expected[0])
    assert short_conv_triton(hidden[:0], weight, bias).shape == (0, 6, 9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"hidden": lambda x: x.double()}, "hidden is float64", id="double"),
        pytest.param({"hidden": lambda x: x[0]}, "hidden has shape", id="no-rows"),
        pytest.param({"weight": lambda x: x.half()}, "weight is float16", id="weight-dtype"),
        pytest.param({"weight": lambda x: x[1:]}, "weight has shape", id="weight-shape"),
        pytest.param({"weight": lambda x: x.t().contiguous().t()}, "weight has stride", id="weight-strides"),
        pytest.param({"weight": lambda x: x.repeat(1, 5)}, "weight has 20 taps", id="taps"),
        pytest.param({"bias": lambda x: x[1:]}, "bias has shape", id="bias-shape"),
        pytest.param({"activation": lambda x: "gelu"}, "activation='gelu'", id="activation"),
    ],
)
def test_reasons(device, change, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    hidden, weight, bias = conv_inputs(device)
    arguments = {"hidden": hidden, "weight": weight, "bias": bias, "activation": "swish"}
    assert short_conv_ineligible_reason(**arguments) is None
    for name, edit in change.items():
        arguments[name] = edit(arguments[name])
    assert reason in short_conv_ineligible_reason(**arguments)
    with pytest.raises(ValueError, match="short_conv_triton: "):
        short_conv_triton(**arguments)


def test_operator(device):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    hidden, weight, bias = conv_inputs(device)
    opcheck(short_conv_op, hidden, weight, bias, "silu")
    opcheck(short_conv_op, hidden, weight)
    compiled = torch.compile(lambda *args: short_conv_op(*args, "silu"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden, weight, bias), short_conv_triton(hidden, weight, bias, activation="silu"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16], ids="r{}".format)
def test_at_a_real_size(device, rows):
    """Catches tiles and rounding that only the type and sizes of published models show."""
    hidden, weight, _ = conv_inputs(device, (rows, 10240, 12), dtype=torch.bfloat16)
    actual = short_conv_triton(hidden, weight, activation="silu")
    expected = short_conv_reference(hidden, weight, activation="silu")
    assert_as_exact_as(actual, expected, exact_conv(hidden, weight, None, "silu"))

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
"""The skinny matrix product against the reference and float64."""

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import BF16, FP16, assert_as_exact_as, opcheck, relative_rms  # noqa: E402

from transformers_dflash2.functional_dflash2 import grouped_conv  # noqa: E402
from transformers_dflash2.kernels import skinny_linear  # noqa: E402
from transformers_dflash2.kernels.skinny_linear import (  # noqa: E402
    skinny_linear_ineligible_reason,
    skinny_linear_op,
    skinny_linear_parts,
    skinny_linear_reference,
    skinny_linear_triton,
)


CPU = torch.device("cpu")
HALF_TYPES = [FP16, BF16]


def operands(device, dtype, rows, in_features, *out_features):
    x = torch.randn(rows, in_features)
    weights = [torch.randn(features, in_features) * in_features**-0.5 for features in out_features]
    return [tensor.to(device, dtype) for tensor in (x, *weights)]


def exact(x, *weights, **options):
    options = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    return skinny_linear_reference(x.double(), *(weight.double() for weight in weights), **options)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("in_features", [128, 200, 384], ids=str)
@pytest.mark.parametrize("out_features", [(32,), (64, 32), (64, 32, 96)], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_equals_the_reference(device, dtype, rows, in_features, out_features):
    """Catches a program that takes the wrong weight, inputs past the end, and rows that are not there."""
    tensors = operands(device, dtype, rows, in_features, *out_features)
    assert_as_exact_as(skinny_linear_triton(*tensors), skinny_linear_reference(*tensors), exact(*tensors))


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("out_features", [(64, 32), (128, 64, 64)], ids=str)
def test_more_rows_side_by_side(device, dtype, out_features):
    """Catches a program whose features belong to two weights."""
    tensors = operands(device, dtype, 100, 200, *out_features)
    assert_as_exact_as(skinny_linear_triton(*tensors), skinny_linear_reference(*tensors), exact(*tensors))


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("in_features", [128, 200], ids=str)
def test_gated(device, dtype, in_features):
    """Catches gate and up that are swapped, and an activation of the wrong one."""
    tensors = operands(device, dtype, 7, in_features, 96, 96)
    tensors[0] *= 3
    options = {"is_gated": True}
    assert_as_exact_as(
        skinny_linear_triton(*tensors, **options),
        skinny_linear_reference(*tensors, **options),
        exact(*tensors, **options),
    )


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_residual_and_strides(device, dtype):
    """Catches a residual that is added twice or read at the rows of another tensor, and a buffer that is ignored."""
    x, weight = operands(device, dtype, 5, 256, 64)
    padded = torch.randn(5, 512, device=device).to(dtype)
    x, residual = padded[:, 3:259], torch.randn(5, 128, device=device).to(dtype)[:, 32:96]
    actual = skinny_linear_triton(x, weight, residual=residual)
    assert_as_exact_as(
        actual, skinny_linear_reference(x, weight, residual=residual), exact(x, weight, residual=residual)
    )
    buffer = residual.contiguous()
    assert skinny_linear_triton(x, weight, residual=buffer, out=buffer) is buffer
    assert torch.equal(buffer, actual)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize(("rows", "parts"), [(5, 2), (5, 8), (5, 16), (20, 4), (40, 8)])
def test_parts(device, dtype, rows, parts):
    """Catches a part that reads or writes where another does, one shorter than a step, and one that is rounded."""
    x, weight = operands(device, dtype, rows, 1024, 96)
    actual = skinny_linear_triton(x, weight, parts=parts)
    expected = exact(x, weight, parts=parts)
    assert actual.dtype == torch.float32 and actual.shape == (parts, rows, 96)
    assert relative_rms(actual, expected) < 1e-5
    assert relative_rms(actual.sum(dim=0), exact(x, weight)) < 1e-5


@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "parts"),
    [
        (8, 4096, 1024, 4),
        (32, 4096, 1024, 8),
        (64, 4096, 1024, 8),
        (8, 4096, 8192, 1),
        (64, 4096, 8192, 2),
        (8, 192, 32, 1),
        (8, 256, 32, 4),
        (8, 256, 4, 4),
    ],
)
def test_number_of_parts(monkeypatch, rows, in_features, out_features, parts):
    """Catches a device that is left idle, and parts that the kernel refuses."""
    monkeypatch.setattr(skinny_linear, "device_limits", lambda device: (132, 1 << 16))
    assert skinny_linear_parts(torch.device("cpu"), rows, in_features, out_features) == parts


def test_steps_in_flight_fit_the_device(monkeypatch):
    """Catches a launch that devices with less shared memory than the measured one refuse."""
    for shared_memory in (64 << 10, 99 << 10, 163 << 10, 227 << 10):
        monkeypatch.setattr(skinny_linear, "device_limits", lambda device, bytes_=shared_memory: (40, bytes_))
        skinny_linear._launch.cache_clear()
        skinny_linear._parts_launch.cache_clear()
        for rows in (16, 64, 128):
            launches = [skinny_linear._launch(CPU, rows, 4096, features, False) for features in (1024, 8192)]
            launches = [(*launch, 1) for launch in launches]
            if rows <= 64:
                launches.append((*skinny_linear._parts_launch(CPU, rows), 1))
                launches.append((*skinny_linear._launch(CPU, rows, 4096, 8192, True), 2))
            for block_out, block_in, num_stages, _, weights in launches:
                assert num_stages >= 1
                assert num_stages == 1 or 2 * num_stages * block_in * (block_out * weights + rows) < shared_memory
    skinny_linear._launch.cache_clear()
    skinny_linear._parts_launch.cache_clear()


def convolution_of(device, dtype, rows, block, taps, out_features, group, parts=None):
    base = torch.randn(taps, out_features, device=device).to(dtype)
    # Both sides of a convolution come from one projection.
    shape = (parts, rows, 2, taps, out_features // group) if parts else (rows, 2, taps, out_features // group)
    dynamic = torch.randn(shape, device=device).to(torch.float32 if parts else dtype)
    return base, dynamic[..., 1, :, :], block


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("parts", [None, 1, 3])
@pytest.mark.parametrize(
    ("rows", "block", "taps", "group"),
    [
        pytest.param(8, 8, 2, 16, id="one-block"),
        pytest.param(12, 4, 3, 8, id="three-blocks"),
        pytest.param(3, 1, 2, 1, id="anchor-only"),
        pytest.param(6, 2, 4, 16, id="more-taps-than-rows"),
        pytest.param(40, 8, 2, 4, id="more-rows"),
    ],
)
def test_convolution(device, dtype, rows, block, taps, group, parts):
    """Catches rows of another block, coefficients of another row, group or side, and a rounding that is left out."""
    x, weight = operands(device, dtype, rows, 128, 96)
    residual = torch.randn(rows, 96, device=device).to(dtype)
    convolution = convolution_of(device, dtype, rows, block, taps, 96, group, parts)
    for options in ({}, {"residual": residual}):
        actual = skinny_linear_triton(x, weight, convolution=convolution, **options)
        # The same roundings in the same places: what is left is the order of sums.
        product, (base, dynamic, _) = skinny_linear_triton(x, weight), convolution
        shape = {"group_size": group, "residual": residual.view(-1, block, 96) if options else None}
        expected = grouped_conv(product.view(-1, block, 96), base, dynamic.unflatten(-3, (-1, block)), **shape)
        assert relative_rms(actual, expected.flatten(0, 1)) < torch.finfo(dtype).eps
        reference = skinny_linear_reference(x, weight, convolution=convolution, **options)
        assert relative_rms(reference, actual) < 4 * torch.finfo(dtype).eps


def test_a_convolution_keeps_blocks_apart(device):
    """Catches a factor of zero in place of a mask: a NaN of one block reaches another, or a row before it."""
    x, weight = operands(device, torch.float16, 8, 128, 32)
    convolution = convolution_of(device, torch.float16, 8, 4, 2, 32, 16)
    x[2] = float("nan")
    actual = skinny_linear_triton(x, weight, convolution=convolution)
    assert actual.isnan().all(dim=1).tolist() == [False, False, True, True, False, False, False, False]
    assert actual.isnan().any(dim=1).tolist() == [False, False, True, True, False, False, False, False]


def test_rows_do_not_meet(device):
    """Catches rows that leak into each other: a NaN stays in its row."""
    x, weight = operands(device, torch.float16, 4, 128, 32)
    x[2, 5] = float("nan")
    actual = skinny_linear_triton(x, weight)
    assert actual.isnan().any(dim=1).tolist() == [False, False, True, False]


def test_operator(device):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    x, weight = operands(device, torch.float16, 6, 128, 32)
    x = x.view(2, 3, 128)
    opcheck(skinny_linear_op, x, [weight])
    opcheck(skinny_linear_op, x, [weight, weight], True)
    compiled = torch.compile(skinny_linear_op, fullgraph=True, backend="aot_eager")
    for weights, is_gated in (([weight], False), ([weight, weight.flip(0)], True), ([weight, weight[:32]], False)):
        expected = skinny_linear_triton(x.flatten(0, 1), *weights, is_gated=is_gated)
        assert torch.equal(compiled(x, weights, is_gated).flatten(0, 1), expected)
    # What the kernel cannot take is multiplied all the same.
    assert torch.equal(skinny_linear_op(x, [weight[:5]]), torch.nn.functional.linear(x, weight[:5]))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        pytest.param(lambda t: ({"x": t["x"].float()}), "x is float32", id="dtype"),
        pytest.param(lambda t: ({"x": t["x"].repeat(17, 1)}), "x has 68 rows; 1 to 64", id="rows"),
        pytest.param(
            lambda t: ({"x": t["x"].repeat(33, 1), "weights": t["weights"] * 2}),
            "x has 132 rows; 1 to 128",
            id="rows-side",
        ),
        pytest.param(
            lambda t: ({"x": t["x"].repeat(17, 1), "weights": t["weights"] * 2, "is_gated": True}),
            "x has 68 rows; 1 to 64",
            id="rows-gated",
        ),
        pytest.param(lambda t: ({"weights": [t["weights"][0][:40]]}), "which 32 does not divide", id="features"),
        pytest.param(lambda t: ({"weights": [t["weights"][0][:, :64]]}), "should be", id="inputs"),
        pytest.param(lambda t: ({"weights": t["weights"] * 4}), "there are 4 weights", id="weights"),
        pytest.param(lambda t: ({"is_gated": True}), "a gated product takes two weights", id="gated"),
        pytest.param(lambda t: ({"parts": 4}), "128 inputs are no multiple of parts=4", id="parts"),
        pytest.param(lambda t: ({"parts": 0}), "parts=0; pass 1", id="no-parts"),
        pytest.param(lambda t: ({"parts": 2, "residual": t["x"]}), "goes with one weight", id="parts-and-residual"),
        pytest.param(
            lambda t: ({"convolution": (t["x"].new_zeros(2, 64), t["x"].new_zeros(4, 2, 4), 3)}),
            "4 rows are no multiple of block=3",
            id="block",
        ),
        pytest.param(
            lambda t: ({"convolution": (t["x"].new_zeros(2, 64), t["x"].new_zeros(4, 3, 4), 4)}),
            "dynamic has shape",
            id="taps",
        ),
        pytest.param(
            lambda t: ({"convolution": (t["x"].new_zeros(2, 64), t["x"].new_zeros(4, 2, 2), 4)}),
            "dynamic has 2 groups for 64 features",
            id="groups",
        ),
        pytest.param(lambda t: ({"residual": t["x"]}), "residual has shape", id="residual"),
    ],
)
def test_reasons(device, edit, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    x, weight = operands(device, torch.float16, 4, 128, 64)
    arguments = {"x": x, "weights": [weight]}
    assert skinny_linear_ineligible_reason(x, weight) is None
    arguments |= edit(arguments)
    tensors = arguments.pop("x"), *arguments.pop("weights")
    assert reason in skinny_linear_ineligible_reason(*tensors, **arguments)
    with pytest.raises(ValueError, match="skinny_linear_triton: "):
        skinny_linear_triton(*tensors, **arguments)

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
"""The 4-bit skinny matrix product against the library whose format it reads, the reference, and float64."""

import sys

import pytest
import torch


pytest.importorskip("triton")
bitsandbytes = pytest.importorskip("bitsandbytes")

from kernel_checks import BF16, FP16, assert_as_exact_as, relative_rms  # noqa: E402
from quantized_targets import as_stored, quantize  # noqa: E402

from transformers_dflash2.fused_modules import _operands_4bit, fused_modules  # noqa: E402
from transformers_dflash2.kernels import skinny_linear_4bit  # noqa: E402
from transformers_dflash2.kernels.skinny_linear_4bit import (  # noqa: E402
    skinny_linear_4bit_ineligible_reason,
    skinny_linear_4bit_reference,
    skinny_linear_4bit_triton,
)
from transformers_dflash2.quantization import HeadProjection  # noqa: E402
from transformers_dflash2.testing import table_target  # noqa: E402


HALF_TYPES = [FP16, BF16]
FORMATS = ["nf4", "nf4-nested", "fp4", "fp4-nested"]
# A rounding to fp16 per product and norm, through two layers.
FP16_RELATIVE_RMS = 5e-3


def linear_4bit(device, dtype, in_features, out_features, *, name="nf4", block_size=64, storage=torch.uint8):
    """A layer of the library, quantised by it."""
    quant_type, *nested = name.split("-")
    linear = bitsandbytes.nn.Linear4bit(in_features, out_features, bias=False, compute_dtype=dtype)
    weight = torch.randn(out_features, in_features) * in_features**-0.5
    # Blocks of very different scales.
    weight *= torch.rand(out_features, 1) * 2 + 0.01
    linear.weight = bitsandbytes.nn.Params4bit(
        weight.to(dtype),
        quant_type=quant_type,
        compress_statistics=bool(nested),
        blocksize=block_size,
        quant_storage=storage,
        module=linear,
    )
    return as_stored(linear.to(device))


def weight_of(linear, dtype):
    """The weight as the library multiplies with it."""
    state = linear.weight.quant_state
    state.dtype = dtype
    return bitsandbytes.functional.dequantize_4bit(linear.weight.data, state)


@pytest.fixture
def launches(monkeypatch):
    """Options of each launch."""
    seen, original = [], skinny_linear_4bit_triton

    def launch(*args, **options):
        seen.append(options)
        return original(*args, **options)

    monkeypatch.setattr(skinny_linear_4bit, "skinny_linear_4bit_triton", launch)
    return seen


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("block_size", [64, 128, 512])
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_library(device, dtype, name, block_size, blocks, rows):
    """Catches halves of bytes that are swapped, a scale of the wrong block, and inputs past the end."""
    linear = linear_4bit(device, dtype, block_size * blocks, 96, name=name, block_size=block_size)
    x = torch.randn(rows, linear.in_features).to(device, dtype)
    tensors, options = _operands_4bit(linear, x)
    assert options["block_size"] == block_size and (options["nested"] is not None) == name.endswith("nested")
    actual = skinny_linear_4bit_triton(x, *tensors, **options)
    exact = x.double() @ weight_of(linear, dtype).double().T
    assert_as_exact_as(actual, linear(x), exact)
    assert_as_exact_as(actual, skinny_linear_4bit_reference(x, *tensors, **options), exact)


@pytest.mark.parametrize("dtype", HALF_TYPES)
# Sharding asks for bytes that are declared as numbers of another type.
@pytest.mark.parametrize("storage", [torch.uint8, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_library(device, dtype, name, storage):
    """Catches a weight that is rounded twice, or from another scale: rows of the unit matrix give its columns."""
    linear = linear_4bit(device, dtype, 320, 96, name=name, storage=storage)
    assert linear.weight.dtype == storage
    columns = torch.arange(3, 320, 5, device=device)
    x = torch.eye(320, device=device, dtype=dtype)[columns]
    tensors, options = _operands_4bit(linear, x)
    assert torch.equal(skinny_linear_4bit_triton(x, *tensors, **options).T, weight_of(linear, dtype)[:, columns])


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_residual_and_strides(device, dtype):
    """Catches a residual that is added before the product is rounded, or read at the rows of another tensor."""
    linear = linear_4bit(device, dtype, 256, 64)
    x = torch.randn(5, 512, device=device).to(dtype)[:, 3:259]
    residual = torch.randn(5, 128, device=device).to(dtype)[:, 32:96]
    tensors, options = _operands_4bit(linear, x)
    actual = skinny_linear_4bit_triton(x, *tensors, **options, residual=residual)
    assert torch.equal(actual, skinny_linear_4bit_triton(x, *tensors, **options) + residual)
    exact = x.double() @ weight_of(linear, dtype).double().T + residual.double()
    assert_as_exact_as(actual, skinny_linear_4bit_reference(x, *tensors, **options, residual=residual), exact)


def test_rows_do_not_meet(device):
    """Catches rows that leak into each other: a NaN stays in its row."""
    linear = linear_4bit(device, torch.float16, 128, 32)
    x = torch.randn(4, 128, device=device).half()
    x[2, 5] = float("nan")
    tensors, options = _operands_4bit(linear, x)
    actual = skinny_linear_4bit_triton(x, *tensors, **options)
    assert actual.isnan().any(dim=1).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        pytest.param(lambda t: {"x": t["x"].float()}, "x is float32", id="dtype"),
        pytest.param(lambda t: {"x": t["x"].repeat(17, 1)}, "x has 68 rows", id="rows"),
        pytest.param(lambda t: {"x": t["x"][:, :96]}, "blocks of 64 do not divide", id="inputs"),
        pytest.param(lambda t: {"block_size": 48}, "block_size is 48", id="block-size"),
        pytest.param(lambda t: {"out_features": 40}, "which 32 does not divide", id="features"),
        pytest.param(lambda t: {"out_features": 32}, "packed has shape", id="packed"),
        pytest.param(lambda t: {"packed": t["packed"].repeat(1, 2)[:, :1]}, "words of four bytes", id="strides"),
        pytest.param(lambda t: {"absmax": t["absmax"].half()}, "absmax is float16", id="absmax"),
        pytest.param(lambda t: {"nested": (t["code"],) * 3}, "absmax is float32", id="nested-absmax"),
        pytest.param(
            lambda t: {"absmax": t["absmax"].byte(), "nested": (t["code"],) * 3}, "nested_code has shape", id="nested"
        ),
        pytest.param(lambda t: {"residual": t["x"]}, "residual has shape", id="residual"),
    ],
)
def test_reasons(device, edit, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    x = torch.randn(4, 128, device=device).half()
    tensors, options = _operands_4bit(linear_4bit(device, torch.float16, 128, 64), x)
    assert skinny_linear_4bit_ineligible_reason(x, *tensors, **options) is None
    arguments = dict(zip(("x", "packed", "absmax", "code"), (x, *tensors), strict=True)) | options
    arguments |= edit(arguments)
    assert reason in skinny_linear_4bit_ineligible_reason(**arguments)
    with pytest.raises(ValueError, match="skinny_linear_4bit_triton: "):
        skinny_linear_4bit_triton(**arguments)


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-nf4-nested"])
def test_fused_target_equals_the_target(device, launches, name):
    """Catches a layer of a quantised target that stays the library's, a residual that is lost, and a head left out."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_key_value_heads": 2}
    dense = table_target(0, 64, mix=0.5, num_hidden_layers=2, num_attention_heads=4, **sizes)
    target = quantize(dense, name, torch.float16).to(device)
    head = target.get_output_embeddings()
    ids = torch.randint(1, 60, (2, 5), device=device)
    hidden = torch.randn(2, 3, 64, device=device)
    with torch.no_grad():
        expected = target(ids, use_cache=False).logits
        scores = HeadProjection(head, 64)(hidden, torch.float16)
        assert not launches
        with fused_modules(target) as counts:
            actual = target(ids, use_cache=False).logits
            assert counts["linear_4bit"] == len(launches) == 7 * 2 + 1
            assert sum(options["residual"] is not None for options in launches) == 2
            assert relative_rms(HeadProjection(head, 64)(hidden, torch.float16), scores) < FP16_RELATIVE_RMS
            assert len(launches) == 7 * 2 + 2
    assert actual.dtype == torch.float16 and relative_rms(actual, expected) < FP16_RELATIVE_RMS
    assert not any("forward" in vars(module) for module in target.modules())


class Subclass(bitsandbytes.nn.Linear4bit):
    pass


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda m: setattr(m, "bias", torch.nn.Parameter(torch.ones(64).to(m.weight.device))), id="bias"),
        pytest.param(lambda m: setattr(m, "__class__", Subclass), id="subclass"),
        pytest.param(lambda m: setattr(m, "forward", lambda x: type(m).forward(m, x) + 1), id="forward"),
        pytest.param(lambda m: m.register_forward_hook(lambda module, args, output: output + 1), id="hook"),
        # Casts, and makes up its mind about the dtype in its first call.
        pytest.param(lambda m: setattr(m, "compute_dtype", torch.float32), id="compute-dtype"),
        pytest.param(lambda m: setattr(m, "compute_type_is_set", False), id="first-call"),
        # Some kinds of sharding leave the state with the module only.
        pytest.param(lambda m: setattr(m.weight, "quant_state", None), id="state"),
    ],
)
def test_other_layers_are_the_librarys_own(device, launches, edit):
    """Catches a stand-in that leaves out what a layer's forward does besides."""
    linear = linear_4bit(device, torch.float16, 128, 64)
    edit(linear)
    x = torch.randn(4, 128, device=device).half()
    with torch.no_grad():
        with fused_modules(linear):
            actual = linear(x)
        assert torch.equal(actual, linear(x))
    assert not launches


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda state: setattr(state, "packing_format_for_cpu", True), id="packed-for-cpus"),
        pytest.param(lambda state: setattr(state, "shape", torch.Size([128, 64])), id="transposed"),
        pytest.param(lambda state: setattr(state.state2, "blocksize", 512), id="nested-block-size"),
    ],
)
def test_other_storage_is_not_read(device, edit):
    """Catches a weight whose bytes are taken for another layout."""
    linear = linear_4bit(device, torch.float16, 128, 64, name="nf4-nested")
    x = torch.randn(4, 128, device=device).half()
    assert _operands_4bit(linear, x) is not None
    edit(linear.weight.quant_state)
    assert _operands_4bit(linear, x) is None


def test_the_library_is_not_loaded(device, monkeypatch):
    """Catches an import of the library by somebody who does not use it."""
    linear = linear_4bit(device, torch.float16, 128, 64)
    monkeypatch.delitem(sys.modules, "bitsandbytes")
    with fused_modules(linear) as counts:
        assert not counts
    assert "bitsandbytes" not in sys.modules


@pytest.mark.parametrize("multiprocessors", [1, 20, 132])
def test_programs_share_all_features(monkeypatch, multiprocessors):
    """Catches features past the last whole share, which no program would write."""
    monkeypatch.setattr(skinny_linear_4bit, "device_limits", lambda device: (multiprocessors, 1 << 16))
    for out_features in range(32, 80_000, 32 * 37):
        for rows in (16, 64):
            block_out, *_ = skinny_linear_4bit._launch.__wrapped__(torch.device("cpu"), rows, out_features)
            assert out_features % block_out == 0

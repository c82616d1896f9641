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
"""Projection and mix of a convolution's input side in one launch, against the reference and float64."""

import math

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import BF16, FP16, assert_as_exact_as  # noqa: E402

from transformers_dflash2.kernels.conv_prepare import (  # noqa: E402
    conv_prepare_ineligible_reason,
    conv_prepare_reference,
    conv_prepare_triton,
)


def inputs(device, dtype=torch.float16, batch=2, block=5, hidden_size=48, group_size=16, taps=2):
    weight = torch.randn(2 * taps * hidden_size // group_size, hidden_size) * hidden_size**-0.5
    tensors = torch.randn(batch, block, hidden_size), weight, torch.randn(taps, hidden_size)
    return [tensor.to(device, dtype) for tensor in tensors]


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({}, id="two-rows-odd-groups"),
        pytest.param({"batch": 1, "block": 1}, id="anchor-only"),
        pytest.param({"batch": 1, "block": 8, "hidden_size": 512}, id="several-steps"),
        pytest.param({"batch": 1, "block": 16, "taps": 4, "group_size": 8}, id="four-taps"),
        pytest.param({"taps": 1, "group_size": 12}, id="one-tap"),
        pytest.param({"block": 2, "taps": 8, "group_size": 24}, id="more-taps-than-rows"),
    ],
)
def test_equals_the_reference(device, dtype, sizes):
    """Catches coefficients of another side, tap or group, and taps that cross a block's start."""
    tensors, group_size = inputs(device, dtype, **sizes), sizes.get("group_size", 16)
    actual = conv_prepare_triton(*tensors, group_size=group_size)
    reference = conv_prepare_reference(*tensors, group_size=group_size)
    exact = conv_prepare_reference(*(tensor.double() for tensor in tensors), group_size=group_size)
    for mine, theirs, truth in zip(actual, reference, exact, strict=True):
        # The mix reads coefficients that were rounded.
        assert_as_exact_as(mine, theirs, truth)


def test_what_is_not_finite_stays_in_its_row(device):
    """Catches a mask by multiplication: a poisoned row reaches no row before it and no other block."""
    tensors = inputs(device, batch=2, block=4)
    clean, _ = conv_prepare_triton(*tensors, group_size=16)
    tensors[0][0, 2] = math.nan
    poisoned, _ = conv_prepare_triton(*tensors, group_size=16)
    assert torch.equal(poisoned[1], clean[1]) and torch.equal(poisoned[0, :2], clean[0, :2])
    assert not torch.isfinite(poisoned[0, 2:]).any()


@pytest.mark.parametrize(
    ("index", "edit", "reason"),
    [
        pytest.param(0, lambda x: x.float(), "hidden is float32", id="dtype"),
        pytest.param(0, lambda x: x.repeat(2, 1, 1), "hidden has 20 rows", id="rows"),
        pytest.param(0, lambda x: x.transpose(0, 1), "hidden has strides", id="strides"),
        pytest.param(1, lambda x: x[:-1], "weight has shape", id="weight"),
        pytest.param(2, lambda x: x.repeat(5, 1), "base_kernel has 10 taps", id="taps"),
    ],
)
def test_reasons(device, index, edit, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    tensors = inputs(device)
    assert conv_prepare_ineligible_reason(*tensors, group_size=16) is None
    assert "group_size=7" in conv_prepare_ineligible_reason(*tensors, group_size=7)
    tensors[index] = edit(tensors[index])
    assert reason in conv_prepare_ineligible_reason(*tensors, group_size=16)
    with pytest.raises(ValueError, match="conv_prepare_triton: "):
        conv_prepare_triton(*tensors, group_size=16)

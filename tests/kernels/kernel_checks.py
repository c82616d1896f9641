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
"""What the tests of several kernels share."""

import pytest
import torch


# Sums of a few dozen fp32 terms in another order.
FP32_RELATIVE_RMS = 1e-5
# One rounding to a half type, about 2e-3 for bf16.
HALF_RELATIVE_RMS = 5e-3
# Largest difference of fp32 probabilities whose sums and exponentials round differently.
PROBABILITY_TOLERANCE = 2e-6

FP32 = pytest.param(torch.float32, id="fp32")
FP16 = pytest.param(torch.float16, id="fp16")
# The interpreter truncates where a GPU rounds to bf16.
BF16 = pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.gpu)
DTYPES = [FP32, FP16, BF16]


def relative_rms(actual, expected):
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30))


def assert_as_exact_as(actual, reference, exact):
    """Like the reference against float64 in a half type, and close to float64 in any type."""
    assert actual.dtype == reference.dtype and actual.shape == reference.shape
    error = relative_rms(actual, exact)
    if actual.dtype == torch.float32:
        assert error < FP32_RELATIVE_RMS
    else:
        assert error < HALF_RELATIVE_RMS
        assert error <= 2 * relative_rms(reference, exact)


def rounding_of(dtype, tensors):
    """The tensors with floating-point values rounded to `dtype`."""
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]


def opcheck(op, *args):
    """The parts of `torch.library.opcheck` that apply to an operation without a backward pass."""
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def captured(run):
    """A graph of `run()`, which must have no effect of its own, and what its replays write to."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results

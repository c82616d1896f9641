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
"""The kernel that orders candidates, bit for bit against the two sorts of the reference."""

import itertools
import math

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import DTYPES, captured, opcheck  # noqa: E402

from transformers_dflash2.functional_dflash2 import order_candidates, top_candidates  # noqa: E402
from transformers_dflash2.kernels.order_candidates import (  # noqa: E402
    order_candidates_ineligible_reason,
    order_candidates_op,
    order_candidates_triton,
)


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0]


def distinct_ids(device, *shape, vocab=1000):
    return torch.rand(*shape[:-1], vocab, device=device).argsort(dim=-1)[..., : shape[-1]].contiguous()


def assert_same(actual, expected):
    values, ids = actual
    assert values.dtype == torch.float32 and ids.dtype == torch.int64
    assert torch.equal(ids, expected[1])
    assert torch.equal(values.isnan(), expected[0].isnan())
    # As bits, in which the zeros differ; those of a NaN are no one's concern.
    bits = [part.masked_fill(part.isnan(), 0.0).view(torch.int32) for part in (values, expected[0])]
    assert torch.equal(*bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 2, 3, 16, 17, 50, 64], ids="k{}".format)
def test_equals_the_reference(device, dtype, top_k):
    """Catches lanes past the candidates that count, equal values out of the order of ids, and values rounded anew."""
    values = torch.randn(3, 5, top_k, device=device).mul(4).round().to(dtype)
    ids = distinct_ids(device, 3, 5, top_k)
    assert_same(order_candidates_triton(values, ids), order_candidates(values, ids))


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(device, dtype):
    """Catches a NaN that has no place or one that depends on its id alone, and zeros that a sign tells apart."""
    values = torch.tensor(list(itertools.product(SPECIAL, repeat=3)), device=device, dtype=dtype)
    ids = distinct_ids(device, *values.shape)
    assert_same(order_candidates_triton(values, ids), order_candidates(values, ids))


def test_does_not_depend_on_the_order_of_its_input(device):
    """Catches ties that are broken by place; ids are compared in all their bits."""
    values = torch.tensor([[2.0, 1.0, 2.0, math.nan, 1.0, math.nan]], device=device)
    ids = torch.tensor([[2**40 + 1, 5, 2**40, 9, 2**33 + 4, 8]], device=device)
    expected = [8, 9, 2**40, 2**40 + 1, 5, 2**33 + 4]
    for _ in range(10):
        places = torch.randperm(6, device=device)
        _, ordered = order_candidates_triton(values[:, places].contiguous(), ids[:, places].contiguous())
        assert ordered[0].tolist() == expected


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 5)], ids=str)
def test_nothing_to_order(device, shape):
    """Catches an empty grid, and a block without lanes."""
    values, ids = order_candidates_triton(torch.zeros(shape, device=device), torch.zeros(shape, device=device).long())
    assert values.shape == ids.shape == shape


def test_candidates_of_a_head(device):
    """Catches an order that does not fit the selection before it or the transform behind it."""
    logits = torch.randn(2, 7, 300, device=device).half()
    options = {"top_k": 16, "multiplier": 0.5, "softcap": 3.0}
    assert_same(top_candidates(logits, **options, order=order_candidates_triton), top_candidates(logits, **options))


def test_writes_into_buffers(device):
    """Catches output buffers that are ignored, as a captured graph would not."""
    values, ids = torch.tensor([[1.0, 2.0]], device=device), torch.tensor([[7, 4]], device=device)
    out = torch.full((1, 2), -7.0, device=device), torch.full((1, 2), -7, device=device)
    returned = order_candidates_triton(values, ids, out=out)
    assert returned[0] is out[0] and returned[1] is out[1]
    assert [buffer.tolist() for buffer in out] == [[[2.0, 1.0]], [[4, 7]]]


@pytest.mark.parametrize(
    ("values", "ids", "out", "reason"),
    [
        pytest.param(torch.tensor(1.0), torch.tensor(1), None, "values has no dimension", id="no-dimension"),
        pytest.param(torch.zeros(2, 3).double(), torch.zeros(2, 3).long(), None, "values is float64", id="double"),
        pytest.param(torch.zeros(2, 3), torch.zeros(2, 3).int(), None, "ids is int32", id="ids"),
        pytest.param(torch.zeros(2, 3), torch.zeros(2, 4).long(), None, "ids has shape", id="shape"),
        pytest.param(torch.zeros(2, 6)[:, :3], torch.zeros(2, 3).long(), None, "values is not contiguous", id="rows"),
        pytest.param(torch.zeros(2, 3), torch.zeros(3, 2).long().T, None, "ids has stride", id="columns"),
        pytest.param(torch.zeros(2, 65), torch.zeros(2, 65).long(), None, "at most 64", id="many"),
        pytest.param(
            torch.zeros(2, 3).half(),
            torch.zeros(2, 3).long(),
            (torch.zeros(2, 3).half(), torch.zeros(2, 3).long()),
            "out[0] is float16",
            id="out-values",
        ),
        pytest.param(
            torch.zeros(2, 3),
            torch.zeros(2, 3).long(),
            (torch.zeros(2, 3), torch.zeros(2, 2).long()),
            "out[1] has shape",
            id="out-ids",
        ),
    ],
)
def test_reasons(device, values, ids, out, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    values, ids = values.to(device), ids.to(device)
    out = out and tuple(buffer.to(device) for buffer in out)
    assert reason in order_candidates_ineligible_reason(values, ids, out=out)
    with pytest.raises(ValueError, match="order_candidates_triton: "):
        order_candidates_triton(values, ids, out=out)


def test_operator(device):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    values, ids = torch.randn(4, 5, device=device).half(), distinct_ids(device, 4, 5)
    opcheck(order_candidates_op, values, ids)
    compiled = torch.compile(lambda *args: order_candidates_op(*args), fullgraph=True, backend="aot_eager")
    assert_same(compiled(values, ids), order_candidates(values, ids))


@pytest.mark.gpu
def test_in_a_graph_at_a_real_size(device):
    """Catches a replay that reads what the recording saw, or starts before its input is written."""
    values, ids = torch.zeros(64, 15, 16, device=device), torch.zeros(64, 15, 16, device=device).long()
    other_values, other_ids = torch.empty_like(values), torch.empty_like(ids)

    def run():
        # Producer and consumer in one graph: the kernel may be placed before the copies end.
        other_values.copy_(values)
        other_ids.copy_(ids)
        return order_candidates_triton(other_values, other_ids)

    graph, ordered = captured(run)
    for _ in range(5):
        values.copy_(torch.randn_like(values).mul(4).round())
        ids.copy_(distinct_ids(device, *ids.shape, vocab=152000))
        graph.replay()
        assert_same(ordered, order_candidates(values, ids))


def test_every_place_is_written(device):
    """Catches a row that names a candidate twice and leaves a place to whatever was in memory."""
    values, ids = torch.tensor([[1.0, 1.0, 0.0]], device=device), torch.tensor([[5, 5, 7]], device=device)
    assert [result.tolist() for result in order_candidates_triton(values, ids)] == [[[1.0, 1.0, 0.0]], [[5, 5, 7]]]

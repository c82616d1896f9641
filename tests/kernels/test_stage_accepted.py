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
"""The kernel that stages the next round, against its plain form."""

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import captured, opcheck  # noqa: E402

from transformers_dflash2.kernels.stage_accepted import (  # noqa: E402
    stage_accepted_ineligible_reason,
    stage_accepted_op,
    stage_accepted_triton,
)
from transformers_dflash2.static_round import stage_accepted  # noqa: E402


NAMES = (
    "tokens",
    "usable",
    "accepted",
    "following",
    "active",
    "pad_token_id",
    "decision",
    "committed",
    "counts",
    "anchors",
)
# Ids past 32 bits show an argument that is cut.
LARGE = 2**40


def arguments(device, rows=8, slots=5):
    """Read, then written arguments, in order; what is written holds something else before."""
    accepted = torch.randint(0, slots + 1, (rows,), device=device)
    accepted[: min(rows, slots + 1)] = torch.arange(slots + 1, device=device)[:rows]
    return [
        LARGE + torch.randint(0, 99, (rows, slots), device=device),
        torch.rand(rows, device=device) < 0.5,
        accepted,
        LARGE + torch.randint(100, 199, (rows,), device=device),
        torch.rand(rows, device=device) < 0.7,
        torch.tensor(LARGE - 1, device=device),
        torch.full((rows, slots + 3), -7, device=device),
        torch.full((rows, slots + 1), -7, device=device),
        torch.full((rows,), -7, device=device),
        torch.randint(200, 299, (rows,), device=device),
    ]


def copies(inputs):
    return [tensor.clone() for tensor in inputs]


def test_what_is_staged(device):
    """Catches padding in front of the end, an anchor or count of a row that is done, and a decision out of order."""
    inputs = [
        torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], device=device),
        torch.tensor([True, False, True], device=device),
        torch.tensor([3, 0, 1], device=device),
        torch.tensor([10, 11, -1], device=device),
        torch.tensor([True, True, False], device=device),
        torch.tensor(99, device=device),
        torch.full((3, 6), -7, device=device),
        torch.full((3, 4), -7, device=device),
        torch.full((3,), -7, device=device),
        torch.tensor([20, 21, 22], device=device),
    ]
    for stage in (stage_accepted, stage_accepted_triton):
        written = copies(inputs)
        assert stage(*written) is None
        decision, committed, counts, anchors = written[6:]
        assert decision.tolist() == [[3, 10, 1, 1, 2, 3], [0, 11, 0, 4, 5, 6], [1, -1, 1, 7, 8, 9]]
        assert committed.tolist() == [[1, 2, 3, 10], [11, 99, 99, 99], [7, -1, 99, 99]]
        assert counts.tolist() == [4, 1, 0]
        assert anchors.tolist() == [10, 11, 22]


@pytest.mark.parametrize("rows", [1, 9], ids="rows{}".format)
@pytest.mark.parametrize("slots", [1, 3, 7, 8, 15, 20], ids="slots{}".format)
def test_equals_the_reference(device, rows, slots):
    """Catches lanes past the block, a row's neighbour that is overwritten, ids in 32 bits and inputs that change."""
    inputs = arguments(device, rows, slots)
    expected, actual = copies(inputs), copies(inputs)
    stage_accepted(*expected)
    stage_accepted_triton(*actual)
    for name, have, want in zip(NAMES, actual, expected, strict=True):
        assert torch.equal(have, want), name
    assert all(torch.equal(*pair) for pair in zip(actual[:6], inputs[:6], strict=True))


def test_strided_tokens(device):
    """Catches contiguous addressing: drafts may be a slice of `[anchor, tokens]`."""
    inputs = arguments(device)
    expected, actual = copies(inputs), copies(inputs)
    stage_accepted(*expected)
    actual[0] = torch.cat([torch.full_like(inputs[0][:, :1], -3), inputs[0]], dim=1)[:, 1:]
    stage_accepted_triton(*actual)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("rows", "slots"), [(0, 3), (4, 0)], ids=["no-rows", "no-slots"])
def test_nothing_drafted(device, rows, slots):
    """Catches an empty grid or block; without a draft the target's token alone is committed."""
    inputs = arguments(device, rows, slots)
    stage_accepted_triton(*inputs)
    assert torch.equal(inputs[7][:, :1], inputs[3][:, None])
    assert torch.equal(inputs[6][:, 1], inputs[3])


@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        pytest.param("tokens", lambda x: x.int(), "tokens is int32", id="tokens"),
        pytest.param("tokens", lambda x: x.T.contiguous().T, "tokens has stride", id="slots-apart"),
        pytest.param("usable", lambda x: x.long(), "usable is int64", id="usable"),
        pytest.param("accepted", lambda x: x[1:], "accepted has shape", id="accepted"),
        pytest.param("following", lambda x: x.int(), "following is int32", id="following"),
        pytest.param("active", lambda x: x[:, None], "active has shape", id="active"),
        pytest.param("pad_token_id", lambda x: x[None], "pad_token_id has shape", id="padding"),
        pytest.param("decision", lambda x: x[:, 1:], "decision is not contiguous", id="decision"),
        pytest.param("committed", lambda x: x[:-1], "committed has shape", id="committed"),
        pytest.param("counts", lambda x: x.int(), "counts is int32", id="counts"),
        pytest.param("anchors", lambda x: x.repeat(2)[::2], "anchors is not contiguous", id="anchors"),
    ],
)
def test_reasons(device, name, edit, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    inputs = arguments(device)
    assert stage_accepted_ineligible_reason(*inputs) is None
    inputs[NAMES.index(name)] = edit(inputs[NAMES.index(name)])
    assert reason in stage_accepted_ineligible_reason(*inputs)
    with pytest.raises(ValueError, match="stage_accepted_triton: "):
        stage_accepted_triton(*inputs)


def test_operator(device):
    """Catches a schema that hides what is written, which a compiled graph would then reorder or drop."""
    inputs = arguments(device)
    opcheck(stage_accepted_op, *inputs)
    expected, actual = copies(inputs), copies(inputs)
    stage_accepted(*expected)

    def next_anchors(*tensors):
        stage_accepted_op(*tensors)
        return tensors[-1] + tensors[-2]

    compiled = torch.compile(next_anchors, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*actual), expected[-1] + expected[-2])
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.gpu
def test_in_a_graph_at_a_real_size(device):
    """Catches a replay that reads what the recording saw, or that starts before its input is written."""
    buffers = arguments(device, rows=64, slots=15)
    tokens = torch.empty_like(buffers[0])

    def run():
        # Producer and consumer in one graph: the kernel may be placed before the copy ends.
        tokens.copy_(buffers[0])
        stage_accepted_triton(tokens, *buffers[1:])

    graph, _ = captured(run)
    for _ in range(5):
        inputs = arguments(device, rows=64, slots=15)
        for buffer, value in zip(buffers, inputs, strict=True):
            buffer.copy_(value)
        graph.replay()
        stage_accepted(*inputs)
        assert all(torch.equal(*pair) for pair in zip(buffers, inputs, strict=True))

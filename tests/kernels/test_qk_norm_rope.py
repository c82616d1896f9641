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
"""The QK-norm and rotation kernel against the reference, the host's modules and float64."""

import math

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb


pytest.importorskip("triton")

from kernel_checks import DTYPES, assert_as_exact_as, captured, opcheck, relative_rms  # noqa: E402

from transformers_dflash2.kernels.qk_norm_rope import (  # noqa: E402
    qk_norm_rope_ineligible_reason,
    qk_norm_rope_op,
    qk_norm_rope_reference,
    qk_norm_rope_triton,
)
from transformers_dflash2.kernels.write_columns import write_columns_triton  # noqa: E402


EPS = 1e-6


def cos_sin_table(positions, head_dim, theta=1e4):
    frequencies = theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(positions).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def rope_inputs(device, rows=3, q_heads=2, kv_heads=1, head_dim=6, dtype=torch.float32, max_positions=50):
    tensors = (
        torch.randn(rows, (q_heads + 2 * kv_heads) * head_dim).to(dtype),
        torch.randint(0, max_positions, (rows,)),
        (1 + 0.1 * torch.randn(head_dim)).to(dtype),
        (1 + 0.1 * torch.randn(head_dim)).to(dtype),
        cos_sin_table(max_positions, head_dim),
    )
    sizes = {"num_heads": q_heads, "num_key_value_heads": kv_heads, "eps": EPS}
    return [tensor.to(device) for tensor in tensors], sizes


def buffers_and_columns(device, qkv, sizes, batch, spare_rows=1, capacity=11):
    """Buffers with more rows and columns than are written, and where each of `batch` rows' entries goes."""
    kv_heads = sizes["num_key_value_heads"]
    head_dim = qkv.shape[1] // (sizes["num_heads"] + 2 * kv_heads)
    buffers = [torch.randn(batch + spare_rows, kv_heads, capacity, head_dim).to(device, qkv.dtype) for _ in range(2)]
    columns = torch.stack([torch.randperm(capacity)[: len(qkv) // batch] for _ in range(batch)])
    return *buffers, columns.to(device)


def in_two_launches(inputs, sizes, write_to):
    """Rows and buffers after the rotation and then a copy of keys and values."""
    *buffers, columns = (tensor.clone() for tensor in write_to)
    rows = qk_norm_rope_triton(inputs[0].clone(), *inputs[1:], **sizes)
    kv_heads, head_dim = buffers[0].shape[1], buffers[0].shape[3]
    heads = rows.view(*columns.shape, -1, head_dim).transpose(1, 2)
    write_columns_triton(*buffers, columns, heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:])
    return rows, *buffers


def exact_rope(qkv, positions, q_weight, k_weight, table, *, num_heads, num_key_value_heads, eps):
    head_dim = table.shape[-1]
    heads = qkv.double().unflatten(-1, (-1, head_dim)).clone()
    for head in range(num_heads + num_key_value_heads):
        weight = (q_weight if head < num_heads else k_weight).double()
        values = heads[:, head]
        normed = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps) * weight
        first, second = normed.chunk(2, dim=-1)
        cos, sin = table[positions].double().chunk(2, dim=-1)
        heads[:, head] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return heads.flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "q_heads", "kv_heads", "head_dim"),
    [
        pytest.param(1, 1, 1, 2, id="smallest"),
        pytest.param(3, 3, 1, 6, id="odd"),
        pytest.param(2, 4, 2, 16, id="powers-of-two"),
        pytest.param(2, 1, 1, 80, id="wide"),
        pytest.param(3, 12, 4, 6, id="four-heads-of-a-program"),
        pytest.param(2, 16, 8, 16, id="eight-heads-of-a-program"),
    ],
)
def test_equals_the_reference(device, dtype, rows, q_heads, kv_heads, head_dim):
    """Catches halves that are swapped, a query weight on key heads, lanes past the head, and a value that changes."""
    inputs, sizes = rope_inputs(device, rows, q_heads, kv_heads, head_dim, dtype)
    exact = exact_rope(*inputs, **sizes)
    reference = qk_norm_rope_reference(inputs[0].clone(), *inputs[1:], **sizes)
    values = inputs[0][:, (q_heads + kv_heads) * head_dim :].clone()
    output = qk_norm_rope_triton(*inputs, **sizes)
    assert output is inputs[0]
    assert_as_exact_as(output, reference, exact)
    assert torch.equal(output[:, (q_heads + kv_heads) * head_dim :], values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_without_norms(device, dtype):
    """Catches a norm without weights, and a rotation that is left out with the norm."""
    (qkv, positions, _, _, table), sizes = rope_inputs(device, dtype=dtype)
    first, second = qkv[:, :18].double().unflatten(-1, (3, 6)).chunk(2, dim=-1)
    cos, sin = table[positions].double()[:, None].chunk(2, dim=-1)
    exact = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(1)
    reference = qk_norm_rope_reference(qkv.clone(), positions, None, None, table, **sizes)
    output = qk_norm_rope_triton(qkv, positions, None, None, table, **sizes)
    assert_as_exact_as(output[:, :18], reference[:, :18], exact)


def test_one_norm_alone_is_refused(device):
    """Catches keys that are normed with whatever lies in memory."""
    (qkv, positions, weight, _, table), sizes = rope_inputs(device)
    reason = qk_norm_rope_ineligible_reason(qkv, positions, weight, None, table, **sizes)
    assert "only q_norm_weight is given" in reason


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounds_where_the_reference_does(device, dtype):
    """Catches a rounding that is left out or added: nearly every value is the same to the last bit."""
    inputs, sizes = rope_inputs(device, 20, 4, 2, 16, dtype)
    reference = qk_norm_rope_reference(inputs[0].clone(), *inputs[1:], **sizes)
    output = qk_norm_rope_triton(*inputs, **sizes)
    assert (output == reference).float().mean() > 0.99


def test_reference_equals_the_host(device):
    """Catches another rotation than the modules that the kernel stands in for."""
    inputs, sizes = rope_inputs(device, 5, 4, 2, 8)
    qkv, positions, q_weight, k_weight, table = inputs
    query, key, value = qkv.clone().split([32, 16, 16], dim=-1)
    q_norm, k_norm = Qwen3RMSNorm(8, eps=EPS).to(device), Qwen3RMSNorm(8, eps=EPS).to(device)
    with torch.no_grad():
        q_norm.weight.copy_(q_weight)
        k_norm.weight.copy_(k_weight)
        query = q_norm(query.view(1, 5, 4, 8)).transpose(1, 2)
        key = k_norm(key.view(1, 5, 2, 8)).transpose(1, 2)
    cos, sin = table[positions][None].chunk(2, dim=-1)
    query, key = apply_rotary_pos_emb(query, key, torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1))
    expected = torch.cat([query.transpose(1, 2).flatten(2)[0], key.transpose(1, 2).flatten(2)[0], value], dim=-1)
    assert relative_rms(qk_norm_rope_reference(*inputs, **sizes), expected) < 1e-6


def test_large_positions(device):
    """Catches angles that are computed in fp32 instead of read: at 100,000 they are off by 0.01."""
    inputs, sizes = rope_inputs(device, 4, 2, 1, 8, max_positions=131072)
    inputs[1] = torch.tensor([0, 1, 99999, 131071], device=device, dtype=torch.int32)
    exact = exact_rope(*inputs, **sizes)
    assert relative_rms(qk_norm_rope_triton(*inputs, **sizes), exact) < 1e-6


def test_a_table_row_for_each_row(device):
    """Catches rows that share the first row of a table, and a table that is too short to have one for each."""
    (qkv, _, *weights, table), sizes = rope_inputs(device, 4)
    expected = qk_norm_rope_triton(qkv.clone(), torch.arange(4, device=device), *weights, table, **sizes)
    reference = qk_norm_rope_reference(qkv.clone(), None, *weights, table[:4], **sizes)
    assert "cos_sin has shape (3, 6)" in qk_norm_rope_ineligible_reason(qkv, None, *weights, table[:3], **sizes)
    assert torch.equal(qk_norm_rope_triton(qkv, None, *weights, table[:4], **sizes), expected)
    assert relative_rms(reference, expected) < 1e-6


def test_rows_are_independent(device):
    """Catches a NaN that reaches another row or head, and a position outside the table that reads other memory."""
    inputs, sizes = rope_inputs(device, 4, 2, 1, 6)
    clean = qk_norm_rope_triton(inputs[0].clone(), *inputs[1:], **sizes)
    inputs[0][1, 0] = math.nan
    inputs[1][2:] = torch.tensor([-1, 50], device=device)
    output = qk_norm_rope_triton(*inputs, **sizes)
    assert torch.equal(output[0], clean[0])
    assert output[1, :6].isnan().all() and torch.equal(output[1, 6:], clean[1, 6:])
    assert output[2:, :18].isnan().all() and torch.equal(output[2:, 18:], clean[2:, 18:])


def test_strided_rows(device):
    """Catches contiguous addressing, and a write beside the rows."""
    inputs, sizes = rope_inputs(device)
    expected = qk_norm_rope_triton(inputs[0].clone(), *inputs[1:], **sizes)
    wide = torch.full((3, 40), 7.0, device=device)
    view = wide[:, 5:29].copy_(inputs[0])
    table = torch.zeros(50, 9, device=device)[:, 2:8].copy_(inputs[4])
    qk_norm_rope_triton(view, *inputs[1:4], table, **sizes)
    # Another alignment may sum in another order.
    assert relative_rms(view, expected) < 1e-6
    assert (wide[:, :5] == 7).all() and (wide[:, 29:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "no-norms"])
@pytest.mark.parametrize(
    ("batch", "entries", "q_heads", "kv_heads", "head_dim"),
    [
        pytest.param(1, 1, 1, 1, 2, id="smallest"),
        pytest.param(2, 3, 5, 3, 6, id="odd"),
        pytest.param(3, 2, 4, 2, 16, id="powers-of-two"),
        pytest.param(2, 2, 12, 4, 6, id="four-heads-of-a-program"),
        pytest.param(2, 2, 16, 8, 16, id="eight-heads-of-a-program"),
    ],
)
def test_writes_what_two_launches_would(device, dtype, has_norms, batch, entries, q_heads, kv_heads, head_dim):
    """Catches keys before their rotation, heads or rows that are mixed up, and a write beside the columns."""
    inputs, sizes = rope_inputs(device, batch * entries, q_heads, kv_heads, head_dim, dtype)
    if not has_norms:
        inputs[2:4] = None, None
    write_to = buffers_and_columns(device, inputs[0], sizes, batch)
    expected = in_two_launches(inputs, sizes, write_to)
    plain = [inputs[0].clone(), *inputs[1:]], [tensor.clone() for tensor in write_to]
    rows = qk_norm_rope_triton(*inputs, **sizes, write_to=write_to)
    assert rows is inputs[0]
    assert all(torch.equal(*pair) for pair in zip((rows, *write_to[:2]), expected, strict=True))
    reference = qk_norm_rope_reference(*plain[0], **sizes, write_to=plain[1])
    for output, other in zip((rows, *write_to[:2]), (reference, *plain[1][:2]), strict=True):
        assert relative_rms(output, other) < (1e-6 if dtype == torch.float32 else 2e-3)


def test_writes_into_strided_buffers(device):
    """Catches contiguous addressing of rows, buffers or columns, and columns in narrow integers."""
    inputs, sizes = rope_inputs(device, 6, 2, 2, 6)
    *buffers, columns = buffers_and_columns(device, inputs[0], sizes, 2)
    expected = in_two_launches(inputs, sizes, (*buffers, columns))
    # Heads of a column side by side, behind a gap.
    wide = [torch.full((3, 11, 3, 8), 7.0, device=device) for _ in range(2)]
    views = [tensor[:, :, 1:, 2:].transpose(1, 2).copy_(buffer) for tensor, buffer in zip(wide, buffers, strict=True)]
    places = torch.zeros(2, 5, dtype=torch.int32, device=device)[:, :3].copy_(columns)
    rows = torch.zeros(6, 40, device=device)[:, :36].copy_(inputs[0])
    qk_norm_rope_triton(rows, *inputs[1:], **sizes, write_to=(*views, places))
    assert all(relative_rms(*pair) < 1e-6 for pair in zip((rows, *views), expected, strict=True))
    assert all((tensor[:, :, :1] == 7).all() and (tensor[..., :2] == 7).all() for tensor in wide)


@pytest.mark.parametrize(
    ("index", "edit", "reason"),
    [
        pytest.param(0, lambda x: x.half(), "keys is float32", id="key-dtype"),
        pytest.param(1, lambda x: x.half(), "values is float32", id="value-dtype"),
        pytest.param(1, lambda x: x[:, :, :-1], "value_buffer has shape", id="buffers"),
        pytest.param(1, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "strides", id="strides"),
        pytest.param(2, lambda x: x.float(), "columns is float32", id="columns-dtype"),
        pytest.param(2, lambda x: x[:, 1:], "columns has shape", id="columns"),
        pytest.param(2, lambda x: x.flatten(), "columns has shape", id="columns-of-rows"),
        pytest.param(2, lambda x: x.view(6, 1), "keys have 6 rows", id="batch"),
    ],
)
def test_reasons_to_write_nothing(device, index, edit, reason):
    """Catches buffers that a launch would miss, and rows that have changed when it is refused."""
    inputs, sizes = rope_inputs(device, 6, 2, 2, 6)
    write_to = list(buffers_and_columns(device, inputs[0], sizes, 2))
    assert qk_norm_rope_ineligible_reason(*inputs, **sizes, write_to=write_to) is None
    write_to[index] = edit(write_to[index])
    assert reason in qk_norm_rope_ineligible_reason(*inputs, **sizes, write_to=write_to)
    before = inputs[0].clone()
    with pytest.raises(ValueError, match="qk_norm_rope_triton: "):
        qk_norm_rope_triton(*inputs, **sizes, write_to=write_to)
    assert torch.equal(inputs[0], before)


def test_buffers_of_other_heads(device):
    """Catches heads that are written into the next row of buffers that have fewer."""
    inputs, sizes = rope_inputs(device, 6, 2, 2, 6)
    *buffers, columns = buffers_and_columns(device, inputs[0], sizes, 2)
    write_to = (*(buffer[:, :1] for buffer in buffers), columns)
    assert "keys has shape" in qk_norm_rope_ineligible_reason(*inputs, **sizes, write_to=write_to)


def test_empty(device):
    """Catches an empty grid, which a launch refuses."""
    inputs, sizes = rope_inputs(device, rows=0)
    assert qk_norm_rope_triton(*inputs, **sizes).shape == (0, 24)
    write_to = *torch.zeros(2, 1, 1, 4, 6, device=device), torch.zeros(1, 0, dtype=torch.long, device=device)
    assert qk_norm_rope_triton(*inputs, **sizes, write_to=write_to).shape == (0, 24)


@pytest.mark.parametrize(
    ("index", "edit", "reason"),
    [
        pytest.param(0, lambda x: x.double(), "qkv is float64", id="double"),
        pytest.param(0, lambda x: x[:, 1:], "qkv has shape", id="width"),
        pytest.param(0, lambda x: x.T.contiguous().T, "qkv has stride", id="stride"),
        pytest.param(1, lambda x: x[1:], "positions has shape", id="positions"),
        pytest.param(1, lambda x: x.float(), "positions is float32", id="positions-dtype"),
        pytest.param(2, lambda x: x[1:], "q_norm_weight has shape", id="q-weight"),
        pytest.param(3, lambda x: x.double(), "k_norm_weight is float64", id="k-weight"),
        pytest.param(4, lambda x: x[:, :5], "cos_sin has 5 columns", id="odd-head"),
        pytest.param(4, lambda x: x[:, :4], "qkv has shape", id="partial-rotation"),
    ],
)
def test_reasons(device, index, edit, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    inputs, sizes = rope_inputs(device)
    assert qk_norm_rope_ineligible_reason(*inputs, **sizes) is None
    inputs[index] = edit(inputs[index])
    assert reason in qk_norm_rope_ineligible_reason(*inputs, **sizes)
    with pytest.raises(ValueError, match="qk_norm_rope_triton: "):
        qk_norm_rope_triton(*inputs, **sizes)


def test_reason_without_heads(device):
    """Catches a launch over no heads."""
    inputs, sizes = rope_inputs(device)
    assert "num_heads=0" in qk_norm_rope_ineligible_reason(*inputs, **{**sizes, "num_heads": 0})


def test_operator(device):
    """Catches a schema that hides the mutation, which a compiled graph would then reorder or drop."""
    inputs, sizes = rope_inputs(device)
    opcheck(qk_norm_rope_op, *inputs, *sizes.values())
    expected = qk_norm_rope_triton(inputs[0].clone(), *inputs[1:], **sizes)

    def double_rows(qkv, *others):
        qk_norm_rope_op(qkv, *others, *sizes.values())
        return 2 * qkv

    compiled = torch.compile(double_rows, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), 2 * expected)
    assert torch.equal(inputs[0], expected)


@pytest.mark.gpu
def test_at_a_real_size(device):
    """Catches offsets that overflow and heads that do not fit one program, at the size of a published model."""
    inputs, sizes = rope_inputs(device, 4096, 32, 8, 128, torch.bfloat16, max_positions=40960)
    exact = exact_rope(*inputs, **sizes)
    reference = qk_norm_rope_reference(inputs[0].clone(), *inputs[1:], **sizes)
    output = qk_norm_rope_triton(*inputs, **sizes)
    assert_as_exact_as(output, reference, exact)
    assert (output == reference).float().mean() > 0.99


@pytest.mark.gpu
def test_writes_in_a_graph_at_a_real_size(device):
    """Catches a replay that writes where the recording did, or that starts before its input is written."""
    inputs, sizes = rope_inputs(device, 64, 32, 8, 128, torch.bfloat16, max_positions=40960)
    write_to = buffers_and_columns(device, inputs[0], sizes, 4, capacity=4096)
    projected, rows = inputs[0].clone(), torch.empty_like(inputs[0])

    def run():
        # Producer and consumer in one graph: the kernel may be placed before the copy ends.
        rows.copy_(projected)
        qk_norm_rope_triton(rows, *inputs[1:], **sizes, write_to=write_to)

    graph, _ = captured(run)
    for _ in range(5):
        projected.normal_()
        write_to[2].copy_(torch.stack([torch.randperm(4096)[:16] for _ in range(4)]))
        expected = in_two_launches([projected, *inputs[1:]], sizes, write_to)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip((rows, *write_to[:2]), expected, strict=True))

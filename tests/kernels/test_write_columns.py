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
"""Writing a block's keys and values into fixed buffers, against the plain form."""

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import DTYPES  # noqa: E402

from transformers_dflash2.kernels.write_columns import (  # noqa: E402
    write_columns_ineligible_reason,
    write_columns_triton,
)
from transformers_dflash2.static_buffers import write_columns  # noqa: E402


def block(device, dtype=torch.float32, rows=4, batch=3, heads=3, entries=5, head_dim=24, capacity=20):
    buffers = [torch.randn(rows, heads, capacity, head_dim).to(device, dtype) for _ in range(2)]
    # As projections give them: heads of one entry side by side.
    states = [torch.randn(batch, entries, heads, head_dim).to(device, dtype).transpose(1, 2) for _ in range(2)]
    columns = torch.stack([torch.randperm(capacity)[:entries] for _ in range(batch)]).to(device)
    return [*buffers, columns, *states]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [{}, {"heads": 1, "entries": 1}, {"heads": 8, "head_dim": 128, "batch": 4}], ids=str)
def test_equals_the_reference(device, dtype, sizes):
    """Catches entries in the wrong column, row or head, keys among the values, and writes beside the columns."""
    arguments = block(device, dtype, **sizes)
    expected = [tensor.clone() for tensor in arguments[:2]]
    write_columns(*expected, *arguments[2:])
    write_columns_triton(*arguments)
    assert all(torch.equal(buffer, want) for buffer, want in zip(arguments, expected, strict=False))


def test_nothing_to_write(device):
    """Catches an empty grid, which a launch refuses."""
    arguments = block(device, entries=0)
    before = arguments[0].clone()
    write_columns_triton(*arguments)
    assert torch.equal(arguments[0], before)


@pytest.mark.parametrize(
    ("index", "edit", "reason"),
    [
        pytest.param(1, lambda x: x[:, :, :-1], "value_buffer has shape", id="buffers"),
        pytest.param(2, lambda x: x.float(), "columns is float32", id="columns"),
        pytest.param(3, lambda x: x.half(), "keys is float16", id="dtype"),
        pytest.param(4, lambda x: x[:2], "values 2", id="rows"),
        pytest.param(4, lambda x: x[:, :2], "values has shape", id="heads"),
        pytest.param(1, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), "strides", id="strides"),
    ],
)
def test_reasons(device, index, edit, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    arguments = block(device)
    assert write_columns_ineligible_reason(*arguments) is None
    arguments[index] = edit(arguments[index])
    assert reason in write_columns_ineligible_reason(*arguments)
    with pytest.raises(ValueError, match="write_columns_triton: "):
        write_columns_triton(*arguments)

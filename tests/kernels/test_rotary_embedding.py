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
"""The kernel of rotary angles against the reference, the host's modules and float64."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding


pytest.importorskip("triton")

from kernel_checks import DTYPES, assert_as_exact_as, captured, opcheck  # noqa: E402

from transformers_dflash2.kernels.rotary_embedding import (  # noqa: E402
    cos_sin_table,
    rotary_embedding_ineligible_reason,
    rotary_embedding_op,
    rotary_embedding_reference,
    rotary_embedding_triton,
)


SCALING = 1.25
# Two units in the last place of 1.
FP32_TOLERANCE = 2**-22


def rotary_inputs(device, batch, block, half, top=4096, base=1e4):
    positions = torch.randint(top, (batch, block), device=device)
    return positions, base ** -(torch.arange(half, device=device) / half)


def exact_rotary(positions, inv_freq):
    """In float64 from the angle on, which the host rounds to fp32."""
    angles = (positions[..., None].float() * inv_freq.float()).double()
    cos, sin = SCALING * angles.cos(), SCALING * angles.sin()
    return torch.cat([cos, cos, sin, sin], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 8, 16), (3, 2, 5), (2, 3, 48)], ids=str)
def test_equals_the_reference(device, dtype, shape):
    """Catches lanes past the frequencies, rows of another position, and a part in another's place."""
    inputs, options = rotary_inputs(device, *shape), {"scaling": SCALING, "dtype": dtype}
    assert_as_exact_as(
        rotary_embedding_triton(*inputs, **options),
        rotary_embedding_reference(*inputs, **options),
        exact_rotary(*inputs),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "config"), [(LlamaRotaryEmbedding, LlamaConfig), (Qwen3RotaryEmbedding, Qwen3Config)]
)
def test_reference_equals_the_host(device, dtype, kind, config):
    """Catches another order of rounding and scaling than in the modules that the kernel stands in for."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    module = kind(config(head_dim=24, max_position_embeddings=256, rope_parameters=yarn)).to(device)
    assert module.attention_scaling != 1
    positions = torch.randint(256, (2, 5), device=device)
    cos, sin = module(torch.empty(0, dtype=dtype, device=device), positions)
    actual = rotary_embedding_reference(positions, module.inv_freq, scaling=module.attention_scaling, dtype=dtype)
    assert torch.equal(actual, torch.cat([cos, sin], dim=-1))


def test_far_positions(device):
    """Catches functions that lose the angle's place in the circle when it is large."""
    positions = torch.tensor([[2**17 + 1, 2**20 - 3, 2**20, 10**6]], device=device)
    inv_freq = rotary_inputs(device, 1, 1, 16)[1]
    actual = rotary_embedding_triton(positions, inv_freq, scaling=SCALING, dtype=torch.float32)
    assert (actual - exact_rotary(positions, inv_freq)).abs().max() < FP32_TOLERANCE


def test_positions_of_any_layout(device):
    """Catches positions that are read as if they were contiguous, or eight bytes each."""
    positions, inv_freq = rotary_inputs(device, 3, 4, 8)
    options = {"scaling": 1.0, "dtype": torch.float32}
    expected = rotary_embedding_triton(positions, inv_freq, **options)
    assert torch.equal(rotary_embedding_triton(positions.t(), inv_freq, **options), expected.transpose(0, 1))
    assert torch.equal(rotary_embedding_triton(positions[:, ::2], inv_freq, **options), expected[:, ::2])
    assert torch.equal(rotary_embedding_triton(positions.int(), inv_freq, **options), expected)
    shared = positions[:1].expand(2, -1)
    assert torch.equal(rotary_embedding_triton(shared, inv_freq, **options), expected[:1].expand(2, -1, -1))


def test_frequencies_of_a_half_type(device):
    """Catches angles that are rounded to the type of the frequencies, which `model.half()` casts."""
    positions, inv_freq = rotary_inputs(device, 2, 3, 8)
    inputs, options = (positions, inv_freq.half()), {"scaling": SCALING, "dtype": torch.float32}
    actual = rotary_embedding_triton(*inputs, **options)
    assert (actual - exact_rotary(*inputs)).abs().max() < FP32_TOLERANCE


def test_table_in_the_middle(device):
    """Catches a table that is copied, and one that is cut from tensors that do not lie as the kernel's do."""
    inputs = rotary_inputs(device, 2, 3, 4)
    out = rotary_embedding_triton(*inputs, scaling=1.0, dtype=torch.float32)
    cos, sin = out.chunk(2, dim=-1)
    expected = torch.cat([cos[..., :4], sin[..., :4]], dim=-1)
    table = cos_sin_table(cos, sin)
    assert torch.equal(table, expected) and table.data_ptr() == out[0, 0, 4:].data_ptr()
    # Parts of two results, copies, one tensor of both the other way round, and both in one with rows of their own.
    doubled = cos_sin_table(cos, (2 * out).chunk(2, dim=-1)[1])
    assert torch.equal(doubled, torch.cat([cos[..., :4], 2 * sin[..., :4]], dim=-1))
    assert torch.equal(cos_sin_table(cos.clone(), sin.clone()), expected)
    assert torch.equal(cos_sin_table(*torch.cat([sin, cos], dim=-1).chunk(2, dim=-1)[::-1]), expected)
    assert torch.equal(cos_sin_table(*torch.stack([cos, sin])), expected)
    assert torch.equal(cos_sin_table(cos[:, :2], sin[:, :2]), expected[:, :2])


def test_empty(device):
    """Catches an empty grid, which a launch refuses."""
    positions, inv_freq = rotary_inputs(device, 2, 3, 4)
    assert rotary_embedding_triton(positions[:0], inv_freq, scaling=1.0, dtype=torch.half).shape == (0, 3, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"positions": lambda x: x.float()}, "positions is float32", id="float-positions"),
        pytest.param({"positions": lambda x: x.expand(3, -1, -1)}, "positions has shape", id="three-rows"),
        pytest.param({"inv_freq": lambda x: x.double()}, "inv_freq is float64", id="double"),
        pytest.param({"inv_freq": lambda x: x.expand(2, -1)}, "inv_freq has shape", id="frequencies-per-row"),
        pytest.param({"inv_freq": lambda x: x[::2]}, "inv_freq has stride 2", id="strided"),
        pytest.param({"inv_freq": lambda x: x[:0]}, "inv_freq is empty", id="none"),
        pytest.param({"dtype": lambda x: torch.float64}, "dtype is float64", id="double-asked-for"),
    ],
)
def test_reasons(device, change, reason):
    """Catches arguments that a launch would misread, and an error that does not say which one."""
    positions, inv_freq = rotary_inputs(device, 2, 3, 4)
    arguments = {"positions": positions, "inv_freq": inv_freq, "scaling": 1.0, "dtype": torch.float16}
    assert rotary_embedding_ineligible_reason(**arguments) is None
    for name, edit in change.items():
        arguments[name] = edit(arguments[name])
    assert reason in rotary_embedding_ineligible_reason(**arguments)
    with pytest.raises(ValueError, match="rotary_embedding_triton: "):
        rotary_embedding_triton(**arguments)


def test_operator(device):
    """Catches a schema, fake or compiled form of the operation that disagrees with the real one."""
    inputs = rotary_inputs(device, 2, 3, 4)
    opcheck(rotary_embedding_op, *inputs, SCALING, torch.float16)
    compiled = torch.compile(
        lambda *args: rotary_embedding_op(*args, SCALING, torch.float16), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(*inputs), rotary_embedding_triton(*inputs, scaling=SCALING, dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("top", [4096, 2**20], ids="p{}".format)
def test_at_a_real_size(device, top):
    """Catches rounding and a reduction of angles that only a device's own functions show."""
    inputs = rotary_inputs(device, 16, 512, 64, top=top, base=1e6)
    exact = exact_rotary(*inputs)
    actual = rotary_embedding_triton(*inputs, scaling=SCALING, dtype=torch.float32)
    assert (actual - exact).abs().max() < FP32_TOLERANCE
    options = {"scaling": SCALING, "dtype": torch.bfloat16}
    actual, expected = rotary_embedding_triton(*inputs, **options), rotary_embedding_reference(*inputs, **options)
    assert_as_exact_as(actual, expected, exact)
    assert (actual == expected).float().mean() > 0.999


@pytest.mark.gpu
def test_cuda_graph_follows_its_positions(device):
    """Catches a launch that a recording cannot hold, and positions that it froze."""
    inputs, options = rotary_inputs(device, 2, 8, 64), {"scaling": SCALING, "dtype": torch.bfloat16}
    graph, out = captured(lambda: rotary_embedding_triton(*inputs, **options))
    for top in (100, 2**20):
        inputs[0].random_(top)
        graph.replay()
        assert torch.equal(out, rotary_embedding_triton(*inputs, **options))

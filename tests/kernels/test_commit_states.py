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
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import relative_rms  # noqa: E402

from transformers_dflash2 import static_buffers  # noqa: E402
from transformers_dflash2.functional_recurrence import RecurrenceInputs, commit_states  # noqa: E402
from transformers_dflash2.kernels import commit_states as module  # noqa: E402
from transformers_dflash2.kernels.commit_states import (  # noqa: E402
    commit_states_ineligible_reason,
    commit_states_triton,
)


# Of a state in float32, after at most eight steps.
FP32_RELATIVE_RMS = 1e-6
ROWS, BLOCK = 4, 5
COUNTS = [0, 1, 3, BLOCK]
KINDS = {
    "gated-delta-rule": {"is_delta_rule": True, "key_heads": 2},
    "decay-per-channel": {"is_delta_rule": True, "key_heads": 4, "decays": 6},
    "mamba-2": {"is_transposed": True, "key_heads": 1},
    "raw-keys": {"is_delta_rule": True, "key_heads": 2, "norm_eps": 1e-6},
    "wide-values": {"is_delta_rule": True, "key_heads": 4, "value_channels": 40},
}


def recurrence(
    device,
    *,
    heads=4,
    key_heads=4,
    key_channels=6,
    value_channels=3,
    decays=1,
    is_delta_rule=False,
    is_transposed=False,
    norm_eps=None,
    dtype=torch.float32,
):
    shape = (value_channels, key_channels) if is_transposed else (key_channels, value_channels)
    inputs = RecurrenceInputs(
        torch.randn(ROWS, BLOCK, key_heads, key_channels, device=device),
        torch.randn(ROWS, BLOCK, heads, value_channels, device=device),
        -torch.rand(ROWS, BLOCK, heads, decays, device=device),
        torch.rand(ROWS, BLOCK, heads, device=device),
        is_delta_rule=is_delta_rule,
        is_transposed=is_transposed,
        norm_eps=norm_eps,
    )
    return torch.randn(ROWS, heads, *shape, device=device).to(dtype), inputs


def window(device, channels=6, width=4, dtype=torch.float32):
    inputs = torch.randn(ROWS, channels, width + BLOCK, device=device).to(dtype)
    return inputs[..., :width].clone(), inputs


def exact(state, inputs, counts):
    """Token by token in float64, one row and head at a time."""
    result = state.double().transpose(-1, -2).clone() if inputs.is_transposed else state.double().clone()
    group = state.shape[1] // inputs.keys.shape[2]
    for row, count in enumerate(counts):
        for head in range(state.shape[1]):
            for token in range(count):
                key = inputs.keys[row, token, head // group].double()
                if inputs.norm_eps is not None:
                    key = key / (key @ key + inputs.norm_eps).sqrt()
                value = inputs.values[row, token, head].double()
                decay = inputs.log_decay[row, token, head].double().exp()
                current = result[row, head] * decay[:, None]
                if inputs.is_delta_rule:
                    value = value - key @ current
                result[row, head] = current + torch.outer(key, inputs.beta[row, token, head].double() * value)
    return result.transpose(-1, -2) if inputs.is_transposed else result


@pytest.mark.parametrize("run", [commit_states, commit_states_triton], ids=["reference", "kernel"])
@pytest.mark.parametrize("kind", KINDS)
def test_states_after_the_kept_tokens(device, run, kind):
    """Catches a head, a row or a layer that reads another's tokens, and a token too many or too few."""
    layers = [recurrence(device, **KINDS[kind]) for _ in range(3)]
    expected = [exact(state, inputs, COUNTS) for state, inputs in layers]
    run([], layers, torch.tensor(COUNTS, device=device))
    for (state, _), wanted in zip(layers, expected, strict=True):
        assert relative_rms(state, wanted) < FP32_RELATIVE_RMS


@pytest.mark.parametrize("run", [commit_states, commit_states_triton], ids=["reference", "kernel"])
def test_windows_end_with_the_last_kept_token(device, run):
    layers = [
        window(device),
        window(device),
        window(device, channels=300, width=5),
        window(device, dtype=torch.float16),
    ]
    run(layers, [], torch.tensor(COUNTS, device=device))
    for state, inputs in layers:
        for row, count in enumerate(COUNTS):
            assert torch.equal(state[row], inputs[row, :, count : count + state.shape[-1]])


def test_layers_of_different_shapes_and_types(device):
    """Catches a launch that takes the shapes of its first layer for those of all."""
    layers = [recurrence(device), recurrence(device, heads=2, key_heads=2), recurrence(device, dtype=torch.float16)]
    reference = [(state.clone(), inputs) for state, inputs in layers]
    counts = torch.tensor(COUNTS, device=device)
    commit_states_triton([window(device)], layers, counts)
    commit_states([], reference, counts)
    for (state, _), (wanted, _) in zip(layers, reference, strict=True):
        torch.testing.assert_close(state, wanted)


def test_a_broken_row_stays_alone(device):
    layer = recurrence(device, is_delta_rule=True)
    layer[0][1], layer[1].keys[1] = torch.nan, torch.nan
    untouched = layer[0].clone()
    commit_states_triton([], [layer], torch.tensor(COUNTS, device=device))
    assert layer[0][[0, 2, 3]].isfinite().all()
    assert torch.equal(layer[0][0], untouched[0])


def test_static_buffers_are_what_the_kernel_takes(device, monkeypatch):
    """Catches buffers that lie in memory as a host's keys do, which are channels of a convolution's output."""
    state, inputs = recurrence(device, is_delta_rule=True, norm_eps=1e-6)
    strided = [tensor.half().transpose(1, 3).contiguous().transpose(1, 3) for tensor in (inputs.keys, inputs.values)]
    assert not any(tensor.is_contiguous() for tensor in strided)
    inputs = replace(inputs, keys=strided[0], values=strided[1])
    convolution, block = window(device)[0], torch.randn(ROWS, 6, BLOCK, device=device)
    filled = SimpleNamespace(
        number_of_states=1,
        device=device,
        dtype=torch.float32,
        has_previous_state={0: True},
        conv_states={0: convolution},
        recurrent_states={0: state},
    )
    layer = static_buffers.StaticRecurrentLayer(filled, rows=ROWS, block=BLOCK)
    layer.load(filled)
    monkeypatch.setattr(static_buffers, "take_recurrence_inputs", lambda layer: inputs)
    layer.update_conv_state(block)
    layer.update_recurrent_state(state)
    expected = exact(state, inputs, COUNTS)
    commit_states_triton(layer.windows, layer.recurrences, torch.tensor(COUNTS, device=device))
    assert relative_rms(layer.recurrent_states[0], expected) < FP32_RELATIVE_RMS


def test_reasons(device):
    counts = torch.tensor(COUNTS, device=device)
    state, inputs = recurrence(device)
    assert commit_states_ineligible_reason([window(device)], [(state, inputs)], counts) is None
    cases = {
        "counts is float32": ([], [], counts.float()),
        "not contiguous": ([], [(state.transpose(-1, -2), inputs)], counts),
        "keys is float16": ([], [(state, replace(inputs, keys=inputs.keys.half()))], counts),
        "has shape": ([window(device)], [], counts[:2]),
        "is float64": ([window(device, dtype=torch.float64)], [], counts),
    }
    for expected, arguments in cases.items():
        assert expected in commit_states_ineligible_reason(*arguments)
        with pytest.raises(ValueError, match="commit_states_triton"):
            commit_states_triton(*arguments)


def test_addresses_live_as_long_as_the_states(device):
    """Catches a table that a graph still reads and that newer tables push out."""
    states = [torch.zeros(2, 3, device=device) for _ in range(200)]
    tables = [weakref.ref(module._addresses([(state,)], torch.device(device))) for state in states]
    assert all(table() is not None for table in tables)
    assert module._addresses([(states[0],)], torch.device(device)) is tables[0]()
    del states
    assert not any(table() is not None for table in tables[1:])

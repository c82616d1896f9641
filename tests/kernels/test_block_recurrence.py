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
"""Blocks of recurrences, kernel and reference, against float64 one row, head and token at a time."""

import functools
import sys
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from families import FAMILIES


pytest.importorskip("triton")

from kernel_checks import BF16, FP16, FP32, assert_as_exact_as, relative_rms  # noqa: E402

from transformers_dflash2 import compat  # noqa: E402
from transformers_dflash2.functional_recurrence import RecurrenceInputs, run_recurrence  # noqa: E402
from transformers_dflash2.kernels import block_recurrence as module  # noqa: E402
from transformers_dflash2.kernels.block_recurrence import (  # noqa: E402
    block_recurrence_ineligible_reason,
    block_recurrence_triton,
)
from transformers_dflash2.rollback import host_modules, watch_recurrences  # noqa: E402


# Of fp32 values after a block, in another order of the sums.
FP32_RELATIVE_RMS = 1e-6
# Largest difference of logits between the host's function, which solves for a whole chunk, and the kernel.
LOGITS_TOLERANCE = 1e-4


@dataclass
class Case:
    """Shapes and options."""

    batch: int = 2
    block: int = 3
    heads: int = 4
    key_heads: int = 2
    key_channels: int = 16
    value_channels: int = 8
    is_delta_rule: bool = True
    is_transposed: bool = False
    has_channel_decay: bool = False
    norm_eps: float | None = 1e-6
    scale: float = 0.25
    has_skip: bool = False
    has_state: bool = True
    wants_state: bool = True

    def arguments(self, device, dtype=torch.float32):
        """`(args, kwargs)`; keys, queries and values lie as the hosts' convolutions leave them, tokens innermost."""
        channels = [self.key_heads * self.key_channels] * 2 + [self.heads * self.value_channels]
        mixed = torch.randn(self.batch, sum(channels), self.block + 3, device=device).to(dtype)
        parts = mixed[..., 3:].transpose(1, 2).split(channels, dim=-1)
        queries, keys, values = (
            part.unflatten(-1, (heads, -1))
            for part, heads in zip(parts, (self.key_heads, self.key_heads, self.heads), strict=True)
        )
        steps = (self.batch, self.block, self.heads)
        decays = (*steps, self.key_channels if self.has_channel_decay else 1)
        inputs = RecurrenceInputs(
            keys,
            values,
            -torch.rand(decays, device=device),
            torch.rand(steps, device=device).to(dtype),
            is_delta_rule=self.is_delta_rule,
            is_transposed=self.is_transposed,
            norm_eps=self.norm_eps,
        )
        channels = (self.key_channels, self.value_channels)
        shape = (self.batch, self.heads, *(reversed(channels) if self.is_transposed else channels))
        state = torch.randn(shape, device=device) if self.has_state else None
        kwargs = {
            "scale": self.scale,
            "skip": torch.randn(self.heads, device=device) if self.has_skip else None,
            "wants_state": self.wants_state,
        }
        return (state, queries, inputs), kwargs

    def exact(self, args, kwargs):
        """Outputs and final state in float64, by the words of the definition."""
        state, queries, inputs = args
        group = self.heads // self.key_heads
        outputs = torch.zeros(inputs.values.shape, dtype=torch.float64)
        final = torch.zeros(self.batch, self.heads, self.key_channels, self.value_channels, dtype=torch.float64)
        if state is not None:
            final += (state.transpose(-1, -2) if self.is_transposed else state).double().cpu()
        for row in range(self.batch):
            for head in range(self.heads):
                for token in range(self.block):
                    query, key = (
                        vectors[row, token, head // group].double().cpu() for vectors in (queries, inputs.keys)
                    )
                    if self.norm_eps is not None:
                        query, key = (vector / (vector @ vector + self.norm_eps).sqrt() for vector in (query, key))
                    value = inputs.values[row, token, head].double().cpu()
                    decay = inputs.log_decay[row, token, head].double().cpu().exp()
                    beta = inputs.beta[row, token, head].double().cpu()
                    current = final[row, head] * decay[:, None]
                    added = value - key @ current if self.is_delta_rule else value
                    current = current + torch.outer(key, beta * added)
                    outputs[row, token, head] = self.scale * query @ current
                    if self.has_skip:
                        outputs[row, token, head] += kwargs["skip"][head].double().cpu() * value
                    final[row, head] = current
        return outputs, final.transpose(-1, -2) if self.is_transposed else final


CASES = {
    "gated-delta-rule": Case(),
    "one-token": Case(block=1, heads=2),
    "decay-per-channel": Case(key_heads=4, has_channel_decay=True),
    "mamba-2": Case(is_delta_rule=False, is_transposed=True, norm_eps=None, scale=1.0, has_skip=True, key_heads=1),
    # Tiles that stick out of the state on both sides.
    "odd-sizes": Case(batch=1, block=5, heads=2, key_heads=1, key_channels=37, value_channels=19),
    "no-state-before": Case(has_state=False, heads=2),
    "no-state-after": Case(wants_state=False, heads=2),
    "unscaled": Case(norm_eps=None, scale=1.0, heads=2, batch=1),
}
LARGE_CASES = {
    "gated-delta-rule": Case(batch=3, block=16, heads=32, key_heads=16, key_channels=128, value_channels=128),
    "decay-per-channel": Case(
        batch=1, block=32, heads=16, key_heads=16, key_channels=96, value_channels=192, has_channel_decay=True
    ),
    "wide-keys": Case(batch=2, block=9, heads=16, key_heads=16, key_channels=256, value_channels=256),
    "mamba-2": replace(CASES["mamba-2"], block=16, heads=48, key_channels=128, value_channels=64),
}


def every(cases):
    return pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in cases.items()])


def check(case, device, dtype):
    args, kwargs = case.arguments(device, dtype)
    exact_outputs, exact_final = case.exact(args, kwargs)
    expected, _ = run_recurrence(*args, **kwargs)
    outputs, final = block_recurrence_triton(*args, **kwargs)
    assert_as_exact_as(outputs, expected, exact_outputs)
    if case.wants_state:
        assert final.dtype == torch.float32 and final.is_contiguous()
        assert relative_rms(final, exact_final) < FP32_RELATIVE_RMS
    else:
        assert final is None


@every(CASES)
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_block(case, dtype, device):
    """Catches a head, row or token that reads another's, and a wrong order of decay, update and output."""
    check(case, device, dtype)


@pytest.mark.gpu
@every(LARGE_CASES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_block_of_a_real_layer(case, dtype, device):
    check(case, device, dtype)


@every(CASES)
def test_reference(case, device):
    args, kwargs = case.arguments(device)
    outputs, final = run_recurrence(*args, **kwargs)
    exact_outputs, exact_final = case.exact(args, kwargs)
    assert relative_rms(outputs, exact_outputs) < FP32_RELATIVE_RMS
    assert relative_rms(final, exact_final) < FP32_RELATIVE_RMS if case.wants_state else final is None


def test_a_block_continues_the_one_before(device):
    """Catches a state after the block that is not the one that the last token left."""
    (state, queries, inputs), kwargs = Case(batch=1, block=5, heads=2).arguments(device)
    whole, final = block_recurrence_triton(state, queries, inputs, **kwargs)
    parts = []
    for tokens in (slice(0, 2), slice(2, 5)):
        fields = {name: getattr(inputs, name)[:, tokens] for name in ("keys", "values", "log_decay", "beta")}
        outputs, state = block_recurrence_triton(state, queries[:, tokens], replace(inputs, **fields), **kwargs)
        parts.append(outputs)
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(state, final)


def test_a_broken_row_stays_alone(device):
    (state, queries, inputs), kwargs = Case(batch=3).arguments(device)
    state[1], inputs.keys[1] = torch.nan, torch.nan
    outputs, final = block_recurrence_triton(state, queries, inputs, **kwargs)
    assert outputs[[0, 2]].isfinite().all() and final[[0, 2]].isfinite().all()


def test_outputs_in_another_dtype(device):
    (state, queries, inputs), kwargs = Case(batch=1, heads=2).arguments(device, torch.float16)
    outputs, _ = block_recurrence_triton(state, queries, inputs, **kwargs, output_dtype=torch.float32)
    expected, _ = run_recurrence(state, queries, inputs, **kwargs, output_dtype=torch.float32)
    assert outputs.dtype == expected.dtype == torch.float32
    assert relative_rms(outputs, expected) < FP32_RELATIVE_RMS


def test_no_rows(device):
    outputs, final = block_recurrence_triton(*Case(batch=0).arguments(device)[0])
    assert outputs.shape == (0, 3, 4, 8) and final.shape == (0, 4, 16, 8)


def test_reasons(device):
    (state, queries, inputs), _ = Case().arguments(device)
    assert block_recurrence_ineligible_reason(state, queries, inputs) is None
    prompt, wide = Case(block=65), Case(key_channels=257)
    cases = {
        "blocks of 1 to 64 tokens": prompt.arguments(device)[0],
        "257 channels": wide.arguments(device)[0],
        "3 heads of queries": (state, queries[:, :, [0, 0, 0]], inputs),
        "keys has shape": (state, queries, replace(inputs, keys=inputs.keys[:, :2])),
        "state has shape": (state.transpose(-1, -2), queries, inputs),
        "log_decay has shape": (state, queries, replace(inputs, log_decay=inputs.log_decay[..., 0])),
        "beta is float64": (state, queries, replace(inputs, beta=inputs.beta.double())),
        "values requires a gradient": (
            state,
            queries,
            replace(inputs, values=inputs.values.detach().requires_grad_()),
        ),
    }
    for expected, arguments in cases.items():
        assert expected in block_recurrence_ineligible_reason(*arguments)
        with pytest.raises(ValueError, match="block_recurrence_triton"):
            block_recurrence_triton(*arguments)
    assert "output_dtype" in block_recurrence_ineligible_reason(state, queries, inputs, output_dtype=torch.int32)
    assert "skip has shape" in block_recurrence_ineligible_reason(state, queries, inputs, skip=queries[0, 0, 0])


@pytest.mark.gpu
def test_cuda_graph_follows_its_inputs(device):
    case = LARGE_CASES["gated-delta-rule"]
    (state, queries, inputs), kwargs = case.arguments(device, torch.bfloat16)
    block_recurrence_triton(state, queries, inputs, **kwargs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs, final = block_recurrence_triton(state, queries, inputs, **kwargs)
    for _ in range(2):
        (new_state, new_queries, new_inputs), _ = case.arguments(device, torch.bfloat16)
        state.copy_(new_state)
        queries.copy_(new_queries)
        for name in ("keys", "values", "log_decay", "beta"):
            getattr(inputs, name).copy_(getattr(new_inputs, name))
        graph.replay()
        expected_outputs, expected_final = block_recurrence_triton(new_state, new_queries, new_inputs, **kwargs)
        assert torch.equal(outputs, expected_outputs) and torch.equal(final, expected_final)


@pytest.fixture
def launches(monkeypatch):
    """The state that each launch of the kernel has started from."""
    states = []

    def counted(state, *args, **kwargs):
        states.append(state)
        return block_recurrence_triton(state, *args, **kwargs)

    monkeypatch.setattr(module, "block_recurrence_triton", counted)
    return states


@pytest.mark.parametrize("family", ["Qwen3.5", "Kimi Linear", "Granite 4"])
def test_targets_verify_blocks_through_the_kernel(family, launches, device):
    """Catches a call of a host that the kernel reads differently, or that does not reach it."""
    target = FAMILIES[family].build(std=0.1).to(device)
    prompt, block = torch.randint(0, 64, (1, 9), device=device), torch.randint(0, 64, (1, 5), device=device)

    def verify(modules):
        cache = target(prompt, use_cache=True)[compat.CACHE_KEY]
        assert not launches, "the kernel took a prompt"
        with watch_recurrences(modules):
            logits = target(block, use_cache=True, **{compat.CACHE_KEY: cache}).logits
        return logits, [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]

    with torch.no_grad():
        expected, expected_states = verify(frozenset())
        logits, states = verify(host_modules(target))
    assert len(launches) == len(states) == 3 and all(state is not None for state in launches)
    assert (logits - expected).abs().max() < LOGITS_TOLERANCE
    for state, wanted in zip(states, expected_states, strict=True):
        assert state.dtype == wanted.dtype and state.shape == wanted.shape
        torch.testing.assert_close(state, wanted, rtol=0, atol=LOGITS_TOLERANCE)


def call_of_the_host(case, device, **more):
    (state, queries, inputs), _ = case.arguments(device)
    return {
        "query": queries,
        "key": inputs.keys,
        "value": inputs.values,
        "g": inputs.log_decay[..., 0],
        "beta": inputs.beta,
        "initial_state": state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        **more,
    }


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="as-targets-call"),
        pytest.param({"use_qk_l2norm_in_kernel": False}, id="no-norm"),
        pytest.param({"initial_state": None}, id="no-state-before"),
        pytest.param({"output_final_state": False}, id="no-state-after"),
        pytest.param({"cu_seqlens": None, "use_cache": True}, id="flags-of-the-target"),
    ],
)
def test_calls_are_answered_as_the_host_answers(options, launches, device):
    name = type(FAMILIES["Qwen3.5"].build()).__module__
    host = sys.modules[name]
    # As many key heads as heads, which every version of the host takes; short keys, which stay stable without a norm.
    call = call_of_the_host(Case(key_heads=4), device, **options)
    call["key"] = 0.1 * call["key"]
    outputs, state = host.torch_chunk_gated_delta_rule(**call)
    with watch_recurrences(frozenset({name})):
        answered, answered_state = host.torch_chunk_gated_delta_rule(**call)
    assert len(launches) == 1
    assert answered.dtype == outputs.dtype and answered.shape == outputs.shape
    torch.testing.assert_close(answered, outputs, rtol=0, atol=1e-5)
    if state is None:
        assert answered_state is None
    else:
        torch.testing.assert_close(answered_state, state, rtol=0, atol=1e-5)


def test_what_stays_with_the_host(launches, device, monkeypatch):
    """Catches a prompt, packed sequences, or a call of a thread that verifies nothing, in the kernel."""
    name = type(FAMILIES["Qwen3.5"].build()).__module__
    host, taken = sys.modules[name], []

    @functools.wraps(host.torch_chunk_gated_delta_rule)
    def original(*args, **kwargs):
        taken.append(kwargs)

    monkeypatch.setattr(host, "torch_chunk_gated_delta_rule", original)
    block = call_of_the_host(Case(), device)
    prompt = call_of_the_host(Case(block=65), device)
    packed = {**block, "cu_seqlens": torch.tensor([0, 3, 6], device=device)}
    with watch_recurrences(frozenset({name})):
        host.torch_chunk_gated_delta_rule(**prompt)
        host.torch_chunk_gated_delta_rule(**packed)
        other = threading.Thread(target=host.torch_chunk_gated_delta_rule, kwargs=block)
        other.start()
        other.join()
    assert [id(call["query"]) for call in taken] == [id(call["query"]) for call in (prompt, packed, block)]
    assert not launches

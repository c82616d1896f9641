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
"""The static tempo recorded in CUDA graphs; what it decides is tested on the CPU as well."""

import contextlib
import copy
import threading

import pytest
import torch
from generation_checks import d0, d1, t0
from test_distribution import BATCH, DRAFTERS, LAWS, SMALLEST_P_VALUE, chi_square_p_value, joint_law
from test_distribution import PROMPT as LAW_PROMPT
from test_distribution import VOCAB as LAW_VOCAB
from test_distribution import target as law_target
from test_static import BATCHES, half_right, shifting, static
from transformers import CompileConfig

from transformers_dflash2 import fused_modules, static_round
from transformers_dflash2.graph_pieces import record_on_cuda
from transformers_dflash2.static_round import StaticRound
from transformers_dflash2.testing import left_pad, table_drafter, table_target


pytest.importorskip("scipy")
pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def moved(*models):
    return [copy.deepcopy(model).to(DEVICE) for model in models]


def on_device(inputs):
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def recorded(target, draft):
    """The rounds of a pair, all of which must hold graphs."""
    rounds = static_round.kept_rounds(target, draft)
    assert rounds and all(kept.capture_failure is None and kept.has_graph("round") for kept in rounds)
    return rounds


def test_it_is_the_default():
    """Catches a GPU that is left waiting for the host, and graphs where a call rules them out."""
    target, draft = moved(t0(), half_right(t0()))
    inputs = {"inputs": left_pad(BATCHES["one"])["input_ids"].to(DEVICE), "max_new_tokens": 20, "do_sample": False}
    plain = target.generate(**inputs)
    assert torch.equal(target.generate(**inputs, assistant_model=draft, disable_compile=True), plain)
    assert torch.equal(target.generate(**inputs, assistant_model=draft, cache_implementation="dynamic"), plain)
    assert not static_round.kept_rounds(target, draft)
    assert torch.equal(target.generate(**inputs, assistant_model=draft), plain)
    recorded(target, draft)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_same_tokens_as_plain(rows):
    """Catches a replay that reads what the recording read, and graphs that a later call cannot use."""
    target, draft = moved(t0(), half_right(t0()))
    for new_tokens in (40, 9, 40):
        inputs = on_device({**left_pad(rows), "max_new_tokens": new_tokens, "do_sample": False})
        expected = target.generate(**inputs)
        assert torch.equal(static(target, draft, **inputs), expected)
        assert torch.equal(target.generate(**inputs, assistant_model=draft), expected)
    (kept,) = recorded(target, draft)
    # A graph of the round, and one that accepts.
    assert len(kept._graphs) == 2


def test_other_arguments_are_recorded_anew():
    """Catches a graph that is replayed for a call whose model arguments it was not recorded with."""
    (target,) = moved(table_target(11))
    target, draft = shifting(target), table_drafter(target)
    inputs = on_device({**left_pad(BATCHES["one"]), "max_new_tokens": 12, "do_sample": False})
    for shift in (0, 2, 0):
        assert torch.equal(static(target, draft, shift=shift, **inputs), target.generate(shift=shift, **inputs))
    assert len(recorded(target, draft)) == 2


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_fused_families(model_type, monkeypatch):
    """Catches a fused module that is never recorded, or changes the text."""
    counts = []
    original = fused_modules.fused_modules.__wrapped__

    def counting(*models):
        for found in original(*models):
            counts.append(dict(found))
            yield found

    monkeypatch.setattr("transformers_dflash2.static_decoding.fused_modules", contextlib.contextmanager(counting))
    (target,) = moved(table_target(model_type=model_type))
    draft = half_right(target)
    inputs = on_device({**left_pad(BATCHES["padded"]), "max_new_tokens": 30, "do_sample": False})
    assert torch.equal(static(target, draft, **inputs), target.generate(**inputs))
    recorded(target, draft)
    # The drafter's two layers and the target's four.
    drafted, verified = counts
    assert drafted == {"norm": drafted["norm"], "mlp": 2, "attention": 2, "draft_layer": 2, "rotary": 1}
    assert verified == {"norm": verified["norm"], "mlp": 4, "layer": 4, "attention": 4, "rotary": 1}


@pytest.mark.parametrize("law", ["temperature", "all", "min-p", "repetition"])
def test_law_over_many_replays(law):
    """Catches noise that is baked into a graph, or a temperature of the first call that stays."""
    target, draft = moved(law_target(), DRAFTERS["spread-out"]())
    prompt = torch.tensor([LAW_PROMPT], device=DEVICE).expand(BATCH, -1)
    # Another temperature comes first: the same graphs serve both.
    static(target, draft, inputs=prompt, do_sample=True, max_new_tokens=4, temperature=5.0, top_k=0)
    torch.manual_seed(5)
    counts = torch.zeros(LAW_VOCAB**3)
    places = LAW_VOCAB ** torch.arange(2, -1, -1)
    for _ in range(10):
        out = static(target, draft, inputs=prompt, do_sample=True, max_new_tokens=4, **LAWS[law][0])
        new = out[:, len(LAW_PROMPT) : len(LAW_PROMPT) + 3].cpu()
        counts += torch.bincount((new * places).sum(-1), minlength=LAW_VOCAB**3)
    recorded(target, draft)
    assert chi_square_p_value(counts.double(), joint_law(law)) >= SMALLEST_P_VALUE


def test_replays_share_no_noise_and_follow_the_seed(monkeypatch):
    """Catches a buffer of noise that is drawn once, and draws that a seed does not repeat."""
    target, draft = moved(t0(), d1())
    drawn = []
    original = StaticRound.draw_noise

    def draw_noise(self, draft):
        original(self, draft)
        drawn.append(torch.cat([self.draft_noise.flatten(), self._accept_noise]))

    monkeypatch.setattr(StaticRound, "draw_noise", draw_noise)
    inputs = on_device({**left_pad(BATCHES["padded"]), "max_new_tokens": 20, "do_sample": True, "temperature": 3.0})
    outputs = []
    for seed in (0, 0, 1):
        drawn.clear()
        torch.manual_seed(seed)
        outputs.append(static(target, draft, **inputs))
        noise = torch.stack(drawn)
        assert noise.unique(dim=0).shape[0] == len(drawn) >= 3
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_greedy_and_sampled_calls_share_the_round():
    """Catches a second recording of the large graph, and a greedy call that samples or draws."""
    target, draft = moved(t0(), d0())
    inputs = on_device({**left_pad([[3, 7, 1]]), "max_new_tokens": 20})
    expected = target.generate(**inputs, do_sample=False)
    for _ in range(2):
        static(target, draft, **inputs, do_sample=True, temperature=2.0, top_k=5)
        state = torch.cuda.get_rng_state()
        assert torch.equal(static(target, draft, **inputs, do_sample=False), expected)
        assert torch.equal(torch.cuda.get_rng_state(), state)
    (kept,) = recorded(target, draft)
    assert len(kept._graphs) == 3


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken-off"])
def test_random_numbers_during_and_after_a_capture(breaks):
    """Catches a capture that keeps the generator: no other thread could draw, nor anybody after a failure."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    expected = torch.stack([torch.randn(4, generator=generator, device=DEVICE) for _ in range(2)])
    tensor, drawn = torch.zeros(4, device=DEVICE), []

    def work():
        thread = threading.Thread(target=lambda: drawn.append(torch.randn(4, device=DEVICE)))
        tensor.add_(1)
        thread.start()
        thread.join()
        if breaks:
            tensor.sum().item()

    torch.manual_seed(3)
    if breaks:
        with pytest.raises(RuntimeError):
            record_on_cuda(work)
    else:
        record_on_cuda(work).replay()
        assert tensor.tolist() == [1.0] * 4
    drawn.append(torch.randn(4, device=DEVICE))
    torch.testing.assert_close(torch.stack(drawn), expected, rtol=0, atol=0)


def test_other_threads_go_on_while_a_round_is_recorded():
    """Catches a recording that forbids the whole process to allocate or to wait for the device."""
    target, draft = moved(t0(), half_right(t0()))
    inputs = on_device({**left_pad(BATCHES["padded"]), "max_new_tokens": 20, "do_sample": False})
    plain = target.generate(**inputs)
    stop, failures, turns = threading.Event(), [], []

    def busy():
        try:
            while not stop.is_set():
                torch.cuda.empty_cache()
                turns.append(torch.arange(1 << 20, device=DEVICE).sum().item())
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(3):
            static_round.release_static_rounds(target)
            assert torch.equal(static(target, draft, **inputs), plain)
            recorded(target, draft)
    finally:
        stop.set()
        thread.join()
    assert turns and not failures


def test_compiled_forward():
    """Catches a compiled forward that a graph cannot hold, or that writes beside the buffers."""
    target, draft = moved(t0(), half_right(t0()))
    inputs = on_device({**left_pad(BATCHES["even"]), "max_new_tokens": 30, "do_sample": False})
    expected = target.generate(**inputs)
    for _ in range(2):
        assert torch.equal(static(target, draft, compile_config=CompileConfig(), **inputs), expected)
    recorded(target, draft)

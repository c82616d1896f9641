# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""The tools around `generate`: what holds for a plain call holds with a drafter as well."""

import threading

import pytest
import torch
from generation_checks import PROMPT, d1, pure_drafter, pure_target, t0
from test_inspection import word_tokenizer
from transformers import AutoModelForCausalLM, TextIteratorStreamer

from transformers_dflash2.testing import table_drafter, table_target


OPTIONS = {"max_new_tokens": 24, "do_sample": False}


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradient_modes(context):
    """Catches buffers that are made in one mode and changed in another."""
    expected = t0().generate(PROMPT, **OPTIONS)
    with context():
        drafted = t0().generate(PROMPT, assistant_model=d1(), **OPTIONS)
    assert torch.equal(drafted, expected)
    # What a call in inference mode leaves behind must not spoil the next one.
    assert torch.equal(t0().generate(PROMPT, assistant_model=d1(), **OPTIONS), expected)


def test_text_streams_from_another_thread():
    """Catches a streamer that is never ended, or gets text out of order."""
    tokenizer = word_tokenizer()
    texts = []
    for draft in (None, pure_drafter()):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        options = {**OPTIONS, "assistant_model": draft, "streamer": streamer}
        worker = threading.Thread(target=pure_target().generate, args=(PROMPT,), kwargs=options)
        worker.start()
        texts.append("".join(streamer))
        worker.join()
    assert texts[0] == texts[1] and texts[0].strip()


@pytest.mark.parametrize("form", ["forward", "module"])
def test_compiled_target(form):
    """
    Catches layers compiled past the hooks that read them.

    The plain call comes first: its code is compiled without taps, and is not compiled again for the sake of hooks.
    """
    target = table_target(0, num_hidden_layers=3)
    draft = table_drafter(target, num_target_layers=3)
    expected = target.generate(PROMPT, assistant_model=draft, **OPTIONS)
    rounds = draft.last_stats.rounds
    torch._dynamo.reset()
    if form == "forward":
        target.forward = torch.compile(target.forward, backend="eager", dynamic=True)
    else:
        target.compile(backend="eager", dynamic=True)
    plain = target.generate(PROMPT, **OPTIONS)
    drafted = target.generate(PROMPT, assistant_model=draft, **OPTIONS)
    assert torch.equal(drafted, expected) and torch.equal(plain, expected)
    # The features still arrive: the drafter is as good as before.
    assert draft.last_stats.rounds == rounds
    torch._dynamo.reset()


def test_device_map_with_layers_on_disk(tmp_path):
    """Catches weights that are read where they lie: those of layers on disk are nowhere until the layer runs."""
    pytest.importorskip("accelerate")
    target = t0()
    expected = target.generate(PROMPT, **OPTIONS)
    target.save_pretrained(tmp_path / "target")
    places = {f"model.layers.{index}": "disk" if index > 1 else "cpu" for index in range(4)}
    rest = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    split = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map={**places, **rest}, offload_folder=tmp_path / "offload"
    )
    assert split.lm_head.weight.device.type == "meta"
    drafted = split.generate(PROMPT, assistant_model=d1(), **OPTIONS)
    assert torch.equal(drafted, expected) and d1().last_stats.rounds > 0

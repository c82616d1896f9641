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
"""When the static tempo is taken, and what `compile_config` does to it."""

import copy
import logging

import torch
from generation_checks import PROMPT, d0, t0
from test_static import static
from transformers import CompileConfig, GenerationConfig

from transformers_dflash2.integration import _static_options


def chosen(call_config=None, on_cuda=False, **options):
    """`(how the tempo runs, what is left for the host)` of one call."""
    arguments = {} if call_config is None else {"generation_config": call_config}

    def effective(name):
        return options.get(name, getattr(arguments.get("generation_config"), name, None))

    return _static_options(arguments, options, effective, on_cuda=on_cuda), options, arguments


def test_when_the_tempo_is_wanted():
    """Catches a tempo that a call gets against its will, or asks for in vain, and one that is idle on a GPU."""
    wanted = {"record": True, "compile_config": None}
    for on_cuda in (True, False):
        assert chosen(cache_implementation="static", on_cuda=on_cuda)[0] == wanted
        for options in ({"cache_implementation": "dynamic"}, {"disable_compile": True}, {"past_key_values": object()}):
            assert chosen(**options, on_cuda=on_cuda)[0] is None
    assert chosen()[0] is None
    static_options, options, _ = chosen(on_cuda=True)
    assert static_options == wanted and options == {"cache_implementation": "dynamic"}


def test_asking_without_recording():
    """Catches a static cache that brings a compilation which the call rules out."""
    static_options, options, _ = chosen(
        cache_implementation="static", disable_compile=True, compile_config=CompileConfig()
    )
    assert static_options == {"record": False, "compile_config": None}
    assert options["cache_implementation"] == "dynamic"


def test_the_host_sees_neither_request():
    """Catches a static cache or a compilation by the host beside ours, and a caller's config that is changed."""
    wanted = CompileConfig()
    static_options, options, _ = chosen(cache_implementation="static", compile_config=wanted)
    assert static_options["compile_config"] is wanted
    assert options == {"cache_implementation": "dynamic"}
    config = GenerationConfig(cache_implementation="static", compile_config=wanted)
    before = copy.deepcopy(config)
    static_options, options, arguments = chosen(config)
    assert static_options == {"record": True, "compile_config": wanted}
    assert options == {}
    assert arguments["generation_config"].cache_implementation == "dynamic"
    assert arguments["generation_config"].compile_config is None
    assert config == before


def compile_config(backend, **options):
    config = CompileConfig(backend=backend, **options)
    # The host's own switch for tests on a CPU.
    config._compile_all_devices = True
    return config


def test_compiled_forward_is_one_graph_with_the_same_tokens():
    """Catches a hook, a buffer or a length that breaks the graph, or is frozen in it."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    config = compile_config(backend, fullgraph=True)
    inputs = {"inputs": PROMPT.repeat(3, 1), "max_new_tokens": 25, "do_sample": False}
    assert torch.equal(static(t0(), d0(), compile_config=config, **inputs), t0().generate(**inputs))
    assert len(compiled) == 1


def test_a_failed_compilation_is_reported(caplog):
    """Catches a call that fails, or is slow without a word, because of a compiler."""
    caplog.set_level(logging.WARNING, logger="transformers_dflash2")

    def backend(graph, inputs):
        raise NotImplementedError("no such operation")

    inputs = {"inputs": PROMPT, "max_new_tokens": 25, "do_sample": False}
    drafted = static(t0(), d0(), compile_config=compile_config(backend), **inputs)
    assert torch.equal(drafted, t0().generate(**inputs))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "compile_config is not honoured" in message and "no such operation" in message


def test_a_cpu_does_not_compile(caplog):
    """Catches minutes of compilation where the host would not compile either."""
    caplog.set_level(logging.INFO, logger="transformers_dflash2")

    def backend(graph, inputs):
        raise AssertionError("compiled on a CPU")

    inputs = {"inputs": PROMPT, "max_new_tokens": 9, "do_sample": False}
    static(t0(), d0(), compile_config=CompileConfig(backend=backend), **inputs)
    assert any("it needs a CUDA device" in record.getMessage() for record in caplog.records)

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
"""When a kernel runs, when the plain path does, and what is said about it."""

import importlib
import logging
import sys

import pytest
import torch


pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources  # noqa: E402

import transformers_dflash2  # noqa: E402
from transformers_dflash2 import import_utils, kernels  # noqa: E402
from transformers_dflash2.kernels import dispatch as dispatch_module  # noqa: E402
from transformers_dflash2.kernels.dispatch import (  # noqa: E402
    device_reason,
    dispatch,
    ineligible_reason,
    next_power_of_2,
    out_reason,
    tensor_reason,
)


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(dispatch_module, "_reported", set())
    monkeypatch.setattr(dispatch_module, "_failures", {})


def test_import_needs_no_triton(monkeypatch):
    """Catches a `kernels` package or a dispatcher that imports triton before a kernel is asked for."""
    monkeypatch.setattr(transformers_dflash2, "kernels", kernels)
    for name in [name for name in sys.modules if name.startswith("transformers_dflash2.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    # Importing it is an error now.
    monkeypatch.setitem(sys.modules, "triton", None)
    fresh = importlib.import_module("transformers_dflash2.kernels.dispatch")
    assert fresh is not dispatch_module
    loaded = {name for name in sys.modules if name.startswith("transformers_dflash2.kernels.")}
    assert loaded == {"transformers_dflash2.kernels.dispatch"}


def test_launchers_are_found_by_name():
    """Catches a launcher that is announced and not there, and an attribute error of another kind for a typo."""
    for name in kernels.__all__:
        assert callable(getattr(kernels, name))
    assert set(kernels.__all__) <= set(dir(kernels))
    with pytest.raises(AttributeError, match="no attribute 'grouped_konv_triton'"):
        kernels.grouped_konv_triton  # noqa: B018


def test_eligible_arguments_run_the_kernel(device, monkeypatch):
    """Catches a dispatcher that quietly takes the plain path."""
    tokens = torch.tensor([[1, 2]], device=device)
    predictions = torch.tensor([[1, 3, 4]], device=device)
    accepted, bonus = dispatch("accept_greedy", pytest.fail, tokens, predictions)
    assert (accepted.tolist(), bonus.tolist()) == ([1], [3])


def test_the_reason_is_logged_once(caplog):
    """Catches a message per call, and one reason that silences the other operations."""
    caplog.set_level(logging.DEBUG, logger="transformers_dflash2")
    wrong = torch.zeros(2, 3)
    for op in ("accept_greedy", "accept_greedy", "grouped_conv"):
        arguments = (wrong, wrong) if op == "accept_greedy" else (wrong, wrong, wrong)
        keywords = {} if op == "accept_greedy" else {"group_size": 1}
        assert dispatch(op, lambda *args, **kwargs: "plain", *arguments, **keywords) == "plain"
    messages = [record.getMessage() for record in caplog.records if "plain PyTorch" in record.getMessage()]
    assert [message.split()[0] for message in messages] == ["accept_greedy", "grouped_conv"]
    # Nothing is lost by the plain path on a CPU, so it is no warning there.
    assert {record.levelno for record in caplog.records if "plain PyTorch" in record.getMessage()} == {logging.DEBUG}


def test_without_triton_the_plain_path_runs(monkeypatch):
    """Catches an import error on a machine without triton."""
    monkeypatch.setattr(dispatch_module, "unavailable_reason", lambda name: "triton is not installed; install it")
    monkeypatch.setattr(dispatch_module, "_module", pytest.fail)
    assert ineligible_reason("accept_greedy", None, None) == "triton is not installed; install it"
    assert dispatch("accept_greedy", lambda tokens, predictions: "plain", None, None) == "plain"
    assert import_utils.is_triton_available()


def test_a_kernel_that_does_not_compile(device, monkeypatch, caplog):
    """Catches a device with less shared memory than a kernel wants that fails the call, or compiles in every one."""
    tokens, predictions = torch.tensor([[1, 2]], device=device), torch.tensor([[1, 3, 4]], device=device)
    launches = []

    def launch(*args):
        launches.append(args)
        raise OutOfResources(232448, 101376, "shared memory")

    monkeypatch.setattr(
        importlib.import_module("transformers_dflash2.kernels.accept_greedy"), "accept_greedy_triton", launch
    )
    caplog.set_level(logging.DEBUG, logger="transformers_dflash2")
    for _ in range(2):
        assert dispatch("accept_greedy", lambda tokens, predictions: "plain", tokens, predictions) == "plain"
    assert len(launches) == 1
    (message,) = [record.getMessage() for record in caplog.records if "plain PyTorch" in record.getMessage()]
    assert "accept_greedy" in message and "shared memory" in message


def test_an_error_of_a_kernel_is_no_reason(device, monkeypatch):
    """Catches a fault of ours that is hidden behind the plain path."""

    def launch(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(
        importlib.import_module("transformers_dflash2.kernels.accept_greedy"), "accept_greedy_triton", launch
    )
    with pytest.raises(ZeroDivisionError):
        dispatch(
            "accept_greedy", pytest.fail, torch.tensor([[1]], device=device), torch.tensor([[1, 3]], device=device)
        )


def test_a_compiler_that_does_not_work(monkeypatch):
    """Catches a machine with triton and without a C compiler on which every call fails."""
    probe = importlib.import_module("transformers_dflash2.kernels.probe")

    def run_probe(device):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(probe, "run_probe", run_probe)
    dispatch_module.compiler_reason.cache_clear()
    reason = dispatch_module.compiler_reason(torch.device("cuda:7"))
    dispatch_module.compiler_reason.cache_clear()
    assert "cuda:7 (RuntimeError: Failed to find C compiler. Please specify via CC)" in reason


@pytest.mark.gpu
def test_the_compiler_works(device):
    """Catches a probe that fails where kernels run."""
    assert dispatch_module.compiler_reason(torch.device("cuda", torch.cuda.current_device())) is None


def test_device_reasons(device, monkeypatch):
    """Catches a kernel launched on a device it cannot run on, on mixed devices, or where a gradient is wanted."""
    here = torch.zeros(1, device=device)
    assert device_reason(a=here, b=None) is None
    meta = torch.zeros(1, device="meta")
    assert "a is on meta, and the kernels need a CUDA device" in device_reason(a=meta)
    assert "b is on meta and a on" in device_reason(a=here, b=meta)
    leaf = torch.zeros(1, device=device, requires_grad=True)
    assert "b requires a gradient" in device_reason(a=here, b=leaf)
    with torch.no_grad():
        assert device_reason(a=here, b=leaf) is None
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "a is on cpu, and the kernels need a CUDA device" in device_reason(a=torch.zeros(1))


def test_tensor_reasons():
    """Catches a shape, dtype or stride that would make a kernel read the wrong memory."""

    def reason(tensor, **kwargs):
        return tensor_reason("x", tensor, shape=(2, None), dtypes=(torch.float32, torch.int64), **kwargs)

    assert reason(torch.zeros(2, 3)) is None
    assert reason(torch.zeros(2, 0, dtype=torch.int64)) is None
    assert reason(torch.zeros(3, 3)) == "x has shape (3, 3); it should be (2, *)"
    assert reason(torch.zeros(2)) == "x has shape (2,); it should be (2, *)"
    assert reason(torch.zeros(2, 3).half()) == "x is float16; convert it to one of: float32, int64"
    assert "x has stride 2 in its last dimension" in reason(torch.zeros(3, 2).T)
    assert reason(torch.zeros(3, 2).T, unit_stride=False) is None
    assert reason(torch.zeros(2, 5)[:, ::5]) is None


def test_out_reasons():
    """Catches an output buffer whose layout or type a kernel would fill wrongly."""
    like = torch.zeros(1)

    def reason(tensor):
        return out_reason("out", tensor, like, shape=(2, 3), dtype=torch.float32)

    assert reason(torch.zeros(2, 3)) is None
    assert "out is on meta" in reason(torch.zeros(2, 3, device="meta"))
    assert "out is not contiguous" in reason(torch.zeros(3, 2).T)
    assert "out is float16" in reason(torch.zeros(2, 3).half())
    assert "out has shape (2, 2)" in reason(torch.zeros(2, 2))


def test_next_power_of_2():
    """Catches an off-by-one at the powers themselves."""
    assert [next_power_of_2(size) for size in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [
        *(1, 1, 2, 4, 4, 8, 1024, 1024, 2048)
    ]

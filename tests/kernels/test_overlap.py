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
"""Kernels that start before the one ahead of them has ended."""

import ast
from pathlib import Path

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import captured  # noqa: E402

import transformers_dflash2.kernels  # noqa: E402
from transformers_dflash2.kernels import overlap  # noqa: E402
from transformers_dflash2.kernels.overlap import overlap_options  # noqa: E402


def launched_kernels():
    """Every kernel of the package that is launched with a grid, as a syntax tree, with its file."""
    folder = Path(transformers_dflash2.kernels.__file__).parent
    for path in sorted(folder.glob("*.py")):
        if path.stem == "probe":
            # It reads nothing, and is alone on its stream.
            continue
        tree = ast.parse(path.read_text())
        launched = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.name in launched:
                yield pytest.param(path, node, id=f"{path.stem}-{node.name}")


def calls(tree, name):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and name in ast.unparse(node.func)]


@pytest.mark.parametrize(("path", "kernel"), list(launched_kernels()))
def test_every_kernel_waits_before_it_reads_writes_or_returns(path, kernel):
    """Catches a kernel that lets the one after it pass the one before it, or reads what is not written yet."""
    assert kernel.args.args[-1].arg == "OVERLAPS"
    waits = [i for i, statement in enumerate(kernel.body) if ast.unparse(statement) == "wait_for_inputs(OVERLAPS)"]
    assert len(waits) == 1
    for statement in kernel.body[: waits[0]]:
        assert not calls(statement, "tl.load") and not calls(statement, "tl.store") and not calls(statement, "atomic")
        assert not any(isinstance(node, ast.Return) for node in ast.walk(statement))


@pytest.mark.parametrize(("path", "kernel"), list(launched_kernels()))
def test_every_launch_says_whether_it_overlaps(path, kernel):
    """Catches a kernel that waits and is not launched so that there is something to wait for."""
    launches = [call for call in ast.walk(ast.parse(path.read_text())) if is_launch(call, kernel.name)]
    assert launches
    for launch in launches:
        assert any(word.arg is None and "overlap_options" in ast.unparse(word.value) for word in launch.keywords)


def is_launch(node, name):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value) == name


@pytest.mark.parametrize(("capability", "overlaps"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_only_devices_that_can_overlap_do(monkeypatch, capability, overlaps):
    """Catches an instruction that older devices do not have."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    options = overlap_options.__wrapped__(torch.device("cuda:0"))
    assert options["OVERLAPS"] is overlaps
    assert options.get("launch_pdl", False) is overlaps


def test_builds_without_the_instructions_do_not_overlap(monkeypatch):
    """Catches a launch option of one vendor's triton in another's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(overlap, "HAS_DEPENDENT_LAUNCH", False)
    assert overlap_options.__wrapped__(torch.device("cuda:0")) == {"OVERLAPS": False}


def test_the_interpreter_does_not_overlap():
    assert overlap_options(torch.device("cpu")) == {"OVERLAPS": False}


@pytest.mark.gpu
def test_results_do_not_depend_on_it(device, monkeypatch):
    """Catches a kernel that reads early: a long chain, each link of which reads the one before, over many replays."""
    from transformers_dflash2.kernels import rms_norm, skinny_linear

    torch.manual_seed(0)
    weights = [torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) / 64 for _ in range(4)]
    norm = torch.ones(4096, device=device, dtype=torch.bfloat16)
    start = torch.randn(8, 4096, device=device, dtype=torch.bfloat16)

    def chain(x):
        for _ in range(8):
            for weight in weights:
                x = rms_norm.rms_norm_triton(skinny_linear.skinny_linear_triton(x, weight), norm, eps=1e-6)[0]
        return x

    assert overlap_options(start.device)["OVERLAPS"]
    for file in (rms_norm, skinny_linear):
        monkeypatch.setattr(file, "overlap_options", lambda device: {"OVERLAPS": False})
    expected = chain(start)
    monkeypatch.undo()
    graph, result = captured(lambda: chain(start))
    for _ in range(50):
        result.zero_()
        graph.replay()
        assert torch.equal(result, expected)
    assert torch.equal(chain(start), expected)

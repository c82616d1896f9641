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
"""Who selects the candidates, and when flashinfer compiles."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from transformers_dflash2.functional_dflash2 import top_candidates
from transformers_dflash2.kernels import top_k as module
from transformers_dflash2.kernels.top_k import CROSSOVER_ROWS, flashinfer_reason, select_top_k


@pytest.fixture
def flashinfer(monkeypatch):
    """A stand-in that answers as the package does, and says what it was asked."""
    fake = SimpleNamespace(compiled=True, fails=False, calls=[])

    def top_k(logits, k, sorted=False, deterministic=False):
        fake.calls.append((tuple(logits.shape), sorted, deterministic))
        if fake.fails:
            raise RuntimeError("no nvcc")
        fake.compiled = True
        values, ids = torch.topk(logits, k, dim=-1)
        return values, ids.int()

    package, jit, topk = (ModuleType(name) for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.topk"))
    package.top_k, package.jit, jit.topk = top_k, jit, topk
    topk.gen_topk_module = lambda: SimpleNamespace(is_compiled=fake.compiled)
    for part in (package, jit, topk):
        monkeypatch.setitem(sys.modules, part.__name__, part)
    monkeypatch.setattr(module, "unavailable_reason", lambda name: None)
    monkeypatch.delenv("TRANSFORMERS_DFLASH2_FLASHINFER", raising=False)
    module._prepare_flashinfer.cache_clear()
    yield fake
    module._prepare_flashinfer.cache_clear()


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    @property
    def is_cuda(self):
        return True


def logits(batch, slots=7, vocab=40, cuda=True):
    values = torch.randn(batch, slots, vocab)
    return values.as_subclass(OnCuda) if cuda else values


@pytest.mark.parametrize(
    ("batch", "cuda", "uses_flashinfer"),
    [
        pytest.param(8, True, True, id="at-the-crossover"),
        pytest.param(7, True, False, id="below"),
        pytest.param(64, False, False, id="on-a-cpu"),
    ],
)
def test_crossover(flashinfer, batch, cuda, uses_flashinfer):
    """Catches the slower selection, ids of another type or shape, and an order that depends on the run."""
    assert CROSSOVER_ROWS == 8 * 7
    values = logits(batch, cuda=cuda)
    actual = select_top_k(values, 5)
    for mine, theirs in zip(actual, torch.topk(values, 5), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    shapes = [call for call in flashinfer.calls if call[0] == (batch * 7, 40)]
    assert shapes == ([((batch * 7, 40), True, True)] if uses_flashinfer else [])


def test_candidates_do_not_depend_on_the_selection(flashinfer):
    """Catches an order among equals that is the selection's and not that of the ids."""
    values = logits(8).round()
    unary, ids = top_candidates(values, top_k=6, select=select_top_k)
    expected_unary, expected_ids = top_candidates(torch.Tensor(values), top_k=6)
    assert torch.equal(unary, expected_unary) and torch.equal(ids, expected_ids)
    assert flashinfer.calls


@pytest.mark.parametrize(
    ("compiled", "wish", "reason"),
    [
        pytest.param(True, None, None, id="compiled"),
        pytest.param(False, None, "TRANSFORMERS_DFLASH2_FLASHINFER=1 compiles it", id="not-compiled"),
        pytest.param(False, "1", None, id="asked-for"),
        pytest.param(True, "0", "TRANSFORMERS_DFLASH2_FLASHINFER=0", id="ruled-out"),
    ],
)
def test_nobody_waits_for_a_compiler_unasked(flashinfer, monkeypatch, compiled, wish, reason):
    """Catches two silent minutes in somebody's first call."""
    flashinfer.compiled = compiled
    if wish is not None:
        monkeypatch.setenv("TRANSFORMERS_DFLASH2_FLASHINFER", wish)
    actual = flashinfer_reason()
    assert actual is None if reason is None else reason in actual
    select_top_k(logits(8), 3)
    assert bool(flashinfer.calls) == (reason is None)


def test_the_first_compilation_is_announced(flashinfer, monkeypatch, caplog):
    """Catches a wait without a word, and words without a wait."""
    caplog.set_level(logging.WARNING, logger="transformers_dflash2")
    monkeypatch.setenv("TRANSFORMERS_DFLASH2_FLASHINFER", "1")
    flashinfer.compiled = False
    for _ in range(2):
        select_top_k(logits(8), 3)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "Compiling flashinfer's top-k kernel",
        "flashinfer's top-k kernel is ready after 0 s.",
    ]


def test_a_failed_compilation_is_reported_once(flashinfer, monkeypatch, caplog):
    """Catches a call that fails for want of a compiler, or that tries again every round."""
    caplog.set_level(logging.WARNING, logger="transformers_dflash2")
    monkeypatch.setenv("TRANSFORMERS_DFLASH2_FLASHINFER", "1")
    flashinfer.fails = True
    for _ in range(2):
        values = logits(8)
        assert torch.equal(select_top_k(values, 3)[1], torch.topk(values, 3)[1])
    assert len(flashinfer.calls) == 1
    assert sum("no nvcc" in record.getMessage() for record in caplog.records) == 1


def test_an_unknown_release_is_not_compiled(flashinfer, monkeypatch):
    """Catches a release of flashinfer that moved its kernels and breaks every call."""
    monkeypatch.delitem(sys.modules, "flashinfer.jit.topk")
    assert "not compiled yet" in flashinfer_reason()


@pytest.mark.gpu
def test_the_real_package():
    """Catches an interface of the package that is not the stand-in's."""
    if flashinfer_reason() is not None:
        pytest.skip(flashinfer_reason())
    values = torch.randn(8, 7, 5000, device="cuda")
    for mine, theirs in zip(select_top_k(values, 16), torch.topk(values, 16), strict=True):
        assert torch.equal(mine, theirs)

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
from kernel_checks import captured

from transformers_dflash2.functional_dflash2 import top_candidates
from transformers_dflash2.kernels import top_k as module
from transformers_dflash2.kernels.top_k import FLASHINFER_ROWS, TWO_STEP_ROWS, flashinfer_reason, select_top_k


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
        pytest.param(8, True, True, id="from-here"),
        pytest.param(7, True, False, id="below"),
        pytest.param(15, True, True, id="up-to-here"),
        pytest.param(16, True, False, id="above"),
        pytest.param(8, False, False, id="on-a-cpu"),
    ],
)
def test_rows_of_flashinfer(flashinfer, batch, cuda, uses_flashinfer):
    """Catches the slower selection, ids of another type or shape, and an order that depends on the run."""
    assert FLASHINFER_ROWS == range(8 * 7, 16 * 7)
    values = logits(batch, cuda=cuda)
    actual = select_top_k(values, 5)
    for mine, theirs in zip(actual, torch.topk(values, 5), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    shapes = [call for call in flashinfer.calls if call[0] == (batch * 7, 40)]
    assert shapes == ([((batch * 7, 40), True, True)] if uses_flashinfer else [])


@pytest.fixture
def two_steps(monkeypatch):
    """Row counts of the selections that were made in two steps."""
    monkeypatch.setenv("TRANSFORMERS_DFLASH2_FLASHINFER", "0")
    module._prepare_flashinfer.cache_clear()
    seen, original = [], module._two_step_top_k

    def two_step(logits, top_k):
        seen.append(logits.numel() // logits.shape[-1])
        return original(logits, top_k)

    monkeypatch.setattr(module, "_two_step_top_k", two_step)
    yield seen
    module._prepare_flashinfer.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# A whole number of slices, slices and a rest, and too few slices to be worth it.
@pytest.mark.parametrize("vocab", [64 * 40, 64 * 40 + 17, 64 * 19 + 5])
@pytest.mark.parametrize("batch", [3, 4])
def test_two_steps(two_steps, dtype, vocab, batch):
    """Catches a value of a slice that was left out, the id of another slice, and a rest that is never looked at."""
    values = logits(batch, vocab=vocab).to(dtype)
    # The largest values of some rows all lie in one slice, or in the rest.
    values[0, 0, 7 : 7 + 40 * 5 : 40] += 9
    values[1, 2, -5:] += 9
    selected, ids = select_top_k(values, 5)
    assert two_steps == ([batch * 7] if batch * 7 >= TWO_STEP_ROWS else [])
    assert selected.shape == ids.shape == (batch, 7, 5) and ids.dtype == torch.int64
    expected = torch.topk(torch.Tensor(values), 5).values
    assert torch.equal(selected.sort(dim=-1, descending=True).values, expected)
    assert torch.equal(torch.Tensor(values).gather(-1, ids), selected)
    assert (ids.sort(dim=-1).values.diff(dim=-1) > 0).all()


def test_two_steps_of_excluded_and_broken_logits(two_steps):
    """Catches excluded ids that displace others, an id that is named twice among equals, and a NaN that is hidden."""
    values = logits(4, vocab=64 * 40)
    values[0, 0] = -torch.inf
    values[0, 0, [3, 70, 2000]] = torch.tensor([1.0, 3.0, 2.0])
    values[0, 1] = 0.0
    values[0, 2, 100] = torch.nan
    selected, ids = select_top_k(values, 5)
    assert two_steps == [28]
    assert ids[0, 0, :3].tolist() == [70, 2000, 3] and selected[0, 0, 3:].tolist() == [-torch.inf] * 2
    assert all(row.unique().numel() == 5 for row in ids.flatten(0, 1))
    assert ids[0, 2, 0] == 100 and selected[0, 2, 0].isnan()


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
def test_two_steps_in_a_graph(two_steps):
    """Catches a selection that cannot be recorded, or that reads what it was recorded with."""
    values = torch.randn(8, 7, 151936, device="cuda", dtype=torch.bfloat16)
    graph, (selected, ids) = captured(lambda: select_top_k(values, 16))
    for _ in range(2):
        values.normal_()
        graph.replay()
        assert torch.equal(selected, torch.topk(values, 16).values)
        assert torch.equal(values.gather(-1, ids), selected)
    assert set(two_steps) == {56}


@pytest.mark.gpu
def test_the_real_package():
    """Catches an interface of the package that is not the stand-in's."""
    if flashinfer_reason() is not None:
        pytest.skip(flashinfer_reason())
    values = torch.randn(8, 7, 5000, device="cuda")
    for mine, theirs in zip(select_top_k(values, 16), torch.topk(values, 16), strict=True):
        assert torch.equal(mine, theirs)

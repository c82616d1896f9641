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
"""The context write of all layers, kernel and reference, against float64 and against the host's own modules."""

import math
from dataclasses import dataclass, replace

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import BF16, FP16, assert_as_exact_as, opcheck, relative_rms  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb  # noqa: E402

from transformers_dflash2.kernels import context_kv as module  # noqa: E402
from transformers_dflash2.kernels.context_kv import (  # noqa: E402
    context_kv_ineligible_reason,
    context_kv_op,
    context_kv_pointers,
    context_kv_reference,
    context_kv_triton,
)


NAN = math.nan
# Marks what a write must leave alone; no value of the tests is that large.
UNTOUCHED = 1000.0


@dataclass
class Case:
    """Shapes and options; `slots` are drawn apart from each other where they are not given."""

    batch: int = 2
    entries: int = 3
    layers: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int | None = None
    columns: int = 7
    slots: tuple[tuple[int, ...], ...] | None = None
    commit_lengths: tuple[int, ...] | None = None
    max_positions: int = 50
    eps: float = 1e-6
    token_major: bool = False

    def buffers(self, device, dtype):
        if self.token_major:
            shape = self.batch, self.columns, self.kv_heads, self.head_dim
            return [
                torch.full(shape, UNTOUCHED, device=device, dtype=dtype).transpose(1, 2) for _ in range(self.layers)
            ]
        shape = self.batch, self.kv_heads, self.columns, self.head_dim
        return [torch.full(shape, UNTOUCHED, device=device, dtype=dtype) for _ in range(self.layers)]

    def inputs(self, device, dtype=torch.float32):
        """`(args, kwargs)` with fresh buffers; a row that is not to be written holds NaN."""
        width = self.layers * 2 * self.kv_heads * self.head_dim
        kv = torch.randn(self.batch * self.entries, width)
        # Rows of different size, so that the norm matters.
        kv *= torch.rand(self.batch * self.entries, 1) * 4 + 0.1
        weight = torch.rand(self.layers, self.head_dim) + 0.5
        rotary_dim = self.rotary_dim or self.head_dim
        inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        angles = torch.arange(self.max_positions)[:, None] * inverse
        table = torch.cat([angles.cos(), angles.sin()], dim=-1)
        positions = torch.randint(0, self.max_positions, (self.batch, self.entries))
        if self.slots is None:
            slots = torch.stack([torch.randperm(self.columns)[: self.entries] for _ in range(self.batch)])
        else:
            slots = torch.tensor(self.slots)
        for row in range(self.batch):
            for entry in range(self.entries):
                if not self.keeps(slots, row, entry):
                    kv[row * self.entries + entry] = NAN
        commit_lengths = None if self.commit_lengths is None else torch.tensor(self.commit_lengths, device=device)
        args = [
            kv.to(device, dtype),
            weight.to(device, dtype),
            table.to(device),
            positions.to(device),
            slots.to(device),
        ]
        kwargs = {"eps": self.eps, "commit_lengths": commit_lengths}
        return [*args, self.buffers(device, dtype), self.buffers(device, dtype)], kwargs

    def keeps(self, slots, row, entry):
        count = self.entries if self.commit_lengths is None else self.commit_lengths[row]
        return entry < count and 0 <= slots[row, entry] < self.columns

    def exact(self, args):
        """The buffers after the write, in float64, one entry at a time."""
        kv, weight, table, positions, slots = (tensor.cpu() for tensor in args[:5])
        weight, table = weight.double(), table.double()
        shape = self.batch, self.kv_heads, self.columns, self.head_dim
        keys = [torch.full(shape, UNTOUCHED, dtype=torch.float64) for _ in range(self.layers)]
        values = [torch.full(shape, UNTOUCHED, dtype=torch.float64) for _ in range(self.layers)]
        half = table.shape[1] // 2
        for row in range(self.batch):
            for entry in range(self.entries):
                if not self.keeps(slots, row, entry):
                    continue
                slot = slots[row, entry]
                projected = kv[row * self.entries + entry].double().view(self.layers, 2, self.kv_heads, self.head_dim)
                cos, sin = table[positions[row, entry]].split(half)
                for layer in range(self.layers):
                    key, value = projected[layer]
                    key = key / (key.square().mean(-1, keepdim=True) + self.eps).sqrt() * weight[layer]
                    x1, x2 = key[:, :half].clone(), key[:, half : 2 * half].clone()
                    key[:, :half], key[:, half : 2 * half] = x1 * cos - x2 * sin, x2 * cos + x1 * sin
                    keys[layer][row, :, slot], values[layer][row, :, slot] = key, value
        return keys, values


CASES = {
    "all": Case(),
    "one-row-one-layer": Case(batch=1, entries=1, layers=1, kv_heads=1),
    "odd-heads": Case(kv_heads=3, layers=3),
    "skips": Case(slots=((-1, 6, 0), (3, -5, -1))),
    # A slot behind the buffer would write into the next head.
    "slot-too-large": Case(slots=((7, 6, 0), (3, 1, 900))),
    # Skipped entries may share a slot with a kept one.
    "commit-lengths": Case(slots=((4, 5, 4), (2, 2, 2)), commit_lengths=(2, 0)),
    "commit-and-skip": Case(slots=((4, -1, 4), (2, 0, 1)), commit_lengths=(2, 3)),
    "partial-rotary": Case(rotary_dim=4),
    "partial-rotary-odd-rest": Case(head_dim=24, rotary_dim=10),
    "head-80": Case(head_dim=80, batch=1),
    "head-96": Case(head_dim=96, rotary_dim=48, batch=1),
    "head-128": Case(head_dim=128, batch=1, kv_heads=8),
    # A large epsilon against small keys shows where it is added.
    "large-eps": Case(eps=0.5),
    "token-major-buffers": Case(token_major=True),
}


def check(case, device, dtype):
    args, kwargs = case.inputs(device, dtype)
    keys, values = case.exact(args)
    context_kv_triton(*args, **kwargs)
    plain = [*args[:5], case.buffers(device, dtype), case.buffers(device, dtype)]
    context_kv_reference(*plain, **kwargs)
    for layer in range(case.layers):
        written = keys[layer] != UNTOUCHED
        for output, reference in zip((args[5], args[6]), (plain[5], plain[6]), strict=True):
            assert torch.equal(output[layer].cpu() == UNTOUCHED, ~written), "a write went astray"
            assert torch.equal(reference[layer].cpu() == UNTOUCHED, ~written)
        assert_as_exact_as(args[5][layer].cpu()[written], plain[5][layer].cpu()[written], keys[layer][written])
        assert torch.equal(args[6][layer].cpu().double(), values[layer])
        assert torch.equal(args[6][layer], plain[6][layer])


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_kernel_and_reference(case, device):
    check(case, device, torch.float32)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("name", ["all", "commit-lengths", "partial-rotary-odd-rest"])
def test_half_types(name, dtype, device):
    check(CASES[name], device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_many_rows(dtype, device):
    case = Case(batch=4, entries=16, layers=5, kv_heads=8, head_dim=128, columns=600, commit_lengths=(16, 0, 5, 1))
    check(case, device, dtype)


def test_table_in_half_precision_and_narrow_integers(device):
    args, kwargs = CASES["commit-and-skip"].inputs(device)
    args[2] = args[2].bfloat16() if device.type == "cuda" else args[2].half()
    args[3], args[4] = args[3].int(), args[4].int()
    kwargs["commit_lengths"] = kwargs["commit_lengths"].int()
    keys, _ = CASES["commit-and-skip"].exact(args)
    context_kv_triton(*args, **kwargs)
    assert all(relative_rms(output, exact) < 1e-5 for output, exact in zip(args[5], keys, strict=True))


def test_like_the_hosts_modules(device):
    """In fp32 the write is what the drafter's norm and rotation of the host compute."""
    case = CASES["all"]
    args, kwargs = case.inputs(device)
    kv, weight, table, positions, slots = args[:5]
    context_kv_triton(*args, **kwargs)
    half = case.head_dim // 2
    cos, sin = (part[positions].repeat(1, 1, 2) for part in table.split(half, dim=-1))
    split = kv.view(case.batch, case.entries, case.layers, 2, case.kv_heads, case.head_dim)
    for layer in range(case.layers):
        norm = Qwen3RMSNorm(case.head_dim, eps=case.eps).to(device)
        norm.weight.data = weight[layer]
        keys = norm(split[:, :, layer, 0]).transpose(1, 2)
        _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
        rows = torch.arange(case.batch, device=device)[:, None]
        assert relative_rms(args[5][layer][rows, :, slots], keys.transpose(1, 2).detach()) < 1e-5


def test_positions_outside_the_table_give_nan(device):
    case = CASES["all"]
    args, kwargs = case.inputs(device)
    args[3][0, 1], args[3][1, 0] = case.max_positions, -1
    for write in (context_kv_triton, context_kv_reference):
        args[5:] = case.buffers(device, torch.float32), case.buffers(device, torch.float32)
        write(*args, **kwargs)
        for row, entry in ((0, 1), (1, 0)):
            column = args[4][row, entry]
            assert all(buffer[row, :, column].isnan().all() for buffer in args[5])
            assert all(buffer[row, :, column].isfinite().all() for buffer in args[6])
        assert args[5][0][0, :, args[4][0, 0]].isfinite().all()


def test_a_table_row_for_each_entry(device):
    """Catches entries that share the first rows of a table, and a table that is too short to have one for each."""
    case = CASES["commit-and-skip"]
    args, kwargs = case.inputs(device)
    args[2], args[3] = args[2][:6], torch.arange(6, device=device).view(2, 3)
    keys, _ = case.exact(args)
    args[3] = None
    for write in (context_kv_triton, context_kv_reference):
        args[5:] = case.buffers(device, torch.float32), case.buffers(device, torch.float32)
        write(*args, **kwargs)
        assert all(relative_rms(output, exact) < 1e-5 for output, exact in zip(args[5], keys, strict=True))
    args[2] = args[2][:5]
    assert "cos_sin has shape (5, 16)" in context_kv_ineligible_reason(*args, **kwargs)


def test_strided_projection_and_given_pointers(device):
    """Rows of a wider product, and the pointer table that a CUDA graph needs."""
    case = CASES["all"]
    args, kwargs = case.inputs(device)
    context_kv_triton(*args, **kwargs)
    wide = torch.full((args[0].shape[0], args[0].shape[1] + 16), NAN, device=device)
    wide[:, 8:-8] = args[0]
    again = [wide[:, 8:-8], *args[1:5], case.buffers(device, torch.float32), case.buffers(device, torch.float32)]
    pointers = context_kv_pointers(again[5], again[6])
    assert pointers.shape == (case.layers, 2) and pointers[1, 0] == again[5][1].data_ptr()
    context_kv_triton(*again, **kwargs, pointers=pointers)
    assert all(torch.equal(a, b) for a, b in zip(args[5] + args[6], again[5] + again[6], strict=True))


def test_nothing_to_write(device):
    args, kwargs = Case().inputs(device)
    args[0], args[3], args[4] = args[0][:0], args[3][:, :0].contiguous(), args[4][:, :0].contiguous()
    context_kv_triton(*args, **kwargs)
    assert (args[5][0] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        pytest.param(0, lambda t: t.double(), "kv is float64", id="kv-dtype"),
        pytest.param(0, lambda t: t[:, :-1], "kv has shape", id="kv-width"),
        pytest.param(0, lambda t: t.clone().requires_grad_(), "gradient", id="gradient"),
        pytest.param(1, lambda t: t[:1], "k_norm_weight has shape", id="weight"),
        pytest.param(2, lambda t: t[:, :7], "7 columns", id="odd-table"),
        pytest.param(2, lambda t: t.repeat(1, 2), "32 columns", id="wide-table"),
        pytest.param(3, lambda t: t.flatten(), "positions has shape", id="positions"),
        pytest.param(4, lambda t: t[:1], "slots has shape", id="slots"),
        pytest.param(4, lambda t: t.t().contiguous().t(), "slots has stride", id="slots-layout"),
        pytest.param(4, lambda t: t.float(), "slots is float32", id="slots-dtype"),
        pytest.param(5, lambda t: t[:1], "1 key buffers and 2 value buffers", id="missing-buffer"),
        pytest.param(5, lambda t: [t[0], t[1].half()], r"key_buffers\[1\] differs", id="buffer-dtype"),
        pytest.param(6, lambda t: [t[0], t[1][:, :, :-1]], r"value_buffers\[1\] differs", id="buffer-columns"),
        pytest.param(6, lambda t: [t[0], torch.zeros(900)[1:449].view_as(t[1])], "multiple of 16", id="unaligned"),
    ],
)
def test_ineligible(index, change, message, device):
    args, kwargs = Case().inputs(device)
    assert context_kv_ineligible_reason(*args, **kwargs) is None
    args[index] = change(args[index])
    if isinstance(args[index], list):
        args[index] = [buffer.to(device) for buffer in args[index]] if message != "multiple of 16" else args[index]
    if message == "multiple of 16" and device.type == "cuda":
        args[index] = [args[index][0], torch.zeros(900, device=device)[1:449].view_as(args[index][0])]
    with pytest.raises(ValueError, match=message):
        context_kv_triton(*args, **kwargs)


def test_ineligible_options(device):
    args, kwargs = Case().inputs(device)
    kwargs["commit_lengths"] = torch.zeros(3, dtype=torch.long, device=device)
    assert "commit_lengths has shape" in context_kv_ineligible_reason(*args, **kwargs)
    kwargs["commit_lengths"] = None
    pointers = torch.zeros(2, 2, dtype=torch.int32, device=device)
    assert "pointers is int32" in context_kv_ineligible_reason(*args, **kwargs, pointers=pointers)
    wide, _ = Case(head_dim=272, kv_heads=1).inputs(device)
    assert "head_dim=272" in context_kv_ineligible_reason(*wide, **kwargs)


def test_without_triton(monkeypatch, device):
    args, kwargs = Case().inputs(device)
    monkeypatch.setattr(module, "triton", None)
    assert "triton" in context_kv_ineligible_reason(*args, **kwargs)
    context_kv_reference(*args, **kwargs)
    assert args[5][0].isfinite().all()


def test_op(device):
    case = replace(CASES["commit-and-skip"], slots=((4, 5, 6), (2, 0, 1)))
    args, kwargs = case.inputs(device)
    args[0] = args[0].nan_to_num()
    opcheck(context_kv_op, *args, *kwargs.values())
    args[5:] = case.buffers(device, torch.float32), case.buffers(device, torch.float32)
    context_kv_triton(*args, **kwargs)
    expected = [buffer.clone() for buffer in args[5] + args[6]]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(*args):
        context_kv_op(*args, **kwargs)

    args[5:] = case.buffers(device, torch.float32), case.buffers(device, torch.float32)
    compiled(*args)
    assert all(torch.equal(a, b) for a, b in zip(args[5] + args[6], expected, strict=True))

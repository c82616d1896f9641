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
"""Block attention, kernel and reference, against a float64 softmax over explicit lists of visible columns."""

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import BF16, DTYPES, FP16, FP32, assert_as_exact_as, opcheck, relative_rms  # noqa: E402

from transformers_dflash2.kernels import block_attention as module  # noqa: E402
from transformers_dflash2.kernels.block_attention import (  # noqa: E402
    BlockAttentionLaunch,
    block_attention_ineligible_reason,
    block_attention_launch,
    block_attention_op,
    block_attention_reference,
    block_attention_triton,
    block_attention_workspace_size,
)


NAN = math.nan
# Bytes of shared memory that a program of an NVIDIA Hopper GPU, and of a small consumer GPU, may take.
SHARED_MEMORY_LIMITS = {"NVIDIA H200": 227 * 1024, "default": 99 * 1024}


@dataclass
class Case:
    """Shapes and options; `columns` is the capacity."""

    lengths: tuple[int, ...] = (0, 45)
    block: int = 3
    columns: int = 48
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    is_causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    starts: tuple[int, ...] | None = None
    launch: BlockAttentionLaunch | None = BlockAttentionLaunch(16, 16, 3)

    def inputs(self, device, dtype=torch.float32):
        """`(args, kwargs)`; whatever no query sees is NaN."""
        batch = len(self.lengths)
        query = torch.randn(batch, self.q_heads, self.block, self.head_dim) * 2
        key = torch.randn(batch, self.kv_heads, self.columns, self.head_dim)
        value = torch.randn(batch, self.kv_heads, self.columns, self.head_dim)
        for row in range(batch):
            seen = sorted({column for step in range(self.block) for column in self.visible(row, step)})
            unseen = torch.ones(self.columns, dtype=torch.bool)
            unseen[seen] = False
            key[row, :, unseen], value[row, :, unseen] = NAN, NAN
        kwargs = {
            "scale": self.head_dim**-0.5,
            "is_causal": self.is_causal,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": torch.randn(self.q_heads).to(device, dtype) if self.sinks else None,
            "starts": None if self.starts is None else torch.tensor(self.starts, device=device),
        }
        lengths = torch.tensor(self.lengths, device=device)
        return [*(tensor.to(device, dtype) for tensor in (query, key, value)), lengths], kwargs

    def visible(self, row, step):
        """The columns that a query sees, by the words of the definition."""
        position = self.lengths[row] + step
        start = 0 if self.starts is None else self.starts[row]
        last = position if self.is_causal else self.lengths[row] + self.block - 1
        columns = range(start, min(last, self.columns - 1) + 1)
        return [c for c in columns if self.window is None or abs(position - c) < self.window]

    def exact(self, args, kwargs):
        query, key, value = (tensor.double().cpu() for tensor in args[:3])
        output = torch.zeros_like(query)
        group = self.q_heads // self.kv_heads
        for row in range(len(self.lengths)):
            for step in range(self.block):
                columns = self.visible(row, step)
                for head in range(self.q_heads) if columns else ():
                    logits = key[row, head // group, columns] @ query[row, head, step] * kwargs["scale"]
                    if self.softcap is not None:
                        logits = self.softcap * (logits / self.softcap).tanh()
                    if self.sinks:
                        logits = torch.cat([logits, kwargs["sinks"][head, None].double().cpu()])
                    weights = logits.softmax(0)[: len(columns)]
                    output[row, head, step] = weights @ value[row, head // group, columns]
        return output


ONE_SPLIT = BlockAttentionLaunch(16, 16, 1)
TWO_SPLITS = BlockAttentionLaunch(16, 16, 2)
CASES = {
    # Nothing committed yet, an odd length, and a block that fills the buffer to its last column.
    "causal": Case(lengths=(0, 31, 45)),
    "block-sees-itself": Case(is_causal=False),
    "one-query": Case(block=1, lengths=(0, 1, 47)),
    "one-split": Case(launch=ONE_SPLIT),
    # Each split gets one step, and most splits none.
    "more-splits-than-work": Case(lengths=(1, 20), launch=BlockAttentionLaunch(16, 16, 7)),
    "window": Case(window=9),
    "window-one": Case(window=1, lengths=(5, 45)),
    # The window hides rows of the block itself on both sides.
    "window-inside-block": Case(block=5, lengths=(0, 41), is_causal=False, window=3),
    "window-wider-than-buffer": Case(window=48),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True),
    "sinks-one-split": Case(sinks=True, window=4, launch=ONE_SPLIT),
    "starts": Case(lengths=(0, 31, 45), starts=(0, 30, 45)),
    # A start behind the first queries leaves them without any column: zeros, also beside a sink.
    "starts-inside-block": Case(starts=(2, 46), sinks=True),
    "starts-behind-block": Case(starts=(20, 1), launch=ONE_SPLIT),
    "starts-behind-block-splits": Case(starts=(20, 1)),
    "starts-and-window": Case(starts=(2, 42), window=7, is_causal=False),
    # Group 3 x block 6 = 18 rows: two tiles, the last with two rows.
    "row-tiles": Case(q_heads=6, block=6, lengths=(9, 42), launch=TWO_SPLITS),
    "one-kv-head": Case(q_heads=5, kv_heads=1),
    "no-groups": Case(q_heads=2, kv_heads=2, block=5, lengths=(0, 43)),
    "longest-block": Case(block=32, q_heads=2, kv_heads=1, lengths=(11,), launch=BlockAttentionLaunch(64, 32, 2)),
    "head-80": Case(head_dim=80, q_heads=2, kv_heads=1),
    "head-96-window": Case(head_dim=96, q_heads=2, kv_heads=1, window=20),
    "head-8": Case(head_dim=8),
    "head-256": Case(head_dim=256, lengths=(17,), launch=TWO_SPLITS),
    "everything": Case(window=11, softcap=3.0, sinks=True, starts=(1, 40), lengths=(2, 44)),
    "default-launch": Case(launch=None, columns=100, lengths=(37, 97)),
    # What a row would hold beyond the buffer is left out instead of read.
    "beyond-the-buffer": Case(lengths=(46, 47, 5)),
}
# For what does not depend on sizes; the interpreter takes milliseconds per program.
SMALL = Case(lengths=(3, 21, 2), columns=24, q_heads=2, kv_heads=1, head_dim=16, launch=TWO_SPLITS)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_kernel_and_reference(case, device):
    args, kwargs = case.inputs(device)
    exact = case.exact(args, kwargs)
    reference = block_attention_reference(*args, **kwargs)
    assert relative_rms(reference, exact) < 1e-5
    output = block_attention_triton(*args, **kwargs, launch=case.launch)
    assert_as_exact_as(output, reference, exact)
    nothing = (exact == 0).all(dim=-1).to(device)
    assert not output[nothing].any()


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("name", ["causal", "window-inside-block", "everything", "sinks-one-split", "head-80"])
def test_half_types(name, dtype, device):
    case = CASES[name]
    args, kwargs = case.inputs(device, dtype)
    reference = block_attention_reference(*args, **kwargs)
    output = block_attention_triton(*args, **kwargs, launch=case.launch)
    assert_as_exact_as(output, reference, case.exact(args, kwargs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_reference_in_types_the_kernel_lacks(dtype):
    case = CASES["everything"]
    args, kwargs = case.inputs("cpu", dtype)
    output = block_attention_reference(*args, **kwargs)
    assert output.dtype == dtype
    # fp64 is computed in fp64; bf16 is rounded once.
    assert relative_rms(output, case.exact(args, kwargs)) < (1e-14 if dtype == torch.float64 else 2.5e-3)


def test_reference_takes_long_blocks(monkeypatch):
    """A prefill runs through the reference, in chunks of queries."""
    case = Case(block=40, lengths=(0, 20), window=13)
    args, kwargs = case.inputs("cpu")
    whole = block_attention_reference(*args, **kwargs)
    monkeypatch.setattr(module, "REFERENCE_QUERY_CHUNK", 16)
    chunked = block_attention_reference(*args, **kwargs)
    assert relative_rms(whole, case.exact(args, kwargs)) < 1e-5
    assert relative_rms(chunked, whole) < 1e-6


def test_strided_tensors(device):
    """Views of a fused projection, of token-major buffers, and of a token-major output."""
    case = SMALL
    (query, key, value, lengths), kwargs = case.inputs(device)
    batch, q_heads, block, head_dim = query.shape
    fused = torch.full((batch, block, q_heads * head_dim + 24), NAN, device=device)
    strided_query = fused[..., 8:-16].view(batch, block, q_heads, head_dim).transpose(1, 2)
    strided_query.copy_(query)
    both = torch.stack([key.transpose(1, 2), value.transpose(1, 2)], dim=3)  # [batch, columns, kv_heads, 2, head_dim]
    out = torch.full((batch, block, q_heads, head_dim), NAN, device=device).transpose(1, 2)
    views = strided_query, both[:, :, :, 0].transpose(1, 2), both[:, :, :, 1].transpose(1, 2)
    result = block_attention_triton(*views, lengths.int(), **kwargs, launch=case.launch, out=out)
    assert result is out
    expected = block_attention_triton(query, key, value, lengths, **kwargs, launch=case.launch)
    assert expected.is_contiguous()
    assert torch.equal(out, expected)


def test_rows_do_not_touch_each_other(device):
    """A row's output has the same bits alone and in a batch, also beside a row of NaN."""
    case = SMALL
    args, kwargs = case.inputs(device)
    together = block_attention_triton(*args, **kwargs, launch=case.launch)
    for tensor in args[:3]:
        tensor[0] = NAN
    beside_nan = block_attention_triton(*args, **kwargs, launch=case.launch)
    assert beside_nan[0].isnan().all()
    assert torch.equal(beside_nan[1:], together[1:])
    alone = block_attention_triton(*(tensor[2:] for tensor in args), **kwargs, launch=case.launch)
    assert torch.equal(alone, together[2:])


def test_nan_query_stays_visible_and_alone(device):
    case = SMALL
    args, kwargs = case.inputs(device)
    clean = block_attention_triton(*args, **kwargs, launch=case.launch)
    args[0][1, 1, 2] = NAN
    output = block_attention_triton(*args, **kwargs, launch=case.launch)
    assert output[1, 1, 2].isnan().all()
    output[1, 1, 2] = clean[1, 1, 2]
    assert torch.equal(output, clean)


def test_huge_logits(device):
    """Logits of some 1e4 would overflow an exponential without the running maximum."""
    case = SMALL
    args, kwargs = case.inputs(device)
    kwargs["scale"] *= 3e3
    output = block_attention_triton(*args, **kwargs, launch=case.launch)
    # Weights are 0 or 1 almost everywhere; an fp32 logit of 1e4 is off by up to 1e-3.
    assert relative_rms(output, case.exact(args, kwargs)) < 1e-2


def test_workspace(device):
    case = SMALL
    args, kwargs = case.inputs(device)
    size = block_attention_workspace_size(args[0], case.launch)
    expected = block_attention_triton(*args, **kwargs, launch=case.launch)
    workspace = torch.full((size + 5,), NAN, device=device)
    assert torch.equal(block_attention_triton(*args, **kwargs, launch=case.launch, workspace=workspace), expected)
    assert workspace[size:].isnan().all()
    with pytest.raises(ValueError, match=f"workspace has {size - 1} elements .* pass {size}"):
        block_attention_triton(*args, **kwargs, launch=case.launch, workspace=workspace[: size - 1])
    assert block_attention_workspace_size(args[0], BlockAttentionLaunch(16, 16, 1)) == 0


def test_empty_batch(device):
    args, kwargs = SMALL.inputs(device)
    empty = [tensor[:0] for tensor in args]
    assert block_attention_triton(*empty, **kwargs).shape == (0, 2, 3, 16)
    assert block_attention_reference(*empty, **kwargs).shape == (0, 2, 3, 16)


def _change(args, kwargs, name, change):
    names = ["query", "key", "value", "lengths"]
    if name in names:
        args[names.index(name)] = change(args[names.index(name)])
    else:
        kwargs[name] = change(kwargs.get(name))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        pytest.param("query", lambda t: t.repeat(1, 1, 12, 1), "holds 36 rows", id="long-block"),
        pytest.param("query", lambda t: t[..., :8], "key has shape", id="head-dim"),
        pytest.param("query", lambda t: t.double(), "query is float64", id="fp64"),
        pytest.param("query", lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), "stride", id="query-stride"),
        pytest.param("query", lambda t: t.clone().requires_grad_(), "gradient", id="gradient"),
        pytest.param("key", lambda t: t.half(), "key is float16", id="key-dtype"),
        pytest.param("key", lambda t: t[:, :, :5], "value has shape", id="key-columns"),
        pytest.param("value", lambda t: t[1:], "value has shape", id="value-batch"),
        pytest.param("lengths", lambda t: t.float(), "lengths is float32", id="lengths-dtype"),
        pytest.param("lengths", lambda t: t[:2], "lengths has shape", id="lengths-shape"),
        pytest.param("starts", lambda _: torch.zeros(3, dtype=torch.int16), "starts is int16", id="starts-dtype"),
        pytest.param("sinks", lambda _: torch.zeros(3), "sinks has shape", id="sinks-shape"),
        pytest.param("window", lambda _: 0, "window=0", id="window"),
        pytest.param("out", lambda _: torch.empty(3, 2, 3, 32), "out has shape", id="out"),
    ],
)
def test_ineligible(name, change, message, device):
    args, kwargs = SMALL.inputs(device)
    assert block_attention_ineligible_reason(*args, **kwargs) is None
    _change(args, kwargs, name, change)
    for key, value in kwargs.items():
        kwargs[key] = value.to(device) if isinstance(value, torch.Tensor) else value
    assert message in block_attention_ineligible_reason(*args, **kwargs)
    with pytest.raises(ValueError, match=message):
        block_attention_triton(*args, **kwargs)


def test_sizes_that_are_ineligible(device):
    (query, key, value, lengths), kwargs = CASES["causal"].inputs(device)
    assert "must divide" in block_attention_ineligible_reason(query[:, :3], key, value, lengths, **kwargs)
    (query, key, value, lengths), kwargs = SMALL.inputs(device)
    reason = block_attention_ineligible_reason(query, key[:, :, :2], value[:, :, :2], lengths, **kwargs)
    assert "2 columns" in reason
    wide = [tensor.repeat(1, 1, 1, 20) for tensor in (query, key, value)]
    assert "head_dim=320" in block_attention_ineligible_reason(*wide, lengths, **kwargs)


def test_without_triton(monkeypatch, device):
    """The reference serves, and the reason says why."""
    args, kwargs = SMALL.inputs(device)
    monkeypatch.setattr(module, "triton", None)
    assert "triton" in block_attention_ineligible_reason(*args, **kwargs)
    assert block_attention_reference(*args, **kwargs).isfinite().all()


def test_op(device):
    args, kwargs = replace(SMALL, window=11, softcap=3.0, sinks=True, starts=(1, 2, 0)).inputs(device)
    # Torch compares results of repeated calls, where NaN differs from NaN.
    args = [args[0], args[1].nan_to_num(), args[2].nan_to_num(), args[3]]
    opcheck(block_attention_op, *args, *kwargs.values())
    expected = block_attention_triton(*args, **kwargs)
    assert torch.equal(block_attention_op(*args, **kwargs), expected)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(*args):
        return block_attention_op(*args, **kwargs) * 2

    assert torch.equal(compiled(*args), expected * 2)


def test_op_falls_back_to_the_reference(device):
    (query, key, value, lengths), kwargs = SMALL.inputs(device)
    arguments = query.double(), key.double(), value.double(), lengths
    assert torch.equal(block_attention_op(*arguments, **kwargs), block_attention_reference(*arguments, **kwargs))


def test_launch_table():
    """Every entry names powers of two and fits the shared memory of its device."""
    table = json.loads(module._CONFIG_PATH.read_text())
    for name, record in {**table["devices"], "default": table["default"]}.items():
        assert {entry["element_bytes"] for entry in record["entries"]} == {2, 4}
        for entry in record["entries"]:
            steps = ("block_columns", "block_columns_long")
            for key in ("element_bytes", "head_dim", "rows", "rows_max", "num_warps", *steps):
                assert entry[key] & (entry[key] - 1) == 0
            tile = entry["head_dim"] * entry["element_bytes"]
            for columns in (entry[key] for key in steps):
                buffers = 2 * max(entry["num_stages"] - 1, 1) * columns * tile
                # Queries, and the weights on their way to the second product.
                extra = entry["rows_max"] * (tile + 4 * columns)
                assert buffers + extra <= SHARED_MEMORY_LIMITS[name], entry


def test_nearest_entry():
    entries = tuple(
        {"element_bytes": size, "head_dim": dim, "rows": rows}
        for size, dim, rows in [(2, 64, 16), (2, 128, 16), (2, 128, 128), (4, 128, 16)]
    )
    nearest = module._nearest_entry
    assert nearest(entries, head_dim=128, rows=32, element_bytes=2) == entries[1]
    assert nearest(entries, head_dim=256, rows=64, element_bytes=2) == entries[2]
    assert nearest(entries, head_dim=64, rows=128, element_bytes=4) == entries[3]
    assert nearest(entries, head_dim=32, rows=128, element_bytes=2) == entries[0]


@pytest.fixture
def table_device(monkeypatch):
    """Plans as on a GPU with 132 multiprocessors, whatever machine this is."""

    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    for cached in (module._device_entries, module._multiprocessors, module._plan):
        cached.cache_clear()
    yield Properties
    for cached in (module._device_entries, module._multiprocessors, module._plan):
        cached.cache_clear()


def plan(batch=1, rows=32, columns=32768, head_dim=128, element_bytes=2):
    return module._plan(torch.device("cuda", 0), element_bytes, batch, 8, rows, head_dim, columns, False)


def test_plan_fills_the_device(table_device):
    launch = plan()
    assert launch.block_rows == 32
    assert launch.splits == 132 // 8, "a program for every multiprocessor"
    assert launch.block_columns == 128, "a long part that is alone there is read in wide steps"
    assert plan(columns=1024).block_columns == plan(batch=128).block_columns == 64
    assert plan(columns=512).splits == 512 // plan(columns=512).block_columns
    assert plan(batch=128, columns=1024).splits == 1
    assert plan(batch=128).splits == 4, "no program has more than 8192 columns"
    assert plan(columns=1 << 18) == launch, "with a single row there is no longer one to wait for"
    assert plan(rows=4).block_rows == 16
    assert plan(rows=4 * 32).block_rows == 128
    assert plan(rows=8 * 32).block_rows == 128
    assert plan(head_dim=256, rows=128).block_rows == 64


def test_plan_of_unknown_devices(table_device, caplog):
    table_device.name = "NVIDIA H100 80GB HBM3"
    assert plan() is not None and not caplog.records
    for cached in (module._device_entries, module._plan):
        cached.cache_clear()
    table_device.name, table_device.major = "NVIDIA RTX 4090", 8
    with caplog.at_level("WARNING", logger="transformers_dflash2"):
        plan()
        plan(columns=1024)
    assert len(caplog.records) == 1 and "safe default" in caplog.text


LONG_CASES = {
    "d128-t8": Case(block=8, lengths=(4000, 513), columns=4352, q_heads=32, kv_heads=8, head_dim=128),
    "d128-t1": Case(block=1, lengths=(4351, 0), columns=4352, q_heads=32, kv_heads=8, head_dim=128),
    "d128-t32-group8": Case(block=32, lengths=(1000, 3), columns=1100, q_heads=16, kv_heads=2, head_dim=128),
    "d64-draft": Case(block=16, lengths=(2000, 77), columns=2048, q_heads=8, head_dim=64, is_causal=False),
    "d80-window": Case(block=5, lengths=(2000, 77), columns=2048, q_heads=8, head_dim=80, window=512),
    "d96": Case(block=7, lengths=(1500, 9), columns=2048, q_heads=6, head_dim=96, starts=(40, 2)),
    "d256-softcap": Case(block=8, lengths=(1500, 9), columns=2048, head_dim=256, softcap=50.0, window=1024),
    "d64-sinks": Case(block=8, lengths=(1500, 9), columns=2048, q_heads=16, head_dim=64, sinks=True, window=128),
    "many-rows": Case(block=8, lengths=tuple(range(0, 640, 20)), columns=1024, q_heads=32, kv_heads=8, head_dim=128),
}


def exact_on_device(case, args, kwargs):
    """The reference in fp64, which the small cases compare with the definition."""
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in args]
    return block_attention_reference(*wide, **kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in LONG_CASES.items()])
def test_long_rows(case, dtype, device):
    args, kwargs = case.inputs(device, dtype)
    exact = exact_on_device(case, args, kwargs)
    reference = block_attention_reference(*args, **kwargs)
    output = block_attention_triton(*args, **kwargs)
    assert_as_exact_as(output, reference, exact)
    again = block_attention_triton(*args, **kwargs)
    assert torch.equal(output, again), "a result that changes between runs is a race"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_cuda_graph_follows_the_lengths(dtype, device):
    """One capture serves all lengths: the grid follows from the capacity."""
    cases = [
        Case(block=8, lengths=lengths, columns=4352, q_heads=32, kv_heads=8, head_dim=128)
        for lengths in ((5, 0), (4344, 2000), (63, 64))
    ]
    (query, key, value, lengths), kwargs = cases[0].inputs(device, dtype)
    out = torch.empty_like(query)
    workspace = torch.empty(block_attention_workspace_size(query, block_attention_launch(query, key)), device=device)
    block_attention_triton(query, key, value, lengths, **kwargs, out=out, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block_attention_triton(query, key, value, lengths, **kwargs, out=out, workspace=workspace)
    for case in cases:
        args, _ = case.inputs(device, dtype)
        for buffer, tensor in zip((query, key, value, lengths), args, strict=True):
            buffer.copy_(tensor)
        out.fill_(NAN)
        workspace.fill_(NAN)
        graph.replay()
        assert torch.equal(out, block_attention_triton(*args, **kwargs))

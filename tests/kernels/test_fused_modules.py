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
"""Fused stand-ins against the modules whose place they take."""

import contextlib

import pytest
import torch


pytest.importorskip("triton")

from families import FAMILIES  # noqa: E402
from kernel_checks import relative_rms  # noqa: E402
from transformers import LlamaConfig, Qwen3Config  # noqa: E402
from transformers.cache_utils import Cache, DynamicCache  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: E402
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig  # noqa: E402
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: E402

from transformers_dflash2 import compat, kernels, static_decoding  # noqa: E402
from transformers_dflash2.fused_modules import (  # noqa: E402
    _fused_convolution,
    _RotaryTables,
    _side_by_side,
    fused_modules,
    skinny_linears,
)
from transformers_dflash2.kernels import skinny_linear  # noqa: E402
from transformers_dflash2.kernels.attention_interface import (  # noqa: E402
    block_attention_lengths,
    use_block_attention,
)
from transformers_dflash2.modeling_dflash2 import DFlash2Attention, DFlash2DecoderLayer, DFlash2GroupedConv  # noqa: E402
from transformers_dflash2.stacked_context import StackedContext, stacked_context_reason  # noqa: E402
from transformers_dflash2.static_buffers import StaticContext, StaticTargetLayer  # noqa: E402
from transformers_dflash2.static_round import StaticRound  # noqa: E402
from transformers_dflash2.testing import (  # noqa: E402
    hybrid_target,
    random_drafter,
    table_drafter,
    table_target,
)


# Sums in another order, through two layers.
FP32_RELATIVE_RMS = 1e-5
LAUNCHERS = ("rms_norm", "gated_rms_norm", "short_conv", "silu_mul", "rotary_embedding", "qk_norm_rope")


@pytest.fixture
def launches(monkeypatch):
    """How often each launcher ran."""
    counts = dict.fromkeys((*LAUNCHERS, "context_kv", "skinny_linear", "write_columns"), 0)
    for name in counts:
        module = __import__(f"transformers_dflash2.kernels.{name}", fromlist=[name])
        original = getattr(module, f"{name}_triton")

        def launch(*args, name=name, original=original, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, f"{name}_triton", launch)
    assert kernels.rms_norm_triton is not None
    return counts


def random_weights(model, std=0.3):
    """Table targets mix little in; here every module has a say."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
    return model


def block_logits(target, fused, value_layout=torch.contiguous_format):
    """Logits of a block on top of two rows of different length, in fixed buffers, values in a layout of their own."""
    torch.manual_seed(1)
    rows, block, capacity = 2, 3, 12
    device = target.device
    config = target.config
    lengths = torch.tensor([4, 6], device=device)
    columns = lengths[:, None] + torch.arange(block, device=device)
    shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
    layers = [
        StaticTargetLayer(
            columns,
            torch.randn(shape, device=device),
            torch.randn(shape, device=device).contiguous(memory_format=value_layout),
        )
        for _ in range(config.num_hidden_layers)
    ]
    inputs = {"input_ids": torch.randint(1, 30, (rows, block), device=device), "position_ids": columns}
    with (
        torch.no_grad(),
        use_block_attention(target),
        block_attention_lengths(lengths),
        fused_modules(target) if fused else contextlib.nullcontext() as counts,
    ):
        logits = target(**inputs, **{compat.CACHE_KEY: Cache(layers=layers)}, use_cache=True).logits
    return logits, counts, layers


DENSE = {"norm": 5, "mlp": 2, "layer": 2, "attention": 2, "rotary": 1}


@pytest.mark.parametrize(
    ("model_type", "options", "kinds", "ropes"),
    [
        pytest.param("qwen3", {}, {**DENSE, "norm": 9}, 2, id="qwen3"),
        pytest.param("llama", {}, DENSE, 2, id="llama"),
        pytest.param("qwen2", {}, DENSE, 2, id="qwen2-biases"),
        pytest.param("mistral", {"sliding_window": 3}, DENSE, 2, id="mistral-window"),
        # Its rotation covers half a head, its norms have biases, its layer adds both sublayers at once.
        pytest.param("phi", {}, {"rotary": 1}, 0, id="phi-left-alone"),
    ],
)
def test_fused_model_equals_the_model(device, launches, model_type, options, kinds, ropes):
    """Catches a stand-in for a class that computes something else, and one that never runs."""
    target = random_weights(table_target(model_type=model_type, num_hidden_layers=2, **options)).to(device)
    expected, _, expected_layers = block_logits(target, fused=False)
    assert {name for name, count in launches.items() if count} == {"write_columns"}
    launches["write_columns"] = 0
    actual, counts, layers = block_logits(target, fused=True)
    assert dict(counts) == kinds
    # Where heads are rotated by the kernel, it writes them as well.
    assert launches["write_columns"] == 2 - ropes
    assert launches["rotary_embedding"] == 1
    assert launches["qk_norm_rope"] == ropes
    assert bool(launches["silu_mul"]) == ("mlp" in kinds)
    # The first norm and the last, and per layer the one before attention and, unless fused, those of heads.
    assert launches["rms_norm"] == (5 if "norm" in kinds else 0)
    assert relative_rms(actual, expected) < FP32_RELATIVE_RMS
    for mine, theirs in zip(layers, expected_layers, strict=True):
        assert relative_rms(mine.keys, theirs.keys) < FP32_RELATIVE_RMS
        assert relative_rms(mine.values, theirs.values) < FP32_RELATIVE_RMS


def test_buffers_that_the_rotation_cannot_write(device, launches):
    """Catches keys that are rotated twice, or never written, where the buffers of a layer differ in layout."""
    target = random_weights(table_target(num_hidden_layers=2)).to(device)
    options = {"value_layout": torch.channels_last}
    expected, _, expected_layers = block_logits(target, fused=False, **options)
    actual, _, layers = block_logits(target, fused=True, **options)
    assert (launches["qk_norm_rope"], launches["write_columns"]) == (2, 0)
    assert relative_rms(actual, expected) < FP32_RELATIVE_RMS
    for mine, theirs in zip(layers, expected_layers, strict=True):
        assert relative_rms(mine.keys, theirs.keys) < FP32_RELATIVE_RMS
        assert relative_rms(mine.values, theirs.values) < FP32_RELATIVE_RMS


def test_models_are_put_back(device):
    """Catches a stand-in that outlives its context, or that hides a forward of the caller's."""
    target = table_target().to(device)
    norm = target.model.norm
    own = norm.forward = lambda hidden: hidden
    with pytest.raises(KeyError), fused_modules(target):
        assert norm.forward is own
        raise KeyError
    assert [module for module in target.modules() if "forward" in vars(module)] == [norm]


def test_a_call_without_a_cache_is_the_classes_own(device, launches):
    """Catches a stand-in that needs the buffers of a recording."""
    target = random_weights(table_target(num_hidden_layers=1)).to(device)
    ids = torch.tensor([[3, 7, 1]], device=device)
    with torch.no_grad():
        expected = target(ids, use_cache=False).logits
        with fused_modules(target):
            actual = target(ids, use_cache=False).logits
    assert launches["qk_norm_rope"] == 0
    assert relative_rms(actual, expected) < FP32_RELATIVE_RMS


ORIGINAL = {"original_max_position_embeddings": 64}
ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "yarn": {"factor": 4.0, **ORIGINAL},
    "dynamic": {"factor": 2.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **ORIGINAL},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize(
    ("kind", "config"), [(LlamaRotaryEmbedding, LlamaConfig), (Qwen3RotaryEmbedding, Qwen3Config)]
)
def test_rotary_module(device, launches, kind, config, rope_type, dtype):
    """Catches a scaling that is forgotten, and frequencies that should have followed the positions."""
    parameters = {"rope_type": rope_type, "rope_theta": 1e4, **ROPES[rope_type]}
    options = {"head_dim": 16, "max_position_embeddings": 256, "rope_parameters": parameters}
    module, other = kind(config(**options)).to(device), kind(config(**options)).to(device)
    follows = rope_type in ("dynamic", "longrope")
    with torch.no_grad(), fused_modules(module) as counts:
        assert dict(counts) == ({} if follows else {"rotary": 1})
        # Past the length that was trained, and back.
        for start in (0, 250, 0):
            positions = start + torch.arange(20, device=device)[None]
            hidden = torch.empty(0, dtype=dtype, device=device)
            actual, expected = (m(hidden, position_ids=positions) for m in (module, other))
            for mine, theirs in zip(actual, expected, strict=True):
                assert mine.dtype == dtype
                assert torch.allclose(mine, theirs, rtol=0, atol=2**-22 if dtype == torch.float32 else 2**-10)
    assert launches["rotary_embedding"] == (0 if follows else 3)


def test_positions_of_several_axes_are_the_classes_own(device, launches):
    """Catches three positions of a token that are taken for three rows."""
    module = LlamaRotaryEmbedding(LlamaConfig(head_dim=16)).to(device)
    positions, hidden = torch.arange(12, device=device).view(3, 1, 4), torch.empty(0, device=device)
    expected = module(hidden, positions)
    with fused_modules(module):
        actual = module(hidden, positions)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, expected, strict=True))
    multimodal = Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(rope_parameters={"mrope_section": [16, 24, 24]}))
    with fused_modules(multimodal) as counts:
        assert not counts
    assert not launches["rotary_embedding"]


def test_tables_lie_in_the_position_embeddings(device):
    """Catches a table that is copied in every round, and rows of a batch that share positions."""
    module, tables = LlamaRotaryEmbedding(LlamaConfig(head_dim=16)).to(device), _RotaryTables()
    with fused_modules(module):
        cos, sin = module(torch.empty(0, device=device), torch.arange(6, device=device).view(2, 3))
    table = tables.get(cos, sin, 2)
    expected = torch.cat([cos[..., :8], sin[..., :8]], dim=-1).flatten(0, 1)
    assert torch.equal(table, expected)
    assert table.untyped_storage().data_ptr() == cos.untyped_storage().data_ptr()
    assert tables.get(cos, sin, 2) is table
    assert torch.equal(tables.get(cos[:1], sin[:1], 2), expected[:3].repeat(2, 1))


HYBRID = {"norm": 11, "layer": 4, "mlp": 4, "gated_norm": 3, "convolution": 1}
HYBRID_LAUNCHES = {"rms_norm": 11, "gated_rms_norm": 3, "short_conv": 3}


@pytest.mark.parametrize(
    ("family", "kinds", "kernels_run"),
    [
        # Per layer two norms, in the one with attention two more, and the last. Its positions are three to a token.
        pytest.param("Qwen3.5", HYBRID, {**HYBRID_LAUNCHES, "silu_mul": 4}, id="qwen3.5"),
        # Feed-forwards are shared experts here.
        pytest.param(
            "Qwen3-Next",
            {**HYBRID, "rotary": 1},
            {**HYBRID_LAUNCHES, "silu_mul": 4, "rotary_embedding": 1},
            id="qwen3-next",
        ),
        # Four norms per layer, and GELU; then two norms of heads more, and a rotation per kind of layer.
        pytest.param("Gemma 2", {"norm": 17, "rotary": 1}, {"rms_norm": 17, "rotary_embedding": 1}, id="gemma-2"),
        pytest.param("Gemma 3", {"norm": 25}, {"rms_norm": 25}, id="gemma-3"),
        # Its gate is a sigmoid, and its gated norm rounds once.
        pytest.param(
            "Kimi Linear",
            {"norm": 10, "mlp": 4, "convolution": 1},
            {"rms_norm": 10, "short_conv": 3, "silu_mul": 4},
            id="kimi-gated-norm-left-alone",
        ),
    ],
)
def test_fused_family_equals_the_family(device, launches, family, kinds, kernels_run):
    """Catches an offset, a gate or a window that a stand-in forgets, on a block behind a cache."""
    torch.manual_seed(0)
    target = FAMILIES[family].build().to(device)
    with torch.no_grad():
        for weight in target.parameters():
            # Fresh norms scale by one, which hides what happens to their weights.
            if weight.dim() == 1:
                weight += 0.2 * torch.randn_like(weight)
    ids = torch.randint(1, 60, (2, 9), device=device)
    logits = []
    for fused in (False, True):
        options = {compat.CACHE_KEY: DynamicCache(config=target.config), "use_cache": True}
        with torch.no_grad():
            target(ids[:, :6], **options)
            assert not any(launches.values())
            with fused_modules(target) if fused else contextlib.nullcontext() as counts:
                logits.append(target(ids[:, 6:], **options).logits)
    assert dict(counts) == kinds
    assert {name: count for name, count in launches.items() if count} == kernels_run
    assert relative_rms(logits[1], logits[0]) < FP32_RELATIVE_RMS


def test_what_no_kernel_takes_is_the_classes_own(device, launches):
    """Catches a stand-in that insists on its kernel, or computes the plain form otherwise than its class."""
    target = hybrid_target().double().to(device)
    ids = torch.tensor([[3, 7, 1]], device=device)
    with torch.no_grad():
        expected = target(ids).logits
        with fused_modules(target) as counts:
            assert torch.equal(target(ids).logits, expected)
    assert counts["layer"] == 4 and not any(launches.values())


def test_packed_sequences_stay_with_the_host(device, launches):
    """Catches a convolution that runs from one packed sequence into the next."""
    hidden, weight = torch.randn(1, 2, 6, device=device), torch.randn(2, 4, device=device)
    seen = {}

    def host(*args, **kwargs):
        seen.update(kwargs)
        return hidden

    assert _fused_convolution(host, hidden, weight, activation="silu", seq_idx=hidden) is hidden
    assert seen == {"activation": "silu", "seq_idx": hidden}
    assert not launches["short_conv"]
    assert _fused_convolution(host, hidden, weight, activation="silu", seq_idx=None) is not hidden
    assert launches["short_conv"]


def test_functions_are_put_back(device):
    """Catches a convolution that outlives its context, by an error or because two contexts end in any order."""
    target, other = hybrid_target().to(device), hybrid_target(seed=1).to(device)
    original = modeling_qwen3_5.causal_conv1d_fn
    with pytest.raises(KeyError), fused_modules(target):
        assert modeling_qwen3_5.causal_conv1d_fn is not original
        raise KeyError
    assert modeling_qwen3_5.causal_conv1d_fn is original
    first, second = fused_modules(target), fused_modules(other)
    assert first.__enter__()["convolution"] == 1
    # It is fused already.
    assert second.__enter__()["convolution"] == 0
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert modeling_qwen3_5.causal_conv1d_fn is original
    assert not [module for model in (target, other) for module in model.modules() if "forward" in vars(module)]


def draft_inputs(device, entries=5):
    target = table_target()
    draft = random_drafter(target, layer_types=["sliding_attention", "full_attention"], sliding_window=4).to(device)
    width = len(draft.config.target_layer_ids) * draft.config.target_hidden_size
    features = torch.randn(2, entries, width, device=device)
    positions = torch.arange(entries, device=device).expand(2, -1) + torch.tensor([[0], [9]], device=device)
    return draft, features, positions


def test_fused_drafter_equals_the_drafter(device, launches):
    """Catches a draft attention whose stand-in writes, windows or rotates otherwise."""
    draft, features, positions = draft_inputs(device)
    embeds = torch.randn(2, 4, 32, device=device)
    outputs = []
    for fused in (False, True):
        context = StaticContext(draft, rows=2, capacity=12)
        launches["write_columns"] = 0
        with torch.no_grad(), fused_modules(draft) if fused else contextlib.nullcontext():
            draft.append_context(context, features, positions, torch.tensor([5, 3], device=device))
            block = context.lengths[:, None] + torch.arange(4, device=device)
            outputs.append(draft(embeds, block, context).last_hidden_state)
        # Of both layers, for the context and, unless fused, for the block.
        assert launches["write_columns"] == (2 if fused else 4)
    # For the block and for the context.
    assert launches["rotary_embedding"] == 2
    assert launches["qk_norm_rope"] == 2 and launches["silu_mul"] == 2
    assert relative_rms(outputs[1], outputs[0]) < FP32_RELATIVE_RMS


# With four heads queries, keys and values are one product; with two, keys and values are too narrow for the kernel.
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["joined", "apart"])
def test_half_types_stream_their_weights(device, launches, kv_heads, monkeypatch):
    """Catches a product of the wrong weights, an addition that is lost or done twice, and a kernel that never runs."""
    torch.manual_seed(0)
    # A device that these layers fill.
    monkeypatch.setattr(skinny_linear, "device_limits", lambda device: (2, 1 << 16))
    target = random_weights(table_target(num_hidden_layers=2, num_key_value_heads=kv_heads)).half().to(device)
    draft = random_drafter(target, target_layer_ids=[0, 1], num_key_value_heads=kv_heads).half().to(device)
    ids, embeds = torch.randint(1, 30, (2, 9), device=device), torch.randn(1, 4, 32, device=device)

    def run(target, draft, fused):
        context, cache = StaticContext(draft, rows=1, capacity=12), DynamicCache(config=target.config)
        options = {compat.CACHE_KEY: cache, "use_cache": True}
        with torch.no_grad():
            target(ids[:, :6], **options)
            with fused_modules(target, draft) if fused else contextlib.nullcontext():
                logits = target(ids[:, 6:], **options).logits
                # Per layer queries, with keys and values or without, the output, gate and up at once, and down.
                assert launches["skinny_linear"] == (8 if fused else 0)
                block = torch.arange(4, device=device)[None]
                return logits, draft(embeds.to(draft.dtype), block, context).last_hidden_state

    plain, actual = run(target, draft, fused=False), run(target, draft, fused=True)
    launches["skinny_linear"] = 0
    exact = run(target.double(), draft.double(), fused=False)
    for mine, theirs, truth in zip(actual, plain, exact, strict=True):
        assert relative_rms(mine, truth) <= 1.5 * relative_rms(theirs, truth) < 0.02


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "with-a-bias"])
def test_more_rows_than_a_product_takes_lie_side_by_side(device, launches, is_plain):
    """Catches projections that are written into each other's columns, and a bias that is lost."""
    layers = [torch.nn.Linear(48, features, bias=False) for features in (64, 32)]
    layers.append(torch.nn.Linear(48, 32, bias=not is_plain))
    layers = torch.nn.ModuleList(layers).to(device, torch.float16)
    x = torch.randn(10, 15, 48, device=device).half()
    expected = torch.cat([layer(x) for layer in layers], dim=-1).detach()
    with torch.no_grad():
        actual = _side_by_side(x, *layers)
    assert actual.shape == (10, 15, 128) and relative_rms(actual, expected) < 1e-3
    # With gradients nothing is written in place.
    assert torch.equal(_side_by_side(x, *layers).detach(), expected)
    assert not launches["skinny_linear"]


@pytest.mark.parametrize("batch", [2, 8])
def test_coefficients_of_a_convolution_come_in_parts(device, launches, monkeypatch, batch):
    """Catches parts that are cut where they are not read as parts, or read with another convolution's layout."""
    torch.manual_seed(0)
    monkeypatch.setattr(skinny_linear, "device_limits", lambda device: (8, 1 << 16))
    options = {"hidden_size": 128, "conv_group_size": 4, "target_layer_ids": [0, 1]}
    target = table_target(num_hidden_layers=2, hidden_size=128)
    draft = random_weights(random_drafter(target, **options), std=0.05).half().to(device)
    conv, shape = draft.layers[0].mlp_conv, (batch, 5, 128)
    hidden, residual = (torch.randn(shape, device=device).half() for _ in range(2))

    def both_sides():
        with torch.no_grad():
            mixed, dynamic = conv.prepare(hidden)
            return mixed, conv.finish(mixed, dynamic, residual), dynamic

    *expected, dynamic = both_sides()
    with fused_modules(draft):
        *actual, parts = both_sides()
        assert (dynamic.dim(), parts.dim()) == (4, 5) and len(parts) == 2
        assert launches["skinny_linear"] == 1
        # A layer that no convolution reads gives its sums as they are.
        assert draft.layers[0].self_attn.o_proj(hidden[..., : draft.layers[0].self_attn.o_proj.in_features]).dim() == 3
    for mine, plain in zip(actual, expected, strict=True):
        assert relative_rms(mine, plain) < 2e-3


@pytest.mark.parametrize("has_conv", [True, False], ids=["dflash2", "dflash-v1"])
def test_a_draft_layer_finishes_in_its_products(device, monkeypatch, has_conv):
    """Catches an output side that is mixed twice or not at all, and a residual of the wrong sublayer."""
    torch.manual_seed(0)
    monkeypatch.setattr(skinny_linear, "device_limits", lambda device: (2, 1 << 16))
    options = {"hidden_size": 64, "intermediate_size": 128, "conv_group_size": 16, "target_layer_ids": [0, 1]}
    target = table_target(num_hidden_layers=2, hidden_size=64)
    options |= {} if has_conv else {"conv_kernel_size": 0, "conv_group_size": 0}
    draft = random_weights(random_drafter(target, **options), std=0.1).half().to(device)
    embeds, finished = torch.randn(2, 4, 64, device=device).half(), []
    original = skinny_linear.skinny_linear_triton

    def product(*args, **kwargs):
        finished.append((kwargs.get("residual") is not None, kwargs.get("convolution") is not None))
        return original(*args, **kwargs)

    def run(fused):
        context = StaticContext(draft, rows=2, capacity=12)
        block = torch.arange(4, device=device).expand(2, -1)
        with torch.no_grad(), fused_modules(draft) if fused else contextlib.nullcontext():
            return draft(embeds, block, context).last_hidden_state

    expected = run(fused=False)
    monkeypatch.setattr(skinny_linear, "skinny_linear_triton", product)
    assert relative_rms(run(fused=True), expected) < 5e-3
    # Of each layer, what follows its two sublayers.
    assert finished.count((True, has_conv)) == 2 * len(draft.layers)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        pytest.param(lambda layer: layer, DFlash2DecoderLayer, id="layer"),
        pytest.param(lambda layer: layer.self_attn, DFlash2Attention, id="attention"),
        pytest.param(lambda layer: layer.mlp_conv, DFlash2GroupedConv, id="convolution"),
    ],
)
def test_draft_layers_with_code_of_their_own_keep_it(device, place, kind):
    """Catches a stand-in that computes what the library's class does in place of what a subclass does."""
    torch.manual_seed(0)
    draft, _, _ = draft_inputs(device)
    name = "finish" if kind is DFlash2GroupedConv else "forward"
    module = place(draft.layers[0])
    embeds, block = torch.randn(1, 4, 32, device=device), torch.arange(4, device=device)[None]

    def run(fused):
        with torch.no_grad(), fused_modules(draft) if fused else contextlib.nullcontext():
            return draft(embeds, block, StaticContext(draft, rows=1, capacity=12)).last_hidden_state

    before = run(fused=False)
    module.__class__ = type("Own", (kind,), {name: lambda self, *args: 2 * getattr(kind, name)(self, *args)})
    own = run(fused=False)
    assert relative_rms(own, before) > 0.05
    assert relative_rms(run(fused=True), own) < FP32_RELATIVE_RMS


def test_narrow_layers_stay_with_the_library(device, launches, monkeypatch):
    """Catches a product that leaves most of a device idle, also in a compiled target."""
    monkeypatch.setattr(skinny_linear, "device_limits", lambda device: (6, 1 << 16))
    target = table_target(num_hidden_layers=1).half().to(device)
    with torch.no_grad(), fused_modules(target):
        target(torch.tensor([[3, 7, 1]], device=device))
    # Gate and up, of 128 features together.
    assert launches["skinny_linear"] == 1
    with skinny_linears(target) as count:
        assert count == 0


@pytest.mark.parametrize("fused", [True, False])
def test_stacked_context_equals_the_layers(device, launches, fused):
    """Catches keys of another layer, uncommitted entries that are kept, and weights of an earlier call."""
    draft, features, positions = draft_inputs(device)
    assert stacked_context_reason(draft) is None
    counts = torch.tensor([5, 2], device=device)
    plain, context = (StaticContext(draft, rows=2, capacity=12) for _ in range(2))
    stacked = StackedContext(draft, context)
    with torch.no_grad():
        for layer in draft.layers:
            layer.self_attn.k_proj.weight.mul_(1.5)
            layer.self_attn.k_norm.weight.mul_(0.5)
        stacked.refresh(draft)
        for shift in (0, 5):
            draft.append_context(plain, features, positions + shift, counts)
            with fused_modules(draft) if fused else contextlib.nullcontext():
                stacked.append(draft, features, positions + shift, counts)
    assert launches["context_kv"] == 2
    assert launches["rotary_embedding"] == (2 if fused else 0)
    assert torch.equal(context.lengths, plain.lengths)
    for mine, theirs in zip((*context.keys, *context.values), (*plain.keys, *plain.values), strict=True):
        for row, length in enumerate(plain.lengths.tolist()):
            assert relative_rms(mine[row, :, :length], theirs[row, :, :length]) < FP32_RELATIVE_RMS


def test_other_projections_are_not_stacked(device):
    """Catches a quantised projection whose weight is read."""
    draft, _, _ = draft_inputs(device)

    class Wrapped(torch.nn.Linear):
        pass

    draft.layers[1].self_attn.v_proj = Wrapped(32, 16, bias=False).to(device)
    assert "Wrapped" in stacked_context_reason(draft)


@pytest.mark.parametrize(
    ("pair", "expected_launches", "attention_writes"),
    [
        pytest.param(
            lambda: (target := table_target(num_hidden_layers=3), table_drafter(target)),
            ("rotary_embedding", "qk_norm_rope", "context_kv"),
            0,
            id="qwen3",
        ),
        # One of its four layers has keys and values, and a rotation that no kernel knows.
        pytest.param(
            lambda: (target := hybrid_target(), random_drafter(target)),
            ("gated_rms_norm", "short_conv", "context_kv"),
            1,
            id="qwen3.5",
        ),
    ],
)
def test_same_tokens_with_fused_modules(device, launches, monkeypatch, pair, expected_launches, attention_writes):
    """Catches kernels that agree one by one and not in a round."""
    # The interpreter takes milliseconds a program.
    monkeypatch.setattr(static_decoding, "MIN_CAPACITY", 16)

    writes = []

    def play(self, key, call, *, during_capture=contextlib.nullcontext, **kwargs):
        before = launches["write_columns"]
        with during_capture():
            call()
        if key == "round":
            writes.append(launches["write_columns"] - before)

    # What a recording would hold, without a device that records.
    monkeypatch.setattr(StaticRound, "play", play)
    target, draft = (model.to(device) for model in pair())
    inputs = {"inputs": torch.tensor([[3, 7, 1]], device=device), "max_new_tokens": 4, "do_sample": False}
    expected = target.generate(**inputs)
    options = {"cache_implementation": "static", "num_assistant_tokens": 1}
    drafted = target.generate(assistant_model=draft, **options, **inputs)
    assert all(launches[name] > 0 for name in expected_launches)
    assert writes and set(writes) == {attention_writes}
    assert torch.equal(drafted, expected)


def test_linears_of_a_compiled_model(device, monkeypatch):
    """Catches a product that breaks the compiler's graph, one that stays the library's, and a stand-in left behind."""
    monkeypatch.setattr(skinny_linear, "device_limits", lambda device: (1, 1 << 16))
    target = random_weights(table_target(num_hidden_layers=1, hidden_size=32, intermediate_size=64)).to(device).half()
    ids, graphs = torch.tensor([[3, 7, 1]], device=device), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        expected = target(ids).logits
        with skinny_linears(target.model) as count:
            actual = torch.compile(target.forward, fullgraph=True, backend=backend)(ids).logits
    assert relative_rms(actual, expected) < 5e-3
    products = [node for node in graphs[0].graph.nodes if "skinny_linear" in str(node.target)]
    # Seven layers and the feed-forward that holds three of them: gate and up are one product.
    assert (count, len(products)) == (8, 6)
    assert not any("forward" in vars(module) for module in target.modules())

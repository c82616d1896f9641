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
"""`"block_attention"` as an attention function of the host: models give the logits of eager attention, row by row."""

import sys
import threading

import pytest
import torch


pytest.importorskip("triton")

from kernel_checks import HALF_RELATIVE_RMS, captured, relative_rms  # noqa: E402
from transformers import (  # noqa: E402
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from transformers.cache_utils import Cache, CacheLayerMixin  # noqa: E402
from transformers.utils.generic import is_flash_attention_requested  # noqa: E402

from transformers_dflash2.kernels import attention_interface as module  # noqa: E402
from transformers_dflash2.kernels import block_attention as kernel_module  # noqa: E402
from transformers_dflash2.kernels.attention_interface import (  # noqa: E402
    ATTENTION_NAME,
    block_attention_forward,
    block_attention_lengths,
    block_attention_mask,
    current_block_lengths,
    register_block_attention,
    unsupported_model_reason,
    use_block_attention,
)
from transformers_dflash2.kernels.block_attention import block_attention_reference  # noqa: E402


NAN = float("nan")
# Logits of two small layers in fp32, whose sums run in another order.
LOGITS_RELATIVE_RMS = 1e-5
VOCAB = 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"use_sliding_window": True}),
    # A cap of 0.5 bends the logits of a random model.
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16}),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig, {"num_local_experts": 2, "num_experts_per_tok": 1}),
}


def build(name, device, **options):
    model_class, config_class, extra = MODELS[name]
    model = model_class(config_class(**SIZES, **extra, attn_implementation="eager", **options)).to(device).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(std=0.3)
    return model


@pytest.fixture(params=list(MODELS))
def model(request, device):
    return build(request.param, device)


class RowLayer(CacheLayerMixin):
    """Buffers of one layer; the block goes behind each row's length."""

    is_compileable = False
    is_sliding = False

    def __init__(self, keys, values, lengths):
        super().__init__()
        self.keys, self.values, self.lengths = keys, values, lengths

    def lazy_initialization(self, *args, **kwargs):
        """The buffers are there."""

    def update(self, key_states, value_states, *args, **kwargs):
        rows = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
        columns = self.lengths[:, None] + torch.arange(key_states.shape[2], device=self.lengths.device)
        self.keys[rows, :, columns] = key_states.transpose(1, 2)
        self.values[rows, :, columns] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_mask_sizes(self, *args, **kwargs):
        return self.keys.shape[2], 0

    def get_seq_length(self, *args, **kwargs):
        return 0

    def get_max_length(self, *args, **kwargs):
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length


def row_cache(caches, lengths, columns, shift=0):
    """One cache of several rows, each with its own length and, before it, `shift` columns of NaN."""
    layers = []
    for parts in zip(*(cache.layers for cache in caches), strict=True):
        buffers = []
        for name in ("keys", "values"):
            first = getattr(parts[0], name)
            buffer = first.new_full((len(caches), first.shape[1], columns, first.shape[3]), NAN)
            for row, part in enumerate(parts):
                states = getattr(part, name)
                buffer[row, :, shift : shift + states.shape[2]] = states[0]
            buffers.append(buffer)
        layers.append(RowLayer(*buffers, lengths + shift))
    return Cache(layers=layers)


@pytest.fixture
def launches(monkeypatch):
    """Launches of the kernel so far."""
    calls = []
    launch = kernel_module.block_attention_triton
    monkeypatch.setattr(
        kernel_module, "block_attention_triton", lambda *args, **kwargs: calls.append(1) or launch(*args, **kwargs)
    )
    return calls


def eager_rows(model, prompts, block):
    """`(logits, caches)` of each row by itself: the logits of the block, and the cache before it."""
    logits, caches = [], []
    for prompt, tokens in zip(prompts, block, strict=True):
        # Without a config all layers are full ones, as the buffers are.
        cache = DynamicCache()
        if len(prompt):
            model(prompt[None], past_key_values=cache)
        caches.append(cache)
        logits.append(model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) :])
    return torch.stack(logits), caches


@pytest.mark.parametrize("shift", [0, 3], ids=["from-0", "left-padded"])
@torch.no_grad()
def test_block_of_ragged_rows(model, device, launches, monkeypatch, shift):
    """A verify pass: two rows of different length, a window shorter than either, NaN in every other column."""
    lengths = torch.tensor([9, 5], device=device)
    prompts = [torch.randint(3, VOCAB, (length,), device=device) for length in lengths.tolist()]
    block = torch.randint(3, VOCAB, (2, 3), device=device)
    expected, caches = eager_rows(model, prompts, block)
    cache = row_cache(caches, lengths, columns=16 + shift, shift=shift)
    positions = lengths[:, None] + torch.arange(3, device=device)
    starts = torch.full_like(lengths, shift) if shift else None
    monkeypatch.setattr(module, "sdpa_mask", None)
    with use_block_attention(model), block_attention_lengths(lengths + shift, starts):
        output = model(block, position_ids=positions, past_key_values=cache)
    assert relative_rms(output.logits, expected) < LOGITS_RELATIVE_RMS
    assert len(launches) == 2
    assert model.config._attn_implementation == "eager"


@torch.no_grad()
def test_outside_of_a_context(model, device, launches):
    """Prefill, left padding, and generation through the host's caches are those of eager attention."""
    register_block_attention()
    ids = torch.randint(3, VOCAB, (2, 7), device=device)
    padded = torch.ones_like(ids)
    padded[1, :3] = 0
    inputs = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": padded}]
    generation = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}

    def run():
        outputs = [model(**kwargs).logits for kwargs in inputs]
        dynamic = model.generate(ids, attention_mask=padded, **generation)
        # One forward at a time: a static cache compiles nothing on a CPU.
        cache = StaticCache(model.config, max_cache_len=12)
        logits = [model(ids, past_key_values=cache).logits]
        position = torch.full((2, 1), 7, device=device)
        logits.append(model(ids[:, :1], past_key_values=cache, position_ids=position).logits)
        return outputs, dynamic, logits

    expected, expected_ids, expected_static = run()
    model.set_attn_implementation(ATTENTION_NAME)
    outputs, generated, static = run()
    for output, exact in zip([*outputs, *static], [*expected, *expected_static], strict=True):
        # Rows of padding attend to nothing, or to everything: nobody reads them.
        real = slice(None) if exact.shape[1] == 1 else slice(3, None)
        assert relative_rms(output[:, real], exact[:, real]) < LOGITS_RELATIVE_RMS
    assert torch.equal(generated, expected_ids)
    assert not launches


def attention_inputs(device, block=3, columns=20):
    query = torch.randn(2, 4, block, 16, device=device)
    key, value = torch.randn(2, 2, 2, columns, 16, device=device)
    return query, key, value, torch.tensor([4, 0], device=device)


class Layer(torch.nn.Module):
    """What attention functions read of a layer."""

    num_key_value_groups = 2

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal

    def forward(self, *args, **kwargs):
        return block_attention_forward(self, *args, **kwargs)


def test_arguments_reach_the_kernel(device, launches):
    query, key, value, lengths = attention_inputs(device)
    sinks = torch.randn(4, device=device, requires_grad=True)
    options = {"sliding_window": 3, "softcap": 2.0, "s_aux": sinks, "scaling": 0.3}
    starts = torch.tensor([1, 0], device=device)
    for of_layer, argument, is_causal in ((True, None, True), (False, None, False), (True, False, False)):
        with block_attention_lengths(lengths, starts), torch.no_grad():
            output, weights = Layer(of_layer)(query, key, value, None, is_causal=argument, **options)
        named = {"window": 3, "softcap": 2.0, "sinks": sinks.detach(), "scale": 0.3, "starts": starts}
        expected = block_attention_reference(query, key, value, lengths, is_causal=is_causal, **named)
        assert weights is None
        assert output.shape == (2, 3, 4, 16) and output.is_contiguous()
        assert relative_rms(output, expected.transpose(1, 2)) < 1e-5
    assert len(launches) == 3


@torch.no_grad()
def test_defaults(device):
    """Scale and causality of a layer that says nothing."""
    query, key, value, lengths = attention_inputs(device)
    with block_attention_lengths(lengths):
        output, _ = block_attention_forward(torch.nn.Module(), query, key, value, None)
    expected = block_attention_reference(query, key, value, lengths, scale=0.25, is_causal=True)
    assert relative_rms(output, expected.transpose(1, 2)) < 1e-5


@torch.no_grad()
def test_prefill_inside_a_context(device, launches):
    """A long input is no block: the reference takes it."""
    query, key, value, lengths = attention_inputs(device, block=40, columns=48)
    with block_attention_lengths(lengths):
        output, _ = Layer(True)(query, key, value, None)
    expected = block_attention_reference(query, key, value, lengths, scale=0.25, is_causal=True)
    assert torch.equal(output, expected.transpose(1, 2))
    assert not launches


@torch.no_grad()
def test_compiled(device):
    """One graph serves other lengths, in place and as new tensors."""
    query, key, value, lengths = attention_inputs(device)
    layer = Layer(True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    graphs = torch._dynamo.utils.counters["stats"]
    seen = None
    for change in (lambda: lengths, lambda: lengths.add_(3), lambda: lengths.flip(0)):
        with block_attention_lengths(change()):
            output, _ = compiled(query, key, value, None)
            expected, _ = layer(query, key, value, None)
        assert torch.equal(output, expected)
        seen = graphs["unique_graphs"] if seen is None else seen
    assert graphs["unique_graphs"] == seen


@torch.no_grad()
def test_compiled_model(device):
    """The host's forward with this function is one graph."""
    model = build("qwen3", device)
    lengths = torch.tensor([9, 5], device=device)
    prompts = [torch.randint(3, VOCAB, (length,), device=device) for length in lengths.tolist()]
    block = torch.randint(3, VOCAB, (2, 3), device=device)
    expected, caches = eager_rows(model, prompts, block)
    cache = row_cache(caches, lengths, columns=16)
    positions = lengths[:, None] + torch.arange(3, device=device)
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    with use_block_attention(model), block_attention_lengths(lengths):
        output = compiled(block, position_ids=positions, past_key_values=cache)
    assert relative_rms(output.logits, expected) < LOGITS_RELATIVE_RMS


@pytest.mark.parametrize("kwargs", [{"attention_mask": True}, {"dropout": 0.1}, {"position_bias": True}])
def test_what_has_no_place_is_refused(kwargs, device):
    query, key, value, lengths = attention_inputs(device)
    (name, content), *_ = kwargs.items()
    kwargs = {"attention_mask": None, name: torch.ones(1, device=device) if content is True else content}
    with block_attention_lengths(lengths), pytest.raises(ValueError, match=f"{name} was given"):
        Layer(True)(query, key, value, **kwargs)


def test_masks_it_does_not_know(device):
    with block_attention_lengths(torch.zeros(1, dtype=torch.long, device=device)):
        assert block_attention_mask(batch_size=1, q_length=2, kv_length=4, config=Qwen3Config(**SIZES)) is None
        with pytest.raises(ValueError, match="a mask function of its own"):
            block_attention_mask(batch_size=1, q_length=2, kv_length=4, use_vmap=True)
        with pytest.raises(ValueError, match="attention_chunk_size=8"):
            block_attention_mask(config=Llama4TextConfig(attention_chunk_size=8))
    query, key, value, _ = attention_inputs(device)
    with pytest.raises(ValueError, match="takes boolean masks"):
        Layer(True)(query, key, value, torch.zeros(1, 1, 3, 20, device=device), softcap=1.0)


def test_lengths_are_scoped(device):
    outer, inner = torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.long)
    assert current_block_lengths() == (None, None)
    with block_attention_lengths(outer, inner):
        with pytest.raises(RuntimeError, match="planned"), block_attention_lengths(inner):
            assert current_block_lengths() == (inner, None)
            raise RuntimeError("planned")
        assert current_block_lengths() == (outer, inner)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current_block_lengths()))
        thread.start()
        thread.join()
        assert seen == [(None, None)]
    assert current_block_lengths() == (None, None)
    with pytest.raises(ValueError, match=r"\(2, 1\) and None"):
        with block_attention_lengths(outer[:, None]):
            pass
    with pytest.raises(ValueError, match=r"\(2,\) and \(1,\)"):
        with block_attention_lengths(outer, inner[:1]):
            pass


def test_use_block_attention_restores(device):
    model = build("qwen3", device)
    with pytest.raises(RuntimeError, match="planned"), use_block_attention(model):
        assert model.config._attn_implementation == ATTENTION_NAME
        assert model.model.layers[0].self_attn.config._attn_implementation == ATTENTION_NAME
        raise RuntimeError("planned")
    assert model.config._attn_implementation == "eager"


def test_name_is_no_flash_attention():
    """The host's own test is a search for "flash" in the name."""
    assert not is_flash_attention_requested(requested_attention_implementation=ATTENTION_NAME)


def test_unsupported_models(model, monkeypatch):
    assert unsupported_model_reason(model) is None
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_supports_attention_backend", False)
        # The interface is a name in the file of the layers.
        assert unsupported_model_reason(model) is None
        patch.delattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")
        assert "does not take an attention function" in unsupported_model_reason(model)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_supports_flash_attn", False)
        assert "does not pass them" in unsupported_model_reason(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "layer_types", ["hybrid", "full_attention"])
        assert "hybrid" in unsupported_model_reason(model)
    model.config.is_causal = False
    assert "is not causal" in unsupported_model_reason(model)


def test_chunked_models_are_unsupported():
    sizes = {**SIZES, "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8}
    config = Llama4TextConfig(**sizes, num_local_experts=2, intermediate_size_mlp=48)
    with torch.device("meta"):
        assert "attention_chunk_size=8" in unsupported_model_reason(Llama4ForCausalLM(config))


@pytest.mark.gpu
@torch.no_grad()
def test_cuda_graph_of_a_model(device):
    """A captured verify pass follows lengths, tokens and positions that change in place."""
    model = build("qwen3", device).bfloat16()
    lengths = torch.tensor([9, 5], device=device)
    block = torch.randint(3, VOCAB, (2, 3), device=device)
    positions = lengths[:, None] + torch.arange(3, device=device)
    cache = Cache(
        layers=[
            RowLayer(*torch.randn(2, 2, 2, 32, 16, device=device, dtype=torch.bfloat16), lengths) for _ in range(2)
        ]
    )

    def run():
        with use_block_attention(model), block_attention_lengths(lengths):
            return model(block, position_ids=positions, past_key_values=cache).logits

    graph, recorded = captured(run)
    for step in range(3):
        lengths += step
        positions += step
        block.random_(3, VOCAB)
        graph.replay()
        # Products of the host's library may pick other algorithms under capture.
        assert relative_rms(recorded, run()) < HALF_RELATIVE_RMS

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
"""
Faults that users of DFlash-family drafters and of assisted generation have met elsewhere, one or more tests each.

The number in a test's name is the entry in the project's list of known faults. 04 and 25 are in
`test_distribution.py`, 59 is swept in full in `test_grid.py`.
"""

import copy
import gc
import itertools
import json
import logging

import pytest
import torch
from generation_checks import (
    CACHE_KEY,
    LOGITS_TOLERANCE,
    PROMPT,
    assert_drafts_as_if_rebuilt,
    cache_kwargs,
    cache_tensors,
    d0,
    d1,
    decoder_layers,
    hook_count,
    module_inputs,
    module_outputs,
    pure_drafter,
    pure_target,
    t0,
    taps_of,
    target_inputs,
    target_passes,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    RwkvConfig,
    RwkvForCausalLM,
    StaticCache,
)

from transformers_dflash2 import DFlash2Config, DFlash2DraftModel
from transformers_dflash2.testing import (
    assert_same_tokens,
    broken_table,
    cycle_table,
    draft_config,
    fill_table_weights,
    hybrid_target,
    left_pad,
    random_drafter,
    random_table,
    read_table,
    returned_cache,
    table_drafter,
    table_target,
    walk_table,
)


CYCLE = cycle_table(32, 0)


def steady_drafter(target, accept, start=1, **kwargs):
    """A drafter for `pure_target` of which `accept` tokens of each block are right (`None`: all)."""
    table = read_table(target)
    if accept == 0:
        table = broken_table(table)
    elif accept is not None:
        table = broken_table(table, start=int(table[start]), accept=accept)
    return table_drafter(target, table, **kwargs)


# 01 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pure", "as_list"), [(False, True), (True, False)], ids=["mixed-two-eos", "pure-one-eos"])
@pytest.mark.parametrize("offset", range(16))
def test_fault_01_first_eos_ends_the_row(offset, pure, as_list):
    """Catches a stop test that only looks at the last token of a block: text or cache goes on after the first EOS."""
    target, draft = (pure_target(), pure_drafter()) if pure else (t0(), d0())
    new = target.generate(PROMPT, max_new_tokens=20, do_sample=False)[0, 3:].tolist()
    unused = next(token for token in range(32) if token not in new[:16]) if as_list else None
    plain, drafted = assert_same_tokens(
        target,
        draft,
        PROMPT,
        max_new_tokens=24,
        eos_token_id=[unused, new[offset]] if as_list else new[offset],
        return_dict_in_generate=True,
    )
    end = new.index(new[offset])
    assert drafted.sequences.shape[1] == 3 + end + 1
    assert returned_cache(drafted).get_seq_length() == returned_cache(plain).get_seq_length() == 3 + end
    for ours, theirs in zip(cache_tensors(returned_cache(drafted)), cache_tensors(returned_cache(plain)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=LOGITS_TOLERANCE, rtol=0)


# 02, 22 --------------------------------------------------------------------------------------------------------------


def test_fault_02_rejected_tokens_leave_the_recurrent_state():
    """
    Catches a recurrent state that keeps rejected tokens: drafters with different errors then give different texts.

    `test_families.py` plants the rejections at every offset and looks at every tensor of the cache.
    """
    target = hybrid_target()
    plain = target.generate(PROMPT, max_new_tokens=64, do_sample=False)
    table = torch.arange(64).roll(1)
    for token, following in itertools.pairwise(plain[0].tolist()):
        table[token] = following
    for stride in (1, 2, 3, 5):
        wrong = broken_table(table, plain[0, ::stride].tolist()) if stride > 1 else table
        draft = table_drafter(target, wrong, target_layer_ids=[0, 2])
        output = target.generate(PROMPT, assistant_model=draft, max_new_tokens=64, do_sample=False)
        assert torch.equal(output, plain)
        accepted = draft.last_stats.accepted_per_position
        # Blocks that were kept in part are the ones that leave something behind.
        assert accepted[0] > accepted[-1]


def test_fault_02_state_outside_of_the_cache_is_refused_by_name():
    """Catches a recurrent model without a cache that could be rolled back: RWKV keeps its state to itself."""
    config = RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, attention_hidden_size=32)
    target = RwkvForCausalLM(config).eval()
    draft = random_drafter(hybrid_target(), target_layer_ids=[0, 2])
    before = hook_count(target, draft)
    with pytest.raises(ValueError, match="RwkvForCausalLM"):
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=4)
    assert hook_count(target, draft) == before


# 05, 38, 40, 41: stand-ins for quantised modules ---------------------------------------------------------------------


class PackedHead(nn.Module):
    """Int8 codes and scales in buffers, no `weight`."""

    def __init__(self, weight):
        super().__init__()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-6) / 127
        self.register_buffer("weight_packed", torch.round(weight / scale).to(torch.int8))
        self.register_buffer("weight_scale", scale)
        self.calls = 0

    def forward(self, hidden):
        self.calls += 1
        return hidden @ (self.weight_packed.to(hidden.dtype) * self.weight_scale.to(hidden.dtype)).T


class CodesOnlyHead(nn.Module):
    """A module with neither a weight nor a parameter."""

    def __init__(self, weight):
        super().__init__()
        self.matrix = [weight.detach().clone()]

    def forward(self, hidden):
        return hidden @ self.matrix[0].T.to(hidden.dtype)


class FourBitLinear(nn.Module):
    """A weight of shape `(elements / 2, 1)` in bytes and a side table, in the manner of 4-bit libraries."""

    def __init__(self, weight, levels=16):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.table = torch.linspace(float(weight.min()), float(weight.max()), levels)
        codes = (weight.flatten()[:, None] - self.table).abs().argmin(dim=1).to(torch.uint8)
        self.weight = nn.Parameter((codes[0::2] * 16 + codes[1::2])[:, None], requires_grad=False)

    def forward(self, hidden):
        codes = torch.stack([self.weight[:, 0] // 16, self.weight[:, 0] % 16], dim=1).flatten().long()
        return hidden @ self.table[codes].view(self.out_features, self.in_features).T.to(hidden.dtype)


class LateLinear(nn.Module):
    """Creates `weight` from packed values in a pre-hook of its first call."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight_packed", weight.detach().to(torch.bfloat16))
        self.decompressions = 0
        self.register_forward_pre_hook(self.decompress)

    @staticmethod
    def decompress(module, args):
        if "weight" not in module._parameters:
            module.decompressions += 1
            module.weight = nn.Parameter(module.weight_packed.float(), requires_grad=False)

    def forward(self, hidden):
        return nn.functional.linear(hidden, self.weight)


def dynamic_int8(weight):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.detach().clone())
    quantize = torch.ao.quantization.quantize_dynamic
    return quantize(nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8)[0]


def check_with_head(make_head):
    # Int8 heads with dynamic activation scales round by call, so the gap between the two best logits has to be wide.
    target = table_target(0, table=CYCLE, mix=0.002)
    draft = table_drafter(target)
    head = make_head(target.get_output_embeddings().weight)
    target.set_output_embeddings(head)
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=24)
    assert draft.last_stats.mean_accepted_length > 4


@pytest.mark.parametrize("head", [PackedHead, CodesOnlyHead], ids=lambda head: head.__name__)
def test_fault_05_40_head_without_weight(head):
    """Catches candidates computed from the head's weight tensor, which quantised heads do not have."""
    check_with_head(head)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fault_05_head_whose_weight_is_a_method():
    """Catches `head.weight` taken for a tensor where it is a method."""
    if not torch.backends.quantized.supported_engines or torch.backends.quantized.engine == "none":
        pytest.skip("this build of torch has no engine for int8 linear layers")
    check_with_head(dynamic_int8)


def test_fault_05_codes_only_head_on_a_target_that_reads_its_prefix():
    """Catches candidate scores that disagree with the scores used for verifying, where the gap is narrow."""
    target = table_target(0)
    draft = table_drafter(target)
    target.set_output_embeddings(PackedHead(target.get_output_embeddings().weight))
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=60)
    # Each pass of target and drafter runs the head once; more would be a hidden second use.
    assert target.get_output_embeddings().calls <= 61 + 2 * 61


def test_fault_38_packed_four_bit_weights():
    """Catches packed bytes multiplied as if they were a matrix, in the head, a tapped layer and the drafter."""
    target = table_target(0, table=CYCLE, mix=0.01)
    draft = table_drafter(target)
    with torch.no_grad():
        target.set_output_embeddings(FourBitLinear(target.get_output_embeddings().weight.detach()))
        attention = decoder_layers(target)[2].self_attn
        attention.o_proj = FourBitLinear(attention.o_proj.weight.detach())
        for layer in draft.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(layer.self_attn, name, FourBitLinear(getattr(layer.self_attn, name).weight.detach()))
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=40)
    assert draft.last_stats.mean_accepted_length > 4


def test_fault_40_weight_that_appears_at_first_call():
    """Catches weights read before the target ran, and weights decompressed anew for every call."""
    target = table_target(0, table=CYCLE, mix=0.01)
    draft = table_drafter(target)
    head = LateLinear(target.get_output_embeddings().weight)
    target.set_output_embeddings(head)
    drafted = target.generate(PROMPT, assistant_model=draft, max_new_tokens=40, do_sample=False)
    assert head.decompressions == 1
    assert torch.equal(drafted, target.generate(PROMPT, max_new_tokens=40, do_sample=False))


class OpaqueWeight(torch.Tensor):
    """A weight that can be used in a linear call (or an embedding call) and in nothing else that computes."""

    ALLOWED = (
        "linear",
        "embedding",
        "__get__",
        "__set__",
        "detach",
        "size",
        "dim",
        "numel",
        "is_floating_point",
        "to",
    )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name not in cls.ALLOWED and not name.startswith(("is_", "requires_grad", "__repr__", "has_")):
            raise NotImplementedError(f"{name} on a quantised weight")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["head", "embedding"])
def test_fault_41_weights_that_only_know_their_own_call(where):
    """Catches transposes, slices and concatenations of a weight that only implements its own call."""
    target = table_target(0, table=CYCLE, mix=0.01)
    draft = table_drafter(target)
    module = target.get_output_embeddings() if where == "head" else target.get_input_embeddings()
    weight = module.weight.detach().clone().as_subclass(OpaqueWeight)
    del module._parameters["weight"]
    module.weight = weight
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=40)
    assert draft.last_stats.mean_accepted_length > 4


# 07, 16 --------------------------------------------------------------------------------------------------------------


ROWS = [[3, 7, 1], [4, 9, 2, 6, 5], [8, 1, 12, 3, 3, 7, 20, 11, 2]]


def test_fault_07_rows_advance_independently():
    """Catches rows that wait for, or are cut by, the row that accepts least."""
    target = t0()
    alone = [target.generate(torch.tensor([row]), max_new_tokens=40, do_sample=False)[0, len(row) :] for row in ROWS]
    only_second = set(alone[1].tolist()) - set(alone[0].tolist()) - set(alone[2].tolist())
    assert only_second, "the recipe needs tokens that only the second row visits"
    draft = table_drafter(target, broken_table(read_table(target), only_second))
    drafted = target.generate(**left_pad(ROWS), assistant_model=draft, max_new_tokens=40, do_sample=False)
    for row, expected in zip(drafted, alone, strict=True):
        assert row[-40:].tolist() == expected.tolist()


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_fault_07_stopped_row_is_padded_and_stays(stopped):
    """Catches a finished row that keeps generating, or that stops its neighbours."""
    target, draft = t0(), d0()
    alone = target.generate(torch.tensor([ROWS[stopped]]), max_new_tokens=40, do_sample=False)[0, len(ROWS[stopped]) :]
    eos = int(alone[4])
    _, drafted = assert_same_tokens(
        target, draft, **left_pad(ROWS), max_new_tokens=40, eos_token_id=eos, pad_token_id=0
    )
    end = alone.tolist().index(eos)
    assert drafted[stopped, 9 : 9 + end + 1].tolist() == alone[: end + 1].tolist()
    assert not drafted[stopped, 9 + end + 1 :].any()


def test_fault_07_several_sampled_sequences_of_one_prompt():
    """Catches a refusal of `num_return_sequences`, or rows that share their random numbers."""
    target, draft = table_target(0, logit_scale=0.2), table_drafter(table_target(0, logit_scale=0.2))
    drafted = target.generate(
        PROMPT, assistant_model=draft, max_new_tokens=24, do_sample=True, num_return_sequences=3, top_k=0
    )
    assert drafted.shape == (3, 27)
    assert len({tuple(row) for row in drafted.tolist()}) == 3
    cold = target.generate(
        PROMPT, assistant_model=draft, max_new_tokens=24, do_sample=True, num_return_sequences=3, temperature=1e-4
    )
    greedy = target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    assert torch.equal(cold, greedy.expand(3, -1))


def test_fault_16_positions_of_each_row_stay_contiguous():
    """Catches a shared cache axis: a row that accepts 0 next to one that accepts 7 drifts from its own text."""
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    table = torch.empty(32, dtype=torch.long)
    table[order[:16]], table[order[16:]] = order[:16].roll(-1), order[16:].roll(-1)
    target = table_target(0, table=table, mix=0.002)
    draft = table_drafter(target, broken_table(table, order[16:].tolist()))
    rows = [[int(order[3])], [int(order[20]), int(order[17]), int(order[30])], [int(order[9]), int(order[2])]]
    drafted = target.generate(
        **left_pad(rows),
        assistant_model=draft,
        max_new_tokens=48,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for index, row in enumerate(rows):
        alone = target.generate(
            torch.tensor([row]), max_new_tokens=48, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        assert drafted.sequences[index, -48:].tolist() == alone.sequences[0, -48:].tolist()
        for ours, theirs in zip(drafted.logits, alone.logits, strict=True):
            torch.testing.assert_close(ours[index], theirs[0], atol=LOGITS_TOLERANCE, rtol=0)
    single = target.generate(torch.tensor([rows[1]]), assistant_model=draft, max_new_tokens=48, do_sample=False)
    assert draft.last_stats.mean_accepted_length == 1.0, "the recipe needs a row that accepts nothing"
    assert single.shape == (1, 51)


# 08 ------------------------------------------------------------------------------------------------------------------


def test_fault_08_target_with_offloaded_weights():
    """Catches weights read at rest: with offload they are on no device between two calls of their module."""
    accelerate = pytest.importorskip("accelerate")
    target = table_target(0)
    draft = table_drafter(target)
    expected = target.generate(PROMPT, max_new_tokens=40, do_sample=False)
    accelerate.cpu_offload(target, execution_device="cpu")
    assert target.get_input_embeddings().weight.device.type == "meta"
    drafted = target.generate(PROMPT, assistant_model=draft, max_new_tokens=40, do_sample=False)
    assert torch.equal(drafted, expected)


# 10 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer_ids",
    [None, [], [0, 4], [-1, 2], [2, 2]],
    ids=["absent", "empty", "past-the-end", "negative", "repeated"],
)
@pytest.mark.parametrize("told", [True, False], ids=["num_target_layers", "no-num_target_layers"])
def test_fault_10_tap_list_is_never_guessed(layer_ids, told):
    """Catches a missing or impossible tap list that is replaced by a formula: acceptance collapses silently."""
    target = t0()
    with pytest.raises(ValueError, match="target_layer_ids"):
        draft = random_drafter(target, target_layer_ids=layer_ids, num_target_layers=4 if told else None)
        with target_passes(target) as passes:
            try:
                target.generate(PROMPT, assistant_model=draft, max_new_tokens=4)
            finally:
                assert not passes, "the target ran before the tap list was checked"


def test_fault_10_tap_list_of_another_length_than_the_fusion_weight(tmp_path):
    """Catches a list whose length does not fit the fusion weight, loaded with fresh random weights."""
    random_drafter(t0()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    place = config.get("dflash_config", config)
    assert place["target_layer_ids"] == [0, 2]
    place["target_layer_ids"] = [0, 1, 2]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, RuntimeError), match="fc|target_layer_ids"):
        DFlash2DraftModel.from_pretrained(tmp_path)


# 11 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, 5], ids=["pad-0", "pad-is-mask"])
@pytest.mark.parametrize("prompt", [[3, 7, 1], [5, 3, 5, 5, 1]], ids=["mask-in-output", "mask-in-prompt"])
def test_fault_11_mask_id_is_an_ordinary_token(prompt, pad):
    """Catches tokens that vanish because unfilled places are found by value."""
    target = pure_target()
    draft = table_drafter(target, mask_token_id=5)
    plain, drafted = assert_same_tokens(
        target,
        draft,
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=40,
        pad_token_id=pad,
    )
    assert 5 in drafted[0, len(prompt) :].tolist() and drafted.shape[1] == len(prompt) + 40
    assert draft.last_stats.mean_accepted_length > 4


# 13 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [0, 2, 5, None])
def test_fault_13_static_buffers_give_the_same_tokens(accept, caplog):
    """Catches `cache_implementation="static"` that crashes, writes past its end or reads stale entries."""
    target = pure_target()
    draft = steady_drafter(target, accept)
    caplog.set_level(logging.INFO, logger="transformers_dflash2")
    for new_tokens in (1, 7, 8, 20):
        expected = target.generate(PROMPT, max_new_tokens=new_tokens, do_sample=False)
        caplog.clear()
        drafted = target.generate(
            PROMPT,
            assistant_model=draft,
            max_new_tokens=new_tokens,
            do_sample=False,
            cache_implementation="static",
        )
        assert torch.equal(drafted, expected)
        reasons = [record for record in caplog.records if "static" in record.getMessage()]
        assert len(reasons) <= 1, "the reason is logged more than once"


def test_fault_13_reason_for_the_dynamic_cache_is_logged(fresh_reports):
    """Catches a request for a static cache that is dropped without a word, where it cannot be honoured."""
    target, draft = t0(), d0()
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_hidden_states": True}
    fresh_reports.set_level(logging.INFO, logger="transformers_dflash2")
    target.generate(PROMPT, assistant_model=draft, do_sample=False, cache_implementation="static", **options)
    target.generate(PROMPT, assistant_model=draft, do_sample=False, cache_implementation="static", **options)
    assert sum("static" in record.getMessage() for record in fresh_reports.records) == 1


def test_fault_13_static_cache_object_is_refused_before_any_work():
    """Catches an index error on the last block, or stale entries, with a static cache made by the caller."""
    target, draft = t0(), d0()
    cache = StaticCache(config=target.config, max_cache_len=23)
    with target_passes(target) as passes:
        with pytest.raises(ValueError, match="DynamicCache"):
            target.generate(PROMPT, assistant_model=draft, max_new_tokens=20, do_sample=False, **cache_kwargs(cache))
    assert not passes and cache.get_seq_length() == 0


# 14 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [32, 40], ids=["codebooks-32", "codebooks-40"])
def test_fault_14_padded_head_rows_are_no_candidates(rows):
    """
    Catches candidate ids beyond the real vocabulary.

    The recipe scales eight random rows, which the target itself would then choose. Here they score high on the
    drafter's mask slots only (the embedding of the mask token), so plain decoding never meets them.
    """
    table = cycle_table(32, 0, length=31, start=3)
    unused = next(token for token in range(32) if token not in walk_table(table, 3, 31))
    target = table_target(0, table=table, mix=0.0)
    draft = table_drafter(target, table, mask_token_id=unused, vocab_size=rows)
    prompt = torch.tensor([[3, 7, 1] if unused not in (3, 7, 1) else [4, 8, 9]])
    head = nn.Linear(32, 40, bias=False)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[:32] = target.get_output_embeddings().weight
        head.weight[32:, unused] = 5.0
    target.set_output_embeddings(head)
    with target_inputs(target) as inputs:
        assert_same_tokens(target, draft, prompt, max_new_tokens=40)
    assert max(int(ids.max()) for ids in inputs) < 32
    assert draft.last_stats.mean_accepted_length > 4


# 17 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_ids", [[0, 2], [3], [2, 0], [0, 1, 2, 3]], ids=str)
def test_fault_17_tap_id_is_the_output_of_that_layer(layer_ids):
    """Catches taps read one layer early or late, the last layer read after the final norm, or a sorted list."""
    target = t0()
    draft = random_drafter(target, target_layer_ids=layer_ids)
    with module_inputs(draft.fc) as fused:
        sequence = target.generate(PROMPT, assistant_model=draft, max_new_tokens=6, do_sample=False)
    expected = taps_of(target, sequence, layer_ids)
    torch.testing.assert_close(fused[0].reshape(-1, len(layer_ids) * 32)[:3], expected[:3], atol=1e-5, rtol=0)


# 19 ------------------------------------------------------------------------------------------------------------------


def first_turn(target, prompt=PROMPT, **kwargs):
    out = target.generate(prompt, max_new_tokens=10, do_sample=False, return_dict_in_generate=True, **kwargs)
    return out.sequences, returned_cache(out)


@pytest.mark.parametrize("kind", ["table", "random"])
@pytest.mark.parametrize("first", ["plain", "drafted"])
@pytest.mark.parametrize("crop", [0, 1, 5], ids=lambda crop: f"crop-{crop}")
def test_fault_19_cache_from_an_earlier_turn(kind, first, crop):
    """Catches a prompt that is run again on top of the kept cache, or a drafter that trips over the unseen part."""
    target, draft = t0(), d0() if kind == "table" else d1()
    sequences, cache = first_turn(target, **({"assistant_model": draft} if first == "drafted" else {}))
    if crop:
        cache.crop(-crop)
    text = torch.cat([sequences, torch.tensor([[9, 4]])], dim=1)
    expected = target.generate(text, max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
    with target_passes(target) as passes:
        drafted = target.generate(
            text,
            assistant_model=draft,
            max_new_tokens=16,
            do_sample=False,
            return_dict_in_generate=True,
            **cache_kwargs(cache),
        )
    assert torch.equal(drafted.sequences, expected.sequences)
    assert passes[0] == (1, 3 + crop), "tokens that the cache holds were run again"
    assert returned_cache(drafted).get_seq_length() == returned_cache(expected).get_seq_length()


def test_fault_19_whole_prompt_cached_but_one_token():
    """Catches an empty first pass, or a whole second prefill, when one prompt token is left to run."""
    target = t0()
    for draft in (d0(), d1()):
        sequences, cache = first_turn(target)
        expected = target.generate(sequences, max_new_tokens=30, do_sample=False)
        assert cache.get_seq_length() == sequences.shape[1] - 1
        drafted = target.generate(
            sequences, assistant_model=draft, max_new_tokens=30, do_sample=False, **cache_kwargs(cache)
        )
        assert torch.equal(drafted, expected)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_fault_19_three_turns_under_either_name():
    """Catches a cache argument that is read under one of its two names only."""
    target, draft = t0(), d0()
    for name in sorted({"past_key_values", CACHE_KEY}):
        text, cache = PROMPT, None
        for extra in (9, 4, 17):
            text = torch.cat([text, torch.tensor([[extra]])], dim=1)
            expected = target.generate(text, max_new_tokens=7, do_sample=False)
            out = target.generate(
                text,
                assistant_model=draft,
                max_new_tokens=7,
                do_sample=False,
                return_dict_in_generate=True,
                **({name: cache} if cache is not None else {}),
            )
            text, cache = out.sequences, returned_cache(out)
            assert torch.equal(text, expected)


def test_fault_19_batch_with_a_kept_cache():
    """Catches rows whose cached lengths are taken for positions."""
    target, draft = t0(), d0()
    batch = left_pad(ROWS)
    out = target.generate(**batch, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    text = torch.cat([out.sequences, torch.tensor([[9, 4]] * 3)], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 12, dtype=torch.long)], dim=1)
    expected = target.generate(text, attention_mask=mask, max_new_tokens=30, do_sample=False)
    drafted = target.generate(
        text,
        attention_mask=mask,
        assistant_model=draft,
        max_new_tokens=30,
        do_sample=False,
        **cache_kwargs(returned_cache(out)),
    )
    assert torch.equal(drafted, expected)


# 20 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.1},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 3.0},
        {"bad_words_ids": [[2], [9, 4]]},
        {"suppress_tokens": [2, 9]},
        {"sequence_bias": [[[9], -10.0], [[2, 9], 4.0]]},
        {"forced_eos_token_id": 6},
        {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": 6},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": 9},
        {"begin_suppress_tokens": [2, 9]},
        {"forced_bos_token_id": 4},
        {"encoder_repetition_penalty": 1.5},
        {"remove_invalid_values": True},
        {"renormalize_logits": True},
    ],
    ids=lambda options: next(iter(options)) + "-" + str(next(iter(options.values()))).replace(" ", ""),
)
@pytest.mark.parametrize("batch", [1, 3])
def test_fault_20_processors_act_on_the_targets_logits(options, batch):
    """Catches verification with unprocessed logits: penalties and bans are accepted and ignored, text loops."""
    table = cycle_table(32, 0, length=2, start=2)
    table[2], table[9] = 9, 2
    target = table_target(0, table=table, logit_scale=0.5)
    draft = table_drafter(target, table)
    assert_same_tokens(target, draft, **left_pad(ROWS[:batch]), max_new_tokens=24, **options)


# 23 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 17])
@pytest.mark.parametrize("accept", [0, 3, None], ids=["accept-0", "accept-3", "accept-7"])
def test_fault_23_context_ends_at_the_last_processed_token(length, accept):
    """
    Catches a context that starts from the wrong row of a pass, or misses or repeats a position.

    The drafter here is a table drafter whose layers do pass on what they read from the context: too little to change
    its choice, enough to change its hidden states.
    """
    target = pure_target()
    prompt = torch.tensor([[1, *walk_table(read_table(target), 1, 16)][:length]])
    draft = steady_drafter(target, accept, start=int(prompt[0, -1]))
    with torch.no_grad():
        for layer in draft.layers:
            layer.self_attn.o_proj.weight.normal_(std=0.02)
            layer.mlp.down_proj.weight.normal_(std=0.02)
    proposals = assert_drafts_as_if_rebuilt(target, draft, prompt, max_new_tokens=36)
    accepted = draft.last_stats.mean_accepted_length
    assert len(proposals) >= 4
    assert accepted == 1 if accept == 0 else accepted > (accept or 7) * 0.8


@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_fault_23_random_drafter_proposes_as_if_rebuilt(length):
    """Catches a stale or shifted draft cache, with a drafter whose proposals depend on all of it."""
    prompt = torch.randint(1, 31, (1, length), generator=torch.Generator().manual_seed(length))
    proposals = assert_drafts_as_if_rebuilt(t0(), d1(), prompt, max_new_tokens=20)
    assert len({tuple(proposal) for proposal in proposals}) > 3


# 26 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 1.0, 32**0.5], ids=["absent", "one", "sqrt-hidden"])
@pytest.mark.parametrize("model_type", ["gemma2", "qwen3"])
def test_fault_26_block_embeddings_follow_the_drafters_config(model_type, scale):
    """Catches the target's own embedding factor applied to the block, applied twice, or the config's one skipped."""
    target = table_target(0, model_type=model_type, mix=0.1)
    draft = random_drafter(target, **({} if scale is None else {"input_embedding_scale": scale}))
    with module_inputs(draft.layers[0]) as blocks, target_inputs(target) as ids:
        assert_same_tokens(target, draft, PROMPT, max_new_tokens=12)
    anchor = next(call for call in ids if call.shape[1] == 8)[0, 0]
    rows = target.get_input_embeddings().weight[torch.tensor([int(anchor)] + [31] * 7)]
    torch.testing.assert_close(blocks[0][0], rows * (scale or 1.0), atol=1e-6, rtol=1e-6)


# 28 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [None, 1], ids=["all-accepted", "reject-at-1"])
@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_fault_28_exactly_the_tokens_asked_for(block_size, accept):
    """Catches a last block that goes over `max_new_tokens` or `max_length`."""
    target = pure_target()
    draft = steady_drafter(target, accept, block_size=block_size)
    expected = target.generate(PROMPT, max_new_tokens=20, do_sample=False)
    for new_tokens in range(1, 21):
        limit = {"max_new_tokens": new_tokens} if new_tokens % 3 else {"max_length": 3 + new_tokens}
        drafted = target.generate(PROMPT, assistant_model=draft, do_sample=False, **limit)
        assert torch.equal(drafted, expected[:, : 3 + new_tokens]), limit


def test_fault_28_no_new_tokens_is_what_plain_generate_makes_of_it():
    """Catches a prompt that comes back longer, or a different error, when nothing may be generated."""
    target, draft = t0(), d0()
    with pytest.raises(ValueError) as plain:
        target.generate(PROMPT, max_new_tokens=0, do_sample=False)
    with pytest.raises(ValueError) as drafted:
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=0, do_sample=False)
    assert str(drafted.value) == str(plain.value)


# 29 ------------------------------------------------------------------------------------------------------------------


# Two roundings of a logit of 6 in bfloat16, whose spacing is 1/32 there.
BFLOAT16_ALLOWANCE = 2 / 32


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fault_29_bfloat16_tokens_are_best_within_rounding(seed):
    """Catches a real error that hides behind "half precision differs": a chosen token trails by more than rounding."""
    target = table_target(seed, dtype=torch.bfloat16)
    draft = table_drafter(target)
    sequence = target.generate(PROMPT, assistant_model=draft, max_new_tokens=60, do_sample=False)
    replay = target.generate(
        sequence[:, :1],
        max_new_tokens=62,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        prefix_allowed_tokens_fn=lambda row, prefix: [int(sequence[0, len(prefix)])],
    )
    assert torch.equal(replay.sequences, sequence)
    for step, logits in enumerate(replay.logits):
        if step + 1 >= 3:
            chosen = logits[0, sequence[0, step + 1]]
            assert logits.max() - chosen <= BFLOAT16_ALLOWANCE, step


def test_fault_29_exact_tie():
    """Catches a tie that is broken otherwise than plain decoding breaks it."""
    target = table_target(0, table=CYCLE, mix=0.0)
    with torch.no_grad():
        head = target.get_output_embeddings().weight
        for token in (4, 11, 17):
            # The successor shares its row with a second token: both score the same, bit for bit.
            head[(int(CYCLE[token]) + 3) % 32, token] = 1.0
    draft = table_drafter(target, CYCLE)
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=60)
    target, draft = target.to(torch.bfloat16), draft.to(torch.bfloat16)
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=60)


# 31 ------------------------------------------------------------------------------------------------------------------


def test_fault_31_chunked_prefill_gives_the_same_proposals():
    """Catches chunks whose hidden states are dropped or placed at shifted positions: acceptance falls silently."""
    target, draft = t0(), d1()
    prompt = torch.randint(1, 31, (1, 23), generator=torch.Generator().manual_seed(5))
    expected = target.generate(prompt, max_new_tokens=14, do_sample=False)
    proposals = {}
    for chunk in (None, 4, 7, 23):
        options = {"max_new_tokens": 14, "prefill_chunk_size": chunk}
        assert torch.equal(target.generate(prompt, do_sample=False, assistant_model=draft, **options), expected)
        proposals[chunk] = assert_drafts_as_if_rebuilt(target, draft, prompt, **options)
    assert len(proposals[None]) > 7
    assert all(chunked == proposals[None] for chunked in proposals.values()), proposals


def test_fault_31_chunked_prefill_of_a_padded_batch():
    """Catches a chunk of padding only, or positions counted from the chunk's start."""
    target, draft = t0(), d1()
    for chunk in (2, 4, 9):
        assert_same_tokens(target, draft, **left_pad(ROWS), max_new_tokens=20, prefill_chunk_size=chunk)


# 32 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [30, 32, 40])
def test_fault_32_vocabulary_sizes_that_differ_by_padding(vocab_size):
    """Catches a shared head that is not bound, or a zero head that is used, because two sizes differ by padding."""
    table = cycle_table(32, 0)
    order = [token for token in [1, *walk_table(table, 1, 31)] if token < 30]
    for token, successor in zip(order, order[1:] + order[:1], strict=True):
        table[token] = successor
    target = table_target(0, table=table, mix=0.0)
    draft = table_drafter(target, table, vocab_size=vocab_size, selector_top_k=30, mask_token_id=29)
    with target_inputs(target) as ids:
        assert_same_tokens(target, draft, PROMPT, max_new_tokens=40)
    assert max(int(call.max()) for call in ids) < 30
    assert draft.last_stats.mean_accepted_length > 6


# 34 ------------------------------------------------------------------------------------------------------------------


def test_fault_34_draft_length_of_the_call_wins_and_does_not_leak():
    """Catches a draft length that is read from the drafter only, or that stays for the next call."""
    target, draft = pure_target(), pure_drafter()
    configs = [copy.deepcopy(target.generation_config).to_dict(), copy.deepcopy(draft.config).to_dict()]
    own = draft.generation_config.to_dict() if getattr(draft, "generation_config", None) is not None else None
    for drafts in (1, 3, 7, 20, None):
        with target_passes(target) as passes:
            target.generate(
                PROMPT,
                assistant_model=draft,
                max_new_tokens=64,
                do_sample=False,
                **({} if drafts is None else {"num_assistant_tokens": drafts}),
            )
        lengths = [length for _, length in passes[1:]]
        assert max(lengths) == (7 if drafts is None else drafts) + 1
        assert all(length == max(lengths) for length in lengths[:-1])
    assert [target.generation_config.to_dict(), draft.config.to_dict()] == configs
    assert own is None or draft.generation_config.to_dict() == own


def test_fault_34_unknown_setting_is_refused():
    """Catches a misspelt setting that is swallowed."""
    with pytest.raises(ValueError, match="num_assistant_tokenz"):
        t0().generate(PROMPT, assistant_model=d0(), max_new_tokens=4, num_assistant_tokenz=3)


# 35 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["block_size", "target_layer_ids", "mask_token_id", "selector_top_k"])
def test_fault_35_nested_keys_are_read_first(key, tmp_path):
    """Catches a drafter trained with blocks of 8 that runs with a default because its nested section is not read."""
    random_drafter(t0()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = config.pop("dflash_config", {})
    merged = {**config, **nested}
    values = {"block_size": 5, "target_layer_ids": [1, 3], "mask_token_id": 7, "selector_top_k": 3}
    variants = {
        "flat": {**merged, key: values[key]},
        "nested": {
            **{name: value for name, value in merged.items() if name not in nested},
            "dflash_config": {**nested, key: values[key]},
        },
        "equal": {**merged, key: values[key], "dflash_config": {**nested, key: values[key]}},
        "different": {**merged, "dflash_config": {**nested, key: values[key]}},
    }
    for name, content in variants.items():
        (tmp_path / "config.json").write_text(json.dumps(content))
        draft = DFlash2DraftModel.from_pretrained(tmp_path)
        assert getattr(draft.config, key) == values[key], name


# 37 ------------------------------------------------------------------------------------------------------------------


class RunsOfThree(LogitsProcessor):
    """Allows only a token that keeps runs at three: a grammar decided by the prefix alone."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, prefix in enumerate(input_ids.tolist()):
            last = prefix[-1]
            run = next((count for count, token in enumerate(reversed(prefix)) if token != last), len(prefix))
            if run % 3:
                allowed = torch.full_like(scores[row], -torch.inf)
                allowed[last] = 0.0
                scores[row] = scores[row] + allowed
            else:
                scores[row, last] = -torch.inf
        return scores


class Matcher(LogitsProcessor):
    """A matcher with inner state: it raises when a prefix does not extend the last one by one token."""

    def __init__(self):
        self.seen = None
        self.lengths = []

    def __call__(self, input_ids, scores):
        prefix = input_ids[0].tolist()
        if self.seen is not None and prefix[:-1] != self.seen:
            raise RuntimeError(f"{prefix} does not extend {self.seen}")
        self.seen = prefix
        self.lengths.append(len(prefix))
        scores = scores.clone()
        scores[0, (7 * len(prefix)) % 32] -= 20.0
        return scores


def test_fault_37_grammar_from_the_prefix():
    """Catches a grammar that is applied to the wrong prefix inside a block."""
    for target, draft in ((t0(), d0()), (pure_target(), pure_drafter())):
        assert_same_tokens(
            target, draft, PROMPT, max_new_tokens=40, logits_processor=LogitsProcessorList([RunsOfThree()])
        )


@pytest.mark.parametrize("accept", [0, 3, None])
def test_fault_37_matcher_with_state_steps_once_per_committed_token(accept):
    """Catches a matcher that is stepped through candidates which are rejected later."""
    target = pure_target()
    draft = steady_drafter(target, accept)
    expected = target.generate(
        PROMPT, max_new_tokens=40, do_sample=False, logits_processor=LogitsProcessorList([Matcher()])
    )
    matcher = Matcher()
    drafted = target.generate(
        PROMPT,
        assistant_model=draft,
        max_new_tokens=40,
        do_sample=False,
        logits_processor=LogitsProcessorList([matcher]),
    )
    assert torch.equal(drafted, expected)
    assert matcher.lengths == list(range(3, 43))


def test_fault_37_prefix_allowed_tokens_fn():
    """Catches a constraint that is asked about candidates out of order."""
    asked = []

    def allowed(batch_id, prefix):
        asked.append(len(prefix))
        return [token for token in range(32) if (token + len(prefix)) % 3]

    for target, draft in ((t0(), d0()), (pure_target(), pure_drafter())):
        assert_same_tokens(target, draft, PROMPT, max_new_tokens=40, prefix_allowed_tokens_fn=allowed)
    assert asked == list(range(3, 43)) * 4


# 43, 44 --------------------------------------------------------------------------------------------------------------


def live_tensors(length, widths):
    """Number of live tensors that hold one row of any of these widths for each of `length` positions."""
    gc.collect()
    found = {}
    for candidate in gc.get_objects():
        if isinstance(candidate, torch.Tensor) and candidate.ndim >= 2:
            if candidate.shape[-2] == length and candidate.shape[-1] in widths:
                found.setdefault(candidate.untyped_storage().data_ptr(), tuple(candidate.shape))
    return found


def test_fault_43_only_tapped_hidden_states_are_kept():
    """Catches all hidden states kept through prefill, or tapped ones kept after the drafter used them."""
    target = table_target(0, num_hidden_layers=24)
    draft = random_drafter(target, target_layer_ids=[1, 12], num_target_layers=24)
    prompt = torch.randint(0, 31, (1, 2000), generator=torch.Generator().manual_seed(0))
    counts = []
    handles = [
        draft.fc.register_forward_pre_hook(lambda module, args: counts.append(len(live_tensors(2000, (32, 64))))),
        # The first pass is the prefill, the second verifies; at the third the first round is over.
        decoder_layers(target)[0].register_forward_pre_hook(
            lambda module, args: counts.append(-len(live_tensors(2000, (32, 64))))
        ),
    ]
    try:
        target.generate(prompt, assistant_model=draft, max_new_tokens=4, do_sample=False)
    finally:
        for handle in handles:
            handle.remove()
    prefill = next(count for count in counts if count > 0)
    # Two taps, their concatenation, and the prompt's rows that the drafter's input hook may hold.
    assert prefill <= 4, counts
    assert counts[-1] == 0 and counts[-3:].count(0) >= 2, counts


def test_fault_43_users_hidden_states_are_complete():
    """Catches a user's `output_hidden_states` that returns tapped layers only."""
    target = table_target(0, num_hidden_layers=24)
    draft = random_drafter(target, target_layer_ids=[1, 12], num_target_layers=24)
    plain, drafted = assert_same_tokens(
        target, draft, PROMPT, max_new_tokens=12, return_dict_in_generate=True, output_hidden_states=True
    )
    assert len(drafted.hidden_states) == len(plain.hidden_states) == 12
    for ours, theirs in zip(drafted.hidden_states, plain.hidden_states, strict=True):
        assert len(ours) == len(theirs) == 25
        for left, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [None, 100])
def test_fault_44_head_runs_on_a_block_of_rows_at_most(chunk):
    """Catches logits computed for the whole prompt."""
    target = table_target(0)
    draft = table_drafter(target)
    prompt = torch.randint(0, 31, (1, 500), generator=torch.Generator().manual_seed(0))
    with module_inputs(target.get_output_embeddings()) as inputs:
        target.generate(
            prompt,
            assistant_model=draft,
            max_new_tokens=20,
            do_sample=False,
            **({} if chunk is None else {"prefill_chunk_size": chunk}),
        )
    assert max(call.reshape(-1, 32).shape[0] for call in inputs) <= 8


# 47, 49 --------------------------------------------------------------------------------------------------------------


def llava_target():
    """A tiny Llava whose text part is a table target."""
    config = AutoConfig.for_model(
        "llava",
        text_config={
            "model_type": "llama",
            "vocab_size": 32,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            "bos_token_id": None,
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "projection_dim": 16,
        },
        image_token_index=30,
        image_token_id=30,
        image_seq_length=4,
        tie_word_embeddings=False,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    from transformers import LlavaForConditionalGeneration

    torch.manual_seed(0)
    target = LlavaForConditionalGeneration(config).eval()
    fill_table_weights(target, random_table(32, 0))
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "vision" in name or "multi_modal_projector" in name:
                parameter.copy_(0.5 * torch.randn(parameter.shape))
    target.generation_config.pad_token_id = 0
    target.generation_config.eos_token_id = None
    return target


def test_fault_47_pictures_reach_the_target_once():
    """Catches pixel inputs that are dropped, or sent again with every block."""
    target = llava_target()
    draft = table_drafter(target, mask_token_id=31, num_target_layers=4)
    prompt = torch.tensor([[3, 30, 30, 30, 30, 7, 1]])
    tower = next(module for name, module in target.named_modules() if name.endswith("vision_tower"))
    outputs = []
    for seed in (1, 2):
        pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        with module_outputs(target.get_output_embeddings()):
            calls = []
            handle = tower.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(1))
            drafted = target.generate(
                prompt,
                pixel_values=pixels,
                attention_mask=torch.ones_like(prompt),
                assistant_model=draft,
                max_new_tokens=40,
                do_sample=False,
            )
            handle.remove()
        assert len(calls) == 1
        expected = target.generate(
            prompt,
            pixel_values=pixels,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=40,
            do_sample=False,
        )
        assert torch.equal(drafted, expected)
        outputs.append(drafted)
    assert not torch.equal(*outputs), "the recipe needs pictures that change the text"


def test_fault_49_composite_config_and_wrapped_text_model():
    """Catches vocabulary, layers, embedding or head looked up on the wrapper instead of the text part."""
    wrapped = llava_target()
    text = AutoModelForCausalLM.from_config(wrapped.config.text_config).eval()
    weights = {name.split("language_model.")[-1]: value for name, value in wrapped.state_dict().items()}
    own = {}
    for name in text.state_dict():
        own[name] = weights[name.removeprefix("model.")] if name != "lm_head.weight" else weights["lm_head.weight"]
    text.load_state_dict(own)
    text.generation_config.eos_token_id, text.generation_config.pad_token_id = None, 0
    draft = table_drafter(text)
    mask = torch.ones_like(PROMPT)
    expected = text.generate(PROMPT, attention_mask=mask, max_new_tokens=40, do_sample=False)
    for target in (text, wrapped):
        drafted = target.generate(
            PROMPT, attention_mask=mask, assistant_model=draft, max_new_tokens=40, do_sample=False
        )
        assert torch.equal(drafted, expected)
    # Without `num_target_layers` only the target can tell that there is no layer 4.
    for target in (text, wrapped):
        with pytest.raises(ValueError, match="target_layer_ids"):
            bad = random_drafter(text, target_layer_ids=[0, 4], num_target_layers=None)
            target.generate(PROMPT, attention_mask=mask, assistant_model=bad, max_new_tokens=4)


# 50 ------------------------------------------------------------------------------------------------------------------


def mean_accepted(target, draft):
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=65)
    return draft.last_stats.mean_accepted_length


def test_fault_50_selector_is_used_and_walks():
    """Catches per-place argmax in spite of a selector, or a predecessor that stays at the anchor."""
    target = pure_target()
    assert mean_accepted(target, table_drafter(target)) == 8.0
    draft = table_drafter(target)
    with torch.no_grad():
        draft.candidate_selector.predecessor_codebook.zero_()
    assert mean_accepted(target, draft) <= 2.0
    draft = table_drafter(target)
    with torch.no_grad():
        selector = draft.candidate_selector
        kept = selector.predecessor_codebook.clone()
        selector.predecessor_codebook.copy_(selector.successor_codebook)
        selector.successor_codebook.copy_(kept)
    assert mean_accepted(target, draft) < 4.0


def test_fault_50_hidden_gate_and_unary_terms_count():
    """Catches a pair term without the hidden gate, and scores without the unary term."""
    target = pure_target()
    draft = table_drafter(target)
    with torch.no_grad():
        draft.candidate_selector.hidden_projection.weight.neg_()
    assert mean_accepted(target, draft) < 4.0
    # The pair term ties at zero for all candidates but one of weight below the unary of the mask's successor.
    weak = table_drafter(target, sharpness=1.0)
    with target_inputs(target) as ids:
        target.generate(PROMPT, assistant_model=weak, max_new_tokens=20, do_sample=False)
    block = next(call for call in ids if call.shape[1] == 8)[0]
    assert block[1:].tolist() == [int(CYCLE[31])] * 7


# 52 ------------------------------------------------------------------------------------------------------------------


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", ["", "model."], ids=["bare", "prefixed"])
@pytest.mark.parametrize("suffix", ["", ".weight"], ids=["bare-codebooks", "codebook-weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fault_52_naming_variants_load_bit_equal(prefix, suffix, dtype, tmp_path):
    """Catches parameters that are "not in model", or quietly fresh, under one of the public namings."""
    draft = random_drafter(t0()).to(dtype)
    draft.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(draft.state_dict())
    assert "candidate_selector.predecessor_codebook" in stored

    def rename(weights):
        return {prefix + name + (suffix if name.endswith("codebook") else ""): w for name, w in weights.items()}

    rewrite(tmp_path, rename)
    loaded = DFlash2DraftModel.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    loaded.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(stored)
    assert all(torch.equal(again[name], stored[name]) for name in stored)


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.attention_conv.base_kernel", "norm.weight"])
def test_fault_52_missing_key_is_an_error(name, tmp_path):
    """Catches a drafter that loads with a random weight in place of a missing one."""
    random_drafter(t0()).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: {key: value for key, value in weights.items() if key != name})
    with pytest.raises((ValueError, RuntimeError), match=name.replace(".", r"\.")):
        DFlash2DraftModel.from_pretrained(tmp_path)


def test_fault_52_unexpected_key_is_an_error(tmp_path):
    """Catches a weight that the model does not know and drops."""
    random_drafter(t0()).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: {**weights, "layers.0.extra.weight": torch.zeros(2)})
    with pytest.raises((ValueError, RuntimeError), match=r"layers\.0\.extra\.weight"):
        DFlash2DraftModel.from_pretrained(tmp_path)


def test_fault_52_sharded_checkpoint(tmp_path):
    """Catches shards that are read in part."""
    draft = random_drafter(t0())
    draft.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded = DFlash2DraftModel.from_pretrained(tmp_path)
    for name, value in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


# 53 ------------------------------------------------------------------------------------------------------------------


def test_fault_53_nothing_of_vocabulary_size_but_the_checkpoints(tmp_path):
    """Catches an embedding or head that the drafter allocates although it borrows the target's."""
    target = t0()
    config = draft_config(target, vocab_size=50_000, selector_rank=8)
    draft = DFlash2DraftModel(config)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_()
    draft.save_pretrained(tmp_path)
    del draft
    stored = load_file(tmp_path / "model.safetensors")
    size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    largest = max(tensor.numel() for tensor in stored.values())
    del stored
    gc.collect()
    known = {id(candidate) for candidate in gc.get_objects() if isinstance(candidate, torch.Tensor)}
    loaded = DFlash2DraftModel.from_pretrained(tmp_path)
    fresh = {}
    for candidate in gc.get_objects():
        if isinstance(candidate, torch.Tensor) and id(candidate) not in known and candidate.device.type == "cpu":
            storage = candidate.untyped_storage()
            fresh[storage.data_ptr()] = storage.nbytes()
    assert sum(fresh.values()) < 2 * size
    assert sum(parameter.numel() * parameter.element_size() for parameter in loaded.parameters()) == size
    assert max(tensor.numel() for tensor in [*loaded.parameters(), *loaded.buffers()]) == largest == 50_000 * 8


def test_fault_53_shared_modules_are_not_registered_on_the_drafter():
    """Catches a target that becomes part of the drafter's state after the first call."""
    target = table_target(0)
    draft = table_drafter(target)
    names, modules = set(draft.state_dict()), {id(module) for module in draft.modules()}
    target.generate(PROMPT, assistant_model=draft, max_new_tokens=12, do_sample=False)
    assert set(draft.state_dict()) == names
    assert {id(module) for module in draft.modules()} == modules


# 55 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", ["lm_head.weight", "d2t"])
def test_fault_55_own_reduced_head_is_refused(extra, tmp_path):
    """Catches the target's head put in place of the drafter's own reduced one."""
    random_drafter(t0()).save_pretrained(tmp_path)
    tensors = {"lm_head.weight": torch.zeros(16, 32), "d2t": torch.arange(16)}
    rewrite(tmp_path, lambda weights: {**weights, extra: tensors[extra]})
    config = json.loads((tmp_path / "config.json").read_text())
    config["draft_vocab_size"] = 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="draft_vocab_size|lm_head|d2t"):
        DFlash2DraftModel.from_pretrained(tmp_path)


# 56 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["absent", None, 32, -1, True], ids=str)
def test_fault_56_mask_id_is_required_and_in_range(mask):
    """Catches the pad id, the end id or -1 used in place of a missing mask id."""
    target = t0()
    with pytest.raises(ValueError, match="mask_token_id"):
        if mask is None:
            settings = draft_config(target).to_dict()
            nested = settings.pop("dflash_config", {})
            config = DFlash2Config(**{**settings, **nested, "mask_token_id": None})
            draft = DFlash2DraftModel(config)
        else:
            draft = random_drafter(target, mask_token_id=None if mask == "absent" else mask)
        with target_passes(target) as passes:
            try:
                target.generate(PROMPT, assistant_model=draft, max_new_tokens=4)
            finally:
                assert not passes, "the target ran before the mask id was checked"


@pytest.mark.parametrize("mask", [0, 31])
def test_fault_56_first_and_last_mask_id_work(mask):
    """Catches 0 taken for missing, or a bound that is one too low."""
    target = t0()
    draft = random_drafter(target, mask_token_id=mask)
    with module_inputs(draft.layers[0]) as blocks:
        assert_same_tokens(target, draft, PROMPT, max_new_tokens=12)
    expected = target.get_input_embeddings().weight[mask]
    torch.testing.assert_close(blocks[0][0, 1:], expected.expand(7, -1), atol=0, rtol=0)


# 58 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fault_58_adapters_of_the_target():
    """Catches an adapter that is applied in prefill only, on the drafter too, or not at all while verifying."""
    peft = pytest.importorskip("peft")
    base = table_target(0)
    draft = table_drafter(base)
    without = base.generate(PROMPT, max_new_tokens=24, do_sample=False)
    config = peft.LoraConfig(r=4, target_modules=["o_proj", "down_proj"], task_type="CAUSAL_LM", lora_alpha=8)
    model = peft.get_peft_model(base, config, adapter_name="first")
    model.add_adapter("second", config)
    with torch.no_grad():
        for index, (_, parameter) in enumerate(
            (name, parameter) for name, parameter in model.named_parameters() if "lora_" in name
        ):
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    model.eval()
    texts = []
    for adapter in ("first", "second", "first"):
        model.set_adapter(adapter)
        expected = model.generate(input_ids=PROMPT, max_new_tokens=24, do_sample=False)
        for runner in (model, base):
            drafted = runner.generate(input_ids=PROMPT, assistant_model=draft, max_new_tokens=24, do_sample=False)
            assert torch.equal(drafted, expected)
        texts.append(expected)
    assert torch.equal(texts[0], texts[2]) and not torch.equal(texts[0], texts[1])
    with model.disable_adapter():
        drafted = model.generate(input_ids=PROMPT, assistant_model=draft, max_new_tokens=24, do_sample=False)
        assert torch.equal(drafted, without)
    merged = model.merge_and_unload()
    assert_same_tokens(merged, draft, PROMPT, max_new_tokens=24)


# 59 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 20])
def test_fault_59_output_does_not_depend_on_the_draft_length(drafts):
    """Catches state that is written wrongly at one draft length only, for instance just the trained one."""
    prompt = torch.randint(1, 31, (1, 20), generator=torch.Generator().manual_seed(2))
    for length in (1, 8, 20):
        inputs = {"input_ids": prompt[:, :length], "max_new_tokens": 20, "do_sample": False}
        expected = t0().generate(**inputs)
        for draft in (d0(), d1()):
            assert torch.equal(t0().generate(**inputs, assistant_model=draft, num_assistant_tokens=drafts), expected)

# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""Targets quantised by the libraries themselves: the same tokens, good candidates, no padded ids."""

import copy
import itertools

import pytest
import torch
from generation_checks import PROMPT, SMALLEST_P_VALUE, chi_square_p_value, target_inputs
from quantized_targets import (
    CYCLE,
    FORMATS,
    UNUSED,
    VOCAB,
    dense_target,
    dequantized_head,
    dtype_of,
    quantize,
    require,
    rounded_input,
    table_pair,
    tied_target,
)
from transformers import BitsAndBytesConfig

from transformers_dflash2 import DFlash2DraftModel
from transformers_dflash2.quantization import HeadProjection
from transformers_dflash2.target import TargetAdapter
from transformers_dflash2.testing import assert_same_tokens, draft_config, random_drafter, table_drafter, table_target


# One format of each kind of layer.
KINDS = ["bnb-nf4", "bnb-int8", "ct-w8a8", "ct-w4a16", "ao-int8"]
# Variants of a format differ in how it is stored, not in what becomes of padded rows.
PADDED_CASES = [
    *((name, 0) for name in FORMATS),
    *((name, 1) for name in KINDS),
    *((name, 64) for name in FORMATS if not name.endswith("ed")),
]
# Share of the dequantised head's best candidates that are drafted from.
LOWEST_RECALL = 0.99


@pytest.mark.parametrize(("name", "padding"), PADDED_CASES)
def test_fault_05_14_38_40_41_same_tokens_as_the_quantised_target_alone(name, padding):
    """
    Catches packed weights that are read instead of called, and padded rows that become candidates: those win every
    mask slot, so that one of them drafted would end acceptance.
    """
    target, draft = table_pair(name, padding)
    assert target.get_output_embeddings().out_features >= VOCAB + padding
    with target_inputs(target) as inputs:
        assert_same_tokens(target, draft, PROMPT, max_new_tokens=15)
    assert max(int(ids.max()) for ids in inputs) < VOCAB
    assert draft.last_stats.mean_accepted_length > 4


@pytest.mark.parametrize("name", KINDS)
def test_tied_head_of_a_quantised_target(name):
    """Catches a tied head that is taken for a quantised one; the text depends on the whole prefix here."""
    target = tied_target(name)
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight
    plain = target.generate(PROMPT, max_new_tokens=15, do_sample=False)
    table = torch.randperm(VOCAB)
    for token, following in itertools.pairwise(plain[0, 2:].tolist()):
        table[token] = following
    draft = table_drafter(target, table, target_layer_ids=[0, 1])
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=15)
    assert draft.last_stats.accepted > 0


@pytest.mark.parametrize("name", KINDS)
def test_batch_with_rows_of_their_own_pace(name):
    """Catches scores of a row that depend on which other rows the quantised layers see."""
    target, draft = table_pair(name)
    rows = torch.tensor([[3, 7, 1], [4, 9, 2], [8, 1, 12]])
    assert_same_tokens(target, draft, rows, max_new_tokens=10, attention_mask=torch.ones_like(rows))


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-int8", "ct-w4a16"])
def test_static_tempo(name, monkeypatch):
    """Catches a quantised target that is kept out of the static tempo, or whose buffers have a dtype of their own."""
    pytest.importorskip("triton")
    from transformers_dflash2.static_decoding import StaticDecoding

    taken, run = [], StaticDecoding.run
    monkeypatch.setattr(StaticDecoding, "run", lambda self: taken.append(self) or run(self))
    target, draft = quantize(dense_target(), name), table_pair(name)[1]
    inputs = {"inputs": PROMPT, "max_new_tokens": 15, "do_sample": False}
    drafted = target.generate(**inputs, assistant_model=draft, cache_implementation="static")
    assert taken and draft.last_stats.mean_accepted_length > 4
    assert torch.equal(drafted, target.generate(**inputs))


@pytest.mark.parametrize("name", ["bnb-nf4", "ct-fp8", "ao-int8"])
def test_sampled_law_is_that_of_the_quantised_target(name):
    """Catches candidate scores that are not those the target verifies with: the law of two tokens would be off."""
    vocab, prompt, draws, temperature = 8, torch.tensor([[3, 6]]), 2_000, 0.8
    dense = table_target(1, vocab, mix=0.15, logit_scale=0.35, num_hidden_layers=2)
    draft = table_drafter(dense, sharpness=1.5, target_layer_ids=[0, 1])
    target = quantize(dense, name)
    prefixes, law = prompt, torch.ones(1, dtype=torch.float64)
    for _ in range(2):
        with torch.no_grad():
            logits = target(prefixes).logits[:, -1].float()
        law = (law[:, None] * (logits / temperature).softmax(-1).double()).flatten()
        following = torch.arange(vocab).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(vocab, 0), following], dim=1)
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": 3}
    out = target.generate(prompt.expand(draws, -1), assistant_model=draft, **options)
    counts = torch.bincount(out[:, 2] * vocab + out[:, 3], minlength=vocab**2).double()
    assert draft.last_stats.accepted > 0
    assert chi_square_p_value(counts, law) >= SMALLEST_P_VALUE


@pytest.mark.parametrize("name", FORMATS)
def test_candidates_are_those_of_the_dequantised_head(name):
    """Catches a projection that drops scales, or a layout that is taken for another."""
    require(name)
    top_k, dtype = 16, dtype_of(name)
    dense = table_target(0, 64, num_hidden_layers=1)
    dense.resize_token_embeddings(256, mean_resizing=False)
    torch.nn.init.normal_(dense.get_output_embeddings().weight)
    target = quantize(dense, name)
    with torch.no_grad():
        # Some heads become usable with the target's first forward.
        target(PROMPT)
        head = target.get_output_embeddings()
        hidden = torch.randn(1, 200, 64).to(dtype)
        ids = HeadProjection(head, 256)(hidden, dtype).topk(top_k).indices
        expected = (rounded_input(head, hidden).float() @ dequantized_head(target).T).topk(top_k).indices
    recall = (ids[..., None] == expected[..., None, :]).any(-1).float().mean()
    assert recall >= LOWEST_RECALL


@pytest.mark.parametrize("name", ["ct-w8a8", "ct-fp8", "ct-w4a16", "ct-nvfp4"])
def test_fault_40_weights_are_decompressed_once(name, monkeypatch):
    """Catches weights that are decompressed anew, or asked for before the target's first forward has made them."""
    require(name)
    from compressed_tensors.compressors import ModelCompressor

    calls = []
    decompress = ModelCompressor.decompress_model
    monkeypatch.setattr(
        ModelCompressor, "decompress_model", lambda self, model: calls.append(1) or decompress(self, model)
    )
    target = quantize(table_target(0, VOCAB, num_hidden_layers=2), name)
    draft = random_drafter(target, target_layer_ids=[0, 1])
    TargetAdapter(target, draft.config)
    assert not calls
    target.generate(PROMPT, max_new_tokens=8, do_sample=False, assistant_model=draft)
    assert len(calls) == 1


@pytest.mark.parametrize("states", ["unpadded_vocab_size", "vocab_size"])
def test_more_candidates_than_real_tokens_are_refused(states):
    """Catches a top-k that would have to take padded rows to be complete, with either way to state the vocabulary."""
    target = table_target(0, VOCAB + 8, num_hidden_layers=2)
    config = draft_config(target, target_layer_ids=[0, 1], selector_top_k=VOCAB + 1)
    setattr(target.config, states, VOCAB)
    with pytest.raises(ValueError, match=f"`selector_top_k`={VOCAB + 1} exceeds the target's vocabulary of {VOCAB}"):
        TargetAdapter(target, config)


@pytest.mark.parametrize("padding", [0, 3])
def test_padded_scores_are_masked_in_place_of_being_cropped(padding):
    """Catches a cropped view, which fast top-k kernels refuse, and a transposed result of a head."""
    head = torch.nn.Linear(16, VOCAB + padding)
    head.register_forward_hook(lambda module, args, output: output.mT.contiguous().mT)
    scores = HeadProjection(head, VOCAB)(torch.randn(2, 5, 16), torch.float32)
    assert scores.is_contiguous() and scores.shape == (2, 5, VOCAB + padding)
    assert torch.isfinite(scores[..., :VOCAB]).all() and (scores[..., VOCAB:] == -torch.inf).all()


@pytest.mark.parametrize("name", KINDS)
def test_quantised_drafter(name, tmp_path):
    """Catches quantised convolutions or selectors, layers that wait for a forward, and a copy that does not load."""
    dense = dense_target()
    draft = table_drafter(dense, CYCLE, mask_token_id=UNUSED, target_layer_ids=[0, 1])
    dense_fc = copy.deepcopy(draft.fc)
    kept = {key: tensor.clone() for key, tensor in draft.state_dict().items() if is_kept_dense(key)}
    quantized = quantize(draft, name)
    assert_same_tokens(dense, quantized, PROMPT, max_new_tokens=15)
    assert quantized.last_stats.mean_accepted_length > 4
    state = quantized.state_dict()
    assert kept and all(torch.equal(state[key], tensor) for key, tensor in kept.items())
    row = torch.randn(1, 64)
    assert not torch.equal(quantized.fc(row), dense_fc(row))
    if name.startswith("bnb"):
        quantized.save_pretrained(tmp_path)
        again = DFlash2DraftModel.from_pretrained(tmp_path)
        assert all(torch.equal(tensor, state[key]) for key, tensor in again.state_dict().items())


def is_kept_dense(key):
    return "_conv." in key or key.startswith("candidate_selector.")


def test_quantization_config_of_the_caller_is_left_alone(tmp_path):
    """Catches a config that grows with every drafter it loads, and a list of the caller's own that is dropped."""
    require("bnb-nf4")
    random_drafter(dense_target(), target_layer_ids=[0, 1]).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["fc"])
    for quantization_config in (config, config.to_dict()):
        draft = DFlash2DraftModel.from_pretrained(tmp_path, quantization_config=quantization_config)
        assert type(draft.fc) is torch.nn.Linear
        assert type(draft.layers[0].attention_conv.kernel_projection) is torch.nn.Linear
        assert type(draft.layers[0].mlp.up_proj) is not torch.nn.Linear
    assert config.llm_int8_skip_modules == ["fc"]

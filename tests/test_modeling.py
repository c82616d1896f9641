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
"""The draft model: its pass against an independent float64 one, its cache, masks and proposals, and strict loading."""

import gc
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from transformers_dflash2 import DFlash2Config, DFlash2DraftModel, DFlash2Model, modeling_dflash2
from transformers_dflash2.functional_dflash2 import selector_lattice, selector_walk, transform_unary
from transformers_dflash2.testing import random_drafter, table_drafter, table_target


MODEL_CARD = Path(__file__).resolve().parents[1] / "model_cards" / "smollm2-135m-dflash2"
# Largest difference of final hidden states (of order 1) between two float32 orders of the same sums.
HIDDEN_TOLERANCE = 1e-5
# The same between float32 and float64 through two layers with large random weights.
FP64_TOLERANCE = 5e-5
# Largest difference of float32 probabilities from one formula to another.
PROBABILITY_TOLERANCE = 1e-6
# A perturbed input that may matter moves an output of order 1 by more than this.
MOVED = 1e-4

HIDDEN, VOCAB, FEATURES = 16, 24, 32


def make_config(layers=("full_attention", "full_attention"), **kwargs):
    settings = {
        "architectures": ["DFlash2DraftModel"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": list(layers),
        "sliding_window": 6,
        "is_causal": False,
        "num_target_layers": 4,
        "block_size": 5,
        "target_layer_ids": [0, 2],
        "mask_token_id": VOCAB - 1,
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 6,
        "selector_top_k": 4,
        "pad_token_id": 0,
        **kwargs,
    }
    if settings["architectures"] == ["DFlashDraftModel"]:
        off = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        settings.update(dict.fromkeys(off, 0))
    return DFlash2Config(**{key: value for key, value in settings.items() if value is not None})


def randomise(model, std=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = std * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
            if name.endswith("base_kernel"):
                parameter[:, 0] += 1
    return model.eval()


def make_draft(layers=("full_attention", "full_attention"), *, seed=0, std=0.3, attn_implementation=None, **kwargs):
    config = make_config(layers, **kwargs)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    return randomise(DFlash2DraftModel(config), std, seed)


SLIDING, FULL = "sliding_attention", "full_attention"
V1 = {"architectures": ["DFlashDraftModel"]}


def inputs(batch=1, context=9, block=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, context, FEATURES, generator=generator)
    return features, torch.randn(batch, block, HIDDEN, generator=generator)


@torch.no_grad()
def run(draft, features, embeds, counts=None, chunks=None):
    """Hidden states of one block behind the context, which comes in chunks: one list of counts per chunk."""
    batch = features.shape[0]
    chunks = [counts or [features.shape[1]] * batch] if chunks is None else chunks
    context = draft.make_context(batch, block_size=embeds.shape[1])
    done = [0] * batch
    for chunk in chunks:
        width = max(chunk)
        positions = torch.tensor(done)[:, None] + torch.arange(width)
        part = features.new_full((batch, width, FEATURES), 7.0)
        for row, count in enumerate(chunk):
            part[row, :count] = features[row, done[row] : done[row] + count]
        draft.append_context(context, part, positions, chunk)
        done = [a + b for a, b in zip(done, chunk, strict=True)]
    positions = torch.tensor(done)[:, None] + torch.arange(embeds.shape[1])
    return draft(embeds, positions, context).last_hidden_state


# ------------------------------------------------------------------------------------------------- an independent pass


def reference_pass(draft, features, embeds, start=0):
    """One row in float64, written from the formulas: no cache, no batch, masks from positions."""
    config, weights = draft.config, {name: value.detach().double() for name, value in draft.state_dict().items()}
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    context_length, block = features.shape[0], embeds.shape[0]

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def rotate(x, positions):
        theta = config.rope_parameters["rope_theta"]
        frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = (positions[:, None].double() * frequencies)[:, None]
        first, second = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )

    def conv(x, base, dynamic):
        output = torch.zeros_like(x)
        for i in range(block):
            for tap in range(min(base.shape[0], i + 1)):
                kernel = base[tap] + dynamic[i, tap].repeat_interleave(config.conv_group_size)
                output[i] += kernel * x[i - tap]
        return output

    def with_conv(name, x, sublayer):
        if config.conv_kernel_size == 0:
            return sublayer(x)
        base, taps = weights[f"{name}.base_kernel"], config.conv_kernel_size
        dynamic = (x @ weights[f"{name}.kernel_projection.weight"].T).view(block, 2, taps, -1)
        return conv(sublayer(conv(x, base[0], dynamic[:, 0])), base[1], dynamic[:, 1])

    vectors = norm(features.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    context_positions = torch.arange(start, start + context_length)
    positions = torch.arange(start + context_length, start + context_length + block)
    key_positions = torch.cat([context_positions, positions])
    x = embeds.double()
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}"
        window = config.sliding_window if config.layer_types[index] == SLIDING else math.inf
        distance = positions[:, None] - key_positions[None]
        visible = distance.abs() < window
        if config.layer_is_causal[index]:
            visible &= distance >= 0

        def attend(rows, layer=layer, visible=visible):
            def project(source, name, count):
                return (source @ weights[f"{layer}.self_attn.{name}_proj.weight"].T).view(-1, count, width)

            q_norm, k_norm = weights[f"{layer}.self_attn.q_norm.weight"], weights[f"{layer}.self_attn.k_norm.weight"]
            queries = rotate(norm(project(rows, "q", heads), q_norm), positions)
            both = torch.cat([vectors, rows])
            keys = rotate(norm(project(both, "k", kv_heads), k_norm), key_positions)
            values = project(both, "v", kv_heads)
            keys, values = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(width)
            law = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
            mixed = torch.einsum("hqk,khd->qhd", law, values).reshape(block, -1)
            return mixed @ weights[f"{layer}.self_attn.o_proj.weight"].T

        def feed_forward(rows, layer=layer):
            gate, up, down = (weights[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
            return (torch.nn.functional.silu(rows @ gate) * (rows @ up)) @ down

        x = x + with_conv(f"{layer}.attention_conv", norm(x, weights[f"{layer}.input_layernorm.weight"]), attend)
        x = x + with_conv(
            f"{layer}.mlp_conv", norm(x, weights[f"{layer}.post_attention_layernorm.weight"]), feed_forward
        )
    return norm(x, weights["norm.weight"])


KINDS = [
    pytest.param({}, id="full"),
    pytest.param({"layers": (SLIDING, SLIDING)}, id="sliding"),
    pytest.param({"layers": (SLIDING, FULL)}, id="mixed"),
    pytest.param({"layers": (FULL, SLIDING), "is_causal": True}, id="causal"),
    pytest.param({"layers": (SLIDING, FULL), "is_causal": None}, id="causal-by-type"),
    pytest.param({"conv_kernel_size": 3, "conv_group_size": 16}, id="three-taps"),
    pytest.param({"conv_kernel_size": 0, "conv_group_size": 0}, id="no-conv"),
    pytest.param({"layers": (SLIDING, FULL), **V1}, id="v1"),
]


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_pass_equals_the_formulas(kind, attn_implementation):
    """Catches a context that meets a layer norm or the conv, wrong rotary halves, a mask, swapped conv sides."""
    draft = make_draft(attn_implementation=attn_implementation, **kind)
    assert draft.layers[0].self_attn.config._attn_implementation == attn_implementation
    for context, block in ((9, 5), (1, 5), (12, 1), (3, 8)):
        features, embeds = inputs(context=context, block=block)
        expected = reference_pass(draft, features[0], embeds[0])
        torch.testing.assert_close(run(draft, features, embeds)[0].double(), expected, atol=FP64_TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_eager_equals_sdpa(kind):
    """Catches a mask of the wrong kind for one of the two attention functions: bool for sdpa, additive for eager."""
    features, embeds = inputs(batch=2)
    outputs = [
        run(make_draft(attn_implementation=name, **kind), features, embeds, counts=[9, 4])
        for name in ("eager", "sdpa")
    ]
    # The two add up in another order, so single entries of a wide range differ by more than the rest: relative RMS.
    eager, sdpa = outputs
    assert (eager - sdpa).norm() <= HIDDEN_TOLERANCE * sdpa.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_block_without_context(kind):
    """Catches a causal flag or window that is forgotten when there is no context, with an empty one and with none."""
    draft = make_draft(**kind)
    _, embeds = inputs(block=8)
    expected = reference_pass(draft, torch.zeros(0, FEATURES), embeds[0])
    positions = torch.arange(8)[None]
    with torch.no_grad():
        for context in (draft.make_context(1, block_size=8), None):
            actual = draft(embeds, positions, context).last_hidden_state
            torch.testing.assert_close(actual[0].double(), expected, atol=FP64_TOLERANCE, rtol=0)


# ------------------------------------------------------------------------------------------------------------- context


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([[1]] * 9, id="one-by-one"),
        pytest.param([[4], [5]], id="halves"),
        pytest.param([[1], [7], [1]], id="long-middle"),
        pytest.param([[5], [0], [4]], id="with-nothing"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_incremental_context_equals_all_at_once(kind, chunks):
    """Catches positions, ring columns or norms that depend on how the context came in."""
    draft = make_draft(**kind)
    features, embeds = inputs()
    torch.testing.assert_close(
        run(draft, features, embeds, chunks=chunks), run(draft, features, embeds), atol=HIDDEN_TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_equal_single_rows(kind):
    """Catches a row that reads its neighbour's context, its padding, or a mask of the longest row."""
    draft = make_draft(**kind)
    features, embeds = inputs(batch=3, context=14)
    chunks = [[9, 1, 4], [2, 5, 0], [1, 4, 5], [2, 1, 0]]
    together = run(draft, features, embeds, chunks=chunks)
    for row in range(3):
        part = slice(row, row + 1)
        count = sum(chunk[row] for chunk in chunks)
        alone = run(draft, features[part, :count], embeds[part])
        torch.testing.assert_close(together[part], alone, atol=HIDDEN_TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_row_leaves_the_others_alone(kind):
    """Catches a NaN that crosses rows, in the context as in the block."""
    draft = make_draft(**kind)
    features, embeds = inputs(batch=3)
    clean = run(draft, features, embeds, counts=[9, 6, 9])
    features[1], embeds[1] = math.nan, math.inf
    broken = run(draft, features, embeds, counts=[9, 6, 9])
    assert torch.equal(broken[[0, 2]], clean[[0, 2]])
    assert broken[1].isnan().all()


@pytest.mark.parametrize("kind", [pytest.param({}, id="full"), pytest.param({"layers": (SLIDING,) * 2}, id="sliding")])
def test_a_broken_block_is_forgotten(kind):
    """Catches keys of a NaN block that stay behind in a masked column and break every later block of that row."""
    draft = make_draft(**kind)
    features, embeds = inputs(batch=2, context=6)
    context = draft.make_context(2, block_size=5)
    with torch.no_grad():
        draft.append_context(context, features[:, :3], torch.arange(3).expand(2, -1), [3, 3])
        draft(embeds.new_full(embeds.shape, math.nan), torch.arange(3, 8).expand(2, -1), context)
        draft.append_context(context, features[:, 3:], torch.arange(3, 6).expand(2, -1), [3, 1])
        output = draft(embeds, torch.tensor([[6], [4]]) + torch.arange(5), context).last_hidden_state
    expected = run(draft, features, embeds, counts=[6, 4])
    torch.testing.assert_close(output, expected, atol=HIDDEN_TOLERANCE, rtol=0)


@pytest.mark.parametrize("layers", [(SLIDING, FULL), (FULL, SLIDING)], ids=["sliding-first", "full-first"])
def test_block_longer_than_the_context_was_made_for(layers):
    """Catches an error for a drafter with windows of two kinds when a call asks for a longer block than usual."""
    draft = make_draft(layers)
    features, embeds = inputs(block=8)
    context = draft.make_context(1, block_size=2)
    with torch.no_grad():
        draft.append_context(context, features, torch.arange(9)[None], [9])
        output = draft(embeds, torch.arange(9, 17)[None], context).last_hidden_state
    torch.testing.assert_close(output, run(draft, features, embeds), atol=HIDDEN_TOLERANCE, rtol=0)


# -------------------------------------------------------------------------------------------------- windows, causality


def moved_rows(draft, features, embeds, perturb):
    """Which rows of a block move when `perturb` changes copies of the inputs."""
    before = run(draft, features, embeds)[0]
    features, embeds = features.clone(), embeds.clone()
    perturb(features, embeds)
    after = run(draft, features, embeds)[0]
    return ((after - before).abs().amax(dim=-1) > MOVED).tolist()


def identity_conv(draft):
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "_conv." in name:
                parameter.zero_()
            if name.endswith("base_kernel"):
                parameter[:, 0] = 1
    return draft


@pytest.mark.parametrize("distance", range(1, 12), ids="distance{}".format)
def test_fault_46_window_counts_from_true_positions(distance):
    """Catches a window ignored, off by one, or counted from the block's start: who sees a context token is exact."""
    window = 6
    draft = identity_conv(make_draft((SLIDING,)))
    features, embeds = inputs(context=20, block=4)

    def perturb(features, embeds):
        features[:, 20 - distance] += 1

    expected = [distance + offset < window for offset in range(4)]
    assert moved_rows(draft, features, embeds, perturb) == expected


@pytest.mark.parametrize("layers", [(SLIDING, FULL), (FULL, SLIDING)], ids=["sliding-first", "full-first"])
@pytest.mark.parametrize("distance", [5, 6, 7, 20], ids="distance{}".format)
def test_fault_46_each_layer_follows_its_type(layers, distance):
    """Catches one mask for all layers: with the other switched off, only a sliding layer loses sight of a token."""
    features, embeds = inputs(context=20, block=1)

    def perturb(features, embeds):
        features[:, 20 - distance] += 1

    for index, layer_type in enumerate(layers):
        draft = identity_conv(make_draft(layers))
        with torch.no_grad():
            draft.layers[1 - index].self_attn.o_proj.weight.zero_()
        expected = layer_type == FULL or distance < 6
        assert moved_rows(draft, features, embeds, perturb) == [expected]


@pytest.mark.parametrize(
    ("kwargs", "causal"),
    [
        pytest.param({"is_causal": False}, [False, False], id="false"),
        pytest.param({"is_causal": True}, [True, True], id="true"),
        pytest.param({"is_causal": None}, [True, False], id="by-type"),
        pytest.param({"is_causal": None, "dflash_config": {"causal": False}}, [False, False], id="nested"),
    ],
)
def test_fault_46_causality_inside_the_block(kwargs, causal):
    """Catches in-block attention that is causal where it must be two-sided, or the other way round."""
    features, embeds = inputs(context=4, block=5)

    def perturb(features, embeds):
        embeds[:, 3, :8] += 1

    for index in range(2):
        draft = identity_conv(make_draft((SLIDING, FULL), **kwargs))
        assert draft.config.layer_is_causal == causal
        with torch.no_grad():
            draft.layers[1 - index].self_attn.o_proj.weight.zero_()
        expected = [False] * 3 + [True] * 2 if causal[index] else [True] * 5
        assert moved_rows(draft, features, embeds, perturb) == expected


def test_conv_moves_later_rows_only():
    """Catches a convolution that runs backwards: with attention off, a changed row reaches its successors only."""
    draft = make_draft((FULL,))
    with torch.no_grad():
        draft.layers[0].self_attn.o_proj.weight.zero_()
    features, embeds = inputs(context=4, block=5)

    def perturb(features, embeds):
        embeds[:, 2, :8] += 1

    # Two taps before and two after the feed-forward layer: two rows further on.
    assert moved_rows(draft, features, embeds, perturb) == [False, False, True, True, True]


def test_fresh_convolutions_are_the_identity():
    """Catches an initialisation that makes a fresh DFlash2 drafter differ from its v1 backbone."""
    fresh = DFlash2DraftModel(make_config())
    kernels = [parameter for name, parameter in fresh.named_parameters() if "base_kernel" in name]
    assert len(kernels) == 4
    for kernel in kernels:
        assert (kernel[:, 0] == 1).all() and (kernel[:, 1:] == 0).all()
    projections = [parameter for name, parameter in fresh.named_parameters() if "kernel_projection" in name]
    assert len(projections) == 4 and all((projection == 0).all() for projection in projections)
    backbone = DFlash2DraftModel(make_config(**V1))
    backbone.load_state_dict(
        {name: value for name, value in fresh.state_dict().items() if name in backbone.state_dict()}
    )
    features, embeds = inputs()
    assert torch.equal(run(fresh.eval(), features, embeds), run(backbone.eval(), features, embeds))


def test_fresh_codebooks_are_initialised():
    """Catches codebooks left as they were allocated: bare parameters are easily missed by an initialisation."""
    selector = DFlash2DraftModel(make_config(selector_rank=64)).candidate_selector
    for codebook in (selector.predecessor_codebook, selector.successor_codebook):
        assert 0.01 < codebook.std() < 0.04


# ----------------------------------------------------------------------------------------------------------- proposals


def propose(draft, hidden, head, *, anchors=None, temperature=1.0, greedy=False, uniforms=None):
    batch, slots, _ = hidden.shape
    with torch.no_grad():
        return draft.propose(
            hidden,
            torch.zeros(batch, dtype=torch.long) if anchors is None else anchors,
            head,
            temperatures=torch.full((batch,), temperature),
            greedy_mask=torch.full((batch,), greedy),
            noise=torch.rand(batch, slots) if uniforms is None else uniforms,
        )


def linear_head(seed=0):
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return lambda rows: rows @ weight.T


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("multiplier", "softcap"),
    [(1.0, None), (0.25, None), (1.0, 2.0), (0.25, 1.5)],
    ids=["plain", "multiplier", "softcap", "both"],
)
def test_proposal_uses_the_unary_transform(multiplier, softcap, greedy):
    """Catches raw head logits in the selector's sum: q would be too sharp wherever the checkpoint scales or caps."""
    draft = make_draft(output_multiplier=multiplier, final_logit_softcapping=softcap)
    hidden, anchors, uniforms = torch.randn(3, 4, HIDDEN), torch.tensor([1, 5, 9]), torch.rand(3, 4)
    proposal = propose(
        draft, hidden, linear_head(), anchors=anchors, greedy=greedy, temperature=0.7, uniforms=uniforms
    )
    logits = linear_head()(hidden)
    values, ids = logits.sort(dim=-1, descending=True)
    values, ids = transform_unary(values[..., :4], multiplier=multiplier, softcap=softcap), ids[..., :4]
    assert torch.equal(proposal.candidate_ids, ids)
    selector = draft.candidate_selector
    scores = selector_lattice(
        values,
        ids,
        hidden @ selector.hidden_projection.weight.T,
        selector.predecessor_codebook,
        selector.successor_codebook,
        anchors,
    )
    tokens, q = selector_walk(scores, ids, uniforms, torch.full((3,), 0.7), torch.full((3,), greedy))
    assert torch.equal(proposal.tokens, tokens)
    torch.testing.assert_close(proposal.q, q, atol=PROBABILITY_TOLERANCE, rtol=0)
    assert proposal.usable.all()


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_v1_proposes_the_most_likely_token_with_a_one_hot_q(greedy):
    """Catches independent sampling of v1 slots, and an argmax draft that reports a soft q, which is lossy."""
    draft = make_draft(**V1, output_multiplier=0.5, final_logit_softcapping=3.0)
    assert draft.config.draft_family == "dflash" and draft.candidate_selector is None
    hidden = torch.randn(2, 4, HIDDEN)
    proposal = propose(draft, hidden, linear_head(), greedy=greedy, temperature=5.0)
    assert torch.equal(proposal.tokens, linear_head()(hidden).argmax(dim=-1))
    assert torch.equal(proposal.candidate_ids, proposal.tokens[..., None])
    assert torch.equal(proposal.q, torch.ones(2, 4, 1))
    assert proposal.usable.all()


@pytest.mark.parametrize("kind", [pytest.param({}, id="dflash2"), pytest.param(V1, id="v1")])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("where", ["hidden", "logits", "hidden-inf"])
def test_rows_that_are_not_finite_are_unusable(kind, greedy, where):
    """Catches a NaN pass that is offered as a proposal, and one that takes the other rows of the batch with it."""
    draft = make_draft(**kind)
    hidden = torch.randn(3, 4, HIDDEN)
    head = linear_head()
    if where == "hidden":
        hidden[1, 2, 3] = math.nan
    elif where == "hidden-inf":
        hidden[1, 2, 3] = math.inf
    else:

        def head(rows):
            logits = linear_head()(rows)
            logits[1, 3] = math.nan
            return logits

    proposal = propose(draft, hidden, head, greedy=greedy)
    assert proposal.usable.tolist() == [True, False, True]
    assert torch.isfinite(proposal.q[[0, 2]]).all()
    assert ((proposal.tokens >= 0) & (proposal.tokens < VOCAB)).all()


@pytest.mark.parametrize("score", [math.inf, -math.inf])
def test_infinite_scores_of_a_v1_drafter_are_usable(score):
    """Catches a best token that is thrown away because its score has no bound."""
    hidden = torch.randn(2, 4, HIDDEN)

    def head(rows):
        logits = linear_head()(rows)
        logits[0, 1, 3] = math.inf
        logits[1, 2] = score
        return logits

    proposal = propose(make_draft(**V1), hidden, head)
    assert proposal.tokens[0, 1] == 3
    assert proposal.usable.all()


@pytest.mark.parametrize("kind", [pytest.param({}, id="dflash2"), pytest.param(V1, id="v1")])
def test_operations_that_have_kernels_are_dispatched(kind, monkeypatch):
    """Catches an operation that runs as many launches where it has a kernel of one."""
    seen = []
    fast = modeling_dflash2._fast
    monkeypatch.setattr(modeling_dflash2, "_fast", lambda op, *args: seen.append(op) or fast(op, *args))
    propose(make_draft(**kind), torch.randn(1, 4, HIDDEN), linear_head())
    assert seen == ["order_candidates", *([] if kind else ["selector_walk"])]


# ------------------------------------------------------------------------------------------------------------- loading


def stored_weights(folder):
    weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights.update(load_file(file))
    return weights


def rewrite(folder, change):
    """Replace the weights file of a saved drafter."""
    weights = change(load_file(folder / "model.safetensors"))
    save_file(
        {name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def assert_same_weights(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert torch.equal(actual[name], value), name


def muse_names(name):
    return name.replace("fc.", "encoder.fc.").replace("hidden_norm.", "encoder.output_norm_enc.", 1)


SPELLINGS = [
    pytest.param(lambda name: name, id="public"),
    pytest.param(lambda name: f"model.{name}", id="prefix"),
    pytest.param(lambda name: name + ".weight" * name.endswith("codebook"), id="codebook-weights"),
    pytest.param(lambda name: "model." + name + ".weight" * name.endswith("codebook"), id="prefix-codebook-weights"),
    pytest.param(lambda name: muse_names(name) if name.startswith(("fc.", "hidden_norm.")) else name, id="encoder"),
    pytest.param(
        lambda name: "model." + (muse_names(name) if name.startswith(("fc.", "hidden_norm.")) else name),
        id="prefix-encoder",
    ),
    pytest.param(lambda name: name.replace("layers.0.", "midlayer.", 1), id="midlayer"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_fault_52_every_spelling_loads_and_is_saved_under_public_names(spelling, dtype, tmp_path):
    """Catches a spelling that is not understood, weights that change on the way, and a file saved as it was spelt."""
    draft = make_draft().to(dtype)
    draft.save_pretrained(tmp_path)
    public = stored_weights(tmp_path)
    assert_same_weights(public, draft.state_dict())
    rewrite(tmp_path, lambda weights: {spelling(name): value for name, value in weights.items()})
    loaded = DFlash2DraftModel.from_pretrained(tmp_path, dtype=dtype)
    assert not loaded.training and loaded.dtype == dtype
    assert_same_weights(loaded.state_dict(), draft.state_dict())
    loaded.save_pretrained(tmp_path / "again")
    assert_same_weights(stored_weights(tmp_path / "again"), public)


def test_fault_52_sharded_round_trip(tmp_path):
    """Catches shards that are read in part, and an index that names files or tensors that are not there."""
    draft = make_draft()
    draft.save_pretrained(tmp_path, max_shard_size="4KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(draft.state_dict())
    assert len(set(index["weight_map"].values())) > 2
    loaded = DFlash2DraftModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_weights(loaded.state_dict(), draft.state_dict())
    loaded.save_pretrained(tmp_path / "one")
    assert_same_weights(stored_weights(tmp_path / "one"), draft.state_dict())


@pytest.mark.parametrize("kind", [pytest.param({}, id="dflash2"), pytest.param(V1, id="v1")])
def test_dtype_is_that_of_the_file(kind, tmp_path):
    """Catches a bfloat16 drafter that is widened on load and takes twice the memory."""
    make_draft(**kind).to(torch.bfloat16).save_pretrained(tmp_path)
    assert DFlash2DraftModel.from_pretrained(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "hidden_norm.weight",
        "layers.1.mlp_conv.base_kernel",
        "layers.0.self_attn.k_norm.weight",
        "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection.weight",
    ],
)
def test_fault_52_missing_tensor_is_named(name, tmp_path):
    """Catches a drafter that loads with a freshly drawn weight in place of a missing one."""
    make_draft().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: {key: value for key, value in weights.items() if key != name})
    with pytest.raises(ValueError, match=rf"missing.*{name}"):
        DFlash2DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["layers.0.extra.weight", "layers.2.mlp.up_proj.weight", "candidate_selector.bias"])
def test_fault_52_unknown_tensor_is_named(name, tmp_path):
    """Catches a weight of the checkpoint, such as a layer more than the config has, that is dropped in silence."""
    make_draft().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: {**weights, name: torch.zeros(2)})
    with pytest.raises(ValueError, match=rf"unexpected.*{name}"):
        DFlash2DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.attention_conv.base_kernel", "layers.1.mlp.up_proj.weight"])
def test_fault_52_wrong_shape_is_named(name, tmp_path):
    """Catches a config and weights of different drafters, which would run with a weight drawn at random."""
    make_draft().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: {**weights, name: weights[name][:-1]})
    with pytest.raises(ValueError, match=rf"shape.*{name}"):
        DFlash2DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("lm_head.weight", "shares the target"),
        ("model.lm_head.weight", "shares the target"),
        ("embed_tokens.weight", "shares the target"),
        ("model.embed_tokens.weight", "shares the target"),
        ("d2t", "DSpark drafters may have one"),
        ("mask_hidden", "shares the target"),
        ("layers.0.self_attn.attention_sink_bias", "without them"),
        ("markov_head.markov_w1.weight", "DSparkDraftModel"),
        ("confidence_head.proj.bias", "DSparkDraftModel"),
    ],
)
def test_tensors_that_cannot_be_honoured_are_refused(name, fix, tmp_path):
    """Catches a drafter with parts of its own that is run without them: the error says what the tensor means."""
    make_draft().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: {**weights, name: torch.zeros(2)})
    with pytest.raises(ValueError, match=rf"is not supported.*{fix}"):
        DFlash2DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq", "t2d"])
def test_tensors_without_meaning_are_skipped(name, tmp_path):
    """Catches strictness that goes too far: other frameworks store tensors that carry nothing."""
    draft = make_draft()
    draft.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: {**weights, name: torch.zeros(4)})
    loaded = DFlash2DraftModel.from_pretrained(tmp_path)
    assert_same_weights(loaded.state_dict(), draft.state_dict())


def test_loading_info_and_key_mapping_of_the_caller(tmp_path):
    """Catches arguments of the host's `from_pretrained` that are swallowed."""
    draft = make_draft()
    draft.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: {name.replace("fc.", "fusion."): value for name, value in weights.items()})
    loaded, info = DFlash2DraftModel.from_pretrained(
        tmp_path, key_mapping={r"^fusion\.": "fc."}, output_loading_info=True
    )
    assert_same_weights(loaded.state_dict(), draft.state_dict())
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_fault_53_parameters_are_those_of_the_file(tmp_path):
    """Catches an embedding, a head or a selector that is allocated although the checkpoint holds none."""
    for number, kind in enumerate(({}, V1)):
        folder = tmp_path / str(number)
        make_draft(vocab_size=5000, **kind).save_pretrained(folder)
        loaded = DFlash2DraftModel.from_pretrained(folder)
        stored = stored_weights(folder)
        assert sum(p.numel() for p in loaded.parameters()) == sum(value.numel() for value in stored.values())
        assert {name for name, _ in loaded.named_parameters()} == set(stored)
        assert max(b.numel() for b in loaded.buffers()) <= loaded.config.head_dim
        if kind:
            assert all(5000 not in parameter.shape for parameter in loaded.parameters())
        gc.collect()


def test_backbone_class_has_no_selector():
    """Catches a backbone that carries the selector's codebooks, the bulk of a small drafter."""
    names = set(DFlash2Model(make_config()).state_dict())
    assert names == {name for name in make_draft().state_dict() if not name.startswith("candidate_selector")}


# ---------------------------------------------------------------------------------------------------------- half types


@pytest.mark.parametrize("dtype", [torch.float16, torch.half, "float16"], ids=["dtype", "alias", "text"])
def test_fp16_is_refused_on_load(dtype, tmp_path):
    """Catches a drafter whose residuals overflow to inf without a word."""
    make_draft().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"float16.*bfloat16.*allow_fp16"):
        DFlash2DraftModel.from_pretrained(tmp_path, dtype=dtype)


def test_fp16_checkpoint_is_refused_unless_widened_or_allowed(tmp_path):
    """Catches a check that looks at the argument only: here the file itself is in float16."""
    draft = make_draft().to(torch.float16)
    draft.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"float16.*allow_fp16"):
        DFlash2DraftModel.from_pretrained(tmp_path)
    assert DFlash2DraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    loaded = DFlash2DraftModel.from_pretrained(tmp_path, allow_fp16=True)
    assert loaded.dtype == torch.float16 and loaded.allow_fp16
    assert_same_weights(loaded.state_dict(), draft.state_dict())


@pytest.mark.parametrize("move", [lambda d: d.half(), lambda d: d.to(torch.float16)], ids=["half", "to"])
def test_fp16_is_refused_when_the_drafter_was_moved_later(move):
    """Catches a check at load only: a drafter that is moved afterwards must not run, unless the user insists."""
    target = table_target()
    draft = move(table_drafter(target))
    prompt = torch.tensor([[3, 7, 1]])
    with pytest.raises(ValueError, match=r"float16.*bfloat16.*allow_fp16"):
        target.generate(prompt, assistant_model=draft, max_new_tokens=4, do_sample=False)
    draft.allow_fp16 = True
    output = target.generate(prompt, assistant_model=draft, max_new_tokens=4, do_sample=False)
    assert torch.equal(output, target.generate(prompt, max_new_tokens=4, do_sample=False))


def test_bf16_pass_stays_near_float32():
    """Catches an op that leaves the drafter's type or rounds along the way: bf16 has three digits, no fewer."""
    draft = make_draft((SLIDING, FULL), std=0.15)
    features, embeds = inputs()
    expected = run(draft, features, embeds)
    output = run(draft.to(torch.bfloat16), features.bfloat16(), embeds.bfloat16())
    assert output.dtype == torch.bfloat16
    error = float((output.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    # A rounding is 2^-9 of a value; a few dozen of them add up like a random walk.
    assert error < 0.03


# -------------------------------------------------------------------------------------------------------- checkpoints


def test_real_drafter_loads_with_all_its_tensors():
    """Catches a public checkpoint that does not load strictly: 66 tensors, sharded, bfloat16, none missing or left."""
    loaded, info = DFlash2DraftModel.from_pretrained(MODEL_CARD, output_loading_info=True)
    stored = stored_weights(MODEL_CARD)
    assert len(stored) == len(loaded.state_dict()) == 66
    assert loaded.dtype == torch.bfloat16
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert_same_weights(loaded.state_dict(), stored)
    config = loaded.config
    assert config.layer_types == [SLIDING] * 3 + [FULL] and config.layer_is_causal == [False] * 4
    windows = [layer.self_attn.sliding_window for layer in loaded.layers]
    assert windows == [256, 256, 256, None]


def test_random_drafter_of_the_testing_module_round_trips(tmp_path):
    """Catches a drafter built in code whose saved config does not describe its weights."""
    draft = random_drafter(table_target())
    draft.save_pretrained(tmp_path)
    loaded = DFlash2DraftModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_weights(loaded.state_dict(), draft.state_dict())
    assert loaded.config.to_dict()["dflash_config"] == draft.config.to_dict()["dflash_config"]

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
"""The benchmark command on tiny shapes: what it counts, and that its synthetic models do what they promise."""

import copy
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from generation_checks import t0
from test_generate import text_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, MuseGlimmerAssistantConfig

from transformers_dflash2 import compat
from transformers_dflash2.benchmark import phases
from transformers_dflash2.benchmark.__main__ import main, parse_arguments
from transformers_dflash2.benchmark.contestants import NAMES, Workload, contestants, load_public
from transformers_dflash2.benchmark.measure import copy_rate, pass_bytes, round_bytes
from transformers_dflash2.benchmark.report import table
from transformers_dflash2.benchmark.synthetic import DRAFTERS, SHAPES, plan_rounds, synthetic_pair, synthetic_pairs
from transformers_dflash2.testing import table_drafter


RUN = ["--device", "cpu", "--dtype", "float32", "--repeats", "1", "--new-tokens", "13"]


@pytest.fixture(scope="module")
def pair():
    return synthetic_pair(SHAPES["tiny"], mean_accepted_length=3.0)


def prompts(pair, rows=2):
    ids = torch.randint(1, 90, (rows, 12))
    ids[:, -1] = pair.cycle[-1]
    return ids


@pytest.mark.parametrize(
    ("wanted", "tokens", "rounds"),
    [
        pytest.param(8, 16, [8, 8], id="all-accepted"),
        pytest.param(1, 4, [1, 1, 1, 1], id="none-accepted"),
        pytest.param(2.5, 16, [2, 3, 2, 3, 2, 3], id="between-two-lengths"),
        pytest.param(1, 2, [1, 1], id="fewest-tokens"),
    ],
)
def test_rounds_have_the_wanted_mean(wanted, tokens, rounds):
    """Catches a plan that fits the cycle and misses the mean."""
    assert plan_rounds(wanted, block=8, tokens=tokens) == rounds


@pytest.mark.parametrize("wanted", [0.5, 8.5])
def test_an_impossible_acceptance_is_refused(wanted):
    """Catches an acceptance that is silently replaced by another."""
    with pytest.raises(ValueError, match=rf"mean_accepted_length={wanted}.*choose 1 to 8"):
        plan_rounds(wanted, block=8, tokens=16)


@pytest.mark.parametrize(
    "sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("wanted", [1.0, 2.5, 8.0])
def test_weights_alone_bring_about_the_acceptance(wanted, sampling):
    """Catches synthetic weights that are accepted more or less often than the command says."""
    pair = synthetic_pair(SHAPES["tiny"], mean_accepted_length=wanted)
    inputs = prompts(pair)
    # Whole rounds only, and the first token comes from the prefill.
    options = {"max_new_tokens": 1 + 8 * 5, **sampling}
    drafted = pair.target.generate(inputs, assistant_model=pair.draft, **options)
    assert pair.mean_accepted_length == wanted
    assert pair.draft.last_stats.mean_accepted_length == pytest.approx(wanted, rel=0.03)
    assert torch.equal(drafted, pair.target.generate(inputs, **options))
    turns = drafted[0, inputs.shape[1] :][: len(pair.cycle)]
    assert torch.equal(turns, pair.cycle)


@pytest.mark.parametrize(
    ("shape", "drafter", "wanted"),
    [
        pytest.param("tiny-hybrid", "dflash2", 2.5, id="hybrid-dflash2"),
        pytest.param("tiny-hybrid", "dspark", 1.0, id="hybrid-dspark-none-accepted"),
        pytest.param("tiny", "dspark", 2.5, id="dense-dspark"),
        pytest.param("tiny", "dspark", 4.0, id="dense-dspark-long"),
    ],
)
@pytest.mark.parametrize("tempo", ["dynamic", "static"])
def test_hybrid_targets_and_dspark_have_the_acceptance_too(shape, drafter, wanted, tempo):
    """Catches states that disturb the cycle, and a Markov table that the anchor's own row outbids."""
    pair = synthetic_pair(SHAPES[shape], drafter=drafter, mean_accepted_length=wanted)
    # Whole rounds only, and the first token comes from the prefill.
    inputs, options = prompts(pair), {"max_new_tokens": 1 + 20, "do_sample": False}
    drafted = pair.target.generate(inputs, assistant_model=pair.draft, cache_implementation=tempo, **options)
    assert pair.draft.last_stats.mean_accepted_length == wanted
    assert torch.equal(drafted, pair.target.generate(inputs, **options))


def test_a_drafter_has_no_sizes_of_the_target_alone():
    """Catches a drafter whose configuration describes linear attention, or whose rotary base is the target's."""
    pairs = synthetic_pairs(SHAPES["tiny-hybrid"], DRAFTERS, mean_accepted_length=2.0, block=7)
    assert pairs["dflash2"].target is pairs["dspark"].target
    for pair in pairs.values():
        assert not [key for key in pair.draft.config.to_dict() if key.startswith("linear_")]
        assert pair.draft.config.block_size == 7
        assert "partial_rotary_factor" not in pair.draft.config.rope_parameters
    assert [pairs[name].draft.config.speculative_tokens for name in DRAFTERS] == [6, 7]


def test_the_dense_shape_is_as_large_as_the_hybrid_one():
    """Catches a comparison of round times between targets of different bytes."""
    hybrid, dense = (parameter_count(SHAPES[name]) for name in ("qwen3.8-27b", "dense-27b"))
    assert hybrid == pytest.approx(26.9e9, rel=0.01)
    assert abs(dense - hybrid) <= (dense - parameter_count(SHAPES["dense-27b"], fewer=1)) / 2


def parameter_count(shape, fewer=0):
    sizes = copy.deepcopy({**shape.shared, **shape.target})
    sizes["num_hidden_layers"] -= fewer
    config = AutoConfig.for_model(shape.model_type, tie_word_embeddings=False, **sizes)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize(("shape", "drafter"), [("tiny", "dflash2"), ("tiny-hybrid", "dspark")])
def test_synthetic_matrices_are_dense(shape, drafter):
    """Catches products with zeros, which a GPU computes faster than others."""
    pair = synthetic_pair(SHAPES[shape], drafter=drafter, mean_accepted_length=3.0)
    for model in (pair.target, pair.draft):
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "base_kernel" not in name and "codebook" not in name:
                assert (parameter != 0).float().mean() > 0.99, name


def test_bytes_count_what_a_pass_reads(pair):
    """Catches a floor with the embedding table in it, or a round without its second head."""
    config, rows, tokens = pair.target.config, 3, 100
    table_bytes = config.vocab_size * config.hidden_size * 4
    weights = sum(p.numel() * 4 for p in pair.target.parameters()) - table_bytes
    entry = 2 * config.num_key_value_heads * config.head_dim * 4
    one_pass = pass_bytes(pair.target, tokens=tokens, rows=rows)
    assert one_pass == weights + rows * tokens * entry * config.num_hidden_layers
    selector = pair.draft.candidate_selector
    codebooks = 4 * (selector.predecessor_codebook.numel() + selector.successor_codebook.numel())
    draft_weights = sum(p.numel() * 4 for p in pair.draft.parameters()) - codebooks
    # One of the two draft layers sees 64 tokens at most.
    context = rows * (64 + tokens) * entry
    assert round_bytes(pair.target, pair.draft, tokens=tokens, rows=rows) == (
        one_pass + draft_weights + table_bytes + context
    )


def test_bytes_of_states_and_markov_tables():
    """Catches keys and values of layers that have none, states that are free, and a table read once for all slots."""
    pair = synthetic_pair(SHAPES["tiny-hybrid"], drafter="dspark", mean_accepted_length=3.0)
    config, rows, tokens = pair.target.config, 3, 100
    weights = sum(p.numel() * 4 for p in pair.target.parameters()) - config.vocab_size * config.hidden_size * 4
    entry = 2 * config.num_key_value_heads * config.head_dim * 4
    linear, full = (config.layer_types.count(kind) for kind in ("linear_attention", "full_attention"))
    cache = compat.get_cache(pair.target(prompts(pair, rows), use_cache=True))
    states = sum(state.nbytes for layer in compat.recurrent_layers(cache) for state in compat.layer_states(layer))
    one_pass = pass_bytes(pair.target, tokens=tokens, rows=rows)
    assert (linear, full) == (6, 2)
    assert one_pass == weights + rows * tokens * entry * full + 2 * states
    head = pair.draft.markov_head
    draft_weights = sum(p.numel() * 4 for p in pair.draft.parameters()) - head.markov_w1.weight.nbytes
    assert round_bytes(pair.target, pair.draft, tokens=tokens, rows=rows) == (
        one_pass
        + draft_weights
        + (pair.draft.config.speculative_tokens - 1) * head.markov_w2.weight.nbytes
        + pair.target.get_output_embeddings().weight.nbytes
        + rows * (64 + tokens) * entry
    )


class CalledOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_copy_rate_is_that_of_a_kernel():
    """Catches the copy engine's rate, to which a copy in a graph comes down."""
    with CalledOperations() as called:
        assert copy_rate(torch.device("cpu")) > 0
    assert "add" in called.names and "copy_" not in called.names


@pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid"])
def test_plain_step_computes_the_next_token(shape, monkeypatch):
    """Catches a step that reads other entries or states than those the prompt has left."""
    pair = synthetic_pair(SHAPES[shape], mean_accepted_length=3.0)
    inputs, steps = prompts(pair, rows=3), []

    class Probe(phases._PhaseProbe):
        def _measure(self, tap):
            with self.recording(self.phases(tap)):
                step = self._plain_step()
                steps.extend(step()[:3, -1].clone() for _ in range(2))

    monkeypatch.setattr(phases, "_PhaseProbe", Probe)
    phases.static_phases(pair.target, pair.draft, Workload([{"input_ids": inputs}], 1 + 1))
    anchors = pair.cycle[:1].expand(3, 1)
    expected = pair.target(torch.cat([inputs, anchors], dim=1)).logits[:, -1]
    torch.testing.assert_close(steps[0], expected, atol=1e-4, rtol=0)
    # What came before matters, and a recurrent state moves on, in place.
    assert (expected - pair.target(anchors).logits[:, -1]).abs().max() > 0.05
    assert torch.equal(*steps) == (shape == "tiny")


def test_two_drafters_side_by_side():
    """Catches results that do not tell their drafter, and a phase that only DFlash2 has."""
    methods = ["--methods", "plain", "dynamic", "static"]
    record = main(["--shape", "tiny-hybrid", "--drafter", "dspark", "dflash2", "--context", "12", *methods, *RUN])
    found = [(result["method"], result["drafter"]) for result in record["results"]]
    assert found == [("plain", None)] + [(tempo, name) for name in ("dspark", "dflash2") for tempo in methods[2:]]
    assert all(result["identical_rows"] == 1 for result in record["results"][1:])
    assert all(result["tokens_per_pass"] == 4 for result in record["results"][1:])
    static = {
        measured["drafter"]: measured["seconds"] for measured in record["phases"] if measured["method"] == "static"
    }
    common = {"commit", "draft", "verify", "accept", "round", "plain step"}
    assert set(static["dspark"]) == common | {"draft: markov"}
    assert set(static["dflash2"]) == common | {"draft: without convolution", "draft: top-k", "draft: selector"}
    assert "static, dspark, batch 1" in table(record)


def test_command_on_a_shape(tmp_path, capsys):
    """Catches a command that fails, a method that vanishes, and ids that nobody compared."""
    path = tmp_path / "record.json"
    record = main(["--shape", "tiny", "--batch", "1", "2", "--context", "12", "--json", str(path), *RUN])
    assert json.loads(path.read_text()) == json.loads(json.dumps(record))
    assert [(result["method"], result["batch"]) for result in record["results"]] == [
        (name, batch) for batch in (1, 2) for name in NAMES
    ]
    measured = {(r["method"], r["batch"]): r for r in record["results"] if "skipped" not in r}
    for batch in (1, 2):
        plain = measured["plain", batch]
        assert plain["passes"] == 12 and plain["tokens"] == 12 * batch
        for name in ("dynamic", "static"):
            ours = measured[name, batch]
            assert ours["identical_rows"] == batch
            assert ours["tokens"] == 12 * batch
            assert ours["tokens_per_pass"] == pytest.approx(12 / ours["passes"])
            assert ours["passes"] < 6
            assert ours["pass_bytes"] > plain["pass_bytes"]
    assert record["copy_bytes_per_second"] > 0
    dynamic, static = record["phases"][:2]
    assert set(dynamic["seconds"]) == {"draft", "verify", "accept", "commit"}
    parts = {"draft: without convolution", "draft: selector", "draft: top-k"}
    assert set(static["seconds"]) == {"draft", "verify", "accept", "commit", "round", "plain step", *parts}
    assert all(spent > 0 for phases in record["phases"] for spent in phases["seconds"].values())
    assert record["environment"]["versions"]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert table(record) in printed
    for name in NAMES:
        assert name in printed


def host_v1():
    """A random DFlash v1 drafter of the host's own class."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
        block_size=4,
        mask_token_id=31,
        target_layer_ids=[0, 2],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return AutoModel.from_config(config)


def test_quantised_rounds(capsys):
    """Catches a column that is left empty, and a failing format that passes for a measured one."""
    script = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "quantized_rounds.py"))
    arguments = ["--shape", "tiny", "--device", "cpu", "--formats", "dense", "--context", "12", "--new-tokens", "17"]
    (row,) = script["main"]([*arguments, "--repeats", "1"])["rows"]
    assert (row["format"], row["head"], row["same"]) == ("dense", "Linear", True)
    assert row["tokens_per_round"] == 4 and row["read_from"] == "calls"
    for key in ("head_milliseconds", "round_milliseconds", "plain_step_milliseconds", "peak_gibibytes"):
        assert row[key] > 0, key
    assert script["table"]([row]) in capsys.readouterr().out
    failed = {"format": "bnb-nf4", "failed": "no kernel"}
    assert script["table"]([row, failed]).endswith("bnb-nf4: left out, no kernel")


def save_pair(folder, *, chat_template=None):
    """A target with its tokenizer, and its drafter; returns the arguments that name their folders."""
    target, tokenizer = t0(), text_tokenizer()
    tokenizer.chat_template = chat_template
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    table_drafter(target).save_pretrained(folder / "draft")
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft")]


@pytest.mark.parametrize(
    ("name", "options"), [("verify_length", ["--thresholds", "0.5"]), ("quantized_pair", ["--formats", "dense"])]
)
def test_scripts_on_a_pair(name, options, tmp_path, monkeypatch, capsys):
    """Catches a script whose imports have moved, and a text that changes with the setting."""
    script = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / f"{name}.py"))
    lengths = ["--prompts", "2", "--max-new-tokens", "10"]
    pair = save_pair(tmp_path, chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")
    monkeypatch.setattr(sys, "argv", [name, *pair, *lengths, *options])
    script["main"]()
    printed = capsys.readouterr().out
    record = json.loads(printed[printed.index("{\n") :])
    rows = record["settings"] if name == "verify_length" else [record["dense"]]
    for row in rows:
        assert row.get("prompts_identical_to_the_first_setting", row.get("identical")) == 2
        assert row["new_tokens"] == 20


def test_command_on_a_real_pair(tmp_path):
    """Catches folders that are not loaded, prompts that are not padded, and lookups that are not counted."""
    host_v1().save_pretrained(tmp_path / "v1")
    pair = [*save_pair(tmp_path), "--host-v1", str(tmp_path / "v1")]
    methods = ["--methods", "plain", "prompt-lookup", "host-dflash-v1", "dynamic"]
    record = main([*pair, "--prompts", "2", "--batch", "1", *methods, *RUN])
    plain, lookup, v1, dynamic = record["results"]
    assert plain["tokens"] == dynamic["tokens"] == lookup["tokens"] == v1["tokens"] == 24
    assert dynamic["identical_rows"] == lookup["identical_rows"] == v1["identical_rows"] == 2
    assert plain["passes"] == 24 and dynamic["passes"] < 24 and lookup["passes"] <= 24 and v1["passes"] <= 24
    assert v1["pass_bytes"] > plain["pass_bytes"]


def test_plot(tmp_path):
    """Catches a picture that only draws where all methods ran."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.png"
    main(["--shape", "tiny", "--context", "8", "--methods", "plain", "prompt-lookup", "--plot", str(path), *RUN])
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "--shape", id="no-models"),
        pytest.param(["--shape", "tiny", "--target", "x"], "--shape", id="two-pairs"),
        pytest.param(["--target", "x"], "--draft", id="no-drafter"),
        pytest.param(["--target", "x", "--draft", "y", "--drafter", "dspark"], "--shape", id="random-drafter"),
        pytest.param(["--shape", "tiny", "--block", "1"], "--block must be at least 2, got 1", id="block"),
        pytest.param(["--shape", "tiny", "--batch", "0"], "--batch must be at least 1, got 0", id="batch"),
        pytest.param(["--shape", "tiny", "--repeats", "0"], "--repeats must be at least 1, got 0", id="repeats"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, message, capsys):
    """Catches a long build that ends in an error about the command line."""
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_public_loop(pair):
    """Catches weights that reach the public package under other names."""
    pytest.importorskip("dflash")
    inputs = prompts(pair, rows=1)
    workload = Workload([{"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}], 30)
    public = load_public(pair.draft)
    (loop,) = [c for c in contestants(pair.target, pair.draft, workload, public=public) if c.name == "public-dflash"]
    assert torch.equal(loop.run(workload.inputs[0], 30), pair.target.generate(inputs, max_new_tokens=30))
    # Four tokens a round or three, the first token apart.
    assert loop.passes() == 11

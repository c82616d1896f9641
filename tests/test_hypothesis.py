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
Options of `generate` drawn at random, against the same call without a drafter.

`HYPOTHESIS_PROFILE=long` runs 2,500 examples in place of 150. Catches options that work alone and not together.
"""

import functools

import pytest
import torch
from generation_checks import returned_scores_gap
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from transformers_dflash2.testing import (
    broken_table,
    cycle_table,
    left_pad,
    random_drafter,
    read_table,
    table_drafter,
    table_target,
)


pytest.importorskip("hypothesis")
from hypothesis import event, given, note  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


VOCAB = 32
# Where the two best scores of plain decoding are closer than this, rounding decides.
TIE = 1e-4
VALUE_TOLERANCE = 2e-5

TARGETS = {
    "mixed": lambda: table_target(3, table=cycle_table(VOCAB, 3)),
    "mixed-flat": lambda: table_target(1, table=cycle_table(VOCAB, 1), mix=0.015, logit_scale=0.5),
    "sure": lambda: table_target(0, table=cycle_table(VOCAB, 0), mix=0.01),
    "pure": lambda: table_target(0, table=cycle_table(VOCAB, 0), mix=0.0),
    "eager": lambda: table_target(3, table=cycle_table(VOCAB, 3), attn_implementation="eager"),
    "sliding": lambda: table_target(0, model_type="mistral", sliding_window=7),
    "mixed-windows": lambda: table_target(0, model_type="gemma2", sliding_window=6, mix=0.1),
}
DRAFTERS = {
    "right": table_drafter,
    "half-right": lambda target: table_drafter(target, broken_table(read_table(target), range(0, VOCAB, 3))),
    "wrong": lambda target: table_drafter(target, broken_table(read_table(target))),
    "random": random_drafter,
    "windows": lambda target: random_drafter(
        target, layer_types=["sliding_attention", "full_attention"], sliding_window=5, block_size=5
    ),
    "v1": lambda target: random_drafter(target, draft_family="dflash"),
}


@functools.cache
def model(name):
    return TARGETS[name]()


@functools.cache
def drafter(target, name):
    return DRAFTERS[name](model(target))


class BiasByPrefix(LogitsProcessor):
    """Depends on the whole prefix of each row, on its length and on the row's number."""

    def __call__(self, input_ids, scores):
        rows = torch.arange(input_ids.shape[0])
        scores = scores.clone()
        scores[rows, (input_ids.sum(-1) + 5 * input_ids.shape[1] + rows) % VOCAB] += 1.5
        return scores


class BiasByStep(LogitsProcessor):
    """Counts its own calls, as a grammar does."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, (11 * self.calls) % VOCAB] += 1.5
        return scores


class StopAfter(StoppingCriteria):
    """Stops a row behind a token of a set, from a given length on."""

    def __init__(self, tokens, length):
        self.tokens, self.length = torch.tensor(sorted(tokens)), length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens) & (input_ids.shape[1] >= self.length)


tokens = st.integers(1, VOCAB - 1)
some_tokens = st.lists(tokens, min_size=1, max_size=3, unique=True)

PROCESSORS = {
    "repetition_penalty": st.sampled_from([0.8, 1.1, 1.5, 3.0]),
    "no_repeat_ngram_size": st.integers(1, 4),
    "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=3),
    "suppress_tokens": some_tokens,
    "begin_suppress_tokens": some_tokens,
    "sequence_bias": st.lists(
        st.tuples(st.lists(tokens, min_size=1, max_size=2), st.sampled_from([-6.0, -1.5, 1.5, 4.0])),
        min_size=1,
        max_size=3,
        unique_by=lambda entry: tuple(entry[0]),
    ).map(lambda entries: [[list(sequence), bias] for sequence, bias in entries]),
    "min_length": st.integers(0, 24),
    "min_new_tokens": st.integers(0, 15),
    "forced_eos_token_id": tokens,
    "forced_bos_token_id": tokens,
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 10), st.sampled_from([1.05, 1.5])),
    "renormalize_logits": st.just(True),
    "remove_invalid_values": st.just(True),
}
OUTPUTS = ("output_scores", "output_logits", "output_hidden_states")


@st.composite
def calls(draw):
    """Model names, prompts, options for both calls and factories of stateful objects."""
    target = draw(st.sampled_from(sorted(TARGETS)))
    # Half of the calls get a drafter that is often right.
    draft = draw(st.one_of(st.sampled_from(["right", "half-right"]), st.sampled_from(sorted(DRAFTERS))))
    rows = draw(st.lists(st.lists(tokens, min_size=1, max_size=12), min_size=1, max_size=4))
    names = draw(st.sets(st.sampled_from(sorted(PROCESSORS)), max_size=3))
    options = {name: draw(PROCESSORS[name]) for name in sorted(names)}
    new_tokens = draw(st.integers(1, 16))
    if draw(st.booleans()):
        options["max_new_tokens"] = new_tokens
    else:
        options["max_length"] = max(map(len, rows)) + new_tokens
    if draw(st.booleans()):
        options["eos_token_id"] = draw(st.one_of(tokens, some_tokens))
        options["pad_token_id"] = draw(st.sampled_from([0, 5]))
    elif "exponential_decay_length_penalty" in options:
        options["eos_token_id"] = draw(tokens)
    if draw(st.integers(0, 3)) == 0:
        options["prefill_chunk_size"] = draw(st.integers(1, 13))
    if draw(st.integers(0, 3)) == 0:
        options["return_dict_in_generate"] = True
        options.update(dict.fromkeys(draw(st.sets(st.sampled_from(OUTPUTS))), True))
    makers = {}
    if draw(st.integers(0, 3)) == 0:
        processors = [draw(st.sampled_from([BiasByPrefix, BiasByStep]))]
        makers["logits_processor"] = lambda: LogitsProcessorList([make() for make in processors])
    if draw(st.integers(0, 2)) == 0:
        stop, length = draw(some_tokens), draw(st.integers(2, 30))
        makers["stopping_criteria"] = lambda: StoppingCriteriaList([StopAfter(stop, length)])
    if draw(st.integers(0, 4)) == 0:
        period = draw(st.integers(2, 5))
        options["prefix_allowed_tokens_fn"] = lambda row, prefix: [
            token for token in range(VOCAB) if (token + len(prefix) + row) % period
        ]
    drafted = {}
    if draw(st.booleans()):
        drafted["num_assistant_tokens"] = draw(st.integers(1, 17))
    if draw(st.integers(0, 3)) == 0:
        drafted["cache_implementation"] = "static"
    return target, draft, rows, options, makers, drafted


@given(calls())
def test_any_call_gives_the_tokens_of_plain_decoding(call):
    """Catches any pair of options whose handling inside a block differs from one token at a time."""
    target_name, draft_name, rows, options, makers, draft_options = call
    note(f"{target_name} {draft_name} {rows} {options} {sorted(makers)} {draft_options}")
    target, draft = model(target_name), drafter(target_name, draft_name)
    inputs = left_pad(rows)
    width = inputs["input_ids"].shape[1]

    def run(**extra):
        return target.generate(
            **inputs, do_sample=False, **options, **{name: make() for name, make in makers.items()}, **extra
        )

    try:
        plain = run()
    except Exception as error:
        event(f"plain generate fails: {type(error).__name__}")
        with pytest.raises(type(error)):
            run(assistant_model=draft, **draft_options)
        return
    drafted = run(assistant_model=draft, **draft_options)
    expected = plain if isinstance(plain, torch.Tensor) else plain.sequences
    actual = drafted if isinstance(drafted, torch.Tensor) else drafted.sequences
    if not torch.equal(expected, actual):
        # A tie in one row changes only that row, unless it ends the text.
        detail = {"return_dict_in_generate": True, "output_scores": True}
        if returned_scores_gap(run(**detail), actual, width) < TIE:
            event("tie")
            return
        pytest.fail(f"plain:   {expected.tolist()}\ndrafted: {actual.tolist()}")
    accepted = draft.last_stats.accepted
    event("accepted tokens: " + ("none" if accepted == 0 else "1 to 5" if accepted < 6 else "6 or more"))
    if isinstance(plain, torch.Tensor):
        return
    eos = options.get("eos_token_id", [])
    eos = eos if isinstance(eos, list) else [eos]
    for name in ("scores", "logits", "hidden_states"):
        theirs, ours = getattr(plain, name), getattr(drafted, name)
        assert (theirs is None) == (ours is None) and (theirs is None or len(theirs) == len(ours))
        for step, (left, right) in enumerate(zip(theirs or (), ours or (), strict=True)):
            left, right = (left, right) if isinstance(left, tuple) else ((left,), (right,))
            for one, other in zip(left, right, strict=True):
                assert one.shape == other.shape
                for row in range(len(rows)):
                    ended = any(token in eos for token in expected[row, width : width + step].tolist())
                    if not ended and not (makers.get("stopping_criteria") and eos):
                        mine, its = other[row], one[row]
                        if name == "hidden_states" and step == 0:
                            first = 0 if mine.shape[0] == width else None
                            real = inputs["attention_mask"][row].bool()
                            mine, its = (mine[real], its[real]) if first == 0 else (mine[-1:], its[-1:])
                        torch.testing.assert_close(mine, its, atol=VALUE_TOLERANCE, rtol=1e-5)

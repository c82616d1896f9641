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
"""What `generate` promises, seen from outside: every call is compared with the same call without a drafter."""

import copy
import threading
import time

import pytest
import torch
from generation_checks import (
    CACHE_KEY,
    PROMPT,
    cache_tensors,
    d0,
    d1,
    decoder_layers,
    hook_count,
    pure_drafter,
    pure_target,
    t0,
    target_passes,
)
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import transformers_dflash2
from transformers_dflash2.testing import (
    assert_same_tokens,
    broken_table,
    cycle_table,
    draft_config,
    left_pad,
    random_drafter,
    read_table,
    returned_cache,
    table_drafter,
    table_target,
    walk_table,
)


ROWS = [[3, 7, 1], [4, 9, 2, 6, 5], [8, 1, 12, 3, 3, 7, 20, 11, 2]]
# One pass over several tokens against several over one, hidden states of up to 6.
VALUE_TOLERANCE = 2e-5

MODELS = {
    "table": (t0, d0),
    "random": (t0, d1),
    "all-accepted": (pure_target, pure_drafter),
}


@pytest.fixture(params=list(MODELS))
def pair(request):
    target, draft = MODELS[request.param]
    return target(), draft()


def text_tokenizer():
    """32 one-letter tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyzABCDEF"
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="a")


# Outputs -------------------------------------------------------------------------------------------------------------


def unfinished_steps(sequences, prompt_length, eos):
    """Steps per row up to and including its end token."""
    steps = []
    for row in sequences[:, prompt_length:].tolist():
        steps.append(row.index(eos) + 1 if eos in row else len(row))
    return steps


@pytest.mark.parametrize("stop", [False, True], ids=["no-eos", "eos"])
@pytest.mark.parametrize("batch", [1, 3])
def test_scores_logits_and_hidden_states(pair, batch, stop):
    """Catches entries that are missing, of another shape, of another place, or of a rejected token."""
    target, draft = pair
    inputs = left_pad(ROWS[:batch])
    width = inputs["input_ids"].shape[1]
    eos = None
    if stop:
        eos = int(target.generate(**inputs, max_new_tokens=9, do_sample=False)[0, -2])
    plain, drafted = assert_same_tokens(
        target,
        draft,
        **inputs,
        max_new_tokens=24,
        eos_token_id=eos,
        repetition_penalty=1.2,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
    )
    steps = unfinished_steps(plain.sequences, width, eos)
    for name in ("scores", "logits"):
        ours, theirs = getattr(drafted, name), getattr(plain, name)
        assert isinstance(ours, tuple) and len(ours) == len(theirs) == plain.sequences.shape[1] - width
        for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            assert left.shape == right.shape and left.dtype == right.dtype == torch.float32
            for row in range(batch):
                if step < steps[row]:
                    torch.testing.assert_close(left[row], right[row], atol=VALUE_TOLERANCE, rtol=0)
    assert len(drafted.hidden_states) == len(plain.hidden_states)
    for step, (ours, theirs) in enumerate(zip(drafted.hidden_states, plain.hidden_states, strict=True)):
        assert isinstance(ours, tuple) and len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert left.shape == right.shape
            for row in range(batch):
                if step < steps[row]:
                    # Rows of padding attend to nothing real; their values are not part of the promise.
                    real = inputs["attention_mask"][row].bool() if step == 0 else torch.ones(1, dtype=torch.bool)
                    torch.testing.assert_close(left[row][real], right[row][real], atol=VALUE_TOLERANCE, rtol=0)
    assert drafted.attentions is None and plain.attentions is None


@pytest.mark.parametrize("batch", [1, 3])
def test_attentions(batch):
    """Catches weights over another number of keys than plain decoding has at that step, or in another order."""
    target = table_target(0, attn_implementation="eager")
    draft = table_drafter(target)
    inputs = left_pad(ROWS[:batch])
    plain, drafted = assert_same_tokens(
        target, draft, **inputs, max_new_tokens=20, return_dict_in_generate=True, output_attentions=True
    )
    assert len(drafted.attentions) == len(plain.attentions) == 20
    for step, (ours, theirs) in enumerate(zip(drafted.attentions, plain.attentions, strict=True)):
        assert len(ours) == len(theirs) == 4
        for left, right in zip(ours, theirs, strict=True):
            assert left.shape == right.shape, step
            for row in range(batch):
                real = inputs["attention_mask"][row].bool() if step == 0 else torch.ones(1, dtype=torch.bool)
                torch.testing.assert_close(left[row][:, real], right[row][:, real], atol=VALUE_TOLERANCE, rtol=0)


def test_outputs_with_chunked_prefill(pair):
    """Catches a first entry that plain `generate` fills otherwise when the prompt comes in chunks."""
    target, draft = pair
    plain, drafted = assert_same_tokens(
        target,
        draft,
        torch.tensor([ROWS[2]]),
        max_new_tokens=12,
        prefill_chunk_size=4,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_logits=True,
    )
    for ours, theirs in zip(drafted.hidden_states, plain.hidden_states, strict=True):
        for left, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(left, right, atol=VALUE_TOLERANCE, rtol=0)


def test_output_class_and_fields(pair):
    """Catches a result that is no `GenerateDecoderOnlyOutput`, or fields filled without being asked for."""
    target, draft = pair
    plain, drafted = assert_same_tokens(target, draft, PROMPT, max_new_tokens=12, return_dict_in_generate=True)
    assert isinstance(drafted, type(plain))
    assert isinstance(drafted, transformers_dflash2.DFlash2GenerateDecoderOnlyOutput)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert getattr(drafted, name) is None
    assert CACHE_KEY in drafted
    assert drafted.dflash2_stats is draft.last_stats
    assert isinstance(target.generate(PROMPT, assistant_model=draft, max_new_tokens=3), torch.Tensor)


@pytest.mark.parametrize("batch", [1, 3])
def test_returned_cache(pair, batch):
    """Catches a cache that keeps rejected tokens, or whose rows are not aligned as plain decoding leaves them."""
    target, draft = pair
    inputs = left_pad(ROWS[:batch])
    plain, drafted = assert_same_tokens(target, draft, **inputs, max_new_tokens=21, return_dict_in_generate=True)
    ours, theirs = returned_cache(drafted), returned_cache(plain)
    assert type(ours) is type(theirs)
    assert ours.get_seq_length() == theirs.get_seq_length()
    for left, right in zip(cache_tensors(ours), cache_tensors(theirs), strict=True):
        assert left.shape == right.shape
        for row, prompt in enumerate(ROWS[:batch]):
            start = inputs["input_ids"].shape[1] - len(prompt)
            torch.testing.assert_close(left[row, :, start:], right[row, :, start:], atol=VALUE_TOLERANCE, rtol=0)


def test_scores_can_be_turned_into_transition_scores(pair):
    """Catches scores that do not belong to the tokens beside them."""
    target, draft = pair
    plain, drafted = assert_same_tokens(
        target, draft, **left_pad(ROWS), max_new_tokens=12, return_dict_in_generate=True, output_scores=True
    )
    ours = target.compute_transition_scores(drafted.sequences, drafted.scores, normalize_logits=True)
    theirs = target.compute_transition_scores(plain.sequences, plain.scores, normalize_logits=True)
    torch.testing.assert_close(ours, theirs, atol=VALUE_TOLERANCE, rtol=0)


# Figures -------------------------------------------------------------------------------------------------------------


def test_figures_of_a_call():
    """Catches figures that do not add up, or that count what was committed without being drafted."""
    target = pure_target()
    for accept, mean in ((None, 8.0), (0, 1.0)):
        table = read_table(target) if accept is None else broken_table(read_table(target))
        draft = table_drafter(target, table)
        with target_passes(target) as passes:
            target.generate(PROMPT, assistant_model=draft, max_new_tokens=65, do_sample=False)
        stats = draft.last_stats
        assert stats.mean_accepted_length == mean == 1 + stats.accepted / stats.rounds
        assert stats.new_tokens == 65
        assert stats.rounds == (8 if accept is None else 64)
        assert stats.target_passes == len(passes) == stats.rounds + 1
        assert sum(stats.accepted_per_position) == stats.accepted
        assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)
        assert stats.accepted <= stats.drafted <= 7 * stats.rounds
        assert stats.fallback_rounds == 0
        assert isinstance(stats, transformers_dflash2.DFlash2Stats)


def test_figures_are_those_of_the_last_call():
    """Catches figures that pile up over calls."""
    target, draft = pure_target(), pure_drafter()
    seen = []
    for _ in range(3):
        target.generate(PROMPT, assistant_model=draft, max_new_tokens=20, do_sample=False)
        seen.append((draft.last_stats.rounds, draft.last_stats.accepted, draft.last_stats.new_tokens))
    assert len(set(seen)) == 1


# Streaming -----------------------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(("put", tuple(value.shape), value.tolist(), value.device.type))

    def end(self):
        self.calls.append(("end",))


@pytest.mark.parametrize("stop", [False, True], ids=["no-eos", "eos"])
@pytest.mark.parametrize("batch", [1, 3])
def test_streamer_sees_what_plain_generate_streams(pair, batch, stop):
    """Catches tokens that are streamed in blocks, streamed before they are final, out of order, or after the end."""
    target, draft = pair
    inputs = left_pad(ROWS[:batch])
    eos = int(target.generate(**inputs, max_new_tokens=9, do_sample=False)[0, -2]) if stop else None
    plain, drafted = Recorder(), Recorder()
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": eos}
    target.generate(**inputs, **options, streamer=plain)
    target.generate(**inputs, **options, streamer=drafted, assistant_model=draft)
    assert drafted.calls == plain.calls


def test_text_streamer(pair, capsys):
    """Catches a streamer of the host that refuses what it is given."""
    target, draft = pair
    tokenizer = text_tokenizer()
    target.generate(PROMPT, max_new_tokens=20, do_sample=False, streamer=TextStreamer(tokenizer))
    plain = capsys.readouterr().out
    target.generate(
        PROMPT, max_new_tokens=20, do_sample=False, streamer=TextStreamer(tokenizer), assistant_model=draft
    )
    assert capsys.readouterr().out == plain
    assert len(plain.strip()) == 23


# Stopping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 3), (3, 2)])
def test_stop_strings_at_every_offset(pair, batch, length):
    """Catches a stop string that is only looked for at the end of a block."""
    target, draft = pair
    tokenizer = text_tokenizer()
    inputs = left_pad(ROWS[:batch])
    text = target.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    for offset in range(0, 15, 2 if batch == 1 else 4):
        stop = tokenizer.decode(text[offset : offset + length])
        assert_same_tokens(target, draft, **inputs, max_new_tokens=20, stop_strings=[stop, "~"], tokenizer=tokenizer)


class SeesEveryPrefix(StoppingCriteria):
    """Stops a row at a given length, and remembers what it was shown."""

    def __init__(self, stop_at=10**9, rows=None):
        self.stop_at, self.rows = stop_at, rows
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        done = torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.stop_at, device=input_ids.device)
        if self.rows is not None:
            done = done & torch.tensor([row in self.rows for row in range(input_ids.shape[0])])
        return done


@pytest.mark.parametrize("new_tokens", [1, 8, 11])
@pytest.mark.parametrize("batch", [1, 3])
def test_custom_criterion_sees_each_prefix_once_in_order(pair, batch, new_tokens):
    """Catches rules that are asked per block: text overshoots, or a rule sees prefixes twice or too early."""
    target, draft = pair
    inputs = left_pad(ROWS[:batch])
    width = inputs["input_ids"].shape[1]
    seen, results = [], []
    for options in ({}, {"assistant_model": draft}):
        rule = SeesEveryPrefix(width + new_tokens)
        results.append(
            target.generate(
                **inputs,
                max_new_tokens=24,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([rule]),
                **options,
            )
        )
        seen.append(rule.seen)
    assert torch.equal(*results) and results[0].shape[1] == width + new_tokens
    assert seen[1] == seen[0]


@pytest.mark.parametrize("eos", [False, True], ids=["no-eos", "eos"])
def test_custom_criterion_that_stops_one_row(pair, eos):
    """Catches a rule for one row that stops all, or a stopped row that is handled otherwise than plain does."""
    target, draft = pair
    inputs = left_pad(ROWS)
    options = {"eos_token_id": 30, "pad_token_id": 0} if eos else {}
    for rows in ([1], [0, 2]):
        for length in (11, 18):
            results = [
                target.generate(
                    **inputs,
                    max_new_tokens=14,
                    do_sample=False,
                    stopping_criteria=StoppingCriteriaList([SeesEveryPrefix(length, rows)]),
                    **options,
                    **assistant,
                )
                for assistant in ({}, {"assistant_model": draft})
            ]
            assert torch.equal(*results), (rows, length)


def test_criterion_that_reads_scores(pair):
    """Catches rules that are given no scores, or scores of later tokens."""

    class Confident(StoppingCriteria):
        def __init__(self):
            self.counts = []

        def __call__(self, input_ids, scores, **kwargs):
            self.counts.append(None if scores is None else len(scores))
            return torch.full((input_ids.shape[0],), len(self.counts) >= 11)

    target, draft = pair
    rules = [Confident(), Confident()]
    for rule, assistant in zip(rules, ({}, {"assistant_model": draft}), strict=True):
        target.generate(
            PROMPT,
            max_new_tokens=24,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([rule]),
            return_dict_in_generate=True,
            output_scores=True,
            **assistant,
        )
    assert rules[0].counts == rules[1].counts == list(range(1, 12))


def test_max_time(pair):
    """Catches a time limit that is not looked at."""
    target, draft = pair
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=40, max_time=1e-9)

    class Slow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            time.sleep(0.02)
            return scores

    drafted = target.generate(
        PROMPT,
        assistant_model=draft,
        max_new_tokens=400,
        do_sample=False,
        max_time=0.3,
        logits_processor=LogitsProcessorList([Slow()]),
    )
    assert 4 <= drafted.shape[1] < 100


def test_length_options(pair):
    """Catches a limit that is read from one place only."""
    target, draft = pair
    for options in (
        {"max_length": 17},
        {"max_new_tokens": 17},
        {"max_length": 40, "max_new_tokens": 5},
        {"min_new_tokens": 9, "max_new_tokens": 20, "eos_token_id": [16, 2, 3, 28]},
        {"min_length": 9, "max_new_tokens": 20, "eos_token_id": [16, 2, 3, 28]},
        {},
    ):
        assert_same_tokens(target, draft, PROMPT, **options)


# Inputs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_ids", [False, True], ids=["embeds-only", "with-ids"])
def test_inputs_embeds(pair, batch, with_ids):
    """Catches prompts without ids that crash, or whose ids come back."""
    target, draft = pair
    inputs = left_pad(ROWS[:batch])
    embeds = target.get_input_embeddings()(inputs["input_ids"]) * 1.5
    options = {"input_ids": inputs["input_ids"]} if with_ids else {}
    assert_same_tokens(
        target,
        draft,
        inputs_embeds=embeds,
        attention_mask=inputs["attention_mask"],
        max_new_tokens=20,
        **options,
    )


def test_inputs_embeds_do_not_fall_back_to_ids():
    """Catches a drafter or a verify pass that is given the ids' own embeddings for the prompt."""
    target, draft = t0(), d1()
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(1, 6, 32, generator=generator)
    assert_same_tokens(target, draft, inputs_embeds=embeds, max_new_tokens=30)
    assert_same_tokens(target, d0(), inputs_embeds=embeds, max_new_tokens=30)


def test_padding_that_is_inferred_or_given(pair):
    """Catches positions counted with padding, or a mask that is only honoured when it is passed."""
    target, draft = pair
    assert_same_tokens(target, draft, torch.tensor([[0, 0, 3, 7, 1]]), max_new_tokens=20)
    assert_same_tokens(target, draft, **left_pad([[3, 7, 1], [1] * 9]), max_new_tokens=20)
    one_row = {name: tensor[:1] for name, tensor in left_pad([[3, 7, 1], [1] * 9]).items()}
    assert_same_tokens(target, draft, **one_row, max_new_tokens=20)


def test_padding_does_not_change_a_row(pair):
    """Catches a row whose text depends on how much padding stands before it."""
    target, draft = pair
    expected = target.generate(PROMPT, max_new_tokens=20, do_sample=False)[0, 3:]
    for width in (4, 7, 12):
        row = {name: tensor[:1] for name, tensor in left_pad([[3, 7, 1], [1] * width]).items()}
        drafted = target.generate(**row, assistant_model=draft, max_new_tokens=20, do_sample=False)
        assert torch.equal(drafted[0, width:], expected)


def test_duplicate_and_many_rows(pair):
    """Catches rows that are mixed up by their index."""
    target, draft = pair
    rows = [[(7 * row + column) % 31 for column in range(1 + row % 6)] for row in range(13)] + [ROWS[0], ROWS[0]]
    assert_same_tokens(target, draft, **left_pad(rows), max_new_tokens=20)


def test_prompt_of_one_token(pair):
    """Catches an off-by-one that a longer prompt hides."""
    target, draft = pair
    for token in range(1, 31, 4):
        assert_same_tokens(target, draft, torch.tensor([[token]]), max_new_tokens=9)


# Processors ----------------------------------------------------------------------------------------------------------


def test_processors_see_each_prefix_once_in_order(pair):
    """Catches a processor that is called for candidates, twice for one place, or out of order."""

    class Sees(LogitsProcessor):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            assert scores.shape == (1, 32) and scores.dtype == torch.float32
            self.seen.append(input_ids[0].tolist())
            return scores

    target, draft = pair
    processors = [Sees(), Sees()]
    for processor, assistant in zip(processors, ({}, {"assistant_model": draft}), strict=True):
        target.generate(
            PROMPT,
            max_new_tokens=24,
            do_sample=False,
            logits_processor=LogitsProcessorList([processor]),
            **assistant,
        )
    assert processors[1].seen == processors[0].seen


def test_processor_that_depends_on_the_row(pair):
    """Catches a processor that is given rows in another order than `generate` was."""

    class ByRow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert input_ids.shape[0] == scores.shape[0]
            bias = torch.zeros_like(scores)
            for row, prefix in enumerate(input_ids.tolist()):
                bias[row, (prefix[-1] + prefix[8] + len(prefix)) % 32] = 3.0
            return scores + bias

    target, draft = pair
    assert_same_tokens(
        target, draft, **left_pad(ROWS), max_new_tokens=24, logits_processor=LogitsProcessorList([ByRow()])
    )


def test_processor_that_writes_in_place(pair):
    """
    Catches raw logits that a processor overwrote, or that are fed to it twice.

    Plain `generate` hands a processor the tensor it returns as raw logits; here those stay what the target said.
    """

    class InPlace(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, input_ids[0, -1]] = -1e4
            return scores

    target, draft = pair
    plain, drafted = assert_same_tokens(
        target,
        draft,
        PROMPT,
        max_new_tokens=24,
        logits_processor=LogitsProcessorList([InPlace()]),
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    for ours, theirs in zip(drafted.scores, plain.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=VALUE_TOLERANCE, rtol=0)
    for ours, scores in zip(drafted.logits, plain.scores, strict=True):
        written = scores == -1e4
        assert written.sum() == 1 and (ours[written] > -100).all()
        torch.testing.assert_close(ours[~written], scores[~written], atol=VALUE_TOLERANCE, rtol=0)


def test_guidance_scale(pair):
    """Catches a processor that runs the target itself and whose passes are taken for the loop's."""
    target, draft = pair
    assert_same_tokens(
        target, draft, PROMPT, max_new_tokens=16, guidance_scale=1.5, negative_prompt_ids=torch.tensor([[4, 9]])
    )


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"use_cache": False}, "use_cache"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens"),
        ({"num_assistant_tokens": -1}, "num_assistant_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_meaningless_options_are_refused_before_any_work(options, word):
    """Catches options that are silently ignored, or that fail after the prompt has been run."""
    target, draft = t0(), d0()
    if "assistant_ensemble_weight" in options and not hasattr(GenerationConfig(), "assistant_ensemble_weight"):
        pytest.skip("this version of transformers has no assistant_ensemble_weight")
    hooks, settings = hook_count(target, draft), target.generation_config.to_dict()
    with target_passes(target) as passes:
        with pytest.raises(ValueError, match=word):
            target.generate(PROMPT, assistant_model=draft, max_new_tokens=4, do_sample=False, **options)
    assert not passes
    assert hook_count(target, draft) == hooks and target.generation_config.to_dict() == settings
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=9)


def test_half_precision_drafter_is_refused():
    """Catches a drafter whose residuals overflow in float16 and that is then never accepted."""
    target = table_target(0)
    draft = table_drafter(target).half()
    hooks = hook_count(target, draft)
    with target_passes(target) as passes:
        with pytest.raises(ValueError, match="float16|fp16"):
            target.generate(PROMPT, assistant_model=draft, max_new_tokens=4)
    assert not passes and hook_count(target, draft) == hooks


@pytest.mark.parametrize(
    "settings",
    [{"hidden_size": 16}, {"num_target_layers": 6}, {"target_hidden_size": 48}, {"target_layer_ids": [0, 9]}],
    ids=lambda settings: next(iter(settings)),
)
def test_drafter_of_another_target_is_refused(settings):
    """Catches a drafter that is run with features or embeddings of the wrong size."""
    target = t0()
    key = next(iter(settings))
    hooks = hook_count(target)
    with target_passes(target) as passes:
        with pytest.raises(ValueError, match=key):
            draft = random_drafter(target, **{"num_target_layers": None, **settings})
            target.generate(PROMPT, assistant_model=draft, max_new_tokens=4)
    assert not passes and hook_count(target) == hooks


# Sampling ------------------------------------------------------------------------------------------------------------


def test_sampling_repeats_with_the_seed(pair):
    """Catches random numbers that do not come from the host's stream."""
    target, draft = pair
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(
            target.generate(
                **left_pad(ROWS), assistant_model=draft, max_new_tokens=24, do_sample=True, temperature=3.0, top_k=0
            )
        )
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_greedy_leaves_the_random_stream_alone(pair):
    """Catches greedy decoding that uses up random numbers."""
    target, draft = pair
    state = torch.get_rng_state()
    target.generate(PROMPT, assistant_model=draft, max_new_tokens=12, do_sample=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_sampled_outputs_have_scores_of_their_tokens(pair):
    """Catches scores of another place, or of the drafter, when sampling."""
    target, draft = pair
    inputs = left_pad(ROWS)
    out = target.generate(
        **inputs,
        assistant_model=draft,
        max_new_tokens=24,
        do_sample=True,
        temperature=2.5,
        top_k=20,
        num_return_sequences=2,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert out.sequences.shape == (6, 33) and len(out.scores) == len(out.logits) == 24
    mask = torch.cat([inputs["attention_mask"].repeat_interleave(2, 0), torch.ones(6, 24, dtype=torch.long)], dim=1)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = target(out.sequences, attention_mask=mask, position_ids=positions).logits[:, 8:-1]
    for step in range(24):
        torch.testing.assert_close(out.logits[step], logits[:, step], atol=VALUE_TOLERANCE, rtol=0)
        scaled = logits[:, step] / 2.5
        kept = scaled >= scaled.topk(20).values[:, -1:] - VALUE_TOLERANCE
        assert torch.isfinite(out.scores[step].gather(1, out.sequences[:, 9 + step, None])).all()
        torch.testing.assert_close(out.scores[step][kept], scaled[kept], atol=VALUE_TOLERANCE, rtol=0, equal_nan=True)


def test_sampling_at_a_low_temperature_is_greedy(pair):
    """Catches residuals or bonus tokens that are drawn from the wrong place."""
    target, draft = pair
    expected = target.generate(**left_pad(ROWS), max_new_tokens=40, do_sample=False)
    drafted = target.generate(
        **left_pad(ROWS), assistant_model=draft, max_new_tokens=40, do_sample=True, temperature=1e-4
    )
    assert torch.equal(drafted, expected)


# Targets -------------------------------------------------------------------------------------------------------------


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "gemma": {"mix": 0.1},
    "gemma2": {"mix": 0.1, "sliding_window": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {"mix": 0.1, "sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "olmo2": {},
    "phi3": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_target_families(family, batch):
    """Catches assumptions about one family: short windows, experts, embedding factors, fused weights."""
    target = table_target(0, model_type=family, **FAMILIES[family])
    _, drafted = assert_same_tokens(target, table_drafter(target), **left_pad(ROWS[:batch]), max_new_tokens=32)
    assert len(set(drafted[0, -32:].tolist())) > 2
    draft = random_drafter(target)
    assert_same_tokens(target, draft, **left_pad(ROWS[:batch]), max_new_tokens=16, prefill_chunk_size=4)
    assert draft.last_stats.rounds > 0


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_sliding_window_target_longer_than_its_window(implementation):
    """Catches rejected tokens that push real ones out of the window: what left it cannot be put back by a crop."""
    target = table_target(0, model_type="mistral", sliding_window=6, attn_implementation=implementation)
    table = read_table(target)
    prompt = torch.randint(1, 31, (1, 17), generator=torch.Generator().manual_seed(3))
    for draft in (table_drafter(target), table_drafter(target, broken_table(table))):
        for length in (1, 5, 6, 17):
            plain, drafted = assert_same_tokens(
                target, draft, prompt[:, :length], max_new_tokens=24, return_dict_in_generate=True
            )
            assert returned_cache(drafted).get_seq_length() == returned_cache(plain).get_seq_length()
            for ours, theirs in zip(
                cache_tensors(returned_cache(drafted)), cache_tensors(returned_cache(plain)), strict=True
            ):
                torch.testing.assert_close(ours, theirs, atol=VALUE_TOLERANCE, rtol=0)
        for draft_tokens in (1, 5, 6, 12):
            assert_same_tokens(
                target, draft, prompt, max_new_tokens=16, draft_kwargs={"num_assistant_tokens": draft_tokens}
            )


def test_sliding_and_full_layers_in_a_padded_batch():
    """Catches windows that are counted from padded positions."""
    target = table_target(0, model_type="gemma2", mix=0.1, sliding_window=6)
    table = read_table(target)
    for draft in (table_drafter(target), table_drafter(target, broken_table(table, [2, 3, 9]))):
        assert_same_tokens(target, draft, **left_pad(ROWS), max_new_tokens=40)


def test_sliding_window_cache_from_an_earlier_turn():
    """Catches a sliding cache that comes back unusable for the next turn."""
    target = table_target(0, model_type="mistral", sliding_window=6)
    draft = table_drafter(target)
    out = target.generate(
        PROMPT, assistant_model=draft, max_new_tokens=14, do_sample=False, return_dict_in_generate=True
    )
    text = torch.cat([out.sequences, torch.tensor([[9, 4]])], dim=1)
    expected = target.generate(text, max_new_tokens=20, do_sample=False)
    drafted = target.generate(
        text,
        assistant_model=draft,
        max_new_tokens=20,
        do_sample=False,
        **{CACHE_KEY: returned_cache(out)},
    )
    assert torch.equal(drafted, expected)


def test_tied_embeddings():
    """Catches a head that is looked for under its own name only."""
    target = table_target(0)
    with torch.no_grad():
        target.get_output_embeddings().weight.copy_(target.get_output_embeddings().weight + 0.3 * torch.randn(32, 32))
    target.get_input_embeddings().weight = target.get_output_embeddings().weight
    for draft in (random_drafter(target), table_drafter(target, cycle_table(32, 0))):
        assert_same_tokens(target, draft, PROMPT, max_new_tokens=40)


# Drafters ------------------------------------------------------------------------------------------------------------


DRAFTERS = {
    "v1": {"draft_family": "dflash"},
    "block-1": {"block_size": 1},
    "block-2": {"block_size": 2},
    "block-17": {"block_size": 17},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "all-sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3},
    "one-tap": {"target_layer_ids": [3]},
    "unordered-taps": {"target_layer_ids": [3, 0, 2]},
    "kernel-1": {"conv_kernel_size": 1},
    "kernel-4": {"conv_kernel_size": 4},
    "top-k-1": {"selector_top_k": 1},
    "top-k-3": {"selector_top_k": 3, "selector_rank": 5},
    "softcap": {"final_logit_softcapping": 3.0, "output_multiplier": 0.5},
    "eager": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_settings(name):
    """Catches a drafter setting that reaches the output."""
    target = t0()
    draft = random_drafter(target, **DRAFTERS[name])
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=20)
    assert_same_tokens(target, draft, **left_pad(ROWS), max_new_tokens=20)
    assert draft.last_stats.rounds > 0


def test_v1_drafter_is_accepted():
    """Catches a v1 drafter that runs without ever being accepted: each slot proposes the best token of its row."""
    table = torch.full((32,), 6)
    table[6] = 6
    target = table_target(0, table=table, mix=0.0)
    draft = random_drafter(target, draft_family="dflash", mask_token_id=30)
    with torch.no_grad():
        for layer in draft.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        draft.norm.weight.fill_(1.0)
    assert draft.candidate_selector is None
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=65)
    assert draft.last_stats.mean_accepted_length == 8.0


def test_non_finite_drafts_fall_back_to_the_target(pair):
    """Catches NaN or infinite draft scores that reach the user."""
    target, draft = pair
    for value in (float("nan"), float("inf")):
        broken = copy.deepcopy(draft)
        with torch.no_grad():
            broken.norm.weight.fill_(value)
        assert_same_tokens(target, broken, **left_pad(ROWS), max_new_tokens=12)
        stats = broken.last_stats
        # The last round of a row has room for no draft.
        assert 0 < stats.rounds - 3 <= stats.fallback_rounds <= stats.rounds
        assert stats.accepted == stats.drafted == 0
        sampled = target.generate(PROMPT, assistant_model=broken, max_new_tokens=20, do_sample=True, temperature=1e-4)
        assert torch.equal(sampled, target.generate(PROMPT, max_new_tokens=20, do_sample=False))


def test_bfloat16_drafter_on_a_float32_target(pair):
    """Catches a drafter whose type has to be the target's."""
    target, draft = pair
    assert_same_tokens(target, copy.deepcopy(draft).to(torch.bfloat16), **left_pad(ROWS), max_new_tokens=30)


def test_models_in_training_mode_and_gradients(pair):
    """Catches graphs that are kept alive through generation."""
    target, draft = pair
    out = target.generate(
        PROMPT,
        assistant_model=draft,
        max_new_tokens=9,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        output_hidden_states=True,
    )
    assert not any(logits.requires_grad for logits in out.logits)
    assert not any(state.requires_grad for step in out.hidden_states for state in step)
    assert not any(tensor.requires_grad for tensor in cache_tensors(returned_cache(out)))


# Doors ---------------------------------------------------------------------------------------------------------------


def test_disable_and_enable():
    """Catches a hook that cannot be removed, or that stacks up."""
    from transformers import GenerationMixin

    target, draft = t0(), d0()
    hooked = GenerationMixin.generate
    transformers_dflash2.enable()
    assert GenerationMixin.generate is hooked
    transformers_dflash2.disable()
    try:
        original = GenerationMixin.generate
        assert original is not hooked and original.__module__ == "transformers.generation.utils"
        transformers_dflash2.disable()
        assert GenerationMixin.generate is original
        with pytest.raises(Exception):  # noqa: B017 - whatever the host makes of an unknown kind of assistant
            target.generate(PROMPT, assistant_model=draft, max_new_tokens=4)
        plain = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    finally:
        transformers_dflash2.enable()
    assert torch.equal(target.generate(PROMPT, max_new_tokens=12, do_sample=False, assistant_model=draft), plain)


@pytest.mark.host_deprecations
def test_other_assistants_reach_the_host():
    """Catches a hook that takes over calls that are not its own."""
    target, assistant = t0(), table_target(0, num_hidden_layers=1)
    plain = target.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(PROMPT, assistant_model=assistant, max_new_tokens=12, do_sample=False), plain)
    assert torch.equal(target.generate(PROMPT, prompt_lookup_num_tokens=2, max_new_tokens=12, do_sample=False), plain)
    assert target.generate(PROMPT, num_beams=2, max_new_tokens=4, do_sample=False).shape == (1, 7)


def test_arguments_by_position():
    """Catches a wrapper that only takes arguments by name."""
    target, draft = t0(), d0()
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    before = config.to_dict()
    plain = target.generate(PROMPT, config)
    assert torch.equal(target.generate(PROMPT, config, assistant_model=draft), plain)
    assert torch.equal(target.generate(inputs=PROMPT, generation_config=config, assistant_model=draft), plain)
    assert config.to_dict() == before


def test_candidate_generator_in_the_hosts_own_loop(pair):
    """Catches a generator that only works with this package's loop, or leaves its hooks behind."""
    from transformers_dflash2.candidate_generator import host_assisted_loop

    target, draft = pair
    hooks = hook_count(target, draft)
    for options in ({}, {"repetition_penalty": 1.3}, {"eos_token_id": 3, "pad_token_id": 0}):
        plain = target.generate(PROMPT, max_new_tokens=30, do_sample=False, **options)
        with host_assisted_loop(target, draft):
            hosted = target.generate(
                PROMPT,
                assistant_model=draft,
                max_new_tokens=30,
                do_sample=False,
                num_assistant_tokens=7,
                speculation_type="dflash",
                **options,
            )
        assert torch.equal(hosted, plain), options
    assert hook_count(target, draft) == hooks
    assert_same_tokens(target, draft, PROMPT, max_new_tokens=12)


@pytest.mark.host_deprecations
def test_pipeline_with_an_instance():
    """Catches a drafter whose config lacks what `pipeline` compares."""
    target, draft = t0(), d0()
    generator = pipeline("text-generation", model=target, tokenizer=text_tokenizer(), assistant_model=draft)
    plain = pipeline("text-generation", model=target, tokenizer=text_tokenizer())
    options = {"max_new_tokens": 20, "do_sample": False}
    assert generator("dhb", **options) == plain("dhb", **options)
    assert draft.last_stats.new_tokens == 20


def test_two_threads_share_target_and_drafter():
    """Catches features of one call that end up in another."""
    target, draft = t0(), d1()
    prompts = [torch.tensor([row]) for row in ROWS]
    expected = [target.generate(prompt, max_new_tokens=30, do_sample=False) for prompt in prompts]
    results, errors = {}, []

    def work(index):
        try:
            for _ in range(2):
                results[index] = target.generate(
                    prompts[index], assistant_model=draft, max_new_tokens=30, do_sample=False
                )
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(results[index], expected[index]) for index in range(3))


def test_drafter_settings_and_configs_are_left_alone(pair):
    """Catches a call that leaves something behind in a config."""
    target, draft = pair
    before = [target.config.to_dict(), target.generation_config.to_dict(), draft.config.to_dict()]
    keys = [set(vars(target)), set(vars(target.generation_config))]
    target.generate(**left_pad(ROWS), assistant_model=draft, max_new_tokens=9, num_assistant_tokens=3, top_k=4)
    assert [target.config.to_dict(), target.generation_config.to_dict(), draft.config.to_dict()] == before
    assert [set(vars(target)), set(vars(target.generation_config))] == keys


def test_draft_config_fits_its_target():
    """Catches a fixture that silently stops being the recipe."""
    target = t0()
    config = draft_config(target)
    assert (config.block_size, config.target_layer_ids, config.mask_token_id) == (8, [0, 2], 31)
    assert config.layer_is_causal == [False, False] and config.draft_family == "dflash2"
    assert walk_table(cycle_table(32, 0), 0, 32)[-1] == 0
    assert len(set(walk_table(cycle_table(32, 0), 0, 32))) == 32
    assert len(decoder_layers(target)) == 4 and isinstance(target.get_output_embeddings(), nn.Linear)

"""What a stranger tries: cancelled calls, other people's wrappers, shared models, odd places for options."""

import functools
import threading
import warnings

import pytest
import torch
from generation_checks import PROMPT, cache_kwargs, d0, new_cache, pure_target, t0
from transformers import GenerationConfig, GenerationMixin

import transformers_dflash2
from transformers_dflash2.kernels.attention_interface import use_block_attention
from transformers_dflash2.testing import table_drafter, table_target


OPTIONS = {"max_new_tokens": 20, "do_sample": False}


class Cancel(Exception):
    pass


class CancellingStreamer:
    """Raises on its n-th token."""

    def __init__(self, tokens):
        self.tokens, self.calls = tokens, -1

    def put(self, value):
        self.calls += 1
        if self.calls == self.tokens:
            raise Cancel

    def end(self):
        pass


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}], ids=["block", "step-by-step"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 9, 13])
def test_a_cancelled_call_leaves_the_cache_of_plain_decoding(tokens, processors):
    """Catches rejected or never streamed tokens that stay in a cache with which the caller goes on."""
    lengths = []
    for assistant in ({}, {"assistant_model": table_drafter(pure_target())}):
        cache = new_cache(pure_target())
        with pytest.raises(Cancel):
            pure_target().generate(
                PROMPT,
                streamer=CancellingStreamer(tokens),
                **OPTIONS,
                **processors,
                **assistant,
                **cache_kwargs(cache),
            )
        lengths.append(cache.get_seq_length())
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize(("vocab_size", "warns"), [(24, True), (32, False)])
def test_a_target_of_another_tokenizer(vocab_size, warns, fresh_reports):
    """Catches a pair that never agrees and never says so, and a draft of ids that the target does not have."""
    target, draft = (
        table_target(1, vocab_size),
        table_drafter(table_target(0, 32), mask_token_id=23, selector_top_k=16),
    )
    prompt = torch.tensor([[3, 7, 1]])
    for _ in range(2):
        assert torch.equal(
            target.generate(prompt, assistant_model=draft, **OPTIONS), target.generate(prompt, **OPTIONS)
        )
    messages = [record.getMessage() for record in fresh_reports.records]
    assert [message.split(":")[0] for message in messages] == (
        ["The drafter's vocabulary has 32 tokens and that of Qwen3ForCausalLM 24"] if warns else []
    )


def test_disable_leaves_the_wrappers_of_others_alone():
    """Catches a mark that `functools.wraps` copies onto somebody else's wrapper, which is then thrown away."""
    ours = GenerationMixin.generate

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    GenerationMixin.generate = theirs
    try:
        transformers_dflash2.disable()
        assert GenerationMixin.generate is theirs
        expected = t0().generate(PROMPT, **OPTIONS)
        transformers_dflash2.enable()
        assert GenerationMixin.generate is theirs
        assert torch.equal(t0().generate(PROMPT, assistant_model=d0(), **OPTIONS), expected)
        assert d0().last_stats.rounds > 0
    finally:
        GenerationMixin.generate = ours
        transformers_dflash2.enable()


def test_disable_and_enable_return_to_the_hosts_function():
    """Catches a wrapper around a wrapper, and one that cannot be removed."""
    ours = GenerationMixin.generate
    transformers_dflash2.enable()
    assert GenerationMixin.generate is ours
    transformers_dflash2.disable()
    assert GenerationMixin.generate is ours.__wrapped__
    transformers_dflash2.enable()
    assert GenerationMixin.generate.__wrapped__ is ours.__wrapped__


def test_attention_is_put_back_by_overlapping_users():
    """Catches a model that is left with another attention function after two threads switched it at once."""
    target = table_target(8)
    before = target.config._attn_implementation

    def switch():
        for _ in range(200):
            with use_block_attention(target):
                assert target.config._attn_implementation != before

    threads = [threading.Thread(target=switch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.config._attn_implementation == before


def test_model_inputs_of_one_call_keep_the_tempo_dynamic(fresh_reports):
    """Catches a prompt's token types that are passed on with every block, or replayed in a later call."""
    target = table_target(
        model_type="gpt2", n_embd=32, n_head=4, n_layer=2, n_positions=128, num_hidden_layers=2, hidden_size=32
    )
    draft = table_drafter(target, target_layer_ids=[0, 1])
    inputs = {"inputs": PROMPT, "token_type_ids": torch.tensor([[1, 1, 2]]), **OPTIONS}
    drafted = target.generate(assistant_model=draft, cache_implementation="static", **inputs)
    assert torch.equal(drafted, target.generate(**inputs))
    assert any("token_type_ids" in record.getMessage() for record in fresh_reports.records)


def test_autocast_keeps_the_tempo_dynamic(fresh_reports):
    """Catches buffers of one dtype that are written in another."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        drafted = t0().generate(PROMPT, assistant_model=d0(), cache_implementation="static", **OPTIONS)
    assert drafted.shape == (1, 23)
    assert any("autocast" in record.getMessage() for record in fresh_reports.records)


@pytest.mark.parametrize("tempo", ["dynamic", "static"])
def test_greedy_calls_leave_the_random_stream_alone(tempo):
    """Catches noise drawn for walks that need none: the user's next sample would change."""
    before = torch.get_rng_state()
    t0().generate(PROMPT, assistant_model=d0(), cache_implementation=tempo, **OPTIONS)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["offloaded_static", "hybrid", "offloaded_hybrid"])
def test_every_name_of_a_preallocated_cache(name):
    """Catches a legal name that ends in a message about a cache which the caller did not pass."""
    expected = t0().generate(PROMPT, **OPTIONS)
    assert torch.equal(t0().generate(PROMPT, assistant_model=d0(), cache_implementation=name, **OPTIONS), expected)


def test_options_in_a_generation_config_stay_there():
    """Catches an option of ours beside the caller's config, at which the host objects."""
    config = GenerationConfig(**OPTIONS, cache_implementation="static", pad_token_id=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafted = t0().generate(PROMPT, generation_config=config, assistant_model=d0())
    assert torch.equal(drafted, t0().generate(PROMPT, **OPTIONS))
    assert config.cache_implementation == "static"


@pytest.mark.parametrize("place", ["argument", "config"])
def test_paged_is_refused_wherever_it_is_asked_for(place):
    """Catches a request for continuous batching that is dropped."""
    request = {"cache_implementation": "paged"}
    if place == "config":
        request = {"generation_config": GenerationConfig(**OPTIONS, **request)}
    with pytest.raises(ValueError, match="paged"):
        t0().generate(PROMPT, assistant_model=d0(), **request)

# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""Taking a call apart: the rounds, their renderings and the command."""

import re

import pytest
import torch
from dspark_checks import table_dspark
from generation_checks import d0, d1, pure_drafter, pure_target, t0
from test_examples import TEMPLATE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from transformers_dflash2 import inspect, trace
from transformers_dflash2.testing import broken_table, read_table, table_drafter


PROMPT = torch.tensor([[3, 7, 1]])
LONG = {"max_new_tokens": 40, "do_sample": False}


def word_tokenizer():
    """One word for each of the 32 tokens; the first ones need escaping in a page."""
    words = ["<b>", "\n", "&"] + [f"w{index}" for index in range(3, 32)]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="w31"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w31", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


def good():
    return pure_target(), pure_drafter()


def bad():
    return t0(), d1()


def half_right():
    """A pair whose drafter is wrong after a few tokens of the table."""
    target = pure_target()
    return target, table_drafter(target, table=broken_table(read_table(target), [5, 9, 20]))


def check(traced, target, draft, **options):
    """What holds for every trace: it is the text, and its counts are those of the call."""
    plain = target.generate(PROMPT, **options)[0, PROMPT.shape[1] :].tolist()
    stats = draft.last_stats
    text = [traced.new_ids[0]]
    for entry in traced.rounds:
        text += [token for token, kind in entry.tokens() if kind in ("accepted", "bonus")]
    assert text == traced.new_ids
    assert sum(entry.accepted for entry in traced.rounds) == stats.accepted
    assert sum(len(entry.proposed) for entry in traced.rounds) == stats.drafted
    assert len(traced.rounds) == stats.rounds
    return plain


@pytest.mark.parametrize("pair", [good, bad, half_right])
def test_greedy_trace_is_the_text(pair):
    """Catches rounds that do not add up to the text, or accepted and refused tokens that are mixed up."""
    target, draft = pair()
    traced = inspect(target, draft, PROMPT, **LONG)
    assert check(traced, target, draft, **LONG) == traced.new_ids
    for entry in traced.rounds:
        if entry.accepted < len(entry.proposed) and entry.bonus is not None:
            assert entry.proposed[entry.accepted] != entry.bonus
    assert "propose" not in vars(draft)


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"]
)
def test_trace_of_a_markov_head(options):
    """Catches a whole vocabulary that is listed for every slot, and candidates without the token that was drawn."""
    target = t0()
    traced = inspect(target, table_dspark(target), PROMPT, max_new_tokens=30, **options)
    assert traced.stats.accepted > 0
    for entry in traced.rounds:
        for token, ids, q in zip(entry.proposed, entry.candidate_ids, entry.q, strict=True):
            assert len(ids) == len(set(ids)) == 8
            assert options["do_sample"] or (ids[0], q[0]) == (token, 1)
    assert str(traced) == traced.to_text(color=False)


def test_sampled_trace_is_the_text():
    """Catches a sampled round whose acceptance is guessed wrongly from the text."""
    target, draft = good()
    options = {"max_new_tokens": 40, "do_sample": True, "temperature": 1.5}
    for seed in range(2):
        torch.manual_seed(seed)
        traced = inspect(target, draft, PROMPT, **options)
        torch.manual_seed(seed)
        again = target.generate(PROMPT, assistant_model=draft, **options)
        assert traced.new_ids == again[0, 3:].tolist()
        check(traced, target, draft, max_new_tokens=1)
    assert any(entry.accepted < len(entry.proposed) for entry in traced.rounds)


@pytest.mark.parametrize("pair", [good, bad])
def test_probabilities(pair):
    """Catches candidates of another slot, or a drafter and a target whose probabilities are exchanged."""
    target, draft = pair()
    traced = inspect(target, draft, PROMPT, **LONG)
    prefix = PROMPT[0].tolist() + traced.new_ids[:1]
    for entry in traced.rounds:
        logits = target(torch.tensor([prefix + entry.proposed])).logits[0, len(prefix) - 1 :]
        for slot, p in enumerate(entry.p):
            expected = torch.softmax(logits[slot], dim=-1)[entry.candidate_ids[slot]]
            torch.testing.assert_close(torch.tensor(p), expected, atol=1e-5, rtol=0)
        assert len(entry.p) == min(entry.accepted + 1, len(entry.proposed))
        for slot, q in enumerate(entry.q):
            # A greedy drafter takes what it holds most likely, and is not certain of it.
            assert entry.candidate_ids[slot][max(range(len(q)), key=q.__getitem__)] == entry.proposed[slot]
            assert sum(q) == pytest.approx(1, abs=1e-5) and (pair is good or max(q) < 0.999)
        prefix += [token for token, kind in entry.tokens() if kind in ("accepted", "bonus")]


def test_end_of_the_text():
    """Catches tokens behind an end token that are shown as refused, though nobody asked about them."""
    target, draft = good()
    first = inspect(target, draft, PROMPT, **LONG).rounds[0]
    assert first.accepted > 2
    traced = inspect(target, draft, PROMPT, **LONG, eos_token_id=first.proposed[1])
    assert [kind for _, kind in traced.rounds[0].tokens()] == ["accepted"] * 2 + ["unused"] * 5
    assert traced.new_ids[-1] == first.proposed[1]


def test_renderings(tokenizer):
    """Catches a page that needs other files, tokens that are read as markup, and figures that are not the call's."""
    target, draft = half_right()
    traced = inspect(target, draft, PROMPT, tokenizer=tokenizer, **LONG)
    traced.new_ids[0] = 0
    traced.rounds[0].proposed[0] = 2
    plain, coloured = traced.to_text(color=False, block=1), traced.to_text()
    assert "\033" not in plain and "\033[31;9m" in coloured and "~w" in plain
    figure = f"{draft.last_stats.mean_accepted_length:.2f} tokens per round"
    page = traced.to_html(block=2)
    assert figure in plain and figure in page
    assert "&lt;b&gt;" in page and "<b>" not in page and "&amp;" in page
    assert not re.search(r"https?://|<script|<link|@import", page)
    assert page.count('class="round chosen"') == 1 and 'id="round-2" class="round chosen"' in page
    assert page.count("<section") == len(traced.rounds) and page.count("<svg") == 2
    with pytest.raises(ValueError, match="block=0"):
        traced.to_text(block=0)
    with pytest.raises(ValueError, match="block=99"):
        traced.to_html(block=99)


def test_one_token_has_no_rounds():
    """Catches renderings that need a round."""
    traced = inspect(t0(), d0(), PROMPT, max_new_tokens=1)
    assert traced.rounds == [] and "1 tokens" in traced.to_text() and "<svg" not in traced.to_html()


def test_prompts(tokenizer):
    """Catches a prompt form that is encoded differently from what the tokenizer says."""
    target, draft = good()
    expected = inspect(target, draft, PROMPT, **LONG).new_ids
    assert inspect(target, draft, "w3 w7 w1".replace("w1", "&"), tokenizer=tokenizer, **LONG).prompt_ids == [3, 7, 2]
    encoded = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    assert inspect(target, draft, encoded, **LONG).new_ids == expected
    messages = [{"role": "user", "content": "w3"}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert inspect(target, draft, messages, tokenizer=tokenizer, **LONG).prompt_ids == wanted
    with pytest.raises(ValueError, match="tokenizer=tokenizer"):
        inspect(target, draft, "w3")
    with pytest.raises(ValueError, match="one row, got 2"):
        inspect(target, draft, PROMPT.repeat(2, 1))


@pytest.mark.parametrize(
    "flags", [[], ["--temperature", "0.8", "--num-assistant-tokens", "3"]], ids=["greedy", "more"]
)
def test_command(tmp_path, tokenizer, capsys, flags):
    """Catches a command that does not load a pair from disk, or leaves out the page."""
    t0().save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    d0().save_pretrained(tmp_path / "draft")
    page = tmp_path / "trace.html"
    arguments = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--html", str(page)]
    trace.main([*arguments, "--chat", "w3", "--max-new-tokens", "12", "--dtype", "float32", *flags])
    assert "12 tokens in" in capsys.readouterr().out
    assert page.read_text().startswith("<!DOCTYPE html>")

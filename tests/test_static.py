"""The static tempo on the CPU: the code path of the CUDA graphs, without the graphs."""

import gc
import weakref

import pytest
import torch
from generation_checks import PROMPT, cache_tensors, d0, d1, hook_count, pure_target, t0
from test_distribution import BATCH, DRAFTERS, LAWS, chi_square_p_value, joint_law
from test_distribution import PROMPT as LAW_PROMPT
from test_distribution import VOCAB as LAW_VOCAB
from test_distribution import target as law_target

from transformers_dflash2 import static_decoding, static_round
from transformers_dflash2.testing import (
    broken_table,
    left_pad,
    random_drafter,
    read_table,
    returned_cache,
    table_drafter,
    table_target,
)


pytest.importorskip("scipy")

# Keys of the two tempos differ by the order in which attention adds up.
CACHE_TOLERANCE = 1e-5
SCORE_TOLERANCE = 2e-5
SMALLEST_P_VALUE = 1e-3

BATCHES = {
    "one": [[3, 7, 1]],
    "one-token": [[5]],
    "even": [[3, 7, 1], [4, 9, 2]],
    "padded": [[3, 7, 1], [4, 9, 2, 8, 11], [6, 1, 30, 2, 9, 17, 5, 22, 3]],
}


def static(target, draft, **kwargs):
    """One call in the static tempo; fails when the tempo was not taken."""
    taken = []
    original = static_decoding.StaticDecoding.run

    def run(self):
        taken.append(self)
        return original(self)

    static_decoding.StaticDecoding.run = run
    try:
        output = target.generate(assistant_model=draft, cache_implementation="static", **kwargs)
    finally:
        static_decoding.StaticDecoding.run = original
    assert len(taken) == 1, "the static tempo was not taken"
    return output


def half_right(target):
    return table_drafter(target, broken_table(read_table(target), range(0, 32, 3)))


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("drafter", [d0, d1], ids=["table", "random"])
@pytest.mark.parametrize("new_tokens", [1, 2, 9, 40])
def test_same_tokens_as_plain(rows, drafter, new_tokens):
    """Catches rows that write at each other's length, read beyond their own, or forget to take back a rejection."""
    inputs = {**left_pad(rows), "max_new_tokens": new_tokens, "do_sample": False}
    assert torch.equal(static(t0(), drafter(), **inputs), t0().generate(**inputs))


@pytest.mark.parametrize("block", [2, 5, 8, 17])
@pytest.mark.parametrize("accept", ["all", "some", "none"])
def test_same_tokens_at_any_block_length(block, accept):
    """Catches a buffer whose room depends on the trained block."""
    target = pure_target()
    draft = {
        "all": table_drafter,
        "some": half_right,
        "none": lambda target: table_drafter(target, broken_table(read_table(target))),
    }[accept](target)
    inputs = {**left_pad(BATCHES["padded"]), "max_new_tokens": 30, "do_sample": False}
    drafted = static(target, draft, num_assistant_tokens=block - 1, **inputs)
    assert torch.equal(drafted, target.generate(**inputs))
    dynamic = target.generate(assistant_model=draft, num_assistant_tokens=block - 1, **inputs)
    assert torch.equal(drafted, dynamic)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("mistral", {"sliding_window": 7}, id="mistral-window"),
        pytest.param(
            "gemma2", {"sliding_window": 6, "mix": 0.1, "attn_implementation": "eager"}, id="gemma2-window-and-cap"
        ),
        pytest.param("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}, id="qwen3-moe"),
    ],
)
def test_families(model_type, options):
    """Catches windows, caps or masks that only the dynamic tempo knows."""
    target = table_target(model_type=model_type, **options)
    inputs = {**left_pad(BATCHES["padded"]), "max_new_tokens": 30, "do_sample": False}
    expected = target.generate(**inputs)
    for draft in (half_right(target), random_drafter(target)):
        assert torch.equal(static(target, draft, **inputs), expected)


def test_a_cap_that_sdpa_leaves_out_keeps_the_tempo_dynamic(fresh_reports):
    """Catches another text than plain decoding gives, because the static tempo honours a cap that sdpa ignores."""
    try:
        target = table_target(model_type="gemma2", mix=0.1, attn_implementation="sdpa")
    except ValueError:
        pytest.skip("this release of transformers refuses sdpa for a model with a cap")
    inputs = {"inputs": PROMPT, "max_new_tokens": 20, "do_sample": False}
    drafted = target.generate(assistant_model=half_right(target), cache_implementation="static", **inputs)
    assert torch.equal(drafted, target.generate(**inputs))
    assert any("attn_logit_softcapping" in record.getMessage() for record in fresh_reports.records)


def test_windows_of_the_drafter(monkeypatch):
    """Catches a drafter whose sliding layers see everything in the static tempo: same text, other proposals."""
    target = t0()
    draft = random_drafter(target, layer_types=["sliding_attention", "full_attention"], sliding_window=5, block_size=5)
    inputs = {"inputs": PROMPT, "max_new_tokens": 40, "do_sample": False}
    proposals = []
    original = type(draft).propose

    def propose(self, *args, **kwargs):
        proposal = original(self, *args, **kwargs)
        proposals.append(proposal.tokens.tolist())
        return proposal

    monkeypatch.setattr(type(draft), "propose", propose)
    target.generate(assistant_model=draft, **inputs)
    dynamic = list(proposals)
    proposals.clear()
    static(target, draft, **inputs)
    assert len(proposals) >= 30
    # Near the length limit the dynamic tempo drafts shorter blocks.
    assert proposals[:30] == dynamic[:30]


def test_every_end_token():
    """Catches text that goes on behind an accepted end token."""
    target, draft = pure_target(), table_drafter(pure_target())
    plain = target.generate(PROMPT, max_new_tokens=20, do_sample=False)
    for token in plain[0, 3:].tolist():
        options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": token, "pad_token_id": 0}
        expected = target.generate(PROMPT, **options)
        assert torch.equal(static(target, draft, inputs=PROMPT, **options), expected)


@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.3}], ids=["plain", "prefix-dependent"])
def test_scores_and_cache(processors):
    """Catches a returned cache or scores that are not those of plain decoding."""
    inputs = {
        **left_pad(BATCHES["padded"]),
        **processors,
        "max_new_tokens": 21,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected, drafted = t0().generate(**inputs), static(t0(), half_right(t0()), **inputs)
    assert torch.equal(drafted.sequences, expected.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(drafted, name), getattr(expected, name), atol=SCORE_TOLERANCE, rtol=0)
    real = torch.cat([inputs["attention_mask"].bool(), torch.ones(3, 20, dtype=torch.bool)], dim=1)
    for mine, theirs in zip(
        cache_tensors(returned_cache(drafted)), cache_tensors(returned_cache(expected)), strict=True
    ):
        assert mine.shape == theirs.shape
        gap = (mine - theirs).abs().masked_fill(~real[:, None, :, None], 0.0)
        assert gap.max() <= CACHE_TOLERANCE


def test_cache_of_an_earlier_turn():
    """Catches a prefix that is lost on the way into the buffers."""
    target, draft = t0(), half_right(t0())
    first = static(target, draft, inputs=PROMPT, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, torch.tensor([[4, 9]])], dim=1)
    cache = returned_cache(first)
    key = "cache" if "cache" in first else "past_key_values"
    expected = target.generate(longer, max_new_tokens=20, do_sample=False)
    # A cache of the caller's and a request for a static one exclude each other in the host.
    second = target.generate(longer, max_new_tokens=20, do_sample=False, assistant_model=draft, **{key: cache})
    assert torch.equal(second, expected)


def test_rounds_are_used_again():
    """Catches stale lengths, anchors or context in buffers that an earlier call has left."""
    static_decoding.release_static_rounds()
    target, draft = t0(), half_right(t0())
    for rows in ([[3, 7, 1]], [[9, 2]], [[4, 9, 2, 8, 11]], [[3, 7, 1]]):
        inputs = {**left_pad(rows), "max_new_tokens": 25, "do_sample": False}
        assert torch.equal(static(target, draft, **inputs), target.generate(**inputs))
    (kept,) = static_round.kept_rounds(target, draft)
    assert not kept.in_use
    static_decoding.release_static_rounds(target)


def shifting(target):
    """A target whose tokens are shifted by an argument of its forward, a number or what a table holds of it."""

    class Shifting(type(target)):
        def forward(self, input_ids=None, position_ids=None, shift: int = 0, shifts: dict | None = None, **kwargs):
            output = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
            output.logits = output.logits.roll(shift if shifts is None else shifts["by"], dims=-1)
            return output

    target.__class__ = Shifting
    return target


def test_a_round_is_kept_for_the_arguments_it_was_made_with():
    """Catches a recording that goes on with the arguments of an earlier call."""
    target = shifting(table_target(11))
    draft = table_drafter(target)
    inputs = {"inputs": PROMPT, "max_new_tokens": 12, "do_sample": False}
    texts = []
    for shift, rounds in ((0, 1), (2, 2), (0, 2)):
        texts.append(static(target, draft, shift=shift, **inputs))
        assert torch.equal(texts[-1], target.generate(shift=shift, **inputs))
        assert len(static_round.kept_rounds(target, draft)) == rounds
    assert not torch.equal(texts[0], texts[1])


def test_arguments_that_no_key_can_hold_keep_the_tempo_dynamic(fresh_reports):
    """Catches a recording that holds somebody's object, whose content may change."""
    target = shifting(table_target(11))
    inputs = {"inputs": PROMPT, "max_new_tokens": 12, "do_sample": False, "shifts": {"by": 2}}
    drafted = target.generate(assistant_model=table_drafter(target), cache_implementation="static", **inputs)
    assert torch.equal(drafted, target.generate(**inputs))
    assert any("not staged: shifts" in record.getMessage() for record in fresh_reports.records)


@pytest.mark.parametrize("freed", ["target", "drafter"])
def test_rounds_go_with_either_model(freed):
    """Catches buffers that keep a model alive, or that a model leaves behind."""
    target = table_target(7)
    draft = table_drafter(target)
    static(target, draft, inputs=PROMPT, max_new_tokens=5, do_sample=False)
    (round_,) = map(weakref.ref, static_round.kept_rounds(target, draft))
    model = weakref.ref(target if freed == "target" else draft)
    assert round_() is not None
    if freed == "target":
        del target
    else:
        del draft
    gc.collect()
    assert model() is None
    assert round_() is None


def test_an_exception_frees_the_round():
    """Catches a round that stays taken, hooks that stay on, and an attention function that is not put back."""
    target, draft = table_target(3), half_right(table_target(3))
    implementation = target.config._attn_implementation

    class Stop(Exception):
        pass

    class Streamer:
        def __init__(self):
            self.calls = 0

        def put(self, value):
            self.calls += 1
            if self.calls == 6:
                raise Stop

        def end(self):
            pass

    hooks = hook_count(target, draft)
    with pytest.raises(Stop):
        static(target, draft, inputs=PROMPT, max_new_tokens=20, do_sample=False, streamer=Streamer())
    assert hook_count(target, draft) == hooks
    assert target.config._attn_implementation == implementation
    assert not any(kept.in_use for kept in static_round.kept_rounds(target, draft))
    inputs = {"inputs": PROMPT, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(static(target, draft, **inputs), target.generate(**inputs))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
    ],
    ids=["hidden-states"],
)
def test_falls_back_with_one_reason(options, word, fresh_reports):
    """Catches a request for the static tempo that is dropped without a word, or crashes."""
    inputs = {"inputs": PROMPT, "max_new_tokens": 9, "do_sample": False, **options}
    expected = t0().generate(**inputs)
    for _ in range(2):
        drafted = t0().generate(**inputs, assistant_model=d0(), cache_implementation="static")
        assert torch.equal(drafted.sequences, expected.sequences)
    assert sum(word in record.getMessage() for record in fresh_reports.records) == 1


def test_the_hosts_own_recording_hooks_do_not_matter():
    """Catches a target that is never fast again once hidden states were asked for."""
    target = table_target(5)
    inputs = {"inputs": PROMPT, "max_new_tokens": 9, "do_sample": False}
    target.generate(**inputs, return_dict_in_generate=True, output_hidden_states=True)
    assert torch.equal(static(target, table_drafter(target), **inputs), target.generate(**inputs))


@pytest.mark.parametrize(
    ("register", "reason"),
    [
        pytest.param(lambda norm, hook: norm.register_forward_hook(hook), "has forward hooks", id="of-the-target"),
        pytest.param(
            lambda norm, hook: torch.nn.modules.module.register_module_forward_hook(
                lambda module, *args: hook(module, *args) if module is norm else None
            ),
            "hooks are registered for all modules",
            id="of-all-modules",
        ),
    ],
)
def test_hooks_of_the_caller_keep_the_tempo_dynamic(register, reason, fresh_reports):
    """Catches a graph that would skip a hook which the caller has put on the target, or on every module."""
    target = table_target(4)
    draft, seen = table_drafter(target), []
    handle = register(target.model.norm, lambda *args: seen.append(args[2].shape[1]))
    try:
        target.generate(
            PROMPT, assistant_model=draft, cache_implementation="static", max_new_tokens=9, do_sample=False
        )
    finally:
        handle.remove()
    assert len(seen) > 1
    assert any(reason in record.getMessage() for record in fresh_reports.records)


@pytest.mark.parametrize("drafter", ["sure-and-wrong", "spread-out"])
def test_joint_law_of_three_tokens(drafter, monkeypatch, law="repetition"):
    """Catches a q of another temperature than the one staged, where processors run outside of a recording."""
    # The reference of attention reads whole buffers.
    monkeypatch.setattr(static_decoding, "MIN_CAPACITY", 32)
    draft = DRAFTERS[drafter]()
    torch.manual_seed(11)
    counts = torch.zeros(LAW_VOCAB**3)
    places = LAW_VOCAB ** torch.arange(2, -1, -1)
    prompt = torch.tensor([LAW_PROMPT]).expand(BATCH, -1)
    for _ in range(max(1, 4_000 // BATCH)):
        out = static(law_target(), draft, inputs=prompt, do_sample=True, max_new_tokens=4, **LAWS[law][0])
        new = out[:, len(LAW_PROMPT) : len(LAW_PROMPT) + 3]
        counts += torch.bincount((new * places).sum(-1), minlength=LAW_VOCAB**3)
    assert chi_square_p_value(counts.double(), joint_law(law)) >= SMALLEST_P_VALUE


def test_seeds_repeat():
    """Catches draws that do not follow the host's seed."""
    inputs = {**left_pad(BATCHES["padded"]), "max_new_tokens": 20, "do_sample": True, "temperature": 3.0}
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(static(t0(), d1(), **inputs))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])

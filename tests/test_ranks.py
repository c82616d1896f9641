# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""Targets under the host's tensor parallelism, on two processes: one text, and nobody waits for ever."""

import multiprocessing

import pytest
import torch
from generation_checks import PROMPT, SMALLEST_P_VALUE, chi_square_p_value
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.distributed import DistributedConfig
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from two_ranks import run_on_two_ranks

from transformers_dflash2.candidate_generator import host_assisted_loop
from transformers_dflash2.quantization import ShardedHeadProjection
from transformers_dflash2.target import TargetAdapter
from transformers_dflash2.testing import cycle_table, draft_config, table_drafter, table_target, walk_table


pytestmark = pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods() or not torch.distributed.is_available(),
    reason="needs os.fork and torch.distributed",
)

# Without GPUs, or on two of them.
over_backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            "gloo", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the host shards on GPUs here")
        ),
        pytest.param(
            "nccl",
            marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")],
        ),
    ],
)

VOCAB = 32
CYCLE = cycle_table(VOCAB, 0, length=VOCAB - 1, start=3)
UNUSED = next(token for token in range(VOCAB) if token not in walk_table(CYCLE, 3, VOCAB - 1))
# Rows of a head whose second half, or the most of it, is padding: fewer real rows there than candidates.
PADDED = {"none": 0, "most-of-a-rank": 24, "a-whole-rank": 32}
# The sampled case: draws, their temperature, and a vocabulary of which every continuation can be counted.
DRAWS, TEMPERATURE, FEW = 2_000, 0.8, 8


def dense_target(padding=0, **kwargs):
    target = table_target(0, VOCAB, table=CYCLE, mix=0.01, num_hidden_layers=2, **kwargs)
    if padding:
        target.resize_token_embeddings(VOCAB + padding, mean_resizing=False)
        garbage = torch.zeros(padding, target.config.hidden_size)
        garbage[:, UNUSED] = 5.0
        target.get_output_embeddings().weight.data[VOCAB:] = garbage
        target.config.unpadded_vocab_size = VOCAB
    return target


def drafter():
    return table_drafter(dense_target(), CYCLE, mask_token_id=UNUSED, target_layer_ids=[0, 1])


def load_sharded(folder, draft):
    """The target, and the drafter on the same device."""
    target = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto", tp_size=2)
    )
    return target, draft.to(target.device)


def candidates(target, draft):
    """What the drafter would choose from, given fixed final rows."""
    adapter = TargetAdapter(target, draft.config)
    with torch.no_grad():
        hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).to(target.device)
        logits = adapter.logits(hidden, torch.float32)
        unary, ids = adapter.projection.select(logits, top_k=20)
    return type(adapter.projection), logits.shape[-1], unary.cpu(), ids.cpu()


def generate(target, draft, prompt=PROMPT, new_tokens=20, **options):
    options = {"do_sample": False, "max_new_tokens": new_tokens, **options}
    return target.generate(prompt.to(target.device), assistant_model=draft, **options).cpu()


# Cases run on every rank: `case(rank, folder)`.


def greedy_case(rank, folder):
    target, draft = load_sharded(folder, drafter())
    kind, rows, unary, ids = candidates(target, draft)
    text = generate(target, draft)
    stats = draft.last_stats
    # A processor that looks at the prefix goes token by token, in a batch row by row.
    penalised = generate(target, draft, torch.tensor([[3, 7, 1], [4, 9, 2]]), 10, repetition_penalty=1.3)
    host_text = text
    # The host's own loop compares vocabulary sizes, padding included.
    if target.config.vocab_size == VOCAB:
        with host_assisted_loop(target, draft):
            host_text = generate(target, draft)
    return kind.__name__, rows, unary, ids, text, stats.mean_accepted_length, penalised, host_text


@over_backends
@pytest.mark.parametrize("padding", PADDED.values(), ids=PADDED)
def test_two_ranks_write_the_text_of_one(backend, padding, tmp_path):
    """Catches candidates that differ from the unsharded ones, and padded rows that only one rank holds."""
    whole, draft = dense_target(padding), drafter()
    whole.save_pretrained(tmp_path)
    _, _, unary, ids = candidates(whole, draft)
    text, penalised = (
        generate(whole, draft),
        generate(whole, draft, torch.tensor([[3, 7, 1], [4, 9, 2]]), 10, repetition_penalty=1.3),
    )
    results = run_on_two_ranks(backend, greedy_case, tmp_path)
    assert [kind for kind, _ in results] == ["returned"] * 2, results
    for _, answer in results:
        projection, rows, sharded_unary, sharded_ids, sharded_text, accepted, sharded_penalised, host_text = answer
        assert projection == ShardedHeadProjection.__name__ and rows == (VOCAB + padding) // 2
        assert torch.equal(sharded_ids, ids)
        torch.testing.assert_close(sharded_unary, unary)
        assert torch.equal(sharded_text, text) and accepted > 4
        assert torch.equal(sharded_penalised, penalised) and torch.equal(host_text, text)


def sampled_case(rank, folder):
    # Every rank has random numbers of its own.
    torch.manual_seed(rank)
    target, draft = load_sharded(folder, flat_drafter())
    prompts = torch.tensor([[3, 6]]).expand(DRAWS, -1)
    return generate(target, draft, prompts, 3, do_sample=True, temperature=TEMPERATURE, top_k=0), draft.last_stats


def embedding_case(rank, folder):
    target, _ = load_sharded(folder, drafter())
    adapter = TargetAdapter(target, draft_config(target, target_layer_ids=[0, 1]))
    with torch.no_grad():
        return adapter.embed(torch.arange(VOCAB, device=target.device)[None]).cpu()


@over_backends
def test_raw_rows_of_a_sharded_embedding(backend, tmp_path):
    """Catches raw rows, of an embedding that scales what it returns, looked up in one rank's shard."""
    whole = table_target(0, VOCAB, num_hidden_layers=2, model_type="gemma3_text")
    whole.save_pretrained(tmp_path)
    for kind, rows in run_on_two_ranks(backend, embedding_case, tmp_path):
        assert kind == "returned", rows
        assert torch.equal(rows[0], whole.get_input_embeddings().weight)


def flat_target():
    return table_target(1, FEW, mix=0.15, logit_scale=0.35, num_hidden_layers=2)


def flat_drafter():
    return table_drafter(flat_target(), sharpness=1.5, target_layer_ids=[0, 1])


@over_backends
def test_two_ranks_draw_one_text_of_the_right_law(backend, tmp_path):
    """Catches ranks that draw, accept or replace tokens each with their own random numbers."""
    whole = flat_target()
    whole.save_pretrained(tmp_path)
    prefixes, law = torch.tensor([[3, 6]]), torch.ones(1, dtype=torch.float64)
    for _ in range(2):
        with torch.no_grad():
            probs = (whole(prefixes).logits[:, -1] / TEMPERATURE).softmax(-1)
        law = (law[:, None] * probs.double()).flatten()
        prefixes = torch.cat([prefixes.repeat_interleave(FEW, 0), torch.arange(FEW).repeat(len(prefixes))[:, None]], 1)
    results = run_on_two_ranks(backend, sampled_case, tmp_path)
    assert [kind for kind, _ in results] == ["returned"] * 2, results
    (_, (text, stats)), (_, (other, other_stats)) = results
    assert torch.equal(text, other) and stats == other_stats and stats.accepted > 0
    counts = torch.bincount(text[:, 2] * FEW + text[:, 3], minlength=FEW**2).double()
    assert chi_square_p_value(counts, law) >= SMALLEST_P_VALUE


class Raises:
    """Counts calls and raises at the third."""

    calls = 0

    def count(self):
        self.calls += 1
        if self.calls == 3:
            raise LookupError("the third call")


class RaisingProcessor(LogitsProcessor, Raises):
    def __call__(self, input_ids, scores):
        self.count()
        return scores


class RaisingStreamer(BaseStreamer, Raises):
    def put(self, value):
        self.count()

    def end(self):
        """Nothing to end."""


def failing_case(rank, folder, where, ranks):
    target, draft = load_sharded(folder, drafter())
    options = {}
    if rank in ranks and where == "streamer":
        options["streamer"] = RaisingStreamer()
    elif rank in ranks and where == "processor":
        options["logits_processor"] = LogitsProcessorList([RaisingProcessor()])
    elif where == "processor":
        # A processor of one rank alone would send that rank another way.
        options["logits_processor"] = LogitsProcessorList([QuietProcessor()])
    elif rank in ranks:
        trap, score = Raises(), ShardedHeadProjection.score
        ShardedHeadProjection.score = lambda self, hidden: (trap.count(), score(self, hidden))[1]
    return generate(target, draft, **options)


class QuietProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@over_backends
@pytest.mark.parametrize(
    ("where", "ranks"),
    [("streamer", [0]), ("streamer", [1]), ("processor", [0]), ("head", [0]), ("head", [1]), ("head", [0, 1])],
    ids=str,
)
def test_no_rank_waits_for_one_that_raised(backend, where, ranks, tmp_path):
    """Catches a collective that the others of a failed rank wait in, and an error that is lost."""
    dense_target(24).save_pretrained(tmp_path)
    for rank, result in enumerate(run_on_two_ranks(backend, failing_case, tmp_path, where, ranks)):
        if rank in ranks:
            assert result == ("raised", "LookupError: the third call")
        else:
            assert result[0] == "raised" and result[1].startswith("PeerFailedError: Another rank")


def late_case(rank, folder):
    target, draft = load_sharded(folder, drafter())
    # The time of rank 0 is up at once, that of rank 1 never.
    rules = StoppingCriteriaList([MaxTimeCriteria(max_time=1e-9 if rank == 0 else 1e9)])
    return generate(target, draft, stopping_criteria=rules)


@over_backends
def test_ranks_stop_together(backend, tmp_path):
    """Catches a stopping rule whose outcome differs from rank to rank, of which the slower ones never hear."""
    dense_target().save_pretrained(tmp_path)
    results = run_on_two_ranks(backend, late_case, tmp_path)
    assert [kind for kind, _ in results] == ["returned"] * 2, results
    assert results[0][1].shape == (1, 4) and torch.equal(results[0][1], results[1][1])

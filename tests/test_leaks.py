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
"""What a call leaves behind: nothing, also when it is interrupted."""

import gc
import logging

import pytest
import torch
from generation_checks import (
    PROMPT,
    assert_hooks_unchanged,
    cache_kwargs,
    d0,
    d1,
    decoder_layers,
    first_turn_cache,
    module_count,
    t0,
)
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from transformers_dflash2.testing import left_pad, random_drafter, table_drafter, table_target


ROWS = [[3, 7, 1], [4, 9, 2, 6, 5], [8, 1, 12, 3, 3, 7, 20, 11, 2]]


def live_objects():
    """Number of objects and of tensors the garbage collector knows, and bytes of the tensors' storages."""
    gc.collect()
    objects = gc.get_objects()
    # A compiler that ran in this process keeps tensors without memory.
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [candidate for candidate in objects if type(candidate) in kinds]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(objects), len(tensors), sum(storages.values())


@pytest.mark.parametrize("calls", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_calls_leave_nothing_behind(calls, monkeypatch):
    """Catches hooks, modules, tensors or other objects that pile up from call to call."""
    # pytest keeps every record that is logged.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    target, table, random = t0(), d0(), d1()
    batch = left_pad(ROWS)
    variants = [
        {"input_ids": PROMPT},
        {**batch, "eos_token_id": 3},
        {"input_ids": PROMPT, "do_sample": True},
        {**batch, "return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True},
        {"input_ids": PROMPT, "repetition_penalty": 1.3, "prefill_chunk_size": 2},
        {"input_ids": PROMPT, "num_assistant_tokens": 3, "num_return_sequences": 2, "do_sample": True},
    ]

    def run(index):
        target.generate(
            assistant_model=(table, random)[index % 2],
            max_new_tokens=5,
            **{"do_sample": False, **variants[index % len(variants)]},
        )

    for index in range(2 * len(variants)):
        run(index)
    live_objects()
    with assert_hooks_unchanged(target, table, random):
        modules, generate = module_count(target, table, random), GenerationMixin.generate
        objects, tensors, size = live_objects()
        for index in range(calls):
            run(index)
        assert module_count(target, table, random) == modules and GenerationMixin.generate is generate
        # The last figures of each drafter are all that stays; the interpreter's own caches may grow by a few objects.
        objects_after, tensors_after, size_after = live_objects()
        assert tensors_after <= tensors and size_after <= size
        assert objects_after - objects < max(50, calls // 10)


def test_target_and_drafter_can_be_collected():
    """Catches a global table that keeps models alive."""
    import weakref

    target = table_target(0)
    draft = table_drafter(target)
    target.generate(PROMPT, assistant_model=draft, max_new_tokens=9, do_sample=False)
    references = [weakref.ref(target), weakref.ref(draft), weakref.ref(decoder_layers(target)[0])]
    del target, draft
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


class Planned(Exception):
    pass


class FailingStreamer(BaseStreamer):
    def __init__(self, error, after):
        self.error, self.left = error, after

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise self.error

    def end(self):
        pass


class FailingProcessor(LogitsProcessor):
    def __init__(self, error, after):
        self.error, self.left = error, after

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores


class FailingCriterion(StoppingCriteria):
    def __init__(self, error, after):
        self.error, self.left = error, after

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def failing_layer(target, error, after):
    left = [after]

    def hook(module, args):
        left[0] -= 1
        if left[0] < 0:
            raise error

    return decoder_layers(target)[2].register_forward_pre_hook(hook)


@pytest.mark.parametrize("after", [0, 1, 6])
@pytest.mark.parametrize("error", [Planned, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["streamer", "processor", "criterion", "target", "drafter"])
def test_errors_leave_target_and_drafter_as_they_were(where, error, after):
    """Catches hooks, an unfinished recording or a half-written state that a failed call leaves to the next one."""
    target, draft = table_target(0), random_drafter(table_target(0))
    expected = target.generate(PROMPT, max_new_tokens=30, do_sample=False)
    options, handle = {}, None
    if where == "streamer":
        options["streamer"] = FailingStreamer(error(), after)
    elif where == "processor":
        options["logits_processor"] = LogitsProcessorList([FailingProcessor(error(), after)])
    elif where == "criterion":
        options["stopping_criteria"] = StoppingCriteriaList([FailingCriterion(error(), after)])
    before = [target.config.to_dict(), target.generation_config.to_dict(), draft.config.to_dict()]
    attributes = [set(vars(target)), set(vars(draft))]
    with assert_hooks_unchanged(target, draft):
        if where == "target":
            handle = failing_layer(target, error(), after)
        elif where == "drafter":
            handle = draft.layers[1].register_forward_pre_hook(
                lambda module, args, left=[after]: left.append(left.pop() - 1) or fail_below_zero(left[0], error())
            )
        with pytest.raises(error):
            target.generate(PROMPT, assistant_model=draft, max_new_tokens=30, do_sample=False, **options)
        if handle is not None:
            handle.remove()
    assert [target.config.to_dict(), target.generation_config.to_dict(), draft.config.to_dict()] == before
    assert [set(vars(target)), set(vars(draft))] == attributes
    assert torch.equal(target.generate(PROMPT, max_new_tokens=30, do_sample=False), expected)
    drafted = target.generate(PROMPT, assistant_model=draft, max_new_tokens=30, do_sample=False)
    assert torch.equal(drafted, expected)


def fail_below_zero(left, error):
    if left < 0:
        raise error


def test_error_with_a_kept_cache_leaves_it_without_recording():
    """Catches a caller's cache that goes on keeping what a crop should drop."""
    target, draft = table_target(0, model_type="mistral", sliding_window=6), None
    draft = table_drafter(target)
    text, cache = first_turn_cache(target)
    recording = [getattr(layer, "record_past", None) for layer in cache.layers]
    with pytest.raises(Planned):
        target.generate(
            torch.cat([text, torch.tensor([[9, 4]])], dim=1),
            assistant_model=draft,
            max_new_tokens=30,
            do_sample=False,
            streamer=FailingStreamer(Planned(), 5),
            **cache_kwargs(cache),
        )
    assert [getattr(layer, "record_past", None) for layer in cache.layers] == recording


def test_figures_survive_an_error():
    """Catches figures of a failed call that are taken for those of a finished one."""
    target, draft = t0(), table_drafter(t0())
    target.generate(PROMPT, assistant_model=draft, max_new_tokens=30, do_sample=False)
    good = draft.last_stats
    with pytest.raises(Planned):
        target.generate(
            PROMPT,
            assistant_model=draft,
            max_new_tokens=30,
            do_sample=False,
            streamer=FailingStreamer(Planned(), 5),
        )
    assert draft.last_stats is good or draft.last_stats is None or draft.last_stats.new_tokens < 30

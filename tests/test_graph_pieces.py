# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""Graphs with gaps, on a device made up for the purpose: launches are noted while a graph is captured, else done."""

import logging
import threading

import pytest
import torch
from torch import nn

from transformers_dflash2 import graph_pieces
from transformers_dflash2.graph_pieces import PieceRecorder, capture_failure


class Device:
    """Stands in for a GPU: what is launched runs at once, or when the graph that is being captured is replayed."""

    def __init__(self):
        self.capturing = None
        self.graphs = []

    def launch(self, work):
        if self.capturing is None:
            work()
        else:
            self.capturing.work.append(work)

    def new_graph(self):
        self.graphs.append(Graph(self))
        return self.graphs[-1]


class Graph:
    def __init__(self, device):
        self.device, self.work, self.pool = device, [], None

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert self.device.capturing is None, "two captures at once"
        self.device.capturing, self.pool = self, pool

    def capture_end(self):
        assert self.device.capturing is self
        self.device.capturing = None

    def replay(self):
        assert self.device.capturing is None
        for work in self.work:
            work()


class Scale(nn.Module):
    """A head: triples its input. One that synchronises breaks any capture."""

    def __init__(self, device, synchronises):
        super().__init__()
        self.device, self.synchronises, self.calls = device, synchronises, 0

    def forward(self, inputs):
        self.calls += 1
        if self.synchronises and self.device.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        output = torch.empty_like(inputs)
        self.device.launch(lambda: output.copy_(inputs * 3))
        return output


class Work:
    """A draft and a verify, each with a call of the head: `result = 3 * (3 * (start + 1) - 1)`."""

    def __init__(self, device, head):
        self.device, self.head = device, head
        self.start, self.result = torch.zeros(2, 2), torch.zeros(2, 2)

    def __call__(self):
        hidden, following = torch.empty(2, 2), torch.empty(2, 2)
        self.device.launch(lambda: hidden.copy_(self.start + 1))
        drafted = self.head(hidden)
        self.device.launch(lambda: following.copy_(drafted - 1))
        verified = self.head(following)
        self.device.launch(lambda: self.result.copy_(verified))

    def expected(self):
        return 3 * (3 * (self.start + 1) - 1)


@pytest.mark.parametrize("synchronises", [False, True], ids=["folded", "left-out"])
def test_replay_does_the_work_on_what_its_tensors_hold(synchronises):
    """Catches a step that reads or writes other tensors than the graphs around it, or runs at the wrong time."""
    device = Device()
    work = Work(device, Scale(device, synchronises))
    outside = [work.head] if synchronises else []
    graph = PieceRecorder(device.new_graph, pool="shared").record(work, outside)
    assert len(graph.pieces) == (5 if synchronises else 1)
    assert {made.pool for made in device.graphs} == {"shared"}
    assert (work.result == 0).all(), "nothing but the modules left out runs while recording"
    for start in (2.0, -7.0):
        work.start.fill_(start)
        graph.replay()
        assert torch.equal(work.result, work.expected())
    assert "forward" not in vars(work.head)


def test_forward_of_the_instance_is_put_back():
    """Catches a replaced forward that stays, or that takes the place of one a library has set on the instance."""
    device = Device()
    head = Scale(device, True)
    own = head.forward = lambda inputs: Scale.forward(head, inputs)
    PieceRecorder(device.new_graph).record(Work(device, head), [head])
    assert vars(head)["forward"] is own


def test_a_capture_that_fails_is_closed():
    """Catches a device that is left capturing, and a failure of closing that hides the failure itself."""
    device = Device()
    work = Work(device, Scale(device, True))
    with pytest.raises(RuntimeError, match="not permitted"):
        PieceRecorder(device.new_graph).record(work)
    assert device.capturing is None


@pytest.mark.parametrize("synchronises", [False, True], ids=["capturable", "not-capturable"])
def test_capture_is_tried_once_and_its_outcome_remembered(synchronises, caplog):
    """Catches a try per round, and a head that leaves the graph without a word."""
    caplog.set_level(logging.WARNING, logger="transformers_dflash2")
    device = Device()
    head = Scale(device, synchronises)
    outcomes = [capture_failure(head, torch.ones(2, 2), device.new_graph) for _ in range(3)]
    assert outcomes == ["operation not permitted when stream is capturing" if synchronises else None] * 3
    # A warm-up and a try.
    assert head.calls == 2
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == synchronises
    assert all("Scale cannot be captured" in message and "not permitted" in message for message in messages)


def test_outcomes_go_with_their_modules():
    """Catches heads that are kept alive by what is known about them."""
    device = Device()
    before = len(graph_pieces._capture_failures)
    head = Scale(device, False)
    capture_failure(head, torch.ones(2, 2), device.new_graph)
    assert len(graph_pieces._capture_failures) == before + 1
    device.graphs.clear()
    del head
    assert len(graph_pieces._capture_failures) == before


def test_other_threads_call_what_is_left_out_as_it_is():
    """Catches a call of another thread that becomes a step between this thread's graphs."""
    device = Device()
    head = Scale(device, synchronises=False)
    answers = []

    def work():
        thread = threading.Thread(target=lambda: answers.append(head.forward(torch.ones(2, 2))))
        thread.start()
        thread.join()

    graph = PieceRecorder(device.new_graph).record(work, [head])
    assert len(graph.pieces) == 1 and len(answers) == head.calls == 1

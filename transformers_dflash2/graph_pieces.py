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
"""Graphs with gaps: everything is captured but the modules that cannot be.

Some layers of quantisation libraries synchronise, or allocate on their own, and a CUDA graph takes neither. One such
layer, an output head for instance, is no reason to launch thousands of other kernels one by one. Where the recorded
work calls a module that is left out, the graph so far is closed, the module's call is noted as a step between graphs,
and the next graph begins. Replaying goes through graphs and steps in turn; what passes between them lies in tensors
that keep their addresses.
"""

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn


logger = logging.getLogger("transformers_dflash2")

# Why a module cannot be captured, `None` if it can. One try is enough: it costs a warm-up, and failing it is not free.
_capture_failures: "weakref.WeakKeyDictionary[nn.Module, str | None]" = weakref.WeakKeyDictionary()


class PiecewiseGraph:
    """
    Captured work in pieces.

    Args:
        pieces (`list[Callable]`): Replays of graphs and calls of what was left out, in order.
    """

    def __init__(self, pieces: list[Callable[[], Any]]):
        self.pieces = pieces

    def replay(self) -> None:
        """Do the work again, on what the tensors it was captured with hold now."""
        for piece in self.pieces:
            piece()


class PieceRecorder:
    """
    Records one call.

    Args:
        new_graph (`Callable`): Makes a graph with the methods of [`torch.cuda.CUDAGraph`].
        pool (*optional*): Memory that all graphs of the recording share. They are replayed in the order in which they
            were recorded, so one may use what an earlier one has freed.
    """

    def __init__(self, new_graph: Callable[[], Any], pool=None):
        self._new_graph, self._pool = new_graph, pool
        self._graph: Any = None
        self._pieces: list[Callable[[], Any]] = []

    def record(self, call: Callable[[], Any], outside: Sequence[nn.Module] = ()) -> PiecewiseGraph:
        """
        Args:
            call (`Callable`): The work. It is run once, to no effect but that of the modules left out.
            outside (`Sequence[nn.Module]`): Modules of one input and one output that are left out.
        """
        with ExitStack() as stack:
            for module in outside:
                stack.enter_context(_forward_replaced(module, self._leave_out))
            self._begin()
            try:
                call()
            except BaseException:
                # What is wrong with the capture is what the call has raised.
                with suppress(RuntimeError):
                    self._graph.capture_end()
                raise
            self._end()
        return PiecewiseGraph(self._pieces)

    def _begin(self) -> None:
        self._graph = self._new_graph()
        # Other threads may allocate, wait for the device and draw random numbers meanwhile.
        with _generator_left_out():
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        self._graph.capture_end()
        self._pieces.append(self._graph.replay)

    def _leave_out(self, forward: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        self._end()
        # The graph that makes `inputs` was not run, so that this result has the right shape and nothing else. Both
        # tensors live as long as the step does.
        output = forward(inputs).clone()
        self._pieces.append(lambda: output.copy_(forward(inputs)))
        self._begin()
        return output


@contextmanager
def _forward_replaced(module: nn.Module, replacement: Callable) -> Iterator[None]:
    own, forward, recording = vars(module).get("forward"), module.forward, threading.get_ident()

    def replaced(inputs: torch.Tensor) -> torch.Tensor:
        # Another thread may run the same model meanwhile.
        return replacement(forward, inputs) if threading.get_ident() == recording else forward(inputs)

    module.forward = replaced
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def capture_failure(module: nn.Module, inputs: torch.Tensor, new_graph: Callable[[], Any]) -> str | None:
    """
    Why a module's forward cannot be captured, `None` if it can. Tried once per module; a failure is logged.

    Args:
        module (`nn.Module`): A module of one input.
        inputs (`torch.Tensor`): An input as the module will get them.
        new_graph (`Callable`): As for [`PieceRecorder`].
    """
    if module not in _capture_failures:
        # What a first call sets up does not belong into a graph.
        module(inputs)
        try:
            PieceRecorder(new_graph).record(lambda: module(inputs))
            _capture_failures[module] = None
        except RuntimeError as error:
            _capture_failures[module] = str(error).splitlines()[0]
            logger.warning(
                "%s cannot be captured in a CUDA graph (%s); it runs between graphs.",
                type(module).__name__,
                _capture_failures[module],
            )
    return _capture_failures[module]


@contextmanager
def _generator_left_out() -> Iterator[None]:
    """
    Let a capture that begins in this context take a copy of the device's generator.

    A generator that takes part in a capture refuses draws outside of it: those of other threads, and for ever those of
    everybody after a capture that broke off. What is recorded here draws nothing.
    """
    if not torch.cuda.is_available():
        yield
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


def record_on_cuda(
    call: Callable[[], Any], head: nn.Module | None = None, head_inputs: torch.Tensor | None = None
) -> PiecewiseGraph:
    """
    Record work, with the head that it calls in the graph if that can be captured and between graphs if not.

    Args:
        call (`Callable`): Work on tensors that keep their addresses. It has been run before.
        head (`nn.Module`, *optional*): The target's output head, if the work calls it.
        head_inputs (`torch.Tensor`, *optional*): An input of the head.

    Raises:
        `RuntimeError`: Something else in the work cannot be captured.
    """
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        failure = None if head is None else capture_failure(head, head_inputs, torch.cuda.CUDAGraph)
        recorder = PieceRecorder(torch.cuda.CUDAGraph, torch.cuda.graph_pool_handle())
        graph = recorder.record(call, outside=[] if failure is None else [head])
    current.wait_stream(stream)
    return graph


__all__ = ["PieceRecorder", "PiecewiseGraph", "capture_failure", "record_on_cuda"]

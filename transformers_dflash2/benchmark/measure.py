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
"""Clocks, bytes, memory, and what a record must say about the machine."""

import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


_PACKAGES = ("torch", "transformers", "transformers_dflash2", "triton", "flashinfer-python", "dflash")


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall time of one call, the device's work included, and what the call returned."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result


def seconds_replayed(call: Callable[[], Any], device: torch.device, *, repeats: int = 20) -> float:
    """
    Median time of a call that launches device work: on CUDA as a replayed graph, elsewhere as it is.

    Args:
        call (`Callable`): Must launch the same work on the same buffers each time.
        device (`torch.device`): Where the work runs.
        repeats (`int`, *optional*, defaults to 20): Timed calls.
    """
    if device.type != "cuda":
        call()
        return statistics.median(seconds(call, device)[0] for _ in range(repeats))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def copy_rate(device: torch.device) -> float:
    """
    Bytes per second that a kernel reads and writes as it goes once through memory, in tensors larger than the caches.

    The kernel adds a number. A plain copy becomes a node of the copy engine in a CUDA graph, which is slower: on an
    H200 it reads 2.76 TB/s where kernels reach 4.25. It takes 8 GiB of a CUDA device's memory, so call it before the
    models are built.
    """
    source = torch.zeros(2**30 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    spent = seconds_replayed(lambda: torch.add(source, 1, out=target), device, repeats=10)
    return 2 * source.nbytes / spent


def _weight_bytes(model: torch.nn.Module, left_out: tuple[torch.Tensor, ...] = ()) -> int:
    skipped = {id(tensor) for tensor in left_out}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in skipped)


def _context_bytes(model: torch.nn.Module, config: Any, tokens: int, rows: int) -> int:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attending = [kind for kind in kinds if kind != "linear_attention"]
    window = getattr(config, "sliding_window", None)
    visible = sum(min(tokens, window) if window and kind == "sliding_attention" else tokens for kind in attending)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    entries = 2 * visible * config.num_key_value_heads * head_dim * model.dtype.itemsize
    recurrent = len(kinds) - len(attending)
    return rows * (entries + (recurrent * _state_bytes(model, config) if recurrent else 0))


def _state_bytes(model: torch.nn.Module, config: Any) -> int:
    """Of one row in one layer of linear attention: its state and its convolution's window, read and written."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    window = (2 * keys + values) * config.linear_conv_kernel_dim * model.dtype.itemsize
    return 2 * (values * config.linear_key_head_dim * torch.float32.itemsize + window)


def pass_bytes(target, *, tokens: int, rows: int) -> int:
    """
    Least bytes that one pass of a target moves: its weights once, and per row the keys and values of `tokens` and the
    states of linear attention, which are fp32.

    Embedding rows are gathered, not read as a whole; a tied table is read as the head.
    """
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    skipped = () if head is embedding else (embedding,)
    config = target.config.get_text_config(decoder=True)
    return _weight_bytes(target, skipped) + _context_bytes(target, config, tokens, rows)


def round_bytes(target, draft, *, tokens: int, rows: int) -> int:
    """Least bytes of one draft-and-verify round: both models, the head a second time, and both contexts."""
    # A few rows are gathered of the codebooks, and of the Markov head's first table.
    gathered = tuple(
        value for name, value in draft.named_parameters() if "codebook" in name or name.endswith("markov_w1.weight")
    )
    markov = getattr(draft, "markov_head", None)
    # Each slot goes through the second one, and waits for the token before.
    again = 0 if markov is None else (draft.config.speculative_tokens - 1) * _weight_bytes(markov.markov_w2)
    return (
        pass_bytes(target, tokens=tokens, rows=rows)
        + _weight_bytes(draft, gathered)
        + again
        + _weight_bytes(target.get_output_embeddings())
        + _context_bytes(draft, draft.config, tokens, rows)
    )


def reset_peak_memory(device: torch.device) -> None:
    """Start a new reading of [`peak_memory`]; on the CPU the reading is that of the whole process."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Most bytes in use at a time, the models included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, commit, device and threads of this run."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            module = sys.modules.get(name)
            versions[name] = getattr(module, "__version__", None)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


__all__ = [
    "copy_rate",
    "environment",
    "pass_bytes",
    "peak_memory",
    "reset_peak_memory",
    "round_bytes",
    "seconds",
    "seconds_replayed",
    "synchronize",
]

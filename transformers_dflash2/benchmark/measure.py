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
    """Bytes per second that a copy within the device's memory reads and writes, larger than its caches."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**26, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    spent = seconds_replayed(lambda: target.copy_(source), device, repeats=10)
    return 2 * source.numel() / spent


def _weight_bytes(model: torch.nn.Module, left_out: tuple[torch.Tensor, ...] = ()) -> int:
    skipped = {id(tensor) for tensor in left_out}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in skipped)


def _context_bytes(model: torch.nn.Module, config: Any, tokens: int, rows: int) -> int:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    visible = sum(min(tokens, window) if window and kind == "sliding_attention" else tokens for kind in kinds)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * visible * rows * config.num_key_value_heads * head_dim * model.dtype.itemsize


def pass_bytes(target, *, tokens: int, rows: int) -> int:
    """
    Least bytes that one pass of a target moves: its weights once, and the keys and values of `tokens` per row.

    Embedding rows are gathered, not read as a whole; a tied table is read as the head.
    """
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    skipped = () if head is embedding else (embedding,)
    config = target.config.get_text_config(decoder=True)
    return _weight_bytes(target, skipped) + _context_bytes(target, config, tokens, rows)


def round_bytes(target, draft, *, tokens: int, rows: int) -> int:
    """Least bytes of one draft-and-verify round: both models, the head a second time, and both contexts."""
    # Of the codebooks a few rows are gathered.
    codebooks = tuple(value for name, value in draft.named_parameters() if "codebook" in name)
    return (
        pass_bytes(target, tokens=tokens, rows=rows)
        + _weight_bytes(draft, codebooks)
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

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
"""The record as a table, and as a picture."""

from typing import Any


_COLUMNS = (
    ("method", "method", "{}"),
    ("drafter", "drafter", "{}"),
    ("batch", "batch", "{}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("x plain", "over_plain", "{:.2f}"),
    ("tokens/pass", "tokens_per_pass", "{:.2f}"),
    ("ms/pass", "milliseconds_per_pass", "{:.2f}"),
    ("floor ms", "floor_milliseconds", "{:.2f}"),
    ("first s", "first_call_seconds", "{:.2f}"),
    ("GiB", "peak_gibibytes", "{:.2f}"),
    ("same", "identical_rows", "{}"),
)


def title(entry: dict[str, Any], *, with_batch: bool = True) -> str:
    """How a result or a list of phases is called in a line of its own."""
    parts = [entry["method"], entry["drafter"], f"batch {entry['batch']}" if with_batch else None]
    return ", ".join(part for part in parts if part is not None)


def table(record: dict[str, Any]) -> str:
    """A Markdown table of the methods, what kept the others out, and the phases of a static round."""
    rows = [[title for title, _, _ in _COLUMNS]]
    for result in record["results"]:
        if "skipped" not in result:
            rows.append(["" if result[key] is None else form.format(result[key]) for _, key, form in _COLUMNS])
    widths = [max(len(row[index]) for row in rows) for index in range(len(_COLUMNS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    for result in record["results"]:
        if "skipped" in result:
            lines.append(f"{title(result)}: left out, {result['skipped']}")
    for phases in record["phases"]:
        parts = ", ".join(f"{name} {value * 1e3:.3f}" for name, value in phases["seconds"].items())
        lines.append(f"{title(phases)}, ms of a round by phase: {parts}")
        for kernel in phases["kernels"]:
            lines.append(
                f"  {kernel['microseconds']:9.1f} us {kernel['launches']:6.1f} launches  {kernel['name'][:90]}"
            )
    return "\n".join(lines)


def plot(record: dict[str, Any], path: str) -> None:
    """
    Draw tokens per second by method and batch.

    Args:
        record (`dict`): What the benchmark measured.
        path (`str`): Where the picture goes; its suffix chooses the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [result for result in record["results"] if "skipped" not in result]
    batches = sorted({result["batch"] for result in results})
    figure, axes = pyplot.subplots(len(batches), 1, figsize=(8, 1 + 2 * len(batches)), squeeze=False)
    for axis, batch in zip(axes[:, 0], batches, strict=True):
        bars = [result for result in results if result["batch"] == batch]
        names = [title(bar, with_batch=False) for bar in bars]
        axis.barh(names, [bar["tokens_per_second"] for bar in bars], color="#3b6ea5")
        axis.invert_yaxis()
        axis.set_xlabel("tokens per second")
        axis.set_title(f"{record['workload']['name']}, batch {batch}, {record['environment']['device']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


__all__ = ["plot", "table", "title"]

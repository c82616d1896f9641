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
"""What quantised targets and heads cost: synthetic targets are quantised in memory and decode with a drafter.

    python benchmarks/quantized_rounds.py --shape qwen3-8b
    python benchmarks/quantized_rounds.py --shape tiny --device cpu --formats dense

| column | holds |
| --- | --- |
| head ms | the output head on seven rows: a replayed graph where its forward can be captured, else a call |
| head in graph | `yes`, or what keeps the head's forward out of a CUDA graph |
| round ms | commit, draft and verify, as replayed graphs; or a call's time per round, where none could be recorded |
| plain step ms | one token of the target alone, as a replayed graph; or plain decoding's time per token |
| read from | `one graph`; `graphs around the head`, whose plain step comes from calls; or `calls`, with the reason |
| GiB | most memory in use while decoding, both models included |
| tokens/round | what a round commits |
| same | whether the text is that of the same target without the drafter |

A format whose library or kernel is missing is listed with the reason. compressed-tensors unpacks its weights in the
first forward; `ct-fp8-kernel` is the host's own layer, which multiplies in float8.
"""

import argparse
import gc
import json
import logging
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from transformers_dflash2.benchmark import measure
from transformers_dflash2.benchmark.contestants import Workload
from transformers_dflash2.benchmark.phases import static_phases
from transformers_dflash2.benchmark.synthetic import SHAPES, random_prompts, synthetic_pair
from transformers_dflash2.graph_pieces import capture_failure
from transformers_dflash2.static_decoding import release_static_rounds
from transformers_dflash2.static_round import kept_rounds


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import compress


# Rows of the head's reading: the slots of a block of eight.
HEAD_ROWS = 7


def replace_linears(target: nn.Module, make: Callable[[nn.Linear], nn.Module], *, only_head: bool = False) -> None:
    """Put another layer in the place of each linear one, or of the head's only."""
    head = target.get_output_embeddings()
    linears = {name: module for name, module in target.named_modules() if isinstance(module, nn.Linear)}
    for name in [name for name, module in linears.items() if module is head or not only_head]:
        # One at a time, so that each frees the dense one.
        target.set_submodule(name, make(linears.pop(name)))


def nf4(linear: nn.Linear) -> nn.Module:
    import bitsandbytes

    options = {"bias": False, "compute_dtype": linear.weight.dtype, "quant_type": "nf4", "device": "meta"}
    layer = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, **options)
    # The library quantises what it moves away from the CPU's memory, or moves within it.
    dense = linear.weight.detach().cpu()
    weight = bitsandbytes.nn.Params4bit(dense, requires_grad=False, quant_type="nf4", module=layer)
    layer.weight = weight.to(linear.weight.device)
    return layer.eval()


def int8(linear: nn.Linear) -> nn.Module:
    import bitsandbytes

    options = {"bias": False, "has_fp16_weights": False, "threshold": 6.0, "device": "meta"}
    layer = bitsandbytes.nn.Linear8bitLt(linear.in_features, linear.out_features, **options)
    weight = bitsandbytes.nn.Int8Params(linear.weight.detach().cpu(), requires_grad=False, has_fp16_weights=False)
    layer.weight = weight.to(linear.weight.device)
    return layer.eval()


def fp8_kernel(target: nn.Module) -> None:
    from transformers.integrations.compressed_tensors import replace_with_compressed_tensors_fp8_linear

    weights = {name: module.weight for name, module in target.named_modules() if isinstance(module, nn.Linear)}
    with torch.device("meta"):
        replace_with_compressed_tensors_fp8_linear(target)
    for name in list(weights):
        weight, layer = weights.pop(name).detach().float(), target.get_submodule(name)
        scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        layer.weight = nn.Parameter((weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        layer.weight_scale = nn.Parameter(scale.T.contiguous(), requires_grad=False)


FORMATS: dict[str, Callable[[nn.Module], Any]] = {
    "dense": lambda target: None,
    "bnb-nf4": lambda target: replace_linears(target, nf4),
    "bnb-int8": lambda target: replace_linears(target, int8),
    "bnb-int8-head": lambda target: replace_linears(target, int8, only_head=True),
    "ct-fp8": lambda target: compress.quantise(target, "FP8_DYNAMIC"),
    "ct-w4a16": lambda target: compress.quantise(target, "W4A16"),
    "ct-fp8-kernel": fp8_kernel,
}


def free_memory(device: torch.device) -> None:
    """Give back what an earlier format held, and start a new reading of the peak."""
    release_static_rounds()
    gc.collect()
    measure.reset_peak_memory(device)


@torch.no_grad()
def measure_head(target) -> dict[str, Any]:
    head, device = target.get_output_embeddings(), target.device
    inputs = torch.randn(1, HEAD_ROWS, target.config.hidden_size, device=device, dtype=target.dtype)
    folded, spent = "no CUDA device", None
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            folded = capture_failure(head, inputs, torch.cuda.CUDAGraph) or "yes"
    if folded == "yes":
        spent = measure.seconds_replayed(lambda: head(inputs), device)
    else:
        head(inputs)
        spent = statistics.median(measure.seconds(lambda: head(inputs), device)[0] for _ in range(20))
    return {"head": type(head).__name__, "head_milliseconds": spent * 1e3, "head_in_graph": folded}


def measure_format(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one format."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pair = synthetic_pair(
        SHAPES[options.shape], mean_accepted_length=options.mean_accepted_length, dtype=dtype, device=device
    )
    target, draft = pair.target, pair.draft
    FORMATS[name](target)
    free_memory(device)
    inputs, tokens = random_prompts(pair, 1, options.context), options.new_tokens

    def decode(new_tokens: int, **drafting) -> torch.Tensor:
        return target.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **drafting)

    def per_token(**drafting) -> float:
        """Seconds of decoding per token, the prefill taken off."""
        long, short = (
            min(measure.seconds(lambda n=count: decode(n, **drafting), device)[0] for _ in range(options.repeats))
            for count in (tokens, 1)
        )
        return (long - short) / (tokens - 1)

    drafting = {"assistant_model": draft, "cache_implementation": "static"}
    expected = decode(tokens)
    drafted = decode(tokens, **drafting)
    tokens_per_round = draft.last_stats.mean_accepted_length
    row = {"format": name, **measure_head(target), "tokens_per_round": tokens_per_round}
    row["same"] = torch.equal(drafted, expected)
    row["peak_gibibytes"] = measure.peak_memory(device) / 2**30
    (round_,) = kept_rounds(target, draft)
    if round_.has_graph("round") and round_.capture_failure is None:
        # Nothing is committed, so that every repetition finds the same lengths.
        round_.counts.zero_()
        replays = (
            measure.seconds(lambda: round_.play("round", lambda: None, record=True), device)[0] for _ in range(20)
        )
        spent = statistics.median(replays)
        row["read_from"] = "one graph" if row["head_in_graph"] == "yes" else "graphs around the head"
    else:
        spent = per_token(**drafting) * tokens_per_round
        row["read_from"] = "calls" if round_.capture_failure is None else f"calls: {round_.capture_failure}"
    row["round_milliseconds"] = spent * 1e3
    if row["read_from"] == "one graph":
        step = static_phases(target, draft, Workload([inputs], tokens))["seconds"]["plain step"]
    else:
        step = per_token()
    row["plain_step_milliseconds"] = step * 1e3
    return row


COLUMNS = (
    ("format", "format", "{}"),
    ("head", "head", "{}"),
    ("head ms", "head_milliseconds", "{:.3f}"),
    ("head in graph", "head_in_graph", "{:.60}"),
    ("round ms", "round_milliseconds", "{:.2f}"),
    ("plain step ms", "plain_step_milliseconds", "{:.2f}"),
    ("read from", "read_from", "{:.60}"),
    ("GiB", "peak_gibibytes", "{:.2f}"),
    ("tokens/round", "tokens_per_round", "{:.2f}"),
    ("same", "same", "{}"),
)


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, and below it the formats that could not be measured."""
    lines = [[title for title, _, _ in COLUMNS], ["---"] * len(COLUMNS)]
    lines += [[form.format(row[key]) for _, key, form in COLUMNS] for row in rows if "failed" not in row]
    printed = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(printed + [f"{row['format']}: left out, {row['failed']}" for row in rows if "failed" in row])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=33, help="tokens to write (default: %(default)s)")
    parser.add_argument("--mean-accepted-length", type=float, default=4.0, help="tokens per round (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls; the fastest counts (%(default)s)")
    options = parser.parse_args(argv)
    if options.new_tokens < 2:
        parser.error(f"--new-tokens must be at least 2, got {options.new_tokens}: the prefill writes the first")
    # It logs a cast on every call of an 8-bit layer.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    rows = []
    for name in options.formats:
        free_memory(torch.device(options.device))
        try:
            rows.append(measure_format(name, options))
        except Exception as error:
            # A missing library or kernel costs one row, not the table.
            rows.append({"format": name, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    record = {
        "shape": options.shape,
        "environment": measure.environment(torch.device(options.device)),
        "rows": rows,
    }
    print(table(rows))
    print(json.dumps(record, indent=1))
    return record


if __name__ == "__main__":
    main()

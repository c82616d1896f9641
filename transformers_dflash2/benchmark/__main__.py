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
"""
Compare decoding methods on one pair of models: one table on the terminal, one JSON record on request.

    python -m transformers_dflash2.benchmark --target T --draft D            # a real pair and its prompts
    python -m transformers_dflash2.benchmark --shape qwen3-8b --device cuda  # random weights, chosen acceptance
    python -m transformers_dflash2.benchmark --shape qwen3-8b --drafter dflash2 dspark  # two drafters, one target

`tokens/s` counts decoding, the prefill taken off; `first s` is a method's first call, with what it captures and
compiles. `floor ms` is the time that the least bytes of a pass (of a round, with a drafter) take at the rate at which
kernels read and write the device's memory, and `same` counts rows whose ids are those of `plain`.
Phases of a round follow; those of the static tempo are readings of replayed graphs, see `phases.py`.
"""

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig

from transformers_dflash2 import DFlash2DraftModel
from transformers_dflash2.static_decoding import release_static_rounds

from . import measure, report
from .contestants import NAMES, Contestant, Workload, contestants, load_public
from .phases import dynamic_phases, static_phases
from .prompts import PROMPTS
from .synthetic import DRAFTERS, SHAPES, random_prompts, synthetic_pairs


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; what cannot work is refused before any model is built."""
    parser = argparse.ArgumentParser(
        prog="python -m transformers_dflash2.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pair = parser.add_argument_group("models")
    pair.add_argument("--target", help="folder or Hub id of the target")
    pair.add_argument("--draft", help="folder or Hub id of its drafter")
    pair.add_argument("--host-v1", help="folder or Hub id of a DFlash v1 drafter, for the host's own loop")
    pair.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead of a real pair")
    pair.add_argument(
        "--drafter",
        nargs="+",
        choices=DRAFTERS,
        default=["dflash2"],
        help="drafters of the shape, side by side (default: %(default)s)",
    )
    pair.add_argument(
        "--mean-accepted-length", type=float, default=4.0, help="tokens per round, with --shape (default: %(default)s)"
    )
    pair.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    pair.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    work = parser.add_argument_group("work")
    work.add_argument("--batch", type=int, nargs="+", default=[1], help="batch sizes (default: %(default)s)")
    work.add_argument("--new-tokens", type=int, default=128, help="tokens to write per row (default: %(default)s)")
    work.add_argument("--context", type=int, default=512, help="prompt tokens, with --shape (default: %(default)s)")
    work.add_argument(
        "--prompts", type=int, default=len(PROMPTS), help="prompts of a real pair (default: %(default)s)"
    )
    work.add_argument(
        "--block",
        type=int,
        help="block size, the drafter's own by default; DFlash2 counts the anchor in it, DSpark does not",
    )
    work.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    work.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES), metavar="METHOD", help=f"of {NAMES}")
    work.add_argument("--repeats", type=int, default=3, help="timed calls, fewer past --budget (default: %(default)s)")
    work.add_argument("--budget", type=float, default=20.0, help="seconds of timed calls per method (%(default)s)")
    out = parser.add_argument_group("output")
    out.add_argument("--json", help="write the record here")
    out.add_argument("--kernels", action="store_true", help="list the kernels of a static round too (CUDA)")
    out.add_argument("--plot", help="draw the rates here (needs matplotlib)")
    options = parser.parse_args(argv)

    if (options.shape is None) == (options.target is None):
        parser.error("choose a real pair with --target and --draft, or random weights with --shape")
    if options.target is not None and options.draft is None:
        parser.error("--target needs --draft")
    if options.target is not None and options.drafter != ["dflash2"]:
        parser.error("--drafter chooses random drafters: pass --shape instead of --target")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    for name in ("new_tokens", "context", "prompts", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.block is not None and options.block < 2:
        parser.error(f"--block must be at least 2, got {options.block}")
    if min(options.batch) < 1:
        parser.error(f"--batch must be at least 1, got {min(options.batch)}")
    return options


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the comparison; returns the record."""
    options = parse_arguments(argv)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    # First, while the memory it takes is free.
    rate = measure.copy_rate(device)
    if options.shape is not None:
        pairs = synthetic_pairs(
            SHAPES[options.shape],
            options.drafter,
            mean_accepted_length=options.mean_accepted_length,
            block=options.block,
            dtype=dtype,
            device=device,
        )
        drafters = {drafter: pair.draft for drafter, pair in pairs.items()}
        pair = pairs[options.drafter[0]]
        target, name, slots = pair.target, options.shape, None
        batches = {batch: [random_prompts(pair, batch, options.context)] for batch in options.batch}
    else:
        target, draft, batches = _load_pair(options, device, dtype)
        drafters = {draft.config.draft_family: draft}
        name, slots = Path(options.target).name, None if options.block is None else options.block - 1
    host_v1 = _load_host_v1(options, device, dtype)
    public = {}
    if "public-dflash" in options.methods:
        public = {drafter: load_public(draft, options.draft) for drafter, draft in drafters.items()}
    first = next(iter(drafters))
    results, phases = [], []
    for batch, inputs in batches.items():
        workload = Workload(
            inputs, options.new_tokens, slots, options.temperature, repeats_itself=options.shape is not None
        )
        expected = None
        for drafter, draft in drafters.items():
            for contestant in contestants(target, draft, workload, host_v1=host_v1, public=public.get(drafter)):
                takes_part = contestant.drafter is not None and contestant.drafter is not host_v1
                # What these drafters are no part of is measured beside the first.
                if contestant.name not in options.methods or not (takes_part or drafter == first):
                    continue
                result, sequences = _measure(contestant, target, draft, workload, options, rate, expected)
                expected = sequences if contestant.name == "plain" else expected
                named = {"method": contestant.name, "drafter": drafter if takes_part else None, "batch": batch}
                results.append({**named, **result})
                _progress(results[-1])
            measured = _phases(target, draft, workload, options)
            phases += [{"batch": batch, "drafter": drafter, **phase} for phase in measured]
    plain = {result["batch"]: result for result in results if result["method"] == "plain"}
    for result in results:
        if "skipped" not in result:
            base = plain.get(result["batch"])
            rates = base and (result["tokens_per_second"], base["tokens_per_second"])
            result["over_plain"] = rates[0] / rates[1] if rates and None not in rates else None
    record = {
        "command": ["python", "-m", "transformers_dflash2.benchmark", *(sys.argv[1:] if argv is None else argv)],
        "environment": measure.environment(device),
        "workload": {"name": name, **vars(options)},
        "copy_bytes_per_second": rate,
        "results": results,
        "phases": phases,
    }
    print(report.table(record))
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    if options.plot:
        report.plot(record, options.plot)
    return record


def _load_pair(options: argparse.Namespace, device: torch.device, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).to(device)
    draft = DFlash2DraftModel.from_pretrained(options.draft, dtype=dtype).to(device)
    tokenizer = AutoTokenizer.from_pretrained(options.target, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = PROMPTS[: options.prompts]
    if tokenizer.chat_template is not None:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            for text in texts
        ]
    batches = {}
    for batch in options.batch:
        chunks = [texts[start : start + batch] for start in range(0, len(texts), batch)]
        batches[batch] = [
            dict(tokenizer(chunk, return_tensors="pt", padding=True, add_special_tokens=False).to(device))
            for chunk in chunks
            if len(chunk) == batch
        ]
        if not batches[batch]:
            raise SystemExit(f"--batch {batch} needs as many prompts; there are {len(texts)}.")
    return target, draft, batches


def _load_host_v1(options: argparse.Namespace, device: torch.device, dtype: torch.dtype):
    if options.host_v1 is None or "host-dflash-v1" not in options.methods:
        return None
    from transformers import AutoModel

    return AutoModel.from_pretrained(options.host_v1, dtype=dtype).to(device)


def _measure(contestant: Contestant, target, draft, workload: Workload, options, rate: float, expected):
    """One method on one batch size: `(result, sequences)`."""
    if contestant.skip is not None:
        return {"skipped": contestant.skip}, None
    device = target.device
    contestant.prepare()
    measure.reset_peak_memory(device)
    new_tokens = workload.new_tokens
    first, _ = measure.seconds(lambda: contestant.run(workload.inputs[0], new_tokens), device)
    sequences, passes = [], 0
    for inputs in workload.inputs:
        output, counted = _counted(contestant, target, inputs, new_tokens)
        sequences.append(output)
        passes += counted
    counts = draft.last_stats
    decode = _median_seconds(contestant, workload, new_tokens, options, device)
    # A call that ends with the prefill has its own first time.
    contestant.run(workload.inputs[0], 1)
    prefill = _median_seconds(contestant, workload, 1, options, device)
    rows = workload.inputs[0]["input_ids"].shape[0]
    written = [_new_tokens(output, inputs, target) for output, inputs in zip(sequences, workload.inputs, strict=True)]
    # The prefill gives each row its first token.
    tokens, passes = sum(map(sum, written)) - rows * len(written), passes - len(written)
    length = statistics.mean(inputs["input_ids"].shape[1] for inputs in workload.inputs) + new_tokens / 2
    least = measure.pass_bytes(target, tokens=int(length), rows=rows)
    if contestant.drafter is not None:
        least = measure.round_bytes(target, contestant.drafter, tokens=int(length), rows=rows)
    spent = max(decode - prefill, 0.0)
    identical = None
    if expected is not None and workload.temperature == 0:
        identical = sum(_same_rows(mine, theirs) for mine, theirs in zip(sequences, expected, strict=True))
    result = {
        "tokens_per_second": tokens / spent if spent else None,
        "seconds": spent,
        "prefill_seconds": prefill,
        "first_call_seconds": first,
        "tokens": tokens,
        "passes": passes,
        "tokens_per_pass": tokens / rows / passes if passes else None,
        "milliseconds_per_pass": spent / passes * 1e3 if passes else None,
        "pass_bytes": least,
        "floor_milliseconds": least / rate * 1e3,
        "peak_gibibytes": measure.peak_memory(device) / 2**30,
        "identical_rows": identical,
        "over_plain": None,
    }
    if contestant.passes is not None and counts is not None and contestant.name != "public-dflash":
        result["mean_accepted_length"] = counts.mean_accepted_length
        result["accepted_per_position"] = counts.accepted_per_position
    return result, sequences


def _counted(contestant: Contestant, target, inputs, new_tokens: int) -> tuple[torch.Tensor, int]:
    """Sequences of one call, and how often the target ran in it."""
    if contestant.passes is not None:
        return contestant.run(inputs, new_tokens), contestant.passes()
    if contestant.name == "plain-static-compile":
        # A hook would be compiled along; one pass makes one token.
        output = contestant.run(inputs, new_tokens)
        return output, output.shape[1] - inputs["input_ids"].shape[1]
    calls = []
    handle = target.register_forward_pre_hook(lambda *args: calls.append(None))
    try:
        return contestant.run(inputs, new_tokens), len(calls)
    finally:
        handle.remove()


def _median_seconds(contestant: Contestant, workload: Workload, new_tokens: int, options, device) -> float:
    """Time of all batches, the median of as many repeats as the budget allows."""
    times: list[float] = []
    while len(times) < options.repeats and (not times or sum(times) < options.budget):
        times.append(
            sum(measure.seconds(lambda b=batch: contestant.run(b, new_tokens), device)[0] for batch in workload.inputs)
        )
    return statistics.median(times)


def _new_tokens(output: torch.Tensor, inputs: dict[str, torch.Tensor], target) -> list[int]:
    """Tokens each row wrote, up to its end token."""
    ends = target.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    written = []
    for row in output[:, inputs["input_ids"].shape[1] :].tolist():
        stops = [index for index, token in enumerate(row) if token in ends]
        written.append(stops[0] + 1 if stops else len(row))
    return written


def _same_rows(mine: torch.Tensor, theirs: torch.Tensor) -> int:
    width = min(mine.shape[1], theirs.shape[1])
    if mine.shape[1] != theirs.shape[1]:
        return 0
    return int((mine[:, :width] == theirs[:, :width]).all(dim=1).sum())


def _phases(target, draft, workload: Workload, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Phases of a round of each tempo that takes part."""
    found = []
    if "dynamic" in options.methods:
        found.append({"method": "dynamic", "seconds": dynamic_phases(target, draft, workload), "kernels": []})
    on_cuda = target.device.type == "cuda"
    for method, compile_config in (("static", None), ("static-compile", CompileConfig())):
        if method in options.methods and (on_cuda or compile_config is None):
            release_static_rounds()
            repeats = 20 if on_cuda else 3
            settings = {"compile_config": compile_config, "repeats": repeats, "kernels": options.kernels and on_cuda}
            found.append({"method": method, **static_phases(target, draft, workload, **settings)})
    return found


def _progress(result: dict[str, Any]) -> None:
    what = result.get("skipped") or f"{result['seconds']:.2f} s for {result['tokens']} tokens"
    print(f"{report.title(result)}: {what}", file=sys.stderr, flush=True)


__all__ = ["main", "parse_arguments"]

if __name__ == "__main__":
    main()

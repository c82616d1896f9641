# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct answers a few prompts with and without its DFlash 2 drafter: same text, fewer target passes.

python examples/demo.py
python examples/demo.py --prompts 12 --plot acceptance.png
"""

import argparse
import sys
import time
from collections import namedtuple

import torch
from smollm2 import DRAFT, find_target
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from transformers_dflash2 import DFlash2DraftModel


PROMPTS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why does the sea look blue?",
    "List seven things to pack for a week in the mountains.",
    "A train covers 180 km in 2 hours and then 90 km in 1 hour. What is its average speed? Explain step by step.",
    "Write a short, friendly email that moves Tuesday's meeting to Thursday.",
    "Quelle est la capitale de la France, et que peut-on y voir ?",
    "Write an SQL query that counts the orders of each customer.",
    "Explain to a child how a bicycle stays upright.",
    "Give me a recipe for pancakes.",
    "What is 17 times 23?",
    "Describe a rainy evening in a harbour town.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
]

Run = namedtuple("Run", "ids seconds")


def generate(target, inputs, options, draft=None) -> Run:
    start = time.perf_counter()
    ids = target.generate(**inputs, **options, assistant_model=draft)
    return Run(ids[0, inputs["input_ids"].shape[1] :], time.perf_counter() - start)


def row(label, tokens, same, rounds, accepted, passes, plain_seconds, draft_seconds) -> str:
    mean = 1 + accepted / rounds if rounds else 1.0
    rates = tokens / plain_seconds, tokens / draft_seconds
    return (
        f"{label:<9} {tokens:>6} {'yes' if same else 'NO':>9} {mean:>15.2f} {tokens:>6} -> {passes:<5} "
        f"{1 - passes / tokens:>5.0%} {rates[0]:>8.1f} -> {rates[1]:<6.1f} {rates[1] / rates[0]:>5.2f}x"
    )


def plot_acceptance(shares: list[float], mean: float, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    bars = axes.bar(range(1, len(shares) + 1), [100 * share for share in shares], color="#3b6ea5")
    axes.bar_label(bars, fmt="%.0f%%", padding=2)
    axes.set_xticks(range(1, len(shares) + 1))
    axes.set(xlabel="position in the block", ylabel="rounds that keep the drafted token (%)", ylim=(0, 105))
    axes.set_title(f"SmolLM2-135M-Instruct + DFlash 2: {mean:.2f} tokens per round")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder of SmolLM2-135M-Instruct (found or downloaded when absent)")
    parser.add_argument("--draft", default=str(DRAFT), help="folder of the drafter")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--block-size", type=int, help="tokens verified per target pass (default: the drafter's own)")
    parser.add_argument("--prompts", type=int, default=6, help=f"how many prompts, up to {len(PROMPTS)}")
    parser.add_argument("--plot", metavar="FILE", help="write a bar chart of acceptance by position")
    args = parser.parse_args(arguments)
    if not 1 <= args.prompts <= len(PROMPTS):
        parser.error(f"--prompts={args.prompts} is outside 1..{len(PROMPTS)}")
    if args.block_size is not None and args.block_size < 2:
        parser.error(f"--block-size={args.block_size} drafts nothing; use 2 or more")
    dtype = getattr(torch, args.dtype)

    folder, origin = find_target(args.target)
    logging.disable_progress_bar()
    start = time.perf_counter()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    loaded = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draft = DFlash2DraftModel.from_pretrained(args.draft, dtype=dtype).eval()
    print(
        f"Target: {origin}\nLoaded the target in {loaded - start:.1f} s, tokenizer and drafter in "
        f"{time.perf_counter() - loaded:.1f} s; {args.dtype}, greedy, {target.device.type}, "
        f"{torch.get_num_threads()} threads\n"
    )

    options = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    drafted_options = dict(options)
    if args.block_size is not None:
        drafted_options["num_assistant_tokens"] = args.block_size - 1

    rows, kept, total = [], [], [0, True, 0, 0, 0, 0.0, 0.0]
    for number, prompt in enumerate(PROMPTS[: args.prompts], start=1):
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(target.device)
        if number == 1:
            # The first calls set things up; they count for neither side.
            generate(target, inputs, options | {"max_new_tokens": 8})
            generate(target, inputs, drafted_options | {"max_new_tokens": 8}, draft)

        plain = generate(target, inputs, options)
        drafted = generate(target, inputs, drafted_options, draft)
        stats = draft.last_stats
        same = torch.equal(plain.ids, drafted.ids)
        print(f"[{number}] {prompt}\n{tokenizer.decode(drafted.ids, skip_special_tokens=True).strip()}")
        if not same:
            print(f"--- without the drafter ---\n{tokenizer.decode(plain.ids, skip_special_tokens=True).strip()}")
        print()

        counts = (
            len(plain.ids),
            same,
            stats.rounds,
            stats.accepted,
            stats.target_passes,
            plain.seconds,
            drafted.seconds,
        )
        rows.append(row(f"[{number}]", *counts))
        total = [a and b if isinstance(b, bool) else a + b for a, b in zip(total, counts, strict=True)]
        for position, count in enumerate(stats.accepted_per_position):
            if position == len(kept):
                kept.append(0)
            kept[position] += count

    header = (
        f"{'prompt':<9} {'tokens':>6} {'identical':>9} {'accepted length':>15} {'target passes':>15} {'saved':>5} "
        f"{'tokens/s':>18} {'speed':>6}"
    )
    print(header, "-" * len(header), *rows, row("all", *total), sep="\n")
    print("\nplain generate -> with the drafter; accepted length = tokens committed per drafted round, bonus included")

    if args.plot:
        plot_acceptance([count / total[2] for count in kept], 1 + total[3] / total[2], args.plot)
        print(f"Chart: {args.plot}")
    if total[1]:
        return 0
    print("\nThe texts marked NO differ.", file=sys.stderr)
    if dtype != torch.float32:
        print(
            f"In {args.dtype} a pass over a block may round differently from a pass over one token, and two almost "
            "equally likely tokens then change places; in float32 the texts must be the same.",
            file=sys.stderr,
        )
    return 1


if __name__ == "__main__":
    raise SystemExit(main())

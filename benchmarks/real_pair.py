"""SmolLM2-135M-Instruct with its drafter, measured against plain `generate` and the public `dflash` loop.

    python benchmarks/real_pair.py parity                 # ids of 16 prompts, batch 1 and 4
    python benchmarks/real_pair.py speed --dtype float32  # tokens per second, blocks of 8 and 4
    python benchmarks/real_pair.py reference              # needs `pip install dflash==0.1.0`

Plain decoding and ours are timed in turns within one run, so that a busy machine slows both. Use an idle machine.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import transformers_dflash2
from transformers_dflash2 import DFlash2DraftModel


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import smollm2


PROMPTS = (
    "What is gravity?",
    "Write a Python function that checks whether a number is prime.",
    "What is 17 plus 25? Explain each step.",
    "List ten animals that live in the sea.",
    "Tell me a short story about a lighthouse keeper.",
    "Erkläre mir auf Deutsch, was ein Computer ist.",
    "Qu'est-ce que la photosynthèse ?",
    "Write an SQL query that counts the orders of each customer.",
    "Give me three tips for better sleep.",
    "Translate to Spanish: The weather is nice today.",
    "A train travels 60 miles per hour for 2.5 hours. How far does it go?",
    "Write a polite email that declines a meeting.",
    "What is the difference between a list and a tuple in Python?",
    "Name the planets of the solar system in order.",
    "Write a JavaScript function that reverses a string.",
    "Who wrote Romeo and Juliet, and what is it about?",
)


def encode(tokenizer, prompts):
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )


def new_tokens(output, inputs):
    return output[:, inputs["input_ids"].shape[1] :]


def parity(target, draft, tokenizer, args):
    result = {}
    for batch in (1, 4):
        same, lengths = 0, []
        for start in range(0, len(PROMPTS), batch):
            inputs = encode(tokenizer, PROMPTS[start : start + batch])
            options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
            plain = target.generate(**inputs, **options)
            ours = target.generate(**inputs, **options, assistant_model=draft)
            same += (
                sum(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)) if plain.shape == ours.shape else 0
            )
            lengths.append(draft.last_stats)
            print(f"batch {batch}, prompts {start}..: {same} of {start + batch} identical", flush=True)
        rounds = sum(stats.rounds for stats in lengths)
        accepted = sum(stats.accepted for stats in lengths)
        result[f"batch_{batch}"] = {
            "identical": same,
            "prompts": len(PROMPTS),
            "mean_accepted_length": 1 + accepted / rounds,
        }
    return result


def speed(target, draft, tokenizer, args):
    result = {}
    for block in args.blocks:
        times = {"plain": 0.0, "ours": 0.0}
        tokens = rounds = accepted = passes = 0
        ratios = []
        for prompt in PROMPTS[: args.prompts]:
            inputs = encode(tokenizer, [prompt])
            options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
            spent = {}
            for name, extra in (
                ("plain", {}),
                ("ours", {"assistant_model": draft, "num_assistant_tokens": block - 1}),
            ):
                start = time.perf_counter()
                output = target.generate(**inputs, **options, **extra)
                spent[name] = time.perf_counter() - start
                times[name] += spent[name] / new_tokens(output, inputs).shape[1]
            ratios.append(spent["plain"] / spent["ours"])
            stats = draft.last_stats
            tokens += stats.new_tokens
            rounds += stats.rounds
            accepted += stats.accepted
            passes += stats.target_passes
        count = len(ratios)
        result[f"block_{block}"] = {
            "plain_tokens_per_second": count / times["plain"],
            "ours_tokens_per_second": count / times["ours"],
            "ratio_of_rates": times["plain"] / times["ours"],
            "median_ratio": statistics.median(ratios),
            "mean_accepted_length": 1 + accepted / rounds,
            "target_passes": passes,
            "new_tokens": tokens,
            "phase_seconds_last_prompt": draft.last_stats.phase_seconds,
        }
        print(json.dumps({f"block_{block}": result[f"block_{block}"]}), flush=True)
    return result


def reference(target, draft, tokenizer, args):
    """Mean accepted length of the public loop on the same weights; no end token, so that both make as many tokens."""
    from dflash.model import DFlash2DraftModel as PublicModel
    from dflash.model import dflash_generate

    public = PublicModel.from_pretrained(args.draft, dtype=draft.dtype).eval()
    rounds = {"public": 0, "ours": 0}
    tokens = {"public": 0, "ours": 0}
    same = 0
    import dflash.model

    dflash.model._cuda_time = time.perf_counter
    for prompt in PROMPTS[: args.prompts]:
        inputs = encode(tokenizer, [prompt])
        output = dflash_generate(
            public, target, inputs["input_ids"], args.max_new_tokens, [tokenizer.eos_token_id], return_stats=True
        )
        ours = target.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False, assistant_model=draft)
        same += torch.equal(output.output_ids, ours)
        rounds["public"] += len(output.acceptance_lengths)
        tokens["public"] += sum(output.acceptance_lengths)
        rounds["ours"] += draft.last_stats.rounds
        tokens["ours"] += draft.last_stats.rounds + draft.last_stats.accepted
    return {
        "identical_ids": same,
        "prompts": args.prompts,
        **{f"{name}_mean_accepted_length": tokens[name] / rounds[name] for name in rounds},
        **{f"{name}_rounds": rounds[name] for name in rounds},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("parity", "speed", "reference"))
    parser.add_argument("--target", default=None)
    parser.add_argument("--draft", default=str(smollm2.DRAFT))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 4])
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    folder, _ = smollm2.find_target(args.target)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "left"
    draft = DFlash2DraftModel.from_pretrained(args.draft, dtype=dtype)
    # One call of each kind before anything is timed.
    inputs = encode(tokenizer, PROMPTS[:1])
    target.generate(**inputs, max_new_tokens=4, do_sample=False)
    target.generate(**inputs, max_new_tokens=4, do_sample=False, assistant_model=draft)
    result = {
        "what": args.what,
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "transformers_dflash2": transformers_dflash2.__version__,
        **globals()[args.what](target, draft, tokenizer, args),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

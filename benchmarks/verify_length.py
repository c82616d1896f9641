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
"""Tokens per verified row with and without an adaptive verify length, on the real DFlash2 pair.

Every drafted token costs the target a row. Greedy decoding of the benchmark's prompts; the text is the same in
every setting, and is compared. Counts do not depend on the machine.

    python benchmarks/verify_length.py --thresholds 0.1 0.2 0.3
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import transformers_dflash2
from transformers_dflash2 import AutoDraftModel
from transformers_dflash2.benchmark.prompts import PROMPTS, encode_chat


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import smollm2


def measure(target, draft, tokenizer, args, options, expected):
    """Figures of one setting; `expected` collects the texts of the first one, and later ones are held against it."""
    totals = {"new_tokens": 0, "rounds": 0, "drafted": 0, "accepted": 0}
    same = 0
    for index, prompt in enumerate(PROMPTS[: args.prompts]):
        inputs = encode_chat(tokenizer, prompt)
        output = target.generate(
            **inputs, max_new_tokens=args.max_new_tokens, do_sample=False, assistant_model=draft, **options
        )
        text = output[0, inputs["input_ids"].shape[1] :].tolist()
        same += expected.setdefault(index, text) == text
        for name in totals:
            totals[name] += getattr(draft.last_stats, name)
    rows = totals["rounds"] + totals["drafted"]
    return {
        "options": options,
        "prompts_identical_to_the_first_setting": same,
        **totals,
        "rows_verified": rows,
        "tokens_per_row": (totals["rounds"] + totals["accepted"]) / rows,
        "tokens_per_round": 1 + totals["accepted"] / totals["rounds"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=None)
    parser.add_argument("--draft", default=str(smollm2.DRAFT))
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--thresholds", type=float, nargs="*", default=[])
    args = parser.parse_args()
    folder, _ = smollm2.find_target(args.target)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draft = AutoDraftModel.from_pretrained(args.draft, dtype=torch.float32)
    heuristic = {"num_assistant_tokens_schedule": "heuristic"}
    settings = [{}, heuristic, *({**heuristic, "assistant_confidence_threshold": value} for value in args.thresholds)]
    expected, results = {}, []
    for options in settings:
        results.append(measure(target, draft, tokenizer, args, options, expected))
        print(json.dumps(results[-1]), flush=True)
    print(
        json.dumps(
            {
                "prompts": args.prompts,
                "max_new_tokens": args.max_new_tokens,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "transformers_dflash2": transformers_dflash2.__version__,
                "settings": results,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()

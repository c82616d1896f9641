"""SmolLM2-135M-Instruct quantised in several ways, with its drafter: same text, and what becomes of acceptance.

    python benchmarks/quantized_pair.py --formats dense bnb-4 bnb-8 W8A8 W4A16

Heads are untied and quantised with the rest. The text is compared with that of the same quantised target alone, in
float32 as far as the format computes in it. Formats that round activations to 8 bits turn the last bit of a float into
a step of 1/127, so that such a target disagrees with itself when it reads the same tokens in one pass instead of one
by one; `unsteady_tokens_of_the_target_alone` counts that, without a drafter. No speed: libraries emulate some of these
formats on a CPU.
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from transformers_dflash2 import DFlash2DraftModel
from transformers_dflash2.benchmark.prompts import PROMPTS, encode_chat


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import compress
import smollm2


def load(folder, name, work):
    if name in ("dense", "bnb-4", "bnb-8"):
        if not work.is_dir():
            compress.load_untied(folder).save_pretrained(work)
        config = None
        if name != "dense":
            # The library logs a cast on every call of an 8-bit layer.
            logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
            bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
            bits = bits if name == "bnb-4" else {"load_in_8bit": True}
            config = BitsAndBytesConfig(**bits, llm_int8_skip_modules=[])
        return AutoModelForCausalLM.from_pretrained(work, quantization_config=config, dtype=torch.float32)
    compress.compress(compress.load_untied(folder), name, work / name)
    return AutoModelForCausalLM.from_pretrained(work / name, dtype=torch.float32)


def measure(target, draft, tokenizer, args):
    same = new_tokens = rounds = accepted = unsteady = 0
    for prompt in PROMPTS[: args.prompts]:
        inputs = encode_chat(tokenizer, prompt)
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        steps = target.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
        plain = steps.sequences
        unsteady += unsteady_tokens(target, plain, torch.cat(steps.logits))
        drafted = target.generate(**inputs, **options, assistant_model=draft)
        same += torch.equal(plain, drafted)
        stats = draft.last_stats
        new_tokens, rounds, accepted = new_tokens + stats.new_tokens, rounds + stats.rounds, accepted + stats.accepted
    return {
        "head": type(target.get_output_embeddings()).__name__,
        "identical": same,
        "prompts": args.prompts,
        "new_tokens": new_tokens,
        "mean_accepted_length": round(1 + accepted / rounds, 3),
        "unsteady_tokens_of_the_target_alone": unsteady,
    }


@torch.no_grad()
def unsteady_tokens(target, sequence, steps):
    """How many greedy tokens come out otherwise when the target, alone, reads its own text in one pass."""
    one_pass = target(sequence).logits[0, -len(steps) - 1 : -1]
    return int((one_pass.argmax(-1) != steps.argmax(-1)).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["dense", "bnb-4", "bnb-8", "W8A8", "W4A16"])
    parser.add_argument("--target", help="folder of the dense target")
    parser.add_argument("--draft", default=str(smollm2.DRAFT))
    parser.add_argument("--prompts", type=int, default=6, help="at most 16")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()
    folder, _ = smollm2.find_target(args.target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draft = DFlash2DraftModel.from_pretrained(args.draft, dtype=torch.float32)
    result = {"torch": torch.__version__, "transformers": transformers.__version__}
    with tempfile.TemporaryDirectory() as work:
        for name in args.formats:
            target = load(folder, name, Path(work) / "untied")
            result[name] = measure(target, draft, tokenizer, args)
            print(name, json.dumps(result[name]), flush=True)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

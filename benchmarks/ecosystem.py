# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct with its drafter inside the tools around `generate`: same ids as without the drafter?

    python benchmarks/ecosystem.py
    python benchmarks/ecosystem.py --only pipeline peft --json figures.json

Greedy, float32. Every line compares the drafted call with the plain call made in the same way, so that a wrapper's own
effect on the target counts on both sides. Rates need an idle machine.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

from transformers_dflash2 import DFlash2DraftModel


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import smollm2


MESSAGES = [{"role": "user", "content": "Write a Python function that checks whether a number is prime."}]


class Pair:
    """The models, a prompt, and how a call is timed."""

    def __init__(self, new_tokens: int):
        self.folder, _ = smollm2.find_target()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.draft = DFlash2DraftModel.from_pretrained(smollm2.DRAFT, dtype=torch.float32).eval()
        self.options = {"do_sample": False, "max_new_tokens": new_tokens}
        self.inputs = self.tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )

    def target(self, **kwargs):
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, **kwargs).eval()

    def generate(self, target, draft=None, **kwargs):
        ids = target.generate(**self.inputs, **self.options, assistant_model=draft, **kwargs)
        return ids[0, self.inputs["input_ids"].shape[1] :].tolist()


def compare(pair: Pair, call) -> dict:
    """Runs `call(draft)` without and with the drafter; it returns new ids."""
    seconds, ids = [], []
    for draft in (None, pair.draft):
        call(draft)
        start = time.perf_counter()
        ids.append(call(draft))
        seconds.append(time.perf_counter() - start)
    return {
        "identical": ids[0] == ids[1],
        "new_tokens": len(ids[1]),
        "accepted_length": round(pair.draft.last_stats.mean_accepted_length, 2),
        "plain_tokens_per_s": round(len(ids[0]) / seconds[0], 1),
        "drafted_tokens_per_s": round(len(ids[1]) / seconds[1], 1),
    }


def chat_template(pair):
    target = pair.target()
    return {"generate, chat template": compare(pair, lambda draft: pair.generate(target, draft))}


def pipelines(pair):
    target, result = pair.target(), {}

    def call(draft):
        pipe = pipeline("text-generation", model=target, tokenizer=pair.tokenizer, assistant_model=draft)
        answer = pipe(MESSAGES, **pair.options)[0]["generated_text"][-1]["content"]
        return pair.tokenizer(answer)["input_ids"]

    result['pipeline("text-generation", assistant_model=draft)'] = compare(pair, call)
    return result


def streamer(pair):
    target = pair.target()

    def call(draft):
        text = TextIteratorStreamer(pair.tokenizer, skip_prompt=True)
        worker = threading.Thread(target=pair.generate, args=(target, draft), kwargs={"streamer": text})
        worker.start()
        answer = "".join(text)
        worker.join()
        return pair.tokenizer(answer)["input_ids"]

    return {"TextIteratorStreamer, in a thread": compare(pair, call)}


def peft(pair):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    target = get_peft_model(pair.target(), config, adapter_name="first").eval()
    target.add_adapter("second", config)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.05)
    result = {}
    # Back to the first one at the end: an adapter of an earlier call must leave nothing behind.
    for number, name in enumerate(["first", "second", "first"], start=1):
        target.set_adapter(name)
        result[f"PEFT, call {number}: adapter {name!r}"] = compare(pair, lambda draft: pair.generate(target, draft))
    with target.disable_adapter():
        result["PEFT, adapters disabled"] = compare(pair, lambda draft: pair.generate(target, draft))
    return result


def device_maps(pair):
    result = {}
    target = pair.target(device_map={"": "cpu"})
    result['device_map={"": "cpu"}'] = compare(pair, lambda draft: pair.generate(target, draft))
    with tempfile.TemporaryDirectory() as folder:
        layers = {f"model.layers.{index}": "cpu" if index < 15 else "disk" for index in range(30)}
        device_map = {"model.embed_tokens": "cpu", **layers, "model.norm": "cpu", "model.rotary_emb": "cpu"}
        target = pair.target(device_map={**device_map, "lm_head": "cpu"}, offload_folder=folder)
        result["device_map with layers 15 to 29 on disk"] = compare(pair, lambda draft: pair.generate(target, draft))
    return result


def compiled(pair):
    target = pair.target()
    target.forward = torch.compile(target.forward, dynamic=True)
    return {"torch.compile(target.forward, dynamic=True)": compare(pair, lambda draft: pair.generate(target, draft))}


def inference_mode(pair):
    target = pair.target()

    def call(draft):
        with torch.inference_mode():
            return pair.generate(target, draft)

    return {"torch.inference_mode()": compare(pair, call)}


def threads(pair, count: int = 3):
    target = pair.target()

    def call(draft):
        answers = [None] * count

        def work(index):
            answers[index] = pair.generate(target, draft)

        workers = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return [token for answer in answers for token in answer]

    return {f"{count} threads, one pair": compare(pair, call)}


CASES = {
    "chat": chat_template,
    "pipeline": pipelines,
    "streamer": streamer,
    "peft": peft,
    "device_map": device_maps,
    "compile": compiled,
    "inference_mode": inference_mode,
    "threads": threads,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    pair, figures = Pair(options.new_tokens), {}
    print("| | identical | tokens per round | tokens/s, plain -> drafted |\n| --- | --- | --- | --- |")
    for name in options.only:
        for label, row in CASES[name](pair).items():
            figures[label] = row
            rates = f"{row['plain_tokens_per_s']} -> {row['drafted_tokens_per_s']}"
            print(f"| {label} | {row['identical']} | {row['accepted_length']} | {rates} |", flush=True)
    if options.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        Path(options.json).write_text(json.dumps({"versions": versions, "figures": figures}, indent=2) + "\n")
    return int(not all(row["identical"] for row in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())

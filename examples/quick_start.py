# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Quick start
#
# A small target, its DFlash 2 drafter, and one call with and without it: the same text in fewer passes of the target.

# %%
import time

import torch
from smollm2 import load_pair


device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer, target, draft = load_pair(device)
print(f"{type(target).__name__} with {type(draft).__name__} on {device}")

# %% [markdown]
# The prompt goes through the tokenizer's chat template, as always.

# %%
chat = [{"role": "user", "content": "Write a Python function that returns the n-th Fibonacci number."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(device)


def answer(**options):
    start = time.perf_counter()
    ids = target.generate(**inputs, max_new_tokens=64, do_sample=False, **options)
    return ids[0, inputs["input_ids"].shape[1] :], time.perf_counter() - start


# %% [markdown]
# `assistant_model` is the only difference between the two calls.

# %%
plain, plain_seconds = answer()
drafted, drafted_seconds = answer(assistant_model=draft)
print(tokenizer.decode(drafted, skip_special_tokens=True))
assert torch.equal(plain, drafted), "greedy text is identical in float32"

# %% [markdown]
# What the call did. A pass of the target commits `mean_accepted_length` tokens instead of one. Whether that saves time
# depends on what a pass over a block costs: nothing on a CPU with a model this small, much on a GPU with a large one.

# %%
stats = draft.last_stats
print(f"{stats.new_tokens} tokens in {stats.target_passes} target passes instead of {len(plain)}")
print(f"{stats.mean_accepted_length:.2f} tokens per round")
print(f"{plain_seconds:.1f} s without, {drafted_seconds:.1f} s with the drafter")

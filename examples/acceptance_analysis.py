# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Where drafts are kept
#
# Acceptance by prompt, by position in the block, over time, and by block length; then one text, token by token.

# %%
import torch
from matplotlib import pyplot as plt
from smollm2 import load_pair

from transformers_dflash2 import inspect


device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer, target, draft = load_pair(device)
prompts = {
    "code": "Write a Python function that returns the n-th Fibonacci number.",
    "fact": "Why does the sea look blue?",
    "list": "List seven things to pack for a week in the mountains.",
}
options = {"max_new_tokens": 48, "do_sample": False}

# %%
traces = {}
for name, prompt in prompts.items():
    chat = [{"role": "user", "content": prompt}]
    traces[name] = inspect(target, draft, chat, tokenizer=tokenizer, **options)
    print(f"{name}: {traces[name].stats.mean_accepted_length:.2f} tokens per round")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.5), layout="constrained")
for name, trace in traces.items():
    shares = trace.acceptance_by_position()
    left.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    right.step(range(1, len(trace.rounds) + 1), trace.committed_by_round(), where="mid", label=name)
left.set(xlabel="position in the block", ylabel="share of rounds that kept it", ylim=(0, 1))
right.set(xlabel="round", ylabel="tokens committed", ylim=(0, None))
left.legend()
plt.show()

# %% [markdown]
# A longer block is kept longer where the text is easy and wasted where it is not. Its cost is one wider pass.

# %%
for count in (1, 3, 5, 7):
    passes, tokens = 0, 0
    for prompt in prompts.values():
        chat = [{"role": "user", "content": prompt}]
        trace = inspect(target, draft, chat, tokenizer=tokenizer, num_assistant_tokens=count, **options)
        passes, tokens = passes + trace.stats.target_passes, tokens + trace.stats.new_tokens
    print(f"{count} drafted tokens: {tokens / passes:.2f} tokens per target pass")

# %% [markdown]
# One text: kept tokens, ~refused ones~ and [the target's own]. `trace.save_html("trace.html")` writes a page on which
# every token opens the candidates of its round.

# %%
print(traces["fact"].to_text(color=False))

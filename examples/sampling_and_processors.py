# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Sampling and logits processors
#
# With a drafter, sampled text follows the distribution of plain sampling, whatever shapes it: temperature, top-p,
# penalties, a processor of your own. A drafted token is kept with probability `min(1, p / q)`, and a refused one is
# replaced by a draw from what `p` has left.

# %%
import torch
from smollm2 import load_pair
from transformers import LogitsProcessor, set_seed


device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer, target, draft = load_pair(device)
chat = [{"role": "user", "content": "Describe the weather in one sentence."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(device)
length = inputs["input_ids"].shape[1]

# %%
for options in (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
):
    set_seed(0)
    ids = target.generate(**inputs, assistant_model=draft, do_sample=True, max_new_tokens=32, **options)
    print(f"{options}: {draft.last_stats.mean_accepted_length:.2f} tokens per round")
    print(f"  {tokenizer.decode(ids[0, length:], skip_special_tokens=True)}\n")

# %% [markdown]
# A processor of your own sees the prefix that plain decoding would show it. One that only looks at the rows that it is
# given says so, and rows of a batch then need not wait for each other.

# %%


class NoDigits(LogitsProcessor):
    """Forbids every token with a digit in it."""

    is_row_independent = True

    def __init__(self):
        texts = tokenizer.batch_decode([[index] for index in range(len(tokenizer))])
        self.ids = [index for index, text in enumerate(texts) if any(map(str.isdigit, text))]

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.ids] = -torch.inf
        return scores


set_seed(0)
ids = target.generate(
    **inputs, assistant_model=draft, do_sample=True, max_new_tokens=32, logits_processor=[NoDigits()]
)
text = tokenizer.decode(ids[0, length:], skip_special_tokens=True)
print(text)
assert not any(map(str.isdigit, text))

# %% [markdown]
# The law of the second token, sampled many times with and without the drafter. The second token is the first one that
# can come from a draft.

# %%
rows, options = 256, {"do_sample": True, "temperature": 0.7, "top_k": 4, "max_new_tokens": 2}
counts = []
for assistant in (None, draft):
    set_seed(1)
    ids = target.generate(**inputs, **options, num_return_sequences=rows, assistant_model=assistant)
    counts.append(torch.bincount(ids[:, length + 1].cpu(), minlength=len(tokenizer)))
plain, drafted = counts
for token in plain.topk(5).indices.tolist():
    print(f"{tokenizer.decode([token])!r:>14}: {plain[token] / rows:.2f} without, {drafted[token] / rows:.2f} with")

# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # A chat that streams
#
# Several turns with one key-value cache: each turn runs only what is new, and the text appears as it is committed.

# %%
import threading

import torch
from smollm2 import load_pair
from transformers import DynamicCache, TextIteratorStreamer

from transformers_dflash2.compat import CACHE_KEY


device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer, target, draft = load_pair(device)

# %% [markdown]
# `TextIteratorStreamer` hands text from the thread that generates to the one that shows it. A round commits several
# tokens, which reach the streamer one by one and in order.

# %%
messages, cache = [], DynamicCache(config=target.config)
seen = []


def reuse(ids):
    """Keeps as much of the cache as the new prompt begins with."""
    common = 0
    while common < min(len(seen), len(ids) - 1) and seen[common] == ids[common]:
        common += 1
    surplus = cache.get_seq_length() - common
    if surplus > 0:
        cache.crop(-surplus)


def turn(text):
    messages.append({"role": "user", "content": text})
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reuse(inputs["input_ids"][0].tolist())
    # The timeout ends the wait for text if the other thread fails.
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)

    def work():
        ids = target.generate(
            **inputs.to(device),
            assistant_model=draft,
            # `cache`, or `past_key_values` before transformers 5.24.
            **{CACHE_KEY: cache},
            streamer=streamer,
            max_new_tokens=40,
            do_sample=False,
        )
        seen[:] = ids[0].tolist()

    worker = threading.Thread(target=work)
    worker.start()
    print(f"> {text}\n")
    reply = ""
    for piece in streamer:
        print(piece, end="", flush=True)
        reply += piece
    worker.join()
    messages.append({"role": "assistant", "content": reply})
    stats = draft.last_stats
    print(f"\n[{stats.new_tokens} tokens, {stats.target_passes} passes, cache of {cache.get_seq_length()}]\n")


# %%
turn("Name three animals that live in the sea.")

# %%
turn("Which of them is the largest?")

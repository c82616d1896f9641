# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # A quantised target on a small card
#
# The drafter only *calls* the target's layers and its head and never reads their weights, so a quantised target needs
# nothing special. On a GPU with bitsandbytes the target loads in 4 bits; elsewhere its projections are replaced by a
# few lines of 8-bit code, which shows the same thing.

# %%
import importlib.util

import torch
from smollm2 import find_target, load_pair
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer, dense, draft = load_pair(device)


class Int8Linear(nn.Module):
    """A projection with 8-bit weights and one scale per output row."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("scale", linear.weight.abs().amax(dim=1, keepdim=True) / 127)
        self.register_buffer("packed", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, hidden):
        return nn.functional.linear(hidden, self.packed.to(hidden.dtype) * self.scale)


def load_quantised():
    folder, _ = find_target()
    if device == "cuda" and importlib.util.find_spec("bitsandbytes"):
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dense.dtype).to(device).eval()
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Int8Linear(child))
    return model


# %%
quantised = load_quantised()


def megabytes(model):
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


print(f"target: {megabytes(dense):.0f} MB dense, {megabytes(quantised):.0f} MB quantised")
print(f"drafter: {megabytes(draft):.0f} MB")

# %% [markdown]
# The drafter was trained on the features of the dense target. With the quantised one it is still exact, since that
# target verifies every token, and accepted almost as often.

# %%
chat = [{"role": "user", "content": "Write a Python function that checks whether a number is prime."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(device)
for name, target in (("dense", dense), ("quantised", quantised)):
    plain = target.generate(**inputs, max_new_tokens=48, do_sample=False)
    drafted = target.generate(**inputs, max_new_tokens=48, do_sample=False, assistant_model=draft)
    same = torch.equal(plain, drafted)
    print(f"{name:<10} same text: {same}, {draft.last_stats.mean_accepted_length:.2f} tokens per round")

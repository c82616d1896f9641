# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Bring your own drafter
#
# What a drafter consists of, how to check one that you trained, and how to publish it. Weights are random here, so it
# is hardly ever right. The text is the target's all the same.

# %%
import tempfile
from pathlib import Path

import torch
from smollm2 import load_pair

from transformers_dflash2 import DFlash2Config, DFlash2DraftModel
from transformers_dflash2.conversion import convert_checkpoint


device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer, target, _ = load_pair(device)
shape = target.config.get_text_config()

# %% [markdown]
# A drafter shares the target's width and vocabulary, reads the outputs of a few of its layers, and embeds one token as
# "not known yet". Any token will do that the text itself never contains.

# %%
layers = shape.num_hidden_layers
config = DFlash2Config(
    vocab_size=shape.vocab_size,
    hidden_size=shape.hidden_size,
    intermediate_size=2 * shape.hidden_size,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_target_layers=layers,
    eos_token_id=shape.eos_token_id,
    target_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct",
    dflash_config={
        "block_size": 6,
        "mask_token_id": 3,
        "target_layer_ids": sorted({0, layers // 2, layers - 2}),
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 16,
        "selector_top_k": 8,
    },
)
draft = DFlash2DraftModel(config).to(device=device, dtype=target.dtype).eval()
print(f"{sum(p.numel() for p in draft.parameters()) / 1e6:.1f} M parameters, trained for {config.trained_for}")

# %% [markdown]
# Whatever the weights, greedy text must be the target's. This is the first check of any drafter; the second is the
# accepted length, which is 1 for one that is never right.

# %%
chat = [{"role": "user", "content": "What is gravity?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(device)
plain = target.generate(**inputs, max_new_tokens=16, do_sample=False)
drafted = target.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=draft)
assert torch.equal(plain, drafted)
print(f"same text, {draft.last_stats.mean_accepted_length:.2f} tokens per round")

# %% [markdown]
# A folder to publish. With the code inside, it works where this package is not installed:
# `AutoModel.from_pretrained(folder, trust_remote_code=True)`. `draft.push_to_hub(repo, include_code=True)` uploads the
# same. SGLang and vLLM read the same config.

# %%
work = Path(tempfile.mkdtemp())
draft.save_pretrained(work / "drafter", include_code=True)
print(sorted(path.name for path in (work / "drafter").iterdir()))

# %% [markdown]
# The Speculators form and back.

# %%
convert_checkpoint(work / "drafter", work / "speculators", to="speculators")
convert_checkpoint(work / "speculators", work / "public", to="public")
again = DFlash2DraftModel.from_pretrained(work / "public", dtype=target.dtype)
assert all(torch.equal(value, draft.state_dict()[name].cpu()) for name, value in again.state_dict().items())
print(f"back again, for {again.config.trained_for}")

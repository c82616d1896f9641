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
"""Tiny models with random weights of the families that drafters are published for."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


_COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GATED_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA2 = {
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}


_PICTURE_TOKENS = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 61, "vision_end_token_id": 62}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
}


@dataclass(frozen=True)
class Family:
    """
    A family of target models.

    Args:
        model_type (`str`): The host's name for its (text) config.
        settings (`dict`): What its tiny config sets beyond the common sizes.
        drops (`tuple[str, ...]`): Common settings that it does not have.
        vision (`dict`, *optional*): The tiny vision config of a wrapper around the text model, which then has
            `settings` in its text config.
        dynamic_only (`str`, *optional*): Why the static tempo is not taken.
    """

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    vision: dict[str, Any] | None = None
    dynamic_only: str | None = None

    @property
    def has_experts(self) -> bool:
        """Whether its tokens choose among experts, whose weights the host keeps in one parameter."""
        return any("experts" in name for name in self.settings)

    @property
    def notes(self) -> str:
        """What the support table says beyond yes."""
        static = f"static: {self.dynamic_only}" if self.dynamic_only else None
        quantized = "nf4: the experts stay dense" if self.has_experts else None
        return "; ".join(filter(None, (static, quantized)))

    def build(self, std: float = 0.3):
        """The tiny model in evaluation mode; fresh weights of the host are so small that it would repeat one token."""
        settings = {k: v for k, v in {**_COMMON, **self.settings}.items() if k not in self.drops}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if self.vision is None:
                config = AutoConfig.for_model(self.model_type, **settings)
                model = AutoModelForCausalLM.from_config(config)
            else:
                config = AutoConfig.for_model(
                    self.model_type, text_config=settings, vision_config=self.vision, **_PICTURE_TOKENS
                )
                model = AutoModelForImageTextToText.from_config(config)
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.data.normal_(std=std)
            return model.eval()


FAMILIES = {
    "Llama": Family("llama"),
    "Qwen2": Family("qwen2", drops=("head_dim",)),
    "Qwen3": Family("qwen3"),
    "Qwen3-MoE": Family("qwen3_moe", _EXPERTS),
    "Qwen3-Next": Family("qwen3_next", {**_GATED_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3.5": Family("qwen3_5_text", _GATED_DELTA_NET),
    "Qwen3.5-MoE": Family("qwen3_5_moe_text", {**_GATED_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "Gemma 2": Family("gemma2", {**_SLIDING, "query_pre_attn_scalar": 8}),
    "Gemma 3": Family("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 8}),
    "Gemma 4": Family(
        "gemma4_text",
        {**_SLIDING, "global_head_dim": 8, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    ),
    "gpt-oss": Family("gpt_oss", {**_LOCAL_EXPERTS, **_SLIDING}),
    "Mistral": Family("mistral", {"sliding_window": 8}),
    "Ministral": Family("ministral", _SLIDING),
    "GLM-4": Family("glm4"),
    "GLM-4-MoE": Family("glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "MiniMax": Family(
        "minimax",
        {**_LOCAL_EXPERTS, "block_size": 4},
        dynamic_only="its recurrence is written out in a layer, a second pass takes it back",
    ),
    "MiniMax-M2": Family("minimax_m2", _LOCAL_EXPERTS),
    "LFM2": Family("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}, drops=("head_dim",)),
    "Falcon-H1": Family(
        "falcon_h1", {**_MAMBA2, "mamba_d_ssm": 64}, dynamic_only="layers of type `hybrid`, as Inkling's"
    ),
    "Granite 4": Family(
        "granitemoehybrid",
        {
            **_MAMBA2,
            **_LOCAL_EXPERTS,
            "shared_intermediate_size": 32,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "Bamba": Family("bamba", {**_MAMBA2, "attn_layer_indices": [1, 3]}),
    "OLMo hybrid": Family("olmo_hybrid", _GATED_DELTA_NET),
    "Kimi Linear": Family(
        "kimi_linear",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        drops=("head_dim",),
    ),
    "Qwen3.5 with vision": Family("qwen3_5", _GATED_DELTA_NET, vision=_VISION),
    "Muse Glimmer": Family(
        "muse_glimmer",
        {"sliding_window": 8},
        vision={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    ),
    "Inkling": Family(
        "inkling_text",
        {
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": 8,
            "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"],
            "rel_extent": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "logits_mup_width_multiplier": 2.0,
        },
        dynamic_only="its attention takes a bias by position",
    ),
}


def support_table() -> str:
    """The table of the README, from what `test_families.py` runs."""
    columns = ("family", "`model_type`", "dynamic tempo", "static tempo", "batch", "quantised (nf4)", "notes")
    rows = [columns, ("---",) * len(columns)]
    for name, family in FAMILIES.items():
        static = "yes" if family.dynamic_only is None else "dynamic instead"
        rows.append((name, f"`{family.model_type}`", "yes", static, "yes", "yes", family.notes))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)

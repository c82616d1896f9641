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
"""Triton kernels, one operation per file, and what decides whether one may run.

Importing this package loads nothing: a launcher's module, and triton with it, is imported when the launcher is first
asked for. [`dispatch.dispatch`] is the way in for callers that must also work without triton.
"""

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .accept_greedy import accept_greedy_triton
    from .accept_sampled import accept_sampled_triton
    from .block_attention import block_attention_triton
    from .block_recurrence import block_recurrence_triton
    from .commit_states import commit_states_triton
    from .context_kv import context_kv_triton
    from .gated_rms_norm import gated_rms_norm_triton
    from .grouped_conv import grouped_conv_triton
    from .markov_step import markov_step_triton
    from .order_candidates import order_candidates_triton
    from .qk_norm_rope import qk_norm_rope_triton
    from .rms_norm import rms_norm_triton
    from .rotary_embedding import rotary_embedding_triton
    from .selector_walk import selector_walk_triton
    from .short_conv import short_conv_triton
    from .silu_mul import silu_mul_triton
    from .skinny_linear import skinny_linear_triton
    from .skinny_linear_4bit import skinny_linear_4bit_triton
    from .stage_accepted import stage_accepted_triton
    from .write_columns import write_columns_triton


__all__ = [
    "accept_greedy_triton",
    "accept_sampled_triton",
    "block_attention_triton",
    "block_recurrence_triton",
    "commit_states_triton",
    "context_kv_triton",
    "gated_rms_norm_triton",
    "grouped_conv_triton",
    "markov_step_triton",
    "order_candidates_triton",
    "qk_norm_rope_triton",
    "rms_norm_triton",
    "rotary_embedding_triton",
    "selector_walk_triton",
    "short_conv_triton",
    "silu_mul_triton",
    "skinny_linear_4bit_triton",
    "skinny_linear_triton",
    "stage_accepted_triton",
    "write_columns_triton",
]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{name.removesuffix('_triton')}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

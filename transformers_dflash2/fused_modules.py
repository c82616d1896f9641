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
"""Fused stand-ins for small modules of a model, for as long as a CUDA graph is recorded.

A norm of the host is half a dozen launches; a decoder of 36 layers has 145 of them, which at a few rows cost more than
the arithmetic. While the context is open the norms' `forward` runs one kernel instead. Only modules whose class
computes what the kernel computes are touched, which is told by the bytecode of their `forward`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .kernels.rms_norm import rms_norm_ineligible_reason, rms_norm_triton


def _is_llama_norm(module: nn.Module) -> bool:
    """Whether a module normalises as Llama does: fp32, rounded, then times the weight."""
    if not hasattr(module, "weight") or not hasattr(module, "variance_epsilon") or "forward" in vars(module):
        return False
    code, like = type(module).forward.__code__, LlamaRMSNorm.forward.__code__
    return (code.co_code, code.co_names, code.co_consts[1:]) == (like.co_code, like.co_names, like.co_consts[1:])


def _fused_norm(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    if rms_norm_ineligible_reason(hidden_states, module.weight, eps=module.variance_epsilon) is not None:
        return type(module).forward(module, hidden_states)
    return rms_norm_triton(hidden_states, module.weight, eps=module.variance_epsilon)[0]


@contextmanager
def fused_norms(*models: nn.Module) -> Iterator[int]:
    """
    Run the models' RMS norms through one kernel each while the context is open.

    Yields:
        How many norms were replaced.
    """
    replaced = []
    try:
        for model in models:
            for module in model.modules():
                if _is_llama_norm(module):
                    module.forward = partial(_fused_norm, module)
                    replaced.append(module)
        yield len(replaced)
    finally:
        for module in replaced:
            del module.forward


__all__ = ["fused_norms"]

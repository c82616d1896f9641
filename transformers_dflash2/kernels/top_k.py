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
"""The largest values of each row: torch's selection for few rows, flashinfer's for many.

On an H200, for 16 of 151,936 values, torch takes 0.047 / 0.109 / 0.570 ms for 7 / 56 / 448 rows and flashinfer 0.6.8
takes 0.050 / 0.052 / 0.312 ms. flashinfer compiles its kernel in its first call, for about two minutes, which no user
should meet unasked: it is used where the kernel lies compiled already, or where
`TRANSFORMERS_DFLASH2_FLASHINFER=1` asks for it. `0` rules it out.
"""

import logging
import os
import time
from functools import lru_cache

import torch

from ..import_utils import unavailable_reason
from .dispatch import FLOAT_DTYPES


__all__ = ["CROSSOVER_ROWS", "flashinfer_reason", "select_top_k"]

logger = logging.getLogger("transformers_dflash2")

# Rows from which flashinfer is the faster one.
CROSSOVER_ROWS = 56


def select_top_k(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The largest `top_k` values of each row, in no order that callers may rely on.

    Args:
        logits (`torch.Tensor` of shape `(..., vocab)`): fp32 or a half type.
        top_k (`int`): Values to keep, `1 <= top_k <= vocab`.

    Returns:
        `(values, ids)`: tensors of shape `(..., top_k)`, in the dtype of `logits` and int64.
    """
    rows = logits.numel() // max(logits.shape[-1], 1)
    if rows < CROSSOVER_ROWS or not logits.is_cuda or logits.dtype not in FLOAT_DTYPES:
        return torch.topk(logits, top_k, dim=-1)
    if _prepare_flashinfer(logits.device) is not None:
        return torch.topk(logits, top_k, dim=-1)
    return _flashinfer_top_k(logits, top_k)


def flashinfer_reason() -> str | None:
    """Why flashinfer's kernel may not be used, or `None`; a kernel that is not compiled yet may be asked for."""
    reason = unavailable_reason("flashinfer")
    if reason is not None:
        return reason
    wish = os.environ.get("TRANSFORMERS_DFLASH2_FLASHINFER")
    if wish == "0":
        return "TRANSFORMERS_DFLASH2_FLASHINFER=0 rules it out"
    if wish == "1" or _is_compiled():
        return None
    return "its kernel is not compiled yet; TRANSFORMERS_DFLASH2_FLASHINFER=1 compiles it, for about two minutes"


def _is_compiled() -> bool:
    try:
        from flashinfer.jit.topk import gen_topk_module

        return bool(gen_topk_module().is_compiled)
    except Exception as error:
        # A release that keeps its kernels elsewhere, or an installation without its compiler.
        logger.debug("flashinfer does not tell whether its top-k is compiled: %s", error)
        return False


@lru_cache
def _prepare_flashinfer(device: torch.device) -> str | None:
    """[`flashinfer_reason`], once per device; the kernel has been compiled and run when it is `None`."""
    reason = flashinfer_reason()
    if reason is not None:
        logger.info("Candidates are selected by torch: flashinfer is not used, %s.", reason)
        return reason
    is_first = not _is_compiled()
    if is_first:
        logger.warning("Compiling flashinfer's top-k kernel, once on this machine; this takes about two minutes.")
    start = time.perf_counter()
    try:
        # Also makes the buffer that later calls share, which must not happen inside a recording.
        _flashinfer_top_k(torch.zeros(1, 32, device=device), 1)
    except Exception as error:
        # Compilers fail in many ways.
        reason = f"its first call failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        logger.warning("Candidates are selected by torch: flashinfer is not used, %s.", reason)
        return reason
    if is_first:
        logger.warning("flashinfer's top-k kernel is ready after %.0f s.", time.perf_counter() - start)
    return None


def _flashinfer_top_k(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    import flashinfer

    values, ids = flashinfer.top_k(logits.flatten(0, -2).contiguous(), top_k, sorted=True, deterministic=True)
    shape = (*logits.shape[:-1], top_k)
    return values.view(shape), ids.view(shape).long()

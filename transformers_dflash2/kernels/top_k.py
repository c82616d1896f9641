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
"""The largest values of each row: torch's selection for few rows, in two steps for many, or flashinfer's.

The largest `k` values of a row lie in at most `k` slices of it, those with the largest maxima. With many rows it pays
to find these slices first, and to select in them alone: microseconds on an H200, for 16 of 151,936 bfloat16 values,

| rows | 7 | 28 | 56 | 112 | 448 |
| --- | --- | --- | --- | --- | --- |
| torch | 47 | 73 | 115 | 185 | 576 |
| torch, in two steps | 53 | 59 | 69 | 73 | 172 |
| flashinfer 0.6.8 | 50 | | 52 | | 312 |

flashinfer compiles its kernel in its first call, for about two minutes, which no user should meet unasked: where it is
the fastest, it is used if the kernel lies compiled already, or if `TRANSFORMERS_DFLASH2_FLASHINFER=1` asks for it. `0`
rules it out.
"""

import logging
import os
import time
from functools import lru_cache

import torch

from ..import_utils import unavailable_reason
from .dispatch import FLOAT_DTYPES


__all__ = ["FLASHINFER_ROWS", "TWO_STEP_ROWS", "flashinfer_reason", "select_top_k"]

logger = logging.getLogger("transformers_dflash2")

# Rows from which two steps are faster than one.
TWO_STEP_ROWS = 28
# Rows for which flashinfer is the fastest.
FLASHINFER_ROWS = range(56, 112)
# Values of a slice. They lie one in each of as many stretches of the row, so that slices are reduced side by side.
_SLICE = 64


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
    if rows < TWO_STEP_ROWS or not logits.is_cuda or logits.dtype not in FLOAT_DTYPES:
        return torch.topk(logits, top_k, dim=-1)
    if rows in FLASHINFER_ROWS and _prepare_flashinfer(logits.device) is None:
        return _flashinfer_top_k(logits, top_k)
    return _two_step_top_k(logits, top_k)


def _two_step_top_k(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[`select_top_k`] in the slices that the values have to be in."""
    slices = logits.shape[-1] // _SLICE
    # Else most of the row is left.
    if slices < 4 * top_k:
        return torch.topk(logits, top_k, dim=-1)
    rows = logits.flatten(0, -2)
    body, tail = rows.split([slices * _SLICE, rows.shape[-1] - slices * _SLICE], dim=-1)
    body = body.unflatten(-1, (_SLICE, slices))
    best = body.amax(dim=1).topk(top_k, dim=-1, sorted=False).indices
    kept = body.gather(2, best[:, None].expand(-1, _SLICE, -1)).flatten(1)
    ids = torch.arange(rows.shape[-1], device=rows.device)
    first, tail_ids = ids[: slices * _SLICE : slices], ids[slices * _SLICE :]
    ids = (first[:, None] + best[:, None]).flatten(1)
    if tail.shape[-1]:
        # What no slice has room for.
        kept, ids = torch.cat([kept, tail], dim=-1), torch.cat([ids, tail_ids.expand(len(rows), -1)], dim=-1)
    values, places = kept.topk(top_k, dim=-1)
    shape = (*logits.shape[:-1], top_k)
    return values.view(shape), ids.gather(1, places).view(shape)


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

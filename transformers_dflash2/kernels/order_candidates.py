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
"""Candidates by value and id in one launch; [`functional_dflash2.order_candidates`] is the reference.

A candidate's place is the number of candidates that come before it. Counting them compares every pair, which for a few
dozen is far less work than starting the two sorts, each of several kernels, that the reference takes.
"""

import torch
import triton
import triton.language as tl

from .dispatch import FLOAT_DTYPES, device_reason, next_power_of_2, out_reason, tensor_reason
from .overlap import overlap_options, wait_for_inputs


__all__ = [
    "MAX_CANDIDATES",
    "order_candidates_ineligible_reason",
    "order_candidates_op",
    "order_candidates_triton",
]

# One program holds all pairs of a row.
MAX_CANDIDATES = 64


@triton.jit
def _order_candidates_kernel(
    value_ptr,
    id_ptr,
    ordered_value_ptr,
    ordered_id_ptr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_K)
    in_k = lanes < TOP_K
    values = tl.load(value_ptr + row * TOP_K + lanes, mask=in_k, other=0.0).to(tl.float32)
    ids = tl.load(id_ptr + row * TOP_K + lanes, mask=in_k, other=0)
    is_nan = (values != values).to(tl.int32)
    # Sorting takes NaN for larger than any number, and all NaN for equal.
    larger = (values[:, None] > values[None, :]) | (is_nan[:, None] > is_nan[None, :])
    equal = (values[:, None] == values[None, :]) | ((is_nan[:, None] & is_nan[None, :]) != 0)
    # Ids are distinct; if they were not, every place would still be taken once.
    twice = (ids[:, None] == ids[None, :]) & (lanes[:, None] < lanes[None, :])
    before = in_k[:, None] & (larger | (equal & ((ids[:, None] < ids[None, :]) | twice)))
    place = tl.sum(before.to(tl.int32), axis=0)
    output = row * TOP_K + place
    tl.store(ordered_value_ptr + output, values, mask=in_k)
    tl.store(ordered_id_ptr + output, ids, mask=in_k)


def order_candidates_ineligible_reason(
    values: torch.Tensor, ids: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> str | None:
    """Why [`order_candidates_triton`] cannot take these arguments, or `None`."""
    reason = device_reason(values=values, ids=ids)
    if reason is not None:
        return reason
    if values.dim() == 0:
        return "values has no dimension; its last one should hold the candidates of a row"
    shape, top_k = tuple(values.shape), values.shape[-1]
    reason = tensor_reason("values", values, shape=shape, dtypes=FLOAT_DTYPES) or tensor_reason(
        "ids", ids, shape=shape, dtypes=(torch.int64,)
    )
    if reason is not None:
        return reason
    for name, tensor in (("values", values), ("ids", ids)):
        if not tensor.is_contiguous():
            return f"{name} is not contiguous; make it contiguous"
    if top_k > MAX_CANDIDATES:
        return f"values has {top_k} candidates in a row; the kernel takes at most {MAX_CANDIDATES}"
    if out is not None:
        return out_reason("out[0]", out[0], values, shape=shape, dtype=torch.float32) or out_reason(
            "out[1]", out[1], values, shape=shape, dtype=torch.int64
        )
    return None


def order_candidates_triton(
    values: torch.Tensor, ids: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The candidates of each row by value descending and, among equals, by id ascending, in one launch.

    Args:
        values (`torch.Tensor` of shape `(..., top_k)`):
            Contiguous; up to 64 candidates in a row. NaN counts as larger than every number.
        ids (`torch.LongTensor` of shape `(..., top_k)`):
            Contiguous ids of the candidates, distinct within a row.
        out (`tuple` of `torch.Tensor`, *optional*):
            Buffers for the results; none may be an input.

    Returns:
        `(values, ids)`: fp32 and int64 tensors of shape `(..., top_k)`.
    """
    reason = order_candidates_ineligible_reason(values, ids, out=out)
    if reason is not None:
        raise ValueError(f"order_candidates_triton: {reason}")
    if out is None:
        out = torch.empty_like(values, dtype=torch.float32), torch.empty_like(ids)
    if values.numel() == 0:
        return out
    top_k = values.shape[-1]
    with torch.cuda.device_of(values):
        _order_candidates_kernel[(values.numel() // top_k,)](
            values,
            ids,
            *out,
            TOP_K=top_k,
            BLOCK_K=next_power_of_2(top_k),
            num_warps=1 if top_k <= 16 else 4,
            **overlap_options(values.device),
        )
    return out


@torch.library.custom_op("transformers_dflash2::order_candidates", mutates_args=())
def order_candidates_op(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[`order_candidates_triton`] for `torch.compile`."""
    return order_candidates_triton(values, ids)


@order_candidates_op.register_fake
def _(values, ids):
    return torch.empty_like(values, dtype=torch.float32), torch.empty_like(ids)

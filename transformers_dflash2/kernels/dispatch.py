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
"""Whether a kernel may run on given arguments, and the plain path where it may not.

Every operation's module has `<op>_ineligible_reason(...)` next to its launcher `<op>_triton(...)`, with the same
arguments. It returns one sentence about the first thing the kernel cannot take, or `None`. The helpers here write the
parts of such a sentence that all operations share; each returns `None` when it has nothing to object to, so that they
chain with `or`.
"""

import importlib
import logging
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ..import_utils import unavailable_reason


logger = logging.getLogger("transformers_dflash2")

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTEGER_DTYPES = (torch.int64, torch.int32)

__all__ = [
    "FLOAT_DTYPES",
    "INTEGER_DTYPES",
    "compiler_reason",
    "device_reason",
    "dispatch",
    "ineligible_reason",
    "is_interpreting",
    "next_power_of_2",
    "out_reason",
    "tensor_reason",
]


def is_interpreting() -> bool:
    """True when kernels run in triton's interpreter, which takes CPU tensors; for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()


def device_reason(**tensors: torch.Tensor | None) -> str | None:
    """Objects to tensors of several devices, to a device without triton, and to inputs that need gradients."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, *_ = given
    device = given[first].device
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreting()):
        return f"{first} is on {device}, and the kernels need a CUDA device; move the inputs to one"
    if device.type == "cuda" and (reason := compiler_reason(device)) is not None:
        return reason
    for name, tensor in given.items():
        if tensor.device != device:
            return f"{name} is on {tensor.device} and {first} on {device}; move them to one device"
        if tensor.requires_grad and torch.is_grad_enabled():
            return f"{name} requires a gradient, which the kernels do not compute; use torch.no_grad()"
    return None


@lru_cache
def compiler_reason(device: torch.device) -> str | None:
    """
    Why triton cannot build kernels for a CUDA device, or `None` if it can.

    Being importable is not enough: it needs a C compiler and Python's headers, and a device that is not too old.
    """
    try:
        importlib.import_module(".probe", __package__).run_probe(device)
    except Exception as error:
        what = " ".join(str(error).split())[:200]
        return f"triton cannot run kernels on {device} ({type(error).__name__}: {what}); see its installation guide"
    return None


def tensor_reason(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    unit_stride: bool = True,
) -> str | None:
    """
    Objects to a tensor's shape, dtype or memory layout.

    Args:
        name (`str`):
            The argument's name, for the sentence.
        tensor (`torch.Tensor`):
            The argument.
        shape (`tuple`):
            Its expected shape; `None` stands for any length.
        dtypes (`tuple` of `torch.dtype`):
            What it may hold.
        unit_stride (`bool`, *optional*, defaults to `True`):
            Whether entries of the last dimension must be neighbours in memory.
    """
    fits = tensor.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        expected = ", ".join("*" if want is None else str(want) for want in shape)
        return f"{name} has shape {tuple(tensor.shape)}; it should be ({expected})"
    if tensor.dtype not in dtypes:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"{name} is {str(tensor.dtype).removeprefix('torch.')}; convert it to one of: {accepted}"
    if unit_stride and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return f"{name} has stride {tensor.stride(-1)} in its last dimension; make it contiguous"
    return None


def out_reason(name: str, tensor: torch.Tensor, like: torch.Tensor, *, shape: tuple, dtype: torch.dtype) -> str | None:
    """Objects to a caller's output buffer: it must be contiguous, on the inputs' device, of the result's type."""
    if tensor.device != like.device:
        return f"{name} is on {tensor.device} and the inputs on {like.device}; allocate it there"
    if not tensor.is_contiguous():
        return f"{name} is not contiguous; allocate it with torch.empty"
    return tensor_reason(name, tensor, shape=shape, dtypes=(dtype,))


def ineligible_reason(op: str, *args: Any, **kwargs: Any) -> str | None:
    """
    Why the kernel of an operation cannot take these arguments, or `None` when it can.

    Args:
        op (`str`):
            Name of the operation, e.g. `"grouped_conv"`.
        *args, **kwargs:
            Its arguments.
    """
    return unavailable_reason("triton") or getattr(_module(op), f"{op}_ineligible_reason")(*args, **kwargs)


def dispatch(op: str, reference: Callable, *args: Any, **kwargs: Any) -> Any:
    """
    Runs an operation through its kernel where that is possible, and through the reference where not.

    The first reason for the plain path is logged, once per operation: as a warning for tensors on a CUDA device, where
    speed is lost, else for debugging.

    Args:
        op (`str`):
            Name of the operation, e.g. `"grouped_conv"`.
        reference (`Callable`):
            The plain PyTorch form; takes the same arguments and returns the same.
        *args, **kwargs:
            Arguments of the operation.
    """
    reason = ineligible_reason(op, *args, **kwargs) or _failures.get(op)
    if reason is None:
        try:
            return getattr(_module(op), f"{op}_triton")(*args, **kwargs)
        except Exception as error:
            if not _is_compiler_error(error):
                raise
            reason = _failures[op] = f"its kernel cannot be built here ({type(error).__name__}: {error})"
    if op not in _reported:
        _reported.add(op)
        on_cuda = any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*args, *kwargs.values()))
        logger.log(
            logging.WARNING if on_cuda else logging.DEBUG, "%s runs as plain PyTorch operations: %s", op, reason
        )
    return reference(*args, **kwargs)


# Operations whose reason has been logged, and operations whose kernels did not compile.
_reported: set[str] = set()
_failures: dict[str, str] = {}


def _is_compiler_error(error: Exception) -> bool:
    """Whether a kernel was not launched because a device has not the registers, memory or instructions it wants."""
    return any(kind.__name__ == "TritonError" for kind in type(error).__mro__)


@lru_cache
def _module(op: str):
    return importlib.import_module(f".{op}", __package__)

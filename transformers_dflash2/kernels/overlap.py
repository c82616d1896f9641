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
"""Kernels that start while the one before them on the stream still runs ("programmatic dependent launch").

A short kernel takes longer to start than to run. On devices of compute capability 9.0 and above a launch can be marked
so that its programs are placed as soon as those of the kernel before it are under way. They may do what does not
depend on that kernel (bring the first weights into the cache), and then wait until it has ended and its writes can be
seen. Graphs keep the marks of the launches they were recorded from.

Every kernel launched with [`overlap_options`] calls [`wait_for_inputs`] before it reads what another kernel writes,
before it writes anything, and before any of its programs can return: a kernel then ends after all those before it,
whether they are of this library or not.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, `griddepcontrol` and
`prefetch`.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl


try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    # A build of triton for other vendors' devices, where nothing overlaps.
    HAS_DEPENDENT_LAUNCH = False

    @triton.jit
    def gdc_wait():
        pass

    gdc_launch_dependents = gdc_wait
else:
    HAS_DEPENDENT_LAUNCH = True


__all__ = ["overlap_options", "prefetch_lines", "wait_for_inputs"]


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Wait for the end of the kernel before, and let the next one be placed."""
    if OVERLAPS:
        gdc_wait()
        # Not before: programs of the next kernel would fill the multiprocessors that are free first, several on one.
        gdc_launch_dependents()


@triton.jit
def prefetch_lines(pointers):
    """Bring the cache lines of a tensor of pointers into the second-level cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@lru_cache
def overlap_options(device: torch.device) -> dict[str, Any]:
    """
    How a kernel is launched so that it overlaps with the one before, where the device can do that.

    Args:
        device (`torch.device`): Where the kernel runs.

    Returns:
        `dict`: keyword arguments of the launch: the kernel's own `OVERLAPS`, and triton's mark.
    """
    if device.type != "cuda" or torch.version.hip is not None or not HAS_DEPENDENT_LAUNCH:
        return {"OVERLAPS": False}
    if torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}

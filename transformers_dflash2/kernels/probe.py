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
"""A kernel that does next to nothing, to find out whether triton can build and run one here."""

import torch
import triton
import triton.language as tl


__all__ = ["run_probe"]


@triton.jit
def _probe_kernel(out_ptr):
    tl.store(out_ptr + tl.program_id(0), 1)


def run_probe(device: torch.device) -> None:
    """
    Run a kernel on a device.

    Args:
        device (`torch.device`): A CUDA device.

    Raises:
        `Exception`: Of whatever kind is met: no C compiler, no headers, a device that is too old.
    """
    out = torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device_of(out):
        _probe_kernel[(1,)](out)
    if out.item() != 1:
        raise RuntimeError("a kernel ran and left nothing behind")

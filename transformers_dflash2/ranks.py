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
"""The processes that share one target under tensor parallelism, and what they have to agree on.

All ranks run the same loop on the same committed tokens. Whatever could differ between them would leave them with
blocks of different lengths or contents, and waiting for each other for ever: random numbers, clocks, a streamer that
only one of them has. So rank 0 speaks for all wherever a choice is made, and every exchange starts by asking whether
somebody has failed. A rank that raises answers the question its peers will ask next, and all of them stop.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from . import compat


class PeerFailedError(RuntimeError):
    """Another rank raised; its own traceback says why."""


class Ranks:
    """
    The ranks of a target. A process that has its target to itself is alone and exchanges nothing.

    Args:
        target ([`~transformers.PreTrainedModel`], *optional*): The model; its sharded weights tell who shares it.
    """

    def __init__(self, target=None):
        mesh = None if target is None else compat.tensor_parallel_mesh(target)
        self._group = None if mesh is None else mesh.get_group()
        self.size = 1 if mesh is None else mesh.size()
        self._device = None if mesh is None else torch.device(mesh.device_type)
        # Whether peers will ask how we fare before they wait for anything else.
        self._is_asked = True

    def check(self) -> None:
        """
        Wait for all ranks.

        Raises:
            `PeerFailedError`: One of them has failed.
        """
        if self.size > 1 and self._any(False):
            raise PeerFailedError(
                "Another rank of the tensor-parallel target raised during generate; see its traceback for the reason."
            )

    def report(self, error: BaseException) -> None:
        """
        Let the others know that this rank cannot go on.

        Not after a failure inside the target's own forward: the others wait in collectives of the host's then, and
        end when this process does.
        """
        if self.size > 1 and self._is_asked and not isinstance(error, PeerFailedError):
            # A peer that is gone already cannot be told, and its end is no reason to hide this one.
            with suppress(RuntimeError):
                self._any(True)

    @contextmanager
    def left_to_host(self) -> Iterator[None]:
        """While open, the host runs collectives of its own."""
        self._is_asked = False
        yield
        self._is_asked = True

    def agree(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rank 0's tensors, on the devices of one's own. Shapes and dtypes are those of every rank."""
        if self.size == 1:
            return tensors
        self.check()
        agreed = []
        for tensor in tensors:
            message = tensor.to(self._device, copy=True)
            # Booleans are no type that every backend sends.
            message = message.to(torch.uint8) if message.dtype == torch.bool else message
            dist.broadcast(message.contiguous(), group=self._group, group_src=0)
            agreed.append(message.to(device=tensor.device, dtype=tensor.dtype))
        return tuple(agreed)

    def gather(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every rank's tensors, side by side in the last dimension in the order of ranks."""
        self.check()
        gathered = []
        for tensor in tensors:
            message = tensor.to(self._device).contiguous()
            parts = [torch.empty_like(message) for _ in range(self.size)]
            dist.all_gather(parts, message, group=self._group)
            gathered.append(torch.cat(parts, dim=-1).to(tensor.device))
        return tuple(gathered)

    def _any(self, flag: bool) -> bool:
        message = torch.tensor([int(flag)], device=self._device)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group)
        return bool(message.item())


__all__ = ["PeerFailedError", "Ranks"]

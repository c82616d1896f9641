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
"""Context keys and values of all draft layers from one product and one kernel.

A drafter projects each committed token's features to keys and values once per layer. For a recording the projections
of all layers are stacked, so that their product is one, and `context_kv` norms, rotates and stores the result.
"""

import torch
from torch import nn

from .fused_modules import is_llama_norm
from .import_utils import unavailable_reason
from .kernels.dispatch import device_reason
from .modeling_dflash2 import DFlash2DraftModel
from .static_buffers import StaticContext


def stacked_context_reason(draft: DFlash2DraftModel) -> str | None:
    """Why a drafter's projections cannot be stacked, or `None` if they can."""
    reason = unavailable_reason("triton") or device_reason(fc=draft.fc.weight.detach())
    if reason is not None:
        return reason
    for layer in draft.layers:
        attention = layer.self_attn
        if not is_llama_norm(attention.k_norm):
            return f"{type(attention.k_norm).__name__} is no norm that the kernel computes"
        for projection in (attention.k_proj, attention.v_proj):
            # A quantised or wrapped one has a forward of its own.
            if type(projection) is not nn.Linear or "forward" in vars(projection) or projection.bias is not None:
                return f"a projection is {type(projection).__name__} and no plain Linear without a bias"
    return None


class StackedContext:
    """
    Appends to a context of fixed size as [`DFlash2Model.append_context`] does.

    Args:
        draft ([`DFlash2DraftModel`]): The drafter; see [`stacked_context_reason`].
        context ([`StaticContext`]): Written in place.
    """

    def __init__(self, draft: DFlash2DraftModel, context: StaticContext):
        from .kernels.context_kv import context_kv_pointers

        self.context = context
        # Addresses of the context's buffers, which live as long as it does.
        self._pointers = context_kv_pointers(context.keys, context.values)
        self._weight = torch.cat(self._projections(draft))
        self._norms = torch.stack(self._norm_weights(draft))

    @staticmethod
    def _projections(draft: DFlash2DraftModel) -> list[torch.Tensor]:
        attentions = [layer.self_attn for layer in draft.layers]
        return [part.weight.detach() for a in attentions for part in (a.k_proj, a.v_proj)]

    @staticmethod
    def _norm_weights(draft: DFlash2DraftModel) -> list[torch.Tensor]:
        return [layer.self_attn.k_norm.weight.detach() for layer in draft.layers]

    def refresh(self, draft: DFlash2DraftModel) -> None:
        """Copy the drafter's weights anew: they may have changed in place since the last call."""
        torch.cat(self._projections(draft), out=self._weight)
        torch.stack(self._norm_weights(draft), out=self._norms)

    def append(
        self, draft: DFlash2DraftModel, features: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """
        Args:
            draft ([`DFlash2DraftModel`]): The drafter.
            features (`torch.Tensor` of shape `(rows, entries, width)`): Outputs of the tapped target layers.
            positions (`torch.LongTensor` of shape `(rows, entries)`): Absolute positions of the entries.
            counts (`torch.LongTensor` of shape `(rows,)`): Entries of each row that are committed.
        """
        from .kernels.context_kv import context_kv_triton
        from .kernels.rotary_embedding import cos_sin_table

        fused = draft.hidden_norm(draft.fc(features))
        table = cos_sin_table(*draft.rotary_emb(fused, positions)).flatten(0, 1)
        columns = self.context.begin_append(positions, counts)
        context_kv_triton(
            nn.functional.linear(fused, self._weight).flatten(0, 1),
            self._norms,
            table,
            None,
            columns,
            self.context.keys,
            self.context.values,
            eps=draft.config.rms_norm_eps,
            commit_lengths=counts,
            pointers=self._pointers,
        )


__all__ = ["StackedContext", "stacked_context_reason"]

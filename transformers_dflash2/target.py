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
"""Everything that is asked of a target model: layers to tap, embedding rows, output head, vocabulary.

Layers and head are only ever *called*: no weight of theirs is read, sliced or cast, so quantised, offloaded and
adapted modules work through their own forward. So is the embedding, unless its class does more than look rows up; then
the rows are read from its weight, because drafters are trained on the raw ones.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .configuration_dflash2 import DFlash2Config


# Layer types of the host whose state a crop cannot take back.
_RECURRENT_LAYER_WORDS = ("linear", "mamba", "conv", "recurrent", "ssm", "rwkv", "lightning", "kda")


class FeatureTap:
    """
    Collects the outputs of tapped layers, of forwards made by the thread that created it while it is listening.

    A call to [`take`] returns what has come in since the last one and lets go of it.
    """

    def __init__(self, num_taps: int):
        self._chunks: list[list[torch.Tensor]] = [[] for _ in range(num_taps)]
        self._thread = threading.get_ident()
        self._is_listening = False

    @contextmanager
    def listen(self) -> Iterator[None]:
        """
        Record while the context is open, what was not taken is let go of. Forwards made by others, a processor for
        instance, are none of ours.
        """
        self._chunks = [[] for _ in self._chunks]
        self._is_listening = True
        try:
            yield
        finally:
            self._is_listening = False

    def record(self, tap: int, output) -> None:
        """Keep the output of a tapped layer."""
        if not self._is_listening:
            return
        # Another thread may be running the same target with a drafter, or without. A compiler knows no threads: what
        # it compiles for a round is run by that round alone.
        if torch.compiler.is_compiling() or threading.get_ident() == self._thread:
            hidden = output[0] if isinstance(output, tuple | list) else output
            self._chunks[tap].append(hidden)

    def take(self, entries: int | None = None) -> list[torch.Tensor]:
        """
        Args:
            entries (`int`, *optional*): Return only the first `entries` of what was recorded.

        Returns:
            One tensor of shape `(batch, entries, target_hidden_size)` per tap, in the order of the taps. Chunks of a
            chunked prefill are joined in order.
        """
        recorded, self._chunks = self._chunks, [[] for _ in self._chunks]
        return [_join(chunks, entries) for chunks in recorded]


def _join(chunks: list[torch.Tensor], entries: int | None) -> torch.Tensor:
    if entries is not None:
        # Chunks past the limit may come from somebody else's forward, of another batch size even.
        kept, chunks = chunks, []
        while kept and entries > 0:
            chunks.append(kept.pop(0)[:, :entries])
            entries -= chunks[-1].shape[1]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)


class TargetAdapter:
    """
    A target model as one drafter sees it.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model that verifies.
        config ([`DFlash2Config`]): The drafter's configuration; it is checked against the target.

    Raises:
        `ValueError`: The target is an encoder-decoder or keeps a recurrent state, or the drafter does not fit it
        (tapped layers, hidden size, mask token, vocabulary).
    """

    def __init__(self, target, config: DFlash2Config):
        self.target = target
        name = type(target).__name__
        if target.config.is_encoder_decoder:
            raise ValueError(f"{name} is an encoder-decoder; a DFlash2 drafter needs a decoder-only target.")
        text_config = target.config.get_text_config(decoder=True)
        reason = _recurrent_reason(target, text_config)
        if reason is not None:
            raise ValueError(
                f"{name} keeps a recurrent state ({reason}) that cannot be rolled back after a partly accepted block; "
                "such hybrid targets are not supported yet. Generate without assistant_model, or use a target with "
                "attention layers only."
            )
        self.layers = _find_layers(target, text_config)
        self.embedding = target.get_input_embeddings()
        self._rows_are_changed = (
            isinstance(self.embedding, nn.Embedding) and type(self.embedding).forward is not nn.Embedding.forward
        )
        if self._rows_are_changed and self.embedding.weight.device.type == "meta":
            raise ValueError(
                f"The input embedding of {name} ({type(self.embedding).__name__}) is offloaded, and a drafter needs "
                "its raw rows. Keep the embedding on a device in the target's device_map."
            )
        self.head = target.get_output_embeddings()
        if self.head is None:
            raise ValueError(f"{name} has no output embeddings; load it with AutoModelForCausalLM.")
        self.vocab_size = _real_vocab_size(text_config)
        # Codebooks have one row per token of the drafter's vocabulary, which may be padded otherwise.
        self.candidate_limit = min(self.vocab_size, config.vocab_size)
        config.validate_for_target(
            embedding_rows=getattr(self.embedding, "num_embeddings", text_config.vocab_size),
            num_layers=len(self.layers),
            hidden_size=text_config.hidden_size,
            vocab_size=self.candidate_limit,
        )
        self._tapped = [self.layers[index] for index in config.target_layer_ids]

    @contextmanager
    def tap(self) -> Iterator[FeatureTap]:
        """Hook the tapped layers while the context is open; the tap records what it is told to [`listen`] to."""
        tap = FeatureTap(len(self._tapped))
        handles = []
        try:
            for index, layer in enumerate(self._tapped):

                def hook(module, args, output, index=index):
                    tap.record(index, output)

                handles.append(layer.register_forward_hook(hook))
            yield tap
        finally:
            for handle in handles:
                handle.remove()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """
        Raw rows of the embedding matrix, without the scale or norm that some models apply in their embedding module.

        Args:
            token_ids (`torch.LongTensor` of shape `(batch, block)`): Token ids, the mask id among them.

        Returns:
            `torch.Tensor` of shape `(batch, block, target_hidden_size)` in the target's dtype.
        """
        token_ids = _move_for(self.embedding, token_ids)
        if self._rows_are_changed:
            return nn.functional.embedding(token_ids, self.embedding.weight)
        return self.embedding(token_ids)

    def logits(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """
        Head scores of the ids that may be drafted; all others hold `-inf`.

        Args:
            hidden (`torch.Tensor` of shape `(batch, slots, hidden_size)`): Final rows of the drafter.
            dtype (`torch.dtype`): The dtype of the target's own hidden states.

        Returns:
            `torch.Tensor` of shape `(batch, slots, head_rows)` on the device of `hidden`.
        """
        logits = self.head(_move_for(self.head, hidden).to(dtype))
        if logits.shape[-1] > self.candidate_limit:
            excluded = torch.arange(logits.shape[-1], device=logits.device) >= self.candidate_limit
            logits = logits.masked_fill(excluded, -torch.inf)
        return logits.to(hidden.device)


def _recurrent_reason(target, text_config) -> str | None:
    layer_types = getattr(text_config, "layer_types", None) or []
    for layer_type in layer_types:
        if any(word in layer_type for word in _RECURRENT_LAYER_WORDS):
            return f"layer type {layer_type!r}"
    return "the model is stateful" if getattr(target, "_is_stateful", False) else None


def _find_layers(target, text_config) -> nn.ModuleList:
    decoder = target.get_decoder()
    for name in ("layers", "h", "blocks"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == text_config.num_hidden_layers:
            return module
    raise ValueError(f"No list of decoder layers was found in {type(target).__name__}, so there is nothing to tap.")


def _real_vocab_size(text_config) -> int:
    unpadded = getattr(text_config, "unpadded_vocab_size", None)
    return text_config.vocab_size if unpadded is None else unpadded


def _move_for(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Bring inputs to where a module computes. An offloaded one, with weights on the meta device, does it alone."""
    for tensor in (*module.parameters(), *module.buffers()):
        return inputs if tensor.device.type == "meta" else inputs.to(tensor.device)
    return inputs


__all__ = ["FeatureTap", "TargetAdapter"]

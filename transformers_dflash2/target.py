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

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from . import compat
from .configuration_dflash2 import DFlash2Config
from .quantization import HeadProjection, ShardedHeadProjection, move_to
from .ranks import Ranks


logger = logging.getLogger("transformers_dflash2")

# Two statements of one vocabulary differ by rows that are no tokens, and by less than this factor.
_MAX_PADDING = 1.02


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
        `ValueError`: The target is an encoder-decoder, or the drafter does not fit it (tapped layers, hidden size,
        mask token, vocabulary).
    """

    def __init__(self, target, config: DFlash2Config):
        self.target = target
        name = type(target).__name__
        if target.config.is_encoder_decoder:
            raise ValueError(f"{name} is an encoder-decoder; a DFlash2 drafter needs a decoder-only target.")
        text_config = target.config.get_text_config(decoder=True)
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
        try:
            config.validate_for_target(
                embedding_rows=getattr(self.embedding, "num_embeddings", text_config.vocab_size),
                num_layers=len(self.layers),
                hidden_size=text_config.hidden_size,
                vocab_size=self.candidate_limit,
            )
        except ValueError as error:
            raise ValueError(f"{error} {_pairing(target, config)}") from error
        smaller, larger = sorted((text_config.vocab_size, config.vocab_size))
        if larger > _MAX_PADDING * smaller:
            logger.warning_once(
                f"The drafter's vocabulary has {config.vocab_size} tokens and that of {name} "
                f"{text_config.vocab_size}: little of what it drafts will be kept. {_pairing(target, config)}"
            )
        self.ranks = Ranks(target)
        first_id = compat.vocabulary_shard(self.head)
        if first_id is None:
            self.projection = HeadProjection(self.head, self.candidate_limit)
        else:
            self.projection = ShardedHeadProjection(self.head, self.candidate_limit, first_id, self.ranks)
        self._tapped = [self.layers[index] for index in config.target_layer_ids]

    @contextmanager
    def tap(self) -> Iterator[FeatureTap]:
        """
        Hook the tapped layers while the context is open; the tap records what it is told to [`listen`] to.

        A target that the caller has compiled runs as written meanwhile: code that was compiled before knows no taps.
        """
        tap = FeatureTap(len(self._tapped))
        with ExitStack() as stack:
            if _is_compiled(self.target):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for index, layer in enumerate(self._tapped):

                def hook(module, args, output, index=index):
                    tap.record(index, output)

                stack.callback(layer.register_forward_hook(hook).remove)
            yield tap

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """
        Raw rows of the embedding matrix, without the scale or norm that some models apply in their embedding module.

        Args:
            token_ids (`torch.LongTensor` of shape `(batch, block)`): Token ids, the mask id among them.

        Returns:
            `torch.Tensor` of shape `(batch, block, target_hidden_size)` in the target's dtype.
        """
        token_ids = move_to(self.embedding, token_ids)
        if self._rows_are_changed:
            return compat.embedding_rows(self.embedding.weight, token_ids)
        return self.embedding(token_ids)

    def logits(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """
        Head scores of the ids that may be drafted; all others hold `-inf`.

        Args:
            hidden (`torch.Tensor` of shape `(batch, slots, hidden_size)`): Final rows of the drafter.
            dtype (`torch.dtype`): The dtype of the target's own hidden states.

        Returns:
            `torch.Tensor` of shape `(batch, slots, head_rows)` on the device of `hidden`; of a head that is spread
            over ranks, the rows of this one.
        """
        return self.projection(hidden, dtype)


def _pairing(target, config: DFlash2Config) -> str:
    """Who was meant to meet whom, for the error message."""
    given = f"{type(target).__name__} {target.name_or_path!r}" if target.name_or_path else type(target).__name__
    trained_for = config.trained_for
    meant = f"was trained for {trained_for!r}" if trained_for else "does not say which target it was trained for"
    return f"The drafter {meant}; this target is {given}."


class TargetHead:
    """
    The target's output head as a drafter calls it: [`TargetAdapter.logits`] with the dtype filled in.

    Args:
        adapter ([`TargetAdapter`]): The target.
        dtype (`torch.dtype`): The dtype of the target's own hidden states.

    Attributes:
        vocab_size (`int`): Ids that may be drafted, `0` to `vocab_size - 1`.
        select (`Callable`): Takes candidates out of the scores, as [`functional_dflash2.top_candidates`] does.
        width_multiplier (`float`): What a target in maximal update parametrisation divides its hidden states by before
            its head; 1 for others. The head as called here does not.
    """

    def __init__(self, adapter: TargetAdapter, dtype: torch.dtype):
        self._adapter, self._dtype = adapter, dtype
        self.vocab_size = adapter.candidate_limit
        self.select = adapter.projection.select
        text_config = adapter.target.config.get_text_config(decoder=True)
        self.width_multiplier = float(getattr(text_config, "logits_mup_width_multiplier", None) or 1.0)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._adapter.logits(hidden, self._dtype)


def _is_compiled(target) -> bool:
    if hasattr(target.forward, "_torchdynamo_orig_callable"):
        return True
    return any(module._compiled_call_impl is not None for module in target.modules())


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


__all__ = ["FeatureTap", "TargetAdapter", "TargetHead"]

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
"""DFlash and DFlash2 draft models.

A drafter has no vocabulary of its own. Hidden states of a few target layers are fused into one context vector per
committed token, and every draft layer projects that vector to keys and values of its own. A block of embeddings
`[anchor, mask, ..., mask]`, taken from the target's table, attends to the context and to itself in a single pass; the
row at offset `j` predicts the token at that same offset. DFlash2 adds a grouped dynamic convolution around each
sublayer and a selector that walks one path through the best candidates of every slot.

Parameter names are those of the public checkpoints.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.quantizers import AutoQuantizationConfig

from .cache_dflash2 import DFlash2ContextCache
from .configuration_dflash2 import DFlash2Config
from .functional_dflash2 import (
    finite_rows,
    grouped_conv,
    largest_probability,
    order_candidates,
    path_scores,
    selector_lattice,
    selector_path,
    top_candidates,
    transform_unary,
)


try:
    from transformers_dflash2.kernels.dispatch import dispatch
    from transformers_dflash2.kernels.top_k import select_top_k
except ImportError:
    # A drafter loaded from the Hub on its own runs on plain PyTorch operations.
    dispatch, select_top_k = None, torch.topk


# Spellings of parameter names found in public checkpoints, and the name here.
CHECKPOINT_KEY_MAPPING = {
    r"^model\.": "",
    r"^encoder\.fc\.": "fc.",
    r"^encoder\.output_norm_enc\.": "hidden_norm.",
    r"^midlayer\.": "layers.0.",
    r"^candidate_selector\.(predecessor|successor)_codebook\.weight$": r"candidate_selector.\1_codebook",
}

# Tensors of other frameworks that carry no information a drafter uses.
_IGNORED_CHECKPOINT_KEYS = ("rotary_emb.inv_freq", "t2d")

# Layers that stay dense in a quantised drafter, as patterns from the start of a name. They hold a few percent of the
# weights, and everything a drafter adds to a row-wise guess goes through them.
_DENSE_MODULES = (r".*\.kernel_projection", r".*\.hidden_projection")
# Frozen copies of the target's weights that Speculators stores with a drafter. The target's own are used.
SPECULATORS_VERIFIER_KEYS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)

# What a tensor we cannot honour means and what to do, for the error message.
_SHARING_FIX = "Use a drafter that shares the target's embedding and head."
_DSPARK_FIX = "Load it with DSparkDraftModel or AutoDraftModel."
_UNSUPPORTED_CHECKPOINT_KEYS = {
    "lm_head": ("an output head of the drafter's own", _SHARING_FIX),
    "embed_tokens": ("an embedding table of the drafter's own", _SHARING_FIX),
    "d2t": ("a reduced draft vocabulary", "DSpark drafters may have one, of `draft_vocab_size` tokens."),
    "mask_hidden": ("a learned mask embedding", _SHARING_FIX),
    "attention_sink_bias": ("attention sinks", "Use a drafter without them."),
    "markov_head": ("a DSpark Markov head", _DSPARK_FIX),
    "confidence_head": ("a DSpark confidence head", _DSPARK_FIX),
}


class UnsupportedTensorError(ValueError):
    """A checkpoint holds a tensor that its model class gives no meaning to."""

    def __init__(self, message: str, key: str):
        super().__init__(message)
        self.key = key


@dataclass
class DFlash2Proposal:
    """
    What a drafter offers for one block.

    Args:
        tokens (`torch.LongTensor` of shape `(batch, slots)`): The drafted tokens.
        candidate_ids (`torch.LongTensor` of shape `(batch, slots, top_k)`): The tokens each slot chose from.
        q (`torch.FloatTensor` of shape `(batch, slots, top_k)`): The distribution over `candidate_ids` from which each
            token was drawn, given the tokens before it; one-hot for a greedy choice. fp32. A drafter whose law covers
            its whole vocabulary has all of it for candidates.
        usable (`torch.BoolTensor` of shape `(batch,)`): `False` for a row whose pass was not finite. Its tokens are
            valid ids but must not be offered.
        confidence (`torch.FloatTensor` of shape `(batch, slots)`, *optional*): For each slot an estimate of how likely
            its token is accepted once all before it are. It depends on the tokens before the slot, never on its own.
    """

    tokens: torch.Tensor
    candidate_ids: torch.Tensor
    q: torch.Tensor
    usable: torch.Tensor
    confidence: torch.Tensor | None = None

    def first(self, slots: int) -> "DFlash2Proposal":
        """The proposal without the tokens behind the first `slots`."""
        confidence = None if self.confidence is None else self.confidence[:, :slots]
        kept = (self.tokens[:, :slots], self.candidate_ids[:, :slots], self.q[:, :slots])
        return DFlash2Proposal(*kept, self.usable, confidence)


class DFlash2Attention(nn.Module):
    """Attention of the block's rows over committed context and over the block itself."""

    def __init__(self, config: DFlash2Config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        self.block_is_causal = config.layer_is_causal[layer_idx]
        # Attention functions of the host take a missing mask for "causal" unless told otherwise.
        self.is_causal = False
        query_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def project_keys_values(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed, not yet rotated keys, and values, each `(batch, kv_heads, rows, head_dim)`."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(hidden).view(shape)).transpose(1, 2)
        values = self.v_proj(hidden).view(shape).transpose(1, 2)
        return keys, values

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        context: DFlash2ContextCache,
    ) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        keys, values = self.project_keys_values(hidden_states)
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
        keys, values = context.with_block(self.layer_idx, keys, values)
        if hasattr(context, "attend"):
            # Fixed buffers are attended to by length.
            output = context.attend(self, queries, keys, values)
            return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))
        implementation = self.config._attn_implementation
        if attention_mask is not None and implementation == "eager":
            # The eager function adds its mask to the scores.
            lowest = torch.finfo(queries.dtype).min
            attention_mask = queries.new_zeros(attention_mask.shape).masked_fill(~attention_mask, lowest)
        attention_function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, _ = attention_function(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))


class DFlash2GroupedConv(nn.Module):
    """
    Both sides of the convolution around one sublayer: `prepare` mixes the sublayer's input, `finish` its output.

    One projection of the *input* rows gives the dynamic coefficients of both sides.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        self.taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        self.groups = config.hidden_size // self.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def prepare(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden (`torch.Tensor` of shape `(batch, block, hidden_size)`): Normed input of the sublayer.

        Returns:
            The mixed input, and the output side's coefficients of shape `(batch, block, taps, groups)`. Where the
            projection leaves its sums in parts, they come before all other dimensions.
        """
        dynamic = self.kernel_projection(hidden).unflatten(-1, (2, self.taps, self.groups))
        return self._mix(hidden, 0, dynamic[..., 0, :, :]), dynamic[..., 1, :, :]

    def finish(self, hidden: torch.Tensor, dynamic: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Mix the sublayer's output with the coefficients that `prepare` returned, and then add the residual."""
        return self._mix(hidden, 1, dynamic, residual)

    def _mix(
        self, hidden: torch.Tensor, side: int, dynamic: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        options = {"group_size": self.group_size, "residual": residual}
        return _fast("grouped_conv", grouped_conv, hidden, self.base_kernel[side], dynamic, **options)


class DFlash2DecoderLayer(nn.Module):
    def __init__(self, config: DFlash2Config, layer_idx: int):
        super().__init__()
        self.self_attn = DFlash2Attention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        has_conv = config.conv_kernel_size > 0
        self.attention_conv = DFlash2GroupedConv(config) if has_conv else None
        self.mlp_conv = DFlash2GroupedConv(config) if has_conv else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        context: DFlash2ContextCache,
    ) -> torch.Tensor:
        hidden_states = _convolved(
            self.attention_conv,
            lambda rows: self.self_attn(rows, position_embeddings, attention_mask, context),
            self.input_layernorm(hidden_states),
            hidden_states,
        )
        return _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden_states), hidden_states)


def _convolved(
    conv: DFlash2GroupedConv | None,
    sublayer: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    if conv is None:
        return residual + sublayer(hidden)
    hidden, dynamic = conv.prepare(hidden)
    return conv.finish(sublayer(hidden), dynamic, residual)


class DFlash2CandidateSelector(nn.Module):
    """Scores transitions between candidates of adjacent slots, see [`functional_dflash2.selector_lattice`]."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(
        self, hidden: torch.Tensor, unary: torch.Tensor, candidate_ids: torch.Tensor, anchor_ids: torch.Tensor
    ) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor` of shape `(batch, slots, hidden_size)`): Final rows of the slots.
            unary (`torch.Tensor` of shape `(batch, slots, top_k)`): Transformed logits of the candidates.
            candidate_ids (`torch.LongTensor` of shape `(batch, slots, top_k)`): The candidates.
            anchor_ids (`torch.LongTensor` of shape `(batch,)`): The last committed tokens.

        Returns:
            fp32 lattice of shape `(batch, slots, top_k, top_k)`.
        """
        return selector_lattice(
            unary,
            candidate_ids,
            self.hidden_projection(hidden),
            self.predecessor_codebook,
            self.successor_codebook,
            anchor_ids,
        )

    def walk(
        self,
        hidden: torch.Tensor,
        unary: torch.Tensor,
        candidate_ids: torch.Tensor,
        anchor_ids: torch.Tensor,
        *walk_arguments: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Arguments of [`forward`] and of [`functional_dflash2.selector_walk`]; what the walk returns."""
        return _fast(
            "selector_walk",
            selector_path,
            unary,
            candidate_ids,
            self.hidden_projection(hidden),
            self.predecessor_codebook,
            self.successor_codebook,
            anchor_ids,
            *walk_arguments,
        )

    def confidence(
        self,
        hidden: torch.Tensor,
        unary: torch.Tensor,
        candidate_ids: torch.Tensor,
        anchor_ids: torch.Tensor,
        tokens: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> torch.Tensor:
        """
        The largest probability in the law of each slot, given the tokens before it.

        It estimates how likely the slot's token is accepted, and does not depend on which one was drawn.

        Args:
            hidden, unary, candidate_ids, anchor_ids: As of [`forward`].
            tokens (`torch.LongTensor` of shape `(batch, slots)`): The path that was walked.
            temperatures (`torch.Tensor` of shape `(batch,)`): fp32.

        Returns:
            fp32 `torch.Tensor` of shape `(batch, slots)`.
        """
        scores = path_scores(
            unary,
            candidate_ids,
            self.hidden_projection(hidden),
            self.predecessor_codebook,
            self.successor_codebook,
            torch.cat([anchor_ids[:, None], tokens[:, :-1]], dim=1),
        )
        return largest_probability(scores, temperatures)


def _fast(op: str, reference: Callable, *args, **kwargs):
    """An operation through its kernel on CUDA tensors, through its reference elsewhere."""
    if dispatch is None or not args[0].is_cuda:
        return reference(*args, **kwargs)
    return dispatch(op, reference, *args, **kwargs)


class DFlash2PreTrainedModel(PreTrainedModel):
    """What all drafters share: the config, the attention backends and the initialisation."""

    config_class = DFlash2Config
    base_model_prefix = ""
    input_modalities = ("text",)
    _no_split_modules = ["DFlash2DecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    # The block's mask is a tensor over true positions, which flash attention cannot take.
    _supports_flash_attn = False
    _supports_flex_attn = False

    def get_input_embeddings(self) -> None:
        """None: blocks are embedded with the target's table."""

    def get_output_embeddings(self) -> None:
        """None: candidates are scored by the target's head."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DFlash2GroupedConv):
            # The identity: tap 0 passes a row through, the others and the dynamic part add nothing.
            identity = torch.zeros_like(module.base_kernel)
            identity[:, 0] = 1.0
            init.copy_(module.base_kernel, identity)
            init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, DFlash2CandidateSelector):
            init.normal_(module.predecessor_codebook, std=self.config.initializer_range)
            init.normal_(module.successor_codebook, std=self.config.initializer_range)


class DFlash2Model(DFlash2PreTrainedModel):
    """
    The backbone of a drafter: context injection, block attention and, for DFlash2, the convolutions.

    Args:
        config ([`DFlash2Config`]): The checkpoint's configuration.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        features = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlash2DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.post_init()

    def make_context(self, batch_size: int, *, block_size: int | None = None) -> DFlash2ContextCache:
        """An empty [`DFlash2ContextCache`] for `batch_size` rows and blocks of `block_size` (the config's)."""
        windows = [layer.self_attn.sliding_window for layer in self.layers]
        block_size = self.config.block_size if block_size is None else block_size
        return DFlash2ContextCache(windows, batch_size=batch_size, block_size=block_size, device=self.device)

    def append_context(
        self,
        context: DFlash2ContextCache,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        counts: list[int] | torch.Tensor,
    ) -> None:
        """
        Turn target features of newly committed tokens into keys and values of every layer.

        Args:
            context ([`DFlash2ContextCache`]): Extended in place.
            features (`torch.Tensor` of shape `(batch, entries, len(target_layer_ids) * target_hidden_size)`):
                Outputs of the tapped target layers, concatenated in the order of `target_layer_ids`.
            position_ids (`torch.LongTensor` of shape `(batch, entries)`): Absolute positions of the entries.
            counts (`list[int]` of length `batch`): In row `b` only the first `counts[b]` entries are committed. A
                context of fixed size takes a tensor.
        """
        if isinstance(counts, list) and not any(counts):
            return
        # One vector per token feeds every layer. It meets no layer norm and no convolution on the way.
        fused = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary_emb(fused, position_ids)
        context.begin_append(position_ids, counts)
        for layer_idx, layer in enumerate(self.layers):
            keys, values = layer.self_attn.project_keys_values(fused)
            # The host's rotary function turns queries and keys together; there are no queries here.
            _, keys = apply_rotary_pos_emb(keys[:, :0], keys, cos, sin)
            context.append(layer_idx, keys, values)

    def forward(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, context: DFlash2ContextCache | None = None
    ) -> BaseModelOutput:
        """
        One pass over a block.

        Args:
            inputs_embeds (`torch.Tensor` of shape `(batch, block, hidden_size)`):
                Raw rows of the target's embedding matrix for `[anchor, mask, ..., mask]`, times
                `input_embedding_scale`.
            position_ids (`torch.LongTensor` of shape `(batch, block)`):
                Absolute positions; the anchor's is the number of tokens committed before it.
            context ([`DFlash2ContextCache`], *optional*):
                Committed context. It is read, not extended. Without it the block sees only itself.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`] whose `last_hidden_state` has shape
            `(batch, block, hidden_size)`; row 0 (the anchor) predicts nothing.
        """
        hidden_states = inputs_embeds
        if context is None:
            context = self.make_context(*inputs_embeds.shape[:1], block_size=inputs_embeds.shape[1])
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        masks: dict[tuple[int | None, bool], torch.Tensor | None] = {}
        for layer_idx, layer in enumerate(self.layers):
            attention = layer.self_attn
            kind = (attention.sliding_window, attention.block_is_causal)
            if kind not in masks:
                masks[kind] = context.block_mask(layer_idx, position_ids, is_causal=attention.block_is_causal)
            hidden_states = layer(hidden_states, position_embeddings, masks[kind], context)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))


class DFlash2DraftModel(DFlash2Model):
    """
    A drafter ready to be passed as `assistant_model` to `generate`. Loads DFlash2 and DFlash (v1) checkpoints.

    Args:
        config ([`DFlash2Config`]): The checkpoint's configuration.
    """

    # `generate` hands an assistant to this library when its class carries this mark.
    is_dflash2_assistant = True
    # The host's `push_to_hub` takes no further arguments for `save_pretrained`.
    _pushes_code = False
    # Whether proposing takes the head's scores of all tokens, and not its best candidates.
    reads_whole_vocabulary = False
    # Whether the confidence of a proposal comes from a head that was trained to estimate acceptance.
    has_trained_confidence = False

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.candidate_selector = DFlash2CandidateSelector(config) if config.selector_rank > 0 else None
        # Set to use a drafter in fp16 in spite of its overflowing residuals.
        self.allow_fp16 = False
        # Figures of the most recent `generate` call that used this drafter.
        self.last_stats = None
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, allow_fp16: bool = False, **kwargs):
        """
        Load a public checkpoint, strictly: every tensor of the model must be in the file and every tensor of the file
        must be understood.

        A `quantization_config` quantises the drafter's linear layers except those of the convolutions and the
        selector, which keep the drafter's dtype.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Hub id or folder.
            allow_fp16 (`bool`, *optional*, defaults to `False`):
                Accept `dtype=torch.float16`. Residuals of published drafters exceed the fp16 range; use bf16 or fp32.
            kwargs: As for [`~transformers.PreTrainedModel.from_pretrained`].

        Raises:
            `ValueError`: fp16 without `allow_fp16`; missing, unknown or misshapen tensors.
        """
        if not allow_fp16 and _names_fp16(kwargs.get("dtype", kwargs.get("torch_dtype"))):
            raise ValueError(_fp16_message("dtype=torch.float16"))
        if kwargs.get("quantization_config") is not None:
            kwargs["quantization_config"] = _keep_dense_modules(kwargs["quantization_config"])
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["key_mapping"] = {**CHECKPOINT_KEY_MAPPING, **(kwargs.pop("key_mapping", None) or {})}
        # Misshapen tensors are reported below with the rest, instead of failing one at a time.
        kwargs.setdefault("ignore_mismatched_sizes", True)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        _check_loading(pretrained_model_name_or_path, info, model.config)
        if not allow_fp16 and model.dtype == torch.float16:
            raise ValueError(_fp16_message("the checkpoint's dtype, float16"))
        model.allow_fp16 = allow_fp16
        # `save_pretrained` undoes renames that happened on the way in; the public names are the ones to write.
        model._weight_conversions = None
        if model._forward_pre_hooks:
            # Some libraries unpack their layers when a model's forward is called first; drafting begins elsewhere.
            model(model.norm.weight.new_zeros(1, 1, model.config.hidden_size), torch.zeros(1, 1, dtype=torch.long))
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory, *args, include_code: bool | None = None, **kwargs):
        """
        Write the drafter in the public checkpoint format.

        Args:
            save_directory (`str` or `os.PathLike`): Folder to write.
            include_code (`bool`, *optional*):
                Whether to write the code as well, so that `AutoModel.from_pretrained(folder, trust_remote_code=True)`
                and `generate(custom_generate=folder, trust_remote_code=True)` work where this package is not
                installed. By default the code is written if the drafter was loaded with such code.
            args, kwargs: As for [`~transformers.PreTrainedModel.save_pretrained`].

        Raises:
            `ValueError`: `include_code` together with `push_to_hub=True`; use [`push_to_hub`].
        """
        from .hub import auto_map, write_remote_code

        if include_code is None:
            include_code = self._pushes_code or self._auto_class is not None
        if include_code and kwargs.get("push_to_hub"):
            raise ValueError(
                "include_code=True with push_to_hub=True: call draft.push_to_hub(repo, include_code=True)."
            )
        before = getattr(self.config, "auto_map", None)
        # An entry like `org/repo--module.Class` finds its code in another repository.
        elsewhere = {name: place for name, place in (before or {}).items() if "--" in place}
        self._set_auto_map(auto_map(type(self)) if include_code else elsewhere)
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
            if include_code:
                write_remote_code(save_directory, type(self))
        finally:
            self._set_auto_map(before)

    def _set_auto_map(self, places: dict[str, str] | None) -> None:
        if places:
            self.config.auto_map = dict(places)
        else:
            self.config.__dict__.pop("auto_map", None)

    def push_to_hub(self, repo_id: str, *args, include_code: bool = False, **kwargs) -> str:
        """
        Upload the drafter.

        Args:
            repo_id (`str`): Repository to upload to.
            include_code (`bool`, *optional*, defaults to `False`): As for [`save_pretrained`].
            args, kwargs: As for [`~transformers.PreTrainedModel.push_to_hub`].
        """
        self._pushes_code = include_code
        try:
            return super().push_to_hub(repo_id, *args, **kwargs)
        finally:
            self._pushes_code = False

    def block_rows(self, slots: int) -> tuple[int, int]:
        """
        The shape of a pass that proposes `slots` tokens.

        Returns:
            `(rows, first)`: rows of the block, `[anchor, mask, ...]`, and the row that stands for the first slot; the
            next ones stand for the others.
        """
        return slots + 1, 1

    def validate_vocabulary(self, vocab_size: int) -> None:
        """Check that the drafter proposes ids under `vocab_size` only, as one that uses the target's head does."""

    def noise_shape(self, batch: int, slots: int, vocab_size: int) -> tuple[int, ...]:
        """Shape of what [`draw_noise`] returns for the same arguments."""
        return batch, slots

    def draw_noise(self, batch: int, slots: int, vocab_size: int) -> torch.Tensor:
        """
        Random numbers for [`propose`], from the global stream of the drafter's device.

        Args:
            batch (`int`): Rows.
            slots (`int`): Tokens to propose.
            vocab_size (`int`): Ids of the target that may be proposed.

        Returns:
            `torch.Tensor` of shape `(batch, slots)`: one number in `[0, 1)` per token.
        """
        return torch.rand(self.noise_shape(batch, slots, vocab_size), device=self.device)

    def propose(
        self,
        slot_hidden: torch.Tensor,
        anchor_ids: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        *,
        temperatures: torch.Tensor,
        greedy_mask: torch.Tensor,
        noise: torch.Tensor | None,
        with_confidence: bool = False,
    ) -> DFlash2Proposal:
        """
        Turn final rows of the mask slots into drafted tokens.

        Args:
            slot_hidden (`torch.Tensor` of shape `(batch, slots, hidden_size)`): Rows of the slots, see [`block_rows`].
            anchor_ids (`torch.LongTensor` of shape `(batch,)`): Last committed tokens.
            head (`Callable`): The target's output head with ids that are no tokens masked to `-inf`; maps
                `(batch, slots, hidden_size)` to `(batch, slots, vocab)` on the drafter's device.
            temperatures (`torch.Tensor` of shape `(batch,)`): The request's temperatures.
            greedy_mask (`torch.BoolTensor` of shape `(batch,)`): Rows that draft greedily.
            noise (`torch.Tensor`, *optional*): What [`draw_noise`] gave; `None` when every row is greedy.
            with_confidence (`bool`, *optional*, defaults to `False`): Whether to fill in `confidence`.

        Returns:
            [`DFlash2Proposal`].
        """
        config = self.config
        logits = head(slot_hidden)
        # A v1 drafter fills its slots independently; sampling them so gives incoherent blocks. It proposes the most
        # likely token of each slot, and says so with a one-hot q.
        top_k = config.selector_top_k if self.candidate_selector is not None else 1
        # A head that is spread over ranks has a way of its own.
        take_candidates = getattr(head, "select", top_candidates)
        unary, candidate_ids = take_candidates(
            logits,
            top_k=top_k,
            multiplier=config.output_multiplier,
            softcap=config.final_logit_softcapping,
            select=select_top_k,
            order=partial(_fast, "order_candidates", order_candidates),
        )
        confidence = None
        if self.candidate_selector is None:
            tokens, q = candidate_ids[..., 0], torch.ones_like(unary)
            # A slot whose best score is infinite has a best token all the same.
            evidence = unary.tanh()
            if with_confidence:
                transform = {"multiplier": config.output_multiplier, "softcap": config.final_logit_softcapping}
                confidence = largest_probability(transform_unary(logits, **transform), temperatures)
        else:
            # A greedy walk reads no noise.
            uniforms = unary.new_zeros(unary.shape[:2]) if noise is None else noise
            tokens, q = self.candidate_selector.walk(
                slot_hidden, unary, candidate_ids, anchor_ids, uniforms, temperatures, greedy_mask
            )
            evidence = q
            if with_confidence:
                confidence = self.candidate_selector.confidence(
                    slot_hidden, unary, candidate_ids, anchor_ids, tokens, temperatures
                )
        return DFlash2Proposal(tokens, candidate_ids, q, finite_rows(slot_hidden, evidence), confidence)


def _keep_dense_modules(quantization_config):
    """A copy of a quantization config, or of the dict that stands for one, that leaves `_DENSE_MODULES` alone."""
    if isinstance(quantization_config, dict):
        quantization_config = AutoQuantizationConfig.from_dict(quantization_config)
    quantization_config = copy.deepcopy(quantization_config)
    for name in ("llm_int8_skip_modules", "modules_to_not_convert"):
        if hasattr(quantization_config, name):
            listed = getattr(quantization_config, name) or []
            setattr(quantization_config, name, [*listed, *_DENSE_MODULES])
    return quantization_config


def _names_fp16(dtype) -> bool:
    return dtype in (torch.float16, "float16", "torch.float16", "fp16", "half")


def _fp16_message(what: str) -> str:
    return (
        f"{what}: hidden states of DFlash2 drafters exceed the range of float16 and turn to inf. Load the drafter "
        "with dtype=torch.bfloat16 or torch.float32, or pass allow_fp16=True to use float16 all the same."
    )


def _check_loading(name, info: dict, config: DFlash2Config) -> None:
    ignored = _IGNORED_CHECKPOINT_KEYS
    if hasattr(config, "speculators_model_type"):
        ignored += SPECULATORS_VERIFIER_KEYS
    unexpected = sorted(key for key in info["unexpected_keys"] if not key.endswith(ignored))
    for key in unexpected:
        for part, (meaning, fix) in _UNSUPPORTED_CHECKPOINT_KEYS.items():
            if part in key.split("."):
                raise UnsupportedTensorError(
                    f"{name}: tensor {key!r} holds {meaning}, which is not supported here. {fix}", key
                )
    missing = sorted(info["missing_keys"])
    mismatched = sorted(str(entry) for entry in info["mismatched_keys"])
    problems = [
        f"{len(keys)} {kind} ({', '.join(keys[:4])}{', ...' if len(keys) > 4 else ''})"
        for kind, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
        if keys
    ]
    if problems:
        raise ValueError(
            f"{name} does not hold the tensors its config announces: {'; '.join(problems)}. Check that config.json "
            "and the weights belong together."
        )


__all__ = [
    "CHECKPOINT_KEY_MAPPING",
    "SPECULATORS_VERIFIER_KEYS",
    "DFlash2CandidateSelector",
    "DFlash2DraftModel",
    "DFlash2Model",
    "DFlash2PreTrainedModel",
    "DFlash2Proposal",
    "UnsupportedTensorError",
]

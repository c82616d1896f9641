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
"""The door into `generate`.

`GenerationMixin.generate` is wrapped once. The wrapper looks at `assistant_model` only: if its class carries the mark
of this library the original `generate` is called without an assistant and with a `custom_generate` of ours, so that
the host prepares inputs, padding, expansion, lengths, cache, processors and stopping rules exactly as for plain
decoding. Every other call passes through untouched.
"""

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from transformers.generation import GenerationMixin, StoppingCriteriaList, StopStringCriteria

from . import compat
from .generation import SpeculativeDecoding
from .verify_length import DEFAULT_THRESHOLD, VerifyLength


logger = logging.getLogger("transformers_dflash2")


class _Hook:
    """What was installed, and whether it acts. Kept here and not on the function, whose attributes wrappers copy."""

    wrapper = None
    original = None
    is_active = False


# Options that mean something else than one continuation per row, with what to do instead.
_UNSUPPORTED_OPTIONS = {
    "num_beams": (1, "use num_beams=1"),
    "num_beam_groups": (1, "use num_beam_groups=1"),
    "penalty_alpha": (None, "leave penalty_alpha out"),
    "constraints": (None, "leave constraints out"),
    "force_words_ids": (None, "leave force_words_ids out"),
    "dola_layers": (None, "leave dola_layers out"),
    "assistant_ensemble_weight": (None, "leave assistant_ensemble_weight out: it changes the output"),
    "assistant_early_exit": (None, "leave assistant_early_exit out"),
    "prompt_lookup_num_tokens": (None, "use either prompt lookup or a drafter"),
    "use_mtp": (None, "use either multi-token prediction or a drafter"),
    "use_cache": (True, "use use_cache=True"),
    "token_healing": (None, "heal the prompt before the call"),
}


# Of `num_assistant_tokens_schedule`. What is learnt about a drafter lasts for one call under either heuristic.
_SCHEDULES = ("constant", "heuristic", "heuristic_transient")


def enable() -> None:
    """Let `generate(..., assistant_model=draft)` recognise DFlash2 drafters. Importing the package does this once."""
    _Hook.is_active = True
    current = GenerationMixin.generate
    while current is not None:
        if current is _Hook.wrapper:
            return
        # Somebody may have wrapped ours in turn.
        current = getattr(current, "__wrapped__", None)
    original = GenerationMixin.generate

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        if not (_Hook.is_active and _may_be_ours(args, kwargs)):
            return original(self, *args, **kwargs)
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        draft = arguments.get("assistant_model")
        if not getattr(draft, "is_dflash2_assistant", False):
            return original(self, *args, **kwargs)
        return _generate_with_draft(original, arguments, draft)

    _Hook.wrapper, _Hook.original = generate, original
    GenerationMixin.generate = generate


def disable() -> None:
    """
    Put the host's own `generate` back.

    Where somebody has wrapped ours since, ours stays in the chain and passes every call through.
    """
    _Hook.is_active = False
    if _Hook.wrapper is not None and GenerationMixin.generate is _Hook.wrapper:
        GenerationMixin.generate = _Hook.original
        _Hook.wrapper = _Hook.original = None


def _may_be_ours(args: tuple, kwargs: dict[str, Any]) -> bool:
    # `assistant_model` is the seventh parameter of `generate`; nobody passes it by position, but one may.
    candidates = [kwargs.get("assistant_model"), *args[5:]]
    return any(getattr(candidate, "is_dflash2_assistant", False) for candidate in candidates)


def _generate_with_draft(original, arguments: dict[str, Any], draft):
    arguments = dict(arguments)
    target = arguments.pop("self")
    options = dict(arguments.pop("kwargs", {}))
    arguments.pop("assistant_model")
    streamer = arguments.get("streamer")
    call_config = arguments.get("generation_config")

    def effective(name: str) -> Any:
        for source in (options, vars(call_config) if call_config is not None else {}, vars(target.generation_config)):
            if source.get(name) is not None:
                return source[name]
        return None

    _refuse_unsupported(target, arguments, options, effective)
    num_assistant_tokens = effective("num_assistant_tokens")
    if num_assistant_tokens is not None and (
        isinstance(num_assistant_tokens, bool) or not isinstance(num_assistant_tokens, int) or num_assistant_tokens < 1
    ):
        raise ValueError(
            f"num_assistant_tokens must be an integer of at least 1, got {num_assistant_tokens!r}. Leave it out to "
            "use the drafter's own block."
        )
    make_verify_length = _verify_length_of(draft, effective)
    static_options = _static_options(arguments, options, effective, on_cuda=target.device.type == "cuda")
    _bind_stop_strings(target, arguments, options, effective)
    options.pop("assistant_tokenizer", None)
    options.pop("tokenizer", None)

    def decode(
        model, input_ids, logits_processor=None, stopping_criteria=None, generation_config=None, **model_kwargs
    ):
        call = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
            "num_assistant_tokens": num_assistant_tokens,
            "verify_length": make_verify_length(),
            "streamer": streamer,
            "model_kwargs": model_kwargs,
        }
        if static_options is not None:
            # Kernels, and triton with them, are loaded by those who use this tempo only. They do not travel with
            # a drafter's remote code.
            try:
                from .static_decoding import StaticDecoding, static_ineligible_reason
            except ImportError as error:
                reason = f"it needs the package transformers_dflash2 with its kernels ({error})"
            else:
                decoding = StaticDecoding(model, draft, input_ids, **static_options, **call)
                reason = static_ineligible_reason(decoding)
                if reason is None:
                    if call["verify_length"] is not None:
                        logger.warning_once(
                            "The static tempo verifies blocks of one length: "
                            "num_assistant_tokens_schedule and assistant_confidence_threshold are not used. The "
                            "output is the same."
                        )
                    return decoding.run()
            logger.warning_once(f"The static tempo is not used: {reason}. The output is the same.")
        return SpeculativeDecoding(model, draft, input_ids, **call).run()

    return original(target, **arguments, custom_generate=decode, **options)


def _verify_length_of(draft, effective) -> Callable[[], VerifyLength | None]:
    """What makes a call's [`VerifyLength`], from the host's own options; it makes `None` where all is verified."""
    schedule, threshold = effective("num_assistant_tokens_schedule"), effective("assistant_confidence_threshold")
    if schedule not in (None, *_SCHEDULES):
        raise ValueError(
            f"num_assistant_tokens_schedule={schedule!r} is unknown; use one of {', '.join(map(repr, _SCHEDULES))}."
        )
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if threshold is not None and not (is_number and 0 <= threshold <= 1):
        raise ValueError(
            f"assistant_confidence_threshold={threshold!r} must be a number from 0 to 1: the smallest probability of "
            "being reached and accepted with which a drafted token is verified. 0 verifies all."
        )
    adapts = schedule in ("heuristic", "heuristic_transient")
    if threshold == 0 or (threshold is None and not adapts):
        return lambda: None
    calibrates = adapts and not draft.has_trained_confidence
    return lambda: VerifyLength(DEFAULT_THRESHOLD if threshold is None else threshold, calibrates=calibrates)


def _refuse_unsupported(target, arguments: dict[str, Any], options: dict[str, Any], effective) -> None:
    if arguments.pop("custom_generate", None) is not None:
        raise ValueError(
            "custom_generate and a DFlash2 assistant_model both replace the decoding loop; pass only one."
        )
    for name, (neutral, fix) in _UNSUPPORTED_OPTIONS.items():
        value = effective(name)
        if value is not None and value is not False and value != neutral or (name == "use_cache" and value is False):
            raise ValueError(f"{name}={value!r} cannot be combined with a DFlash2 assistant_model: {fix}.")
    guidance = effective("guidance_scale")
    if guidance is not None and guidance != 1 and _batch_may_exceed_one(arguments, options, effective):
        raise ValueError(
            f"guidance_scale={guidance!r} keeps a cache of its own for the whole batch; with a DFlash2 "
            "assistant_model generate one row at a time."
        )
    if effective("cache_implementation") == "paged":
        raise ValueError(
            'cache_implementation="paged" (continuous batching) does not take an assistant_model: use "dynamic" or '
            '"static", or generate without assistant_model.'
        )
    if arguments.get("synced_gpus") or compat.must_synchronise_ranks(target):
        raise ValueError(
            "synced_gpus needs every rank to run the same number of forwards, which speculation does not; generate "
            "without assistant_model under ZeRO-3 or FSDP."
        )


def _batch_may_exceed_one(arguments: dict[str, Any], options: dict[str, Any], effective) -> bool:
    for inputs in (arguments.get("inputs"), options.get("input_ids"), options.get("inputs_embeds")):
        if inputs is not None and inputs.shape[0] > 1:
            return True
    return (effective("num_return_sequences") or 1) > 1


def _static_options(
    arguments: dict[str, Any], options: dict[str, Any], effective, *, on_cuda: bool
) -> dict[str, Any] | None:
    """
    How the static tempo is to run, or `None` where it is not wanted.

    It is wanted where the call asks for a static cache, and on CUDA devices unless the call asks for another one,
    brings a cache, or rules recordings out.

    The prefill fills a dynamic cache either way, as the static tempo has buffers of its own, so the host is shown
    neither the request for a static cache nor `compile_config`.
    """
    implementation = effective("cache_implementation")
    if implementation is None:
        # The host refuses a cache beside any `cache_implementation`.
        brings_cache = any(options.get(name) is not None for name in compat.CACHE_KEYS)
        if not on_cuda or brings_cache or effective("disable_compile"):
            return None
    elif implementation not in compat.STATIC_CACHE_IMPLEMENTATIONS:
        return None
    never_record = bool(effective("disable_compile"))
    static_options = {
        "record": not never_record,
        "compile_config": None if never_record else effective("compile_config"),
    }
    call_config = arguments.get("generation_config")
    if call_config is not None:
        call_config = arguments["generation_config"] = copy.deepcopy(call_config)
        call_config.compile_config = None
    options.pop("compile_config", None)
    if options.get("cache_implementation") is None and call_config is not None:
        call_config.cache_implementation = "dynamic"
    else:
        options["cache_implementation"] = "dynamic"
    return static_options


def _bind_stop_strings(target, arguments: dict[str, Any], options: dict[str, Any], effective) -> None:
    """
    Turn `stop_strings` into a stopping rule here: the tokenizer it needs does not travel through `custom_generate`.
    """
    stop_strings = effective("stop_strings")
    if stop_strings is None:
        return
    tokenizer = options.get("tokenizer")
    if tokenizer is None:
        raise ValueError(
            f"stop_strings={stop_strings!r} need the tokenizer: pass tokenizer=tokenizer to generate as well."
        )
    if target.generation_config.stop_strings is not None:
        raise ValueError(
            f"target.generation_config.stop_strings={target.generation_config.stop_strings!r} cannot be honoured from "
            "there with a DFlash2 assistant_model: set it to None and pass stop_strings to generate."
        )
    options.pop("stop_strings", None)
    if arguments.get("generation_config") is not None:
        config = copy.deepcopy(arguments["generation_config"])
        config.stop_strings = None
        arguments["generation_config"] = config
    criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    arguments["stopping_criteria"] = criteria


__all__ = ["disable", "enable"]

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
"""The decoding methods that are compared.

Every method is a call that takes a batch of prompts and returns the sequences. Methods of the host and of this package
go through `generate`, as a user would call them; the public `dflash` loop has a function of its own.
"""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CompileConfig

from .. import static_decoding


@dataclass
class Workload:
    """
    What every method is asked to do.

    Args:
        inputs (`list[dict]`): Model inputs of one batch each, left-padded.
        new_tokens (`int`): Tokens to write per row.
        slots (`int`, *optional*): Tokens to draft per round; the drafter's own number by default.
        temperature (`float`): 0 decodes greedily.
        repeats_itself (`bool`): Whether the text goes round a cycle.
    """

    inputs: list[dict[str, torch.Tensor]]
    new_tokens: int
    slots: int | None = None
    temperature: float = 0.0
    repeats_itself: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling options of `generate`; the host's own cut-offs are switched off."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}


@dataclass
class Contestant:
    """
    A decoding method.

    Args:
        name (`str`): How tables call it.
        run (`Callable`): `(inputs, new_tokens) -> sequences`.
        drafter (`torch.nn.Module`, *optional*): The drafter that takes part, whose weights a round moves as well.
        passes (`Callable`, *optional*): Target passes of the last call, prefill included; by default they are counted
            with a hook during one call that is not timed.
        skip (`str`, *optional*): Why it does not take part.
        prepare (`Callable`): Frees what an earlier method keeps.
    """

    name: str
    run: Callable[[dict[str, torch.Tensor], int], torch.Tensor]
    drafter: torch.nn.Module | None = None
    passes: Callable[[], int] | None = None
    skip: str | None = None
    prepare: Callable[[], None] = field(default=static_decoding.release_static_rounds)


NAMES = (
    "plain",
    "plain-static-compile",
    "prompt-lookup",
    "host-dflash-v1",
    "public-dflash",
    "dynamic",
    "static",
    "static-compile",
)


def contestants(target, draft, workload: Workload, *, host_v1=None, public=None) -> list[Contestant]:
    """
    All methods, those that cannot take part with the reason.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        draft ([`DFlash2DraftModel`]): Its drafter.
        workload ([`Workload`]): Decides which methods apply.
        host_v1 ([`~transformers.PreTrainedModel`], *optional*): A DFlash v1 drafter of the host's own class.
        public (`torch.nn.Module`, *optional*): The drafter as the public `dflash` package loads it.
    """
    batch = workload.inputs[0]["input_ids"].shape[0]
    on_cuda = target.device.type == "cuda"
    only_cuda = None if on_cuda else "compiles for a GPU; this run is on the CPU"
    only_one_row = None if batch == 1 else f"takes one row, the batch has {batch}"
    repeated = "the synthetic text repeats itself, so copying from it would always be right"

    def generate(**options):
        def run(inputs, new_tokens):
            return target.generate(**inputs, max_new_tokens=new_tokens, **workload.sampling, **options)

        return run

    def ours(**options):
        slots = {} if workload.slots is None else {"num_assistant_tokens": workload.slots}
        return generate(assistant_model=draft, **slots, **options)

    def our_passes():
        return draft.last_stats.target_passes

    def fresh_compiler():
        static_decoding.release_static_rounds()
        torch.compiler.reset()

    return [
        Contestant("plain", generate()),
        Contestant(
            "plain-static-compile", generate(cache_implementation="static"), skip=only_cuda, prepare=fresh_compiler
        ),
        Contestant(
            "prompt-lookup",
            generate(prompt_lookup_num_tokens=workload.slots or draft.config.block_size - 1),
            skip=repeated if workload.repeats_itself else only_one_row,
        ),
        Contestant(
            "host-dflash-v1",
            generate(assistant_model=host_v1, speculation_type="dflash"),
            drafter=host_v1,
            skip="no drafter of the host's own class: pass --host-v1" if host_v1 is None else only_one_row,
        ),
        _public_loop(target, public, workload, only_one_row),
        Contestant("dynamic", ours(cache_implementation="dynamic"), drafter=draft, passes=our_passes),
        Contestant("static", ours(cache_implementation="static"), drafter=draft, passes=our_passes),
        Contestant(
            "static-compile",
            ours(cache_implementation="static", compile_config=CompileConfig(dynamic=False)),
            drafter=draft,
            passes=our_passes,
            skip=only_cuda,
            prepare=fresh_compiler,
        ),
    ]


def _public_loop(target, public, workload: Workload, only_one_row: str | None) -> Contestant:
    rounds = []

    def run(inputs, new_tokens):
        import dflash.model

        # Its own clock needs CUDA.
        dflash.model._cuda_time = time.perf_counter
        end = target.generation_config.eos_token_id
        output = dflash.model.dflash_generate(
            public,
            target,
            inputs["input_ids"],
            new_tokens,
            [end] if isinstance(end, int) else end,
            temperature=workload.temperature,
            block_size=None if workload.slots is None else workload.slots + 1,
            return_stats=True,
        )
        rounds[:] = output.acceptance_lengths
        return output.output_ids

    skip = only_one_row
    if public is None:
        missing = importlib.util.find_spec("dflash") is None
        skip = "the package dflash is not installed" if missing else "its classes do not take this drafter"
    return Contestant("public-dflash", run, drafter=public, passes=lambda: 1 + len(rounds), skip=skip)


def load_public(draft, path: str | None = None):
    """
    A drafter as the public `dflash` package has it, or `None` without that package.

    Args:
        draft ([`DFlash2DraftModel`]): The drafter whose weights it gets.
        path (`str`, *optional*): Its checkpoint, which the package then loads itself.
    """
    if importlib.util.find_spec("dflash") is None:
        return None
    from dflash.model import DFlash2DraftModel as PublicModel
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    if draft.candidate_selector is None:
        return None
    if path is not None:
        return PublicModel.from_pretrained(path, dtype=draft.dtype).to(draft.device).eval()
    config = Qwen3Config(**draft.config.to_dict())
    config._attn_implementation = "sdpa"
    with torch.device(draft.device):
        public = PublicModel(config).to(draft.dtype).eval()
    renamed = {
        f"{key}.weight" if key.endswith("_codebook") else key: value for key, value in draft.state_dict().items()
    }
    public.load_state_dict(renamed)
    return public


__all__ = ["NAMES", "Contestant", "Workload", "contestants", "load_public"]

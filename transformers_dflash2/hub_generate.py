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
"""A DFlash2 drafter as a `custom_generate` recipe.

A copy of this file lies in a drafter's folder as `custom_generate/generate.py`. With it
`target.generate(**inputs, custom_generate="org/drafter", trust_remote_code=True)` loads the drafter of that folder
once and generates with it. The file stands alone: the recipe loader copies no files from the folder above.
"""

import inspect
from weakref import WeakKeyDictionary

import torch
from transformers import AutoModel


_drafts: WeakKeyDictionary = WeakKeyDictionary()


def generate(model, *args, assistant_model=None, **kwargs):
    """
    Generate with the drafter of the repository that this recipe was loaded from.

    Args:
        model ([`~transformers.PreTrainedModel`]): The target.
        assistant_model ([`DFlash2DraftModel`], *optional*):
            The drafter, if it is loaded already.
        args, kwargs: What [`~transformers.GenerationMixin.generate`] takes.

    Returns:
        What [`~transformers.GenerationMixin.generate`] returns.

    Raises:
        `ValueError`: No drafter was passed, and the recipe was not called by `generate(custom_generate="...")`.
    """
    if assistant_model is None:
        # `generate` does not say which repository it took the recipe from; its frame knows.
        caller = inspect.currentframe().f_back
        repository = caller.f_locals.get("custom_generate")
        if not isinstance(repository, str):
            raise ValueError("There is no drafter: pass assistant_model, or custom_generate as the drafter's folder.")
        loaded = _drafts.setdefault(model, {})
        if repository not in loaded:
            # Hidden states of drafters exceed the range of float16.
            dtype = torch.bfloat16 if model.dtype == torch.float16 else model.dtype
            draft = AutoModel.from_pretrained(repository, trust_remote_code=True, dtype=dtype)
            loaded[repository] = draft.to(model.device).eval()
        assistant_model = loaded[repository]
    return model.generate(*args, assistant_model=assistant_model, **kwargs)


__all__ = ["generate"]

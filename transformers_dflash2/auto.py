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
"""One loader for every drafter."""

from transformers import PreTrainedConfig

from .configuration_dspark import is_dspark_config
from .modeling_dflash2 import DFlash2DraftModel
from .modeling_dspark import DSparkDraftModel


# Arguments of `from_pretrained` that say where files come from.
_FILE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class AutoDraftModel:
    """
    Picks the class of a drafter from its checkpoint: [`DFlash2DraftModel`] for DFlash and DFlash2, and
    [`DSparkDraftModel`]. It is not instantiated.

    Example:

    ```python
    >>> from transformers_dflash2 import AutoDraftModel

    >>> draft = AutoDraftModel.from_pretrained("model_cards/smollm2-135m-dflash2")
    >>> type(draft).__name__
    'DFlash2DraftModel'
    ```
    """

    def __init__(self):
        raise TypeError("AutoDraftModel is not instantiated; call AutoDraftModel.from_pretrained(folder_or_hub_id).")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs) -> DFlash2DraftModel:
        """
        Load a drafter.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Hub id or folder.
            kwargs: As for [`DFlash2DraftModel.from_pretrained`].

        Raises:
            `ValueError`: What the class itself raises.
        """
        config = kwargs.get("config")
        if config is None:
            where = {key: kwargs[key] for key in _FILE_ARGUMENTS if key in kwargs}
            raw, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **where)
        else:
            raw = config.to_dict()
        model_class = DSparkDraftModel if is_dspark_config(raw) else DFlash2DraftModel
        return model_class.from_pretrained(pretrained_model_name_or_path, **kwargs)


__all__ = ["AutoDraftModel"]

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
"""Lossless speculative decoding with DFlash2 drafters, inside `transformers`' own `generate`."""

from .auto import AutoDraftModel
from .candidate_generator import DFlash2CandidateGenerator
from .configuration_dflash2 import DFlash2Config
from .configuration_dspark import DSparkConfig
from .generation import DFlash2GenerateDecoderOnlyOutput, DFlash2Stats
from .inspection import inspect
from .integration import disable, enable
from .modeling_dflash2 import DFlash2DraftModel, DFlash2Model, DFlash2PreTrainedModel
from .modeling_dspark import DSparkDraftModel


__version__ = "0.1.0"

enable()

__all__ = [
    "AutoDraftModel",
    "DFlash2CandidateGenerator",
    "DFlash2Config",
    "DFlash2DraftModel",
    "DFlash2GenerateDecoderOnlyOutput",
    "DFlash2Model",
    "DFlash2PreTrainedModel",
    "DFlash2Stats",
    "DSparkConfig",
    "DSparkDraftModel",
    "disable",
    "enable",
    "inspect",
]

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
"""Kernels run on the GPU where there is one, and in triton's interpreter where there is none."""

import os
import warnings

import pytest
import torch


# Read when a kernel is decorated: before any module of `transformers_dflash2.kernels` that the tests here import.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory holds NaN, or the largest integer: an entry that no program writes cannot look right by luck."""
    with warnings.catch_warnings():
        # The mode that fills memory also warns about operations of the references whose sums have no fixed order.
        warnings.simplefilter("ignore")
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])

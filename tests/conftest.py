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
import logging
import os
import random
from pathlib import Path

import pytest


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Also for the processes that tests start: two test processes with two threads each fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402


# Kernel tests run in triton's interpreter where there is no GPU. Triton reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from transformers_dflash2.kernels import dispatch  # noqa: E402


KERNEL_TESTS = Path(__file__).parent / "kernels"


try:
    from hypothesis import HealthCheck, settings
except ImportError:
    settings = None

if settings is not None:
    common = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
    settings.register_profile("default", max_examples=60, derandomize=True, **common)
    settings.register_profile("long", max_examples=2500, **common)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config):
    config.addinivalue_line("markers", "host_deprecations: the host's own code logs a deprecation notice here")


def pytest_collection_modifyitems(config, items):
    strict = [
        pytest.mark.filterwarnings(f"error::{category}:{module}")
        for category, module in (
            ("FutureWarning", r"transformers(\.|$)"),
            ("FutureWarning", r"transformers_dflash2(\.|$)"),
            ("DeprecationWarning", r"transformers_dflash2(\.|$)"),
        )
    ]
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        for mark in strict:
            # In front, so that a test's own marks have the last word.
            item.add_marker(mark, append=False)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny models are fastest on one thread, and sums then run in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def interpreter_for_kernel_tests_only(request, monkeypatch):
    """
    Triton's interpreter stays out of tests that are not about kernels.

    It takes milliseconds a program: a generation test on it runs hundreds of times longer than on plain operations.
    """
    if KERNEL_TESTS not in request.path.parents:
        monkeypatch.setattr(dispatch, "is_interpreting", lambda: False)


@pytest.fixture(autouse=True)
def seed():
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def fresh_reports(caplog):
    """Collects what the library reports; what it says once in the life of a process it says anew."""
    logging.Logger.warning_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="transformers_dflash2")
    return caplog


class _DeprecationNotices(logging.Handler):
    """Collects what `transformers` logs about deprecated use."""

    def __init__(self):
        super().__init__(level=logging.WARNING)
        self.messages = []

    def emit(self, record):
        message = record.getMessage()
        if "deprecat" in message.lower():
            self.messages.append(message)


@pytest.fixture(autouse=True)
def no_deprecated_use(request):
    """A deprecation notice that `transformers` logs fails the test; those it warns about are errors by filter."""
    logger = logging.getLogger("transformers")
    handler = _DeprecationNotices()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    if handler.messages and "host_deprecations" not in request.keywords:
        pytest.fail(f"transformers logged a deprecation notice: {handler.messages[0]}")

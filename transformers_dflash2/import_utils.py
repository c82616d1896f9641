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
"""Which optional packages are usable here.

Nothing is imported to find out: presence is a module lookup and the version is read from the installed metadata. A
package that is present but older than its floor counts as unavailable, and `unavailable_reason` says so together with
the command that mends it.
"""

import importlib.metadata
import importlib.util
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from packaging import version


__all__ = [
    "is_accelerate_available",
    "is_bitsandbytes_available",
    "is_compressed_tensors_available",
    "is_flashinfer_available",
    "is_torch_version",
    "is_torchao_available",
    "is_transformers_version",
    "is_triton_available",
    "require",
    "unavailable_reason",
]


class _OptionalPackage(NamedTuple):
    module: str
    # Names under which an index may serve the module; the first one is what the install command asks for.
    distributions: tuple[str, ...]
    floor: str


# Keys are the names of this package's extras.
_OPTIONAL_PACKAGES = {
    "accelerate": _OptionalPackage("accelerate", ("accelerate",), "1.1"),
    "bitsandbytes": _OptionalPackage("bitsandbytes", ("bitsandbytes",), "0.46.1"),
    "compressed-tensors": _OptionalPackage("compressed_tensors", ("compressed-tensors",), "0.15"),
    "flashinfer": _OptionalPackage("flashinfer", ("flashinfer-python",), "0.6.8"),
    "torchao": _OptionalPackage("torchao", ("torchao",), "0.15"),
    "triton": _OptionalPackage(
        "triton", ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"), "3.4"
    ),
}

_OPERATORS: dict[str, Callable[[version.Version, version.Version], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def _installed_version(distributions: tuple[str, ...]) -> version.Version | None:
    for distribution in distributions:
        try:
            return version.parse(importlib.metadata.version(distribution))
        except (importlib.metadata.PackageNotFoundError, version.InvalidVersion, TypeError):
            continue
    return None


@lru_cache
def unavailable_reason(name: str) -> str | None:
    """
    Why an optional package cannot be used, or `None` when it can.

    Args:
        name (`str`):
            Name of one of this package's extras: `"accelerate"`, `"bitsandbytes"`, `"compressed-tensors"`,
            `"flashinfer"`, `"torchao"` or `"triton"`.

    Returns:
        `str` or `None`: One sentence that names the package, the version floor and the install command.
    """
    if name not in _OPTIONAL_PACKAGES:
        raise ValueError(f"name={name!r} is no optional package; use one of {sorted(_OPTIONAL_PACKAGES)}")
    package = _OPTIONAL_PACKAGES[name]
    distribution = package.distributions[0]
    fix = f"install it with `pip install -U '{distribution}>={package.floor}'`"
    try:
        spec = importlib.util.find_spec(package.module)
    except (ImportError, ValueError):
        spec = None
    # A folder of that name on the path is a namespace package without an origin, and no installation.
    if spec is None or spec.origin is None:
        return f"{distribution} is not installed; {fix}"
    found = _installed_version(package.distributions)
    # A build from source may carry no metadata: there is nothing to compare, so it is taken as it is.
    if found is None:
        return None
    # Nightly and local builds (`3.4.0.dev1`, `3.4.0+git1`) count as their release.
    if version.parse(found.base_version) < version.parse(package.floor):
        return f"{distribution} {found} is installed, {package.floor} or newer is needed; {fix}"
    return None


def require(name: str, feature: str) -> None:
    """
    Raises unless an optional package is usable.

    Args:
        name (`str`):
            Name of the extra, as for [`unavailable_reason`].
        feature (`str`):
            What needs the package; the message starts with it.
    """
    reason = unavailable_reason(name)
    if reason is not None:
        raise ImportError(f"{feature} needs {name}: {reason}")


def is_accelerate_available() -> bool:
    return unavailable_reason("accelerate") is None


def is_bitsandbytes_available() -> bool:
    return unavailable_reason("bitsandbytes") is None


def is_compressed_tensors_available() -> bool:
    return unavailable_reason("compressed-tensors") is None


def is_flashinfer_available() -> bool:
    """True when flashinfer can be imported; its kernels need a CUDA device besides and refuse CPU tensors."""
    return unavailable_reason("flashinfer") is None


def is_torchao_available() -> bool:
    return unavailable_reason("torchao") is None


def is_triton_available() -> bool:
    return unavailable_reason("triton") is None


@lru_cache
def _is_version(distribution: str, operation: str, reference: str) -> bool:
    if operation not in _OPERATORS:
        raise ValueError(f"operation={operation!r} is unknown; use one of {list(_OPERATORS)}")
    # Development and local builds count as the release they lead to, so `5.20.0.dev0` is not below `5.20`.
    found = version.parse(version.parse(importlib.metadata.version(distribution)).base_version)
    return _OPERATORS[operation](found, version.parse(reference))


def is_transformers_version(operation: str, reference: str) -> bool:
    """
    Compares the installed transformers with a release.

    Args:
        operation (`str`):
            One of `"<"`, `"<="`, `"=="`, `"!="`, `">="`, `">"`.
        reference (`str`):
            The release on the right-hand side, e.g. `"5.20"`.
    """
    return _is_version("transformers", operation, reference)


def is_torch_version(operation: str, reference: str) -> bool:
    """Compares the installed torch with a release; arguments as for [`is_transformers_version`]."""
    return _is_version("torch", operation, reference)

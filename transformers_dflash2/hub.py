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
"""A drafter's code as files beside its weights, so that it runs where this package is not installed.

`transformers` loads such code from a flat folder and collects files by reading their relative imports. The files are
made from the package itself: starting at the model and the hook on `generate`, every import is followed, modules of
sub-packages get flat names (`quantization/head.py` becomes `quantization_head.py`), and relative imports are rewritten
to match. Modules that need Triton kernels stay behind: who imports one has to do it inside `try`, and in the copy that
import asks for the installed package instead.

Two files get a last paragraph, those of the model and of its config: they give way to the installed package where
there is one, and the model installs the copied hook where there is none.
"""

import ast
import inspect
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .hub_generate import generate


PACKAGE_NAME = "transformers_dflash2"
# Where `generate(custom_generate="folder", trust_remote_code=True)` looks for a loop.
CUSTOM_GENERATE = "custom_generate/generate.py"

_FOLDER = Path(__file__).parent
# The hook, which the last paragraph of the model's file imports.
_HOOK = "integration"
_LEFT_BEHIND = "kernels"

_NOTE = "# The lines below were added when this file was copied from the package transformers_dflash2."
_CONFIG_PARAGRAPH = """
try:
    from transformers_dflash2 import {name} as _Installed{name}
except ImportError:
    pass
else:

    class {name}(_Installed{name}):
        __doc__ = _Installed{name}.__doc__

        # Without a constructor of its own the host would turn this class into a dataclass.
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
"""
_MODEL_PARAGRAPH = """
try:
    from transformers_dflash2 import {name} as _Installed{name}
except ImportError:
    from .integration import enable as _enable

    _enable()
else:

    class {name}(_Installed{name}):
        __doc__ = _Installed{name}.__doc__
"""


class _Import(NamedTuple):
    node: ast.ImportFrom
    is_guarded: bool
    is_lazy: bool


def auto_map(model_class: type) -> dict[str, str]:
    """
    The `auto_map` entry of a drafter's config.

    Args:
        model_class (`type`): The drafter's class.

    Returns:
        `dict[str, str]`: Place of config and model by the name of the host's auto class.
    """
    return {
        name: f"{entry.__module__.rpartition('.')[2]}.{entry.__name__}"
        for name, entry in (("AutoConfig", model_class.config_class), ("AutoModel", model_class))
    }


def remote_code_files(model_class: type) -> dict[str, str]:
    """
    The files that make a drafter's folder loadable with `trust_remote_code=True`.

    Args:
        model_class (`type`): The drafter's class.

    Returns:
        `dict[str, str]`: Text of each file by its path in the folder, `custom_generate/generate.py` among them.

    Raises:
        `ValueError`: A module that travels imports one that stays behind, outside of `try`.
    """
    paragraphs = {}
    for paragraph, place in zip((_CONFIG_PARAGRAPH, _MODEL_PARAGRAPH), auto_map(model_class).values(), strict=True):
        module, name = place.split(".")
        paragraphs[module] = paragraph.format(name=name)
    files, pending = {}, [*paragraphs, _HOOK]
    while pending:
        module = pending.pop()
        name = f"{_flat(module)}.py"
        if name in files:
            continue
        text, imported = _flattened(module)
        if module in paragraphs and _NOTE not in text:
            text = f"{text.rstrip()}\n\n\n{_NOTE}{paragraphs[module]}"
        files[name] = text
        pending += imported
    files[CUSTOM_GENERATE] = Path(inspect.getfile(generate)).read_text(encoding="utf-8")
    return dict(sorted(files.items()))


def write_remote_code(folder: str | Path, model_class: type) -> list[Path]:
    """
    Write [`remote_code_files`] into a folder.

    Args:
        folder (`str` or `Path`): The folder of a saved drafter.
        model_class (`type`): The drafter's class.

    Returns:
        `list[Path]`: The files that were written.
    """
    paths = []
    for name, text in remote_code_files(model_class).items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _flat(module: str) -> str:
    return module.removesuffix(".__init__").replace(".", "_")


def _path(module: str) -> Path:
    return _FOLDER.joinpath(*module.split(".")).with_suffix(".py")


def _find(parts: list[str]) -> str | None:
    """The module of that dotted name: a file, or the `__init__` of a folder."""
    for candidate in (".".join(parts), ".".join([*parts, "__init__"])):
        if parts and _path(candidate).is_file():
            return candidate
    return None


@cache
def _relative_imports(path: Path) -> list[_Import]:
    found = []

    def visit(node: ast.AST, is_guarded: bool, is_lazy: bool) -> None:
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append(_Import(node, is_guarded, is_lazy))
        for child in ast.iter_child_nodes(node):
            visit(
                child,
                is_guarded or isinstance(node, ast.Try),
                is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef),
            )

    visit(ast.parse(path.read_text(encoding="utf-8")), False, False)
    return found


def _imported_modules(module: str, node: ast.ImportFrom) -> tuple[str | None, dict[str, str]]:
    """The module that an import takes objects from, and the names in it that are modules themselves."""
    base = module.split(".")[: -node.level] + (node.module.split(".") if node.module else [])
    modules = {alias.name: _find([*base, alias.name]) for alias in node.names}
    return _find(base), {name: found for name, found in modules.items() if found is not None}


def _stays_behind(module: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a module cannot do without the kernels."""
    if module.split(".")[0] == _LEFT_BEHIND:
        return True
    if module in seen:
        return False
    for entry in _relative_imports(_path(module)):
        if entry.is_guarded or entry.is_lazy:
            continue
        source, submodules = _imported_modules(module, entry.node)
        others = [*submodules.values(), *([source] if len(submodules) < len(entry.node.names) else [])]
        if any(other is not None and _stays_behind(other, seen | {module}) for other in others):
            return True
    return False


def _flattened(module: str) -> tuple[str, list[str]]:
    """The text of a module with flat imports, and the modules it takes along."""
    text = _path(module).read_text(encoding="utf-8")
    lines, followed = text.splitlines(), []
    for entry in sorted(_relative_imports(_path(module)), key=lambda entry: -entry.node.lineno):
        node = entry.node
        source, submodules = _imported_modules(module, node)
        statements = []
        objects = [alias for alias in node.names if alias.name not in submodules]
        if objects:
            statements.append(_from_module(module, entry, source, objects, followed))
        for alias in (alias for alias in node.names if alias.name in submodules):
            statements += _import_of_module(module, entry, submodules[alias.name], alias, followed)
        if "\n".join(statements) != ast.unparse(node):
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in statements]
    return "\n".join(lines) + "\n", followed


def _from_module(module: str, entry: _Import, source: str, objects: list[ast.alias], followed: list[str]) -> str:
    names = ", ".join(alias.name if alias.asname is None else f"{alias.name} as {alias.asname}" for alias in objects)
    return f"from {_place(module, entry, source, followed)} import {names}"


def _import_of_module(module: str, entry: _Import, source: str, alias: ast.alias, followed: list[str]) -> list[str]:
    place = _place(module, entry, source, followed)
    name = alias.asname or alias.name
    if not place.startswith("."):
        parent, _, last = place.rpartition(".")
        return [f"from {parent} import {last} as {name}"]
    renamed = place[1:] if name == place[1:] else f"{place[1:]} as {name}"
    # The loader takes along what it finds in lines of the first form only. A copy has that line already.
    seen_by_loader = f"from {place} import __name__ as _{place[1:]}"
    text = _path(module).read_text(encoding="utf-8")
    return [*([] if seen_by_loader in text else [seen_by_loader]), f"from . import {renamed}"]


def _place(module: str, entry: _Import, source: str, followed: list[str]) -> str:
    """What stands between `from` and `import`; a module that travels is added to those to follow."""
    if not _stays_behind(source):
        followed.append(source)
        return f".{_flat(source)}"
    if entry.is_guarded:
        return f"{PACKAGE_NAME}.{source.removesuffix('.__init__')}"
    raise ValueError(
        f"{module}, line {entry.node.lineno}: {source} needs the kernels, which stay behind when a drafter's code "
        "travels. Import it inside try/except ImportError, and do without it where it is missing."
    )


__all__ = ["CUSTOM_GENERATE", "auto_map", "remote_code_files", "write_remote_code"]

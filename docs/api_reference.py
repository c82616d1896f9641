# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the page `api.md` from the docstrings, for mkdocs.

The sources are parsed and not imported, so that the documentation builds in a second on a machine without torch.
"""

import ast
import inspect
import re
from pathlib import Path
from typing import NamedTuple

from mkdocs.structure.files import File


__all__ = ["on_files", "render"]

PACKAGE = Path(__file__).resolve().parents[1] / "transformers_dflash2"
# Public names outside of the top level, by module.
FURTHER = {
    "hub": ["auto_map", "remote_code_files", "write_remote_code"],
    "conversion": ["convert_checkpoint", "to_public", "to_speculators"],
    "traces": ["Trace", "TracedRound"],
    "candidate_generator": ["host_assisted_loop"],
    "testing": None,
}
_SECTIONS = ("Args:", "Returns:", "Raises:", "Example:", "Examples:", "Source:")
# An entry of a list, as opposed to the next line of the one before.
_ENTRY = re.compile(r"    [\w`*, .]+( \(.*|: .*|:)$")
_WIDTH = 88


class Entry(NamedTuple):
    title: str
    signature: str
    docstring: str
    members: list


def on_files(files, config):
    """Called by mkdocs: adds the page."""
    files.append(File.generated(config, "api.md", content=render()))
    return files


def render() -> str:
    """The page as Markdown."""
    lines = ["# API reference", "", "Names of `transformers_dflash2`, by the module that defines them.", ""]
    for module, names in _public_names().items():
        lines += [f"## {module.removeprefix('transformers_dflash2.')}", ""]
        for name in names:
            lines += _section(_find(module, name), level=3)
    return "\n".join(lines)


def _public_names() -> dict[str, list[str]]:
    tree = _tree("__init__")
    exported = _all(tree)
    places: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in exported:
                    places.setdefault(f"transformers_dflash2.{node.module}", []).append(alias.name)
    for module, names in FURTHER.items():
        names = names or [name for name in _all(_tree(module)) if name[0].islower()]
        found = places.setdefault(f"transformers_dflash2.{module}", [])
        found += [name for name in names if name not in found]
    return dict(sorted(places.items()))


def _tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def _all(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError("a module has no literal __all__")


def _find(module: str, name: str) -> Entry:
    for node in _tree(module.removeprefix("transformers_dflash2.")).body:
        if getattr(node, "name", None) == name:
            return _entry(node, name)
    raise ValueError(f"{module} defines no {name}; correct docs/api_reference.py or the module's __all__.")


def _entry(node, title: str) -> Entry:
    docstring = ast.get_docstring(node)
    if not docstring:
        raise ValueError(f"{title} is public and has no docstring.")
    if isinstance(node, ast.ClassDef):
        functions = [entry for entry in node.body if isinstance(entry, ast.FunctionDef)]
        members = [
            _entry(entry, f"{title}.{entry.name}")
            for entry in functions
            if entry.name[0] != "_" and ast.get_docstring(entry)
        ]
        constructor = next((entry for entry in functions if entry.name == "__init__"), None)
        return Entry(title, _signature(title, constructor), docstring, members)
    if any(getattr(decorator, "id", None) == "property" for decorator in node.decorator_list):
        return Entry(title, title, docstring, [])
    return Entry(title, _signature(title, node), docstring, [])


def _signature(title: str, function: ast.FunctionDef | None) -> str:
    if function is None:
        return title
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(function.args))
    if len(title) + len(arguments) > _WIDTH:
        # At commas outside of brackets.
        arguments = "\n    " + re.sub(r", (?![^\[(]*[\])])", ",\n    ", arguments) + ",\n"
    return f"{title}({arguments})"


def _section(entry: Entry, level: int) -> list[str]:
    lines = [f"{'#' * level} {entry.title.split('.')[-1]}", "", "```python", entry.signature, "```", ""]
    lines += [*_markdown(entry.docstring), ""]
    for member in entry.members:
        lines += _section(member, min(level + 1, 6))
    return lines


def _markdown(docstring: str) -> list[str]:
    """A Hugging Face docstring as Markdown: sections in bold, their entries as a list."""
    lines, section, in_code = [], None, False
    for line in inspect.cleandoc(docstring).splitlines():
        bare = line.strip()
        if bare.startswith("```"):
            in_code = not in_code
        if in_code or bare.startswith("```"):
            lines.append(line)
            continue
        # Links to other objects are plain names here.
        line = re.sub(r"\[`~?([^`\]]+)`\](?!\()", r"`\1`", line)
        if line in _SECTIONS:
            section = line
            lines += ["", f"**{line}**", ""]
        elif section in ("Args:", "Raises:") and _ENTRY.match(line):
            lines.append(f"- {line.strip()}")
        elif section is not None and line and not line.startswith(" "):
            section = None
            lines += ["", line]
        elif section is not None:
            # The text of an entry, or of a section without entries.
            indent = "    " if section in ("Args:", "Raises:") and bare else ""
            lines.append(f"{indent}{line.strip()}")
        else:
            lines.append(line)
    return lines

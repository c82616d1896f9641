# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes a notebook of every example script with `# %%` cells, so that both are the same code.

python examples/build_notebooks.py            # write the notebooks
python examples/build_notebooks.py --check    # only say which ones are out of date
"""

import argparse
import json
from pathlib import Path


__all__ = ["REPOSITORY", "SCRIPTS", "build_notebook", "main"]

HERE = Path(__file__).resolve().parent
REPOSITORY = "transformers-dflash2/transformers_dflash2"
SCRIPTS = sorted(path for path in HERE.glob("*.py") if "\n# %% [markdown]\n" in path.read_text(encoding="utf-8"))

_BADGE = (
    "[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{repository}/blob/main/examples/{name}.ipynb)"
)
_SETUP = """\
# On Colab: the repository, for the small drafter in it, and the package. The torch that is installed stays.
import os
import sys


if "google.colab" in sys.modules and not os.path.exists("smollm2.py"):
    !git clone -q --depth 1 https://github.com/{repository} dflash2
    %pip install -q -e "dflash2[demo]"
    os.chdir("dflash2/examples")
    sys.path[:0] = ["..", "."]

import torch


print("GPU:", torch.cuda.get_device_name() if torch.cuda.is_available() else "none, running on the CPU")
"""


def build_notebook(script: Path) -> str:
    """The notebook of one script, as JSON."""
    # What comes before the first cell is the licence.
    parts = script.read_text(encoding="utf-8").split("\n# %%")[1:]
    name = script.stem
    cells = [_markdown(_BADGE.format(repository=REPOSITORY, name=name)), _code(_SETUP.format(repository=REPOSITORY))]
    for part in parts:
        marker, _, body = part.partition("\n")
        if marker.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            cells.append(_markdown("\n".join(lines)))
        else:
            cells.append(_code(body.strip("\n")))
    # The title comes first, the badge below it.
    cells[0]["source"] = [*cells[2]["source"], "\n\n", *cells[0]["source"]]
    del cells[2]
    for number, cell in enumerate(cells):
        cell["id"] = f"{name}-{number}"
    notebook = {
        "cells": cells,
        "metadata": {
            "accelerator": "GPU",
            "colab": {"gpuType": "T4", "provenance": []},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _markdown(text: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text: str) -> dict:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": text.strip("\n").splitlines(keepends=True),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a notebook is out of date")
    options = parser.parse_args(arguments)
    stale = []
    for script in SCRIPTS:
        path, text = script.with_suffix(".ipynb"), build_notebook(script)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not options.check:
                path.write_text(text, encoding="utf-8")
    print("\n".join(f"{'out of date' if options.check else 'wrote'}: {name}" for name in stale) or "up to date")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())

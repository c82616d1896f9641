# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""The notebooks: the same code as their scripts, stored without outputs, and they run from top to bottom."""

import os
from pathlib import Path

import build_notebooks
import pytest
import smollm2
from generation_checks import pure_drafter, pure_target
from test_inspection import word_tokenizer


nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def test_notebooks_are_those_of_the_scripts(capsys):
    """Catches a notebook that was edited by hand, or a script without a notebook."""
    assert build_notebooks.main(["--check"]) == 0, "run python examples/build_notebooks.py"
    assert [path.stem for path in NOTEBOOKS] == [script.stem for script in build_notebooks.SCRIPTS]
    assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_well_formed(path):
    """Catches outputs in the repository, or a notebook without its badge and its metadata."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert notebook.metadata.accelerator == "GPU"
    title = notebook.cells[0]
    assert title.source.startswith("# ") and f"/blob/main/examples/{path.name})" in title.source
    assert "git clone" in code[0].source and "torch.cuda.is_available()" in code[0].source


def run(path: Path, environment: dict[str, str]) -> dict:
    notebook = nbformat.read(path, as_version=4)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MPLBACKEND": "agg",
        **environment,
    }
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": EXAMPLES}}
    )
    client.execute(env={**os.environ, **variables})
    return notebook


def text_of(notebook) -> str:
    return "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory):
    """A pair of random weights on disk that the notebooks take for SmolLM2."""
    folder = tmp_path_factory.mktemp("pair")
    pure_target().save_pretrained(folder / "target")
    word_tokenizer().save_pretrained(folder / "target")
    pure_drafter().save_pretrained(folder / "draft")
    return {
        "TRANSFORMERS_DFLASH2_TARGET": str(folder / "target"),
        "TRANSFORMERS_DFLASH2_DRAFT": str(folder / "draft"),
    }


@pytest.mark.parametrize("script", build_notebooks.SCRIPTS, ids=lambda script: script.stem)
def test_script_runs_on_a_tiny_pair(script, tiny_pair, monkeypatch, capsys):
    """Catches an example that no longer fits the package. The notebooks are this code."""
    for name, value in tiny_pair.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MPLBACKEND", "agg")
    import matplotlib

    matplotlib.use("agg")
    cells = script.read_text(encoding="utf-8")
    exec(compile(cells, str(script), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_a_notebook_executes(tiny_pair):
    """Catches a notebook that a kernel cannot run from top to bottom."""
    assert "tokens per round" in text_of(run(EXAMPLES / "quick_start.ipynb", tiny_pair))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_executes_with_the_real_pair(path):
    """Runs each notebook on SmolLM2 and its drafter."""
    assert text_of(run(path, {"TRANSFORMERS_DFLASH2_TARGET": str(smollm2.find_target()[0])}))

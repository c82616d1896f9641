# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""A drafter's code beside its weights: what is written, and that it works where the package is not installed."""

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from transformers_dflash2 import DFlash2DraftModel, hub
from transformers_dflash2.testing import table_drafter, table_target


ROOT = Path(__file__).resolve().parents[1]
PROMPT = [[3, 7, 1]]
AUTO_MAP = {
    "AutoConfig": "configuration_dflash2.DFlash2Config",
    "AutoModel": "modeling_dflash2.DFlash2DraftModel",
}

# Stands in for a machine without the package, whether or not it is installed here.
BLOCK = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "transformers_dflash2":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a drafter on disk, the drafter with its code, and what the package generates with them."""
    folder = tmp_path_factory.mktemp("pair")
    target = table_target(0)
    draft = table_drafter(target)
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft", include_code=True)
    ids = torch.tensor(PROMPT)
    options = {"max_new_tokens": 24, "assistant_model": draft}
    greedy = target.generate(ids, do_sample=False, **options).tolist()
    torch.manual_seed(0)
    sampled = target.generate(ids, do_sample=True, temperature=0.7, **options).tolist()
    return folder, greedy, sampled, draft.last_stats.rounds


def run(script: str, folder: Path, *, blocked: bool) -> dict:
    """Runs a script that prints JSON in its last line, in a process of its own with a module cache of its own."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    source = textwrap.dedent(BLOCK if blocked else "") + textwrap.dedent(script)
    command = [sys.executable, "-c", source, str(folder), json.dumps(PROMPT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.strip().splitlines()[-1])


LOAD = """
    import json, torch
    from transformers import AutoModel, AutoModelForCausalLM
    folder, ids = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(folder + "/target")
    draft = AutoModel.from_pretrained(folder + "/draft", trust_remote_code=True)
"""


def test_without_the_package(pair):
    """Catches remote code that fails to load alone, generates something else, or loses its code on the next save."""
    folder, greedy, sampled, rounds = pair
    script = """
        options = {"max_new_tokens": 24, "assistant_model": draft}
        out = {"greedy": target.generate(ids, do_sample=False, **options).tolist()}
        torch.manual_seed(0)
        out["sampled"] = target.generate(ids, do_sample=True, temperature=0.7, **options).tolist()
        out["rounds"] = draft.last_stats.rounds
        static = target.generate(ids, do_sample=False, cache_implementation="static", **options)
        out["static"] = static.tolist()

        # The recipe form, with nothing but the target loaded.
        recipe = {"custom_generate": folder + "/draft", "trust_remote_code": True}
        out["recipe"] = target.generate(ids, do_sample=False, max_new_tokens=24, **recipe).tolist()

        # Saved again, with its code, and loaded from there.
        draft.save_pretrained(folder + "/again")
        again = AutoModel.from_pretrained(folder + "/again", trust_remote_code=True)
        options["assistant_model"] = again
        out["again"] = target.generate(ids, do_sample=False, **options).tolist()
        out["module"] = type(draft).__module__.split(".")[0]
        out["package"] = [name for name in sys.modules if name.startswith("transformers_dflash2")]
        print(json.dumps(out))
    """
    out = run(textwrap.dedent(LOAD) + textwrap.dedent(script), folder, blocked=True)
    assert out["module"] == "transformers_modules" and out["package"] == []
    assert out["greedy"] == out["static"] == out["recipe"] == out["again"] == greedy
    assert out["sampled"] == sampled and out["rounds"] == rounds
    for name in hub.remote_code_files(DFlash2DraftModel):
        assert (folder / "again" / name).read_text() == (folder / "draft" / name).read_text(), name
    first, second = (json.loads((folder / name / "config.json").read_text()) for name in ("draft", "again"))
    assert first == second


def test_with_the_package(pair):
    """Catches remote code that runs its own slow loop although the package is there."""
    folder, greedy, _, _ = pair
    script = """
        import transformers_dflash2
        from transformers_dflash2 import generation, static_decoding
        loops = []
        for loop in (generation.SpeculativeDecoding, static_decoding.StaticDecoding):
            run = loop.run
            loop.run = lambda self, run=run: loops.append(type(self).__name__) or run(self)
        options = {"max_new_tokens": 24, "assistant_model": draft, "do_sample": False}
        out = {"greedy": target.generate(ids, **options).tolist(), "loops": loops}
        out["is_ours"] = isinstance(draft, transformers_dflash2.DFlash2DraftModel)
        out["config_is_ours"] = isinstance(draft.config, transformers_dflash2.DFlash2Config)
        print(json.dumps(out))
    """
    out = run("import sys\n" + textwrap.dedent(LOAD) + textwrap.dedent(script), folder, blocked=False)
    assert out == {"greedy": greedy, "loops": ["SpeculativeDecoding"], "is_ours": True, "config_is_ours": True}


def test_config_stays_public(pair, tmp_path):
    """Catches code that changes the config which other engines read, beyond the entry that names it."""
    folder = pair[0]
    draft = DFlash2DraftModel.from_pretrained(folder / "draft")
    draft.save_pretrained(tmp_path)
    with_code, without = (json.loads((path / "config.json").read_text()) for path in (folder / "draft", tmp_path))
    assert with_code.pop("auto_map") == AUTO_MAP
    assert with_code == without
    assert [path.name for path in tmp_path.glob("*.py")] == []
    # Saving does not change what was loaded.
    assert draft.config.auto_map == AUTO_MAP


def test_code_elsewhere_stays_named(pair, tmp_path):
    """Catches a reference to another repository's code that is lost on saving."""
    draft = table_drafter(table_target(0))
    draft.config.auto_map = {"AutoModel": "org/code--modeling.Model", "AutoConfig": "configuration.Config"}
    draft.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["auto_map"] == {"AutoModel": "org/code--modeling.Model"}


def test_push_to_hub_takes_the_code(monkeypatch):
    """Catches an upload that leaves the code out."""
    uploaded = []

    class Repository:
        repo_id = "org/draft"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, *args, **kwargs: Repository)
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *args, **kwargs: _Card())
    monkeypatch.setattr(
        DFlash2DraftModel,
        "_upload_modified_files",
        lambda self, folder, *args, **kwargs: uploaded.append({p.name for p in Path(folder).rglob("*.py")}),
    )
    draft = table_drafter(table_target(0))
    draft.push_to_hub("org/draft", include_code=True)
    draft.push_to_hub("org/draft")
    assert uploaded == [{Path(name).name for name in hub.remote_code_files(DFlash2DraftModel)}, set()]
    with pytest.raises(ValueError, match=r"draft\.push_to_hub\(repo, include_code=True\)"):
        draft.save_pretrained("folder", include_code=True, push_to_hub=True)


class _Card:
    def save(self, path):
        Path(path).write_text("")


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flat")
    hub.write_remote_code(folder, DFlash2DraftModel)
    return folder


def test_loader_sees_every_file(flat):
    """Catches an import in a form that `transformers` does not recognise, whose file then stays behind."""
    roots = {value.split(".")[0] for value in AUTO_MAP.values()}
    seen = {f"{root}.py" for root in roots}
    for root in roots:
        seen |= {Path(path).name for path in get_relative_import_files(flat / f"{root}.py")}
    assert seen == {path.name for path in flat.glob("*.py")}


def test_files_need_nothing_else(flat):
    """Catches a package that the loader insists on, an import that leads out of the folder, and kernels in a copy."""
    for path in flat.rglob("*.py"):
        needed = {name.split(".")[0] for name in get_imports(path)} - set(sys.stdlib_module_names)
        # transformers itself needs the last two.
        assert needed <= {"torch", "transformers", "packaging", "huggingface_hub"}, path.name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                assert node.level == 1 and all((flat / f"{name}.py").is_file() for name in names), path.name
    assert not {"static_decoding.py", "fused_modules.py", "kernels.py"} & {path.name for path in flat.glob("*.py")}


def test_copies_equal_the_package(flat):
    """Catches drift: apart from imports and the two last paragraphs a copy is the package's own file."""
    package = Path(hub.__file__).parent
    originals = {
        path.relative_to(package).as_posix().removesuffix("/__init__.py").removesuffix(".py").replace("/", "_"): path
        for path in package.rglob("*.py")
    }
    for path in flat.glob("*.py"):
        own = originals[path.stem].read_text().splitlines()
        copied = [line for line in path.read_text().split(f"\n{hub._NOTE}")[0].rstrip().splitlines()]
        different = [line for line in copied if line not in own]
        assert all(line.lstrip().startswith("from ") for line in different), path.name
        assert len(copied) >= len(own)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {"a": "from .sub import head\n", "sub/__init__": "", "sub/head": "x = 1\n"},
            {"a.py": "from .sub_head import __name__ as _sub_head\nfrom . import sub_head as head\n"},
            id="module-of-a-folder",
        ),
        pytest.param(
            {
                "a": "from .sub.head import x as y\n",
                "sub/__init__": "",
                "sub/head": "from ..b import x\n",
                "b": "x = 1\n",
            },
            {"a.py": "from .sub_head import x as y\n", "sub_head.py": "from .b import x\n"},
            id="names-of-a-folder",
        ),
        pytest.param(
            {"a": "from .sub import x\n", "sub/__init__": "from .head import x\n", "sub/head": "x = 1\n"},
            {"a.py": "from .sub import x\n", "sub.py": "from .sub_head import x\n"},
            id="folder-itself",
        ),
        pytest.param(
            {
                "a": "try:\n    from .fast import x\nexcept ImportError:\n    x = 0\n",
                "fast": "from .kernels import x\n",
            },
            {"a.py": "try:\n    from transformers_dflash2.fast import x\nexcept ImportError:\n    x = 0\n"},
            id="kernels-stay",
        ),
    ],
)
def test_flattening(tmp_path, monkeypatch, files, expected):
    """Catches wrong names after folders are flattened, or a module with kernels that travels."""
    _write(tmp_path, files, monkeypatch)
    written = hub.remote_code_files(DFlash2DraftModel)
    assert expected.items() <= written.items()
    assert not any(name.startswith(("fast", "kernels")) for name in written)


def test_kernels_outside_of_try_are_an_error(tmp_path, monkeypatch):
    """Catches a copy that would ask for the package in order to load."""
    files = {"a": "def f():\n    from .fast import x\n", "fast": "from .kernels import x\n"}
    _write(tmp_path, files, monkeypatch)
    with pytest.raises(ValueError, match="a, line 2: fast needs the kernels"):
        hub.remote_code_files(DFlash2DraftModel)


def _write(folder: Path, files: dict[str, str], monkeypatch) -> None:
    for name, text in {"kernels/__init__": "", "config": "", "model": "", **files}.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(hub, "_FOLDER", folder)
    monkeypatch.setattr(hub, "_HOOK", "a")
    monkeypatch.setattr(
        hub, "auto_map", lambda model_class: {"AutoConfig": "config.Config", "AutoModel": "model.Model"}
    )

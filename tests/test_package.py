# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""What holds for the package as a whole: imports, public names, layers, Hub files, metadata."""

import ast
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import transformers_dflash2
from transformers_dflash2 import import_utils


try:
    import tomllib
except ImportError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(transformers_dflash2.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))
# Those of the model; tests/test_hub.py looks at everything that travels.
HUB_FILES = [
    "cache_dflash2",
    "configuration_dflash2",
    "configuration_dspark",
    "functional_dflash2",
    "functional_dspark",
    "hub",
    "hub_generate",
    "modeling_dflash2",
    "modeling_dspark",
    "pairing",
]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

PUBLIC_NAMES = [
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

# A module may import from modules of a lower rank only. Sub-packages have the rank of their folder.
RANKS = {
    "hub_generate": 0,
    "pairing": 0,
    "import_utils": 0,
    "compat": 1,
    "configuration_dflash2": 1,
    "functional_dflash2": 1,
    "functional_recurrence": 1,
    "graph_pieces": 1,
    "hub": 1,
    "cache_dflash2": 2,
    "configuration_dspark": 2,
    "functional_dspark": 2,
    "kernels": 2,
    "ranks": 2,
    "modeling_dflash2": 3,
    "quantization": 3,
    "rollback": 3,
    "conversion": 4,
    "fused_modules": 4,
    "modeling_dspark": 4,
    "static_buffers": 4,
    "target": 4,
    "verify_length": 4,
    "auto": 5,
    "candidate_generator": 5,
    "stacked_context": 5,
    "generation": 6,
    "static_round": 6,
    "static_decoding": 7,
    "traces": 7,
    "integration": 8,
    "inspection": 8,
    "trace": 9,
    "__init__": 9,
    "testing": 10,
    "benchmark": 10,
}


def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def dotted(module: str) -> str:
    return ".".join(["transformers_dflash2", *module.split("/")]).removesuffix(".__init__")


def imported_modules(module: str) -> list[str]:
    """Files of this package that a file imports, inside functions too, as paths relative to the package."""
    folder = module.split("/")[:-1]
    found = []
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*folder[: len(folder) - node.level + 1], *(node.module.split(".") if node.module else [])]
            elif node.module and node.module.split(".")[0] == "transformers_dflash2":
                base = node.module.split(".")[1:]
            else:
                continue
            candidates = [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            candidates = [name[1:] for name in names if name[0] == "transformers_dflash2"]
        else:
            continue
        for parts in candidates:
            # The longest prefix that is a file; the rest are names in it.
            while parts and not (
                PACKAGE.joinpath(*parts).is_dir() or PACKAGE.joinpath(*parts).with_suffix(".py").is_file()
            ):
                parts = parts[:-1]
            found.append("/".join(parts) or "__init__")
    return found


def rank(module: str) -> int:
    top = module.split("/")[0]
    assert top in RANKS, f"{module} has no rank; place it in RANKS where the import direction of the package wants it"
    return RANKS[top]


def declared_names(module: str) -> list[str] | None:
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == ["__all__"]:
            return ast.literal_eval(node.value)
    return None


def sort_key(name: str) -> tuple:
    """The order of ruff's RUF022: constants, classes, the rest; numbers by value."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def test_public_names_are_pinned():
    """Catches a name that slips into or out of the public interface."""
    assert transformers_dflash2.__all__ == PUBLIC_NAMES
    assert all(hasattr(transformers_dflash2, name) for name in PUBLIC_NAMES)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_sorted_all(module):
    """Catches a module whose public names are implicit, unsorted, repeated or missing."""
    names = declared_names(module)
    assert names is not None, f"{module} has no literal __all__"
    assert names == sorted(names, key=sort_key)
    assert len(names) == len(set(names))
    if import_needs(module):
        pytest.skip("needs an optional package")
    imported = importlib.import_module(dotted(module))
    assert [name for name in names if not hasattr(imported, name)] == []


def import_needs(module: str) -> bool:
    folder = module.split("/")[0]
    return folder == "kernels" and not import_utils.is_triton_available()


def test_every_folder_is_importable():
    """Catches a sub-package without `__init__.py`, which an installed wheel would lose."""
    assert {name.removesuffix("/__init__") for name in MODULES if name != "__init__"} == {
        info.name.removeprefix("transformers_dflash2.").replace(".", "/")
        for info in pkgutil.walk_packages([str(PACKAGE)], "transformers_dflash2.", onerror=lambda name: None)
    }


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    """Catches cycles and shortcuts: integration -> generation -> candidate_generator -> modeling -> functional."""
    own = rank(module)
    inside = module.split("/")[0]
    wrong = [
        other
        for other in imported_modules(module)
        if rank(other) >= own and not ("/" in module and other.split("/")[0] == inside)
    ]
    assert wrong == []


def test_only_the_package_itself_imports_the_hook():
    """Catches a module that installs the hook as a side effect of being imported."""
    assert [module for module in MODULES if "integration" in imported_modules(module)] == ["__init__"]


@pytest.mark.parametrize("module", HUB_FILES)
def test_hub_files_import_each_other_only(module):
    """Catches an import that works in the package and fails once the file lies beside a checkpoint."""
    from transformers.dynamic_module_utils import get_imports

    tree = tree_of(module)
    in_try = [
        ast.dump(node)
        for attempt in ast.walk(tree)
        if isinstance(attempt, ast.Try)
        for node in ast.walk(attempt)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            where = f"line {node.lineno}"
            assert node.level == 1 and node.module in HUB_FILES, (
                f"{where}: relative import of a file that stays behind"
            )
            assert all(alias.name != "*" for alias in node.names), f"{where}: name the objects"
    for other in imported_modules(module):
        assert other in HUB_FILES or (module == "modeling_dflash2" and other.split("/")[0] == "kernels"), other
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "transformers_dflash2":
            assert ast.dump(node) in in_try, f"line {node.lineno}: an absolute import of the package belongs in a try"
    # What the Hub loader insists on having installed.
    needed = {name.split(".")[0] for name in get_imports(PACKAGE / f"{module}.py")}
    assert needed - set(sys.stdlib_module_names) <= {"torch", "transformers", "huggingface_hub"}


def test_hub_files_work_without_the_package(tmp_path, monkeypatch):
    """Catches Hub files that lean on the installed package, or that collide with it when both are loaded."""
    folder = tmp_path / "dflash2_hub_copy"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for module in HUB_FILES:
        shutil.copy(PACKAGE / f"{module}.py", folder)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_dflash2"]:
        monkeypatch.setitem(sys.modules, name, None)
    try:
        copy = importlib.import_module("dflash2_hub_copy.modeling_dflash2")
        assert copy.DFlash2DraftModel is not transformers_dflash2.DFlash2DraftModel
        assert copy.DFlash2DraftModel.config_class.__module__ == "dflash2_hub_copy.configuration_dflash2"
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "dflash2_hub_copy"]:
            del sys.modules[name]


def test_import_is_lean():
    """Catches an import that loads an optional package, or touches CUDA, before anyone asks for it."""
    script = """
        import sys
        import torch
        import transformers.models.qwen3.modeling_qwen3, transformers.generation.candidate_generator
        before = set(sys.modules)
        touched = []
        for name in ("_lazy_init", "device_count", "is_available"):
            setattr(torch.cuda, name, lambda *_, _name=name: touched.append(_name))
        import transformers_dflash2
        loaded = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
        print(sorted(loaded - {name.split(".")[0] for name in before}), touched, torch.cuda.is_initialized())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().splitlines()[-1] == "['transformers_dflash2'] [] False"


def test_repository_names_no_machine():
    """Catches absolute paths of somebody's machine in a tracked file."""
    try:
        command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    pattern = re.compile(rb"(?<![\w./:-])/(?:work|root|home|mnt|tmp|Users)/\w+")
    hits = []
    for name in filter(None, listing.split(b"\0")):
        path = ROOT / name.decode()
        if path.is_file() and path.suffix not in {".safetensors", ".png"}:
            hits += [f"{name.decode()}: {hit.decode()}" for hit in pattern.findall(path.read_bytes())]
    assert hits == []


def test_version_is_stated_once():
    """Catches a release whose metadata and attribute disagree."""
    stated = PYPROJECT["project"]["version"]
    assert getattr(transformers_dflash2, "__version__", stated) == stated
    try:
        assert importlib.metadata.version("transformers_dflash2") == stated
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed")


def test_environment_variables_are_listed():
    """Catches a variable that the code reads and the README does not explain, and the reverse."""
    pattern = re.compile(r"TRANSFORMERS_DFLASH2_[A-Z0-9_]*[A-Z0-9]")
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    used = {name for path in sources for name in pattern.findall(path.read_text(encoding="utf-8"))}
    listed = re.findall(
        r"^\| `(TRANSFORMERS_DFLASH2_\w+)`", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M
    )
    assert sorted(listed) == sorted(used)


def test_package_data_is_there():
    """Catches a package that type checkers ignore."""
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("extra", sorted(import_utils._OPTIONAL_PACKAGES))
def test_floors_match_the_extras(extra):
    """Catches an extra that installs a version which the availability check then refuses."""
    package = import_utils._OPTIONAL_PACKAGES[extra]
    assert PYPROJECT["project"]["optional-dependencies"][extra] == [f"{package.distributions[0]}>={package.floor}"]


@pytest.fixture
def installed(monkeypatch):
    """Pretends that triton is there in a given version, or not at all."""

    def pretend(version, origin="triton/__init__.py"):
        spec = importlib.util.spec_from_loader("triton", loader=None, origin=origin)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if version is not False else None)

        def find_version(distribution):
            if version is None or distribution != "triton":
                raise importlib.metadata.PackageNotFoundError(distribution)
            return version

        monkeypatch.setattr(importlib.metadata, "version", find_version)
        import_utils.unavailable_reason.cache_clear()

    yield pretend
    import_utils.unavailable_reason.cache_clear()


@pytest.mark.parametrize(
    ("version", "available"),
    [
        pytest.param(False, False, id="absent"),
        pytest.param("3.3.1", False, id="too-old"),
        pytest.param("3.4.0", True, id="floor"),
        pytest.param("3.10.0", True, id="two-digit-minor-is-newer"),
        pytest.param("3.4.0.dev20250101", True, id="nightly-of-the-floor"),
        pytest.param("3.4.0+git5389ed79", True, id="local-build"),
        pytest.param(None, True, id="no-metadata"),
    ],
)
def test_availability_has_a_floor(installed, version, available):
    """Catches string comparison of versions and floors that are not enforced."""
    installed(version)
    assert import_utils.is_triton_available() is available
    if available:
        import_utils.require("triton", "The fused kernel")
    else:
        with pytest.raises(ImportError, match=r"The fused kernel needs triton: .*pip install -U 'triton>=3\.4'"):
            import_utils.require("triton", "The fused kernel")


def test_a_folder_of_that_name_is_no_package(installed):
    """Catches a `triton` folder in the working directory counting as an installation."""
    installed("3.8.0", origin=None)
    assert not import_utils.is_triton_available()


def test_unknown_names_are_refused():
    """Catches a typo that would read as "not available"."""
    with pytest.raises(ValueError, match="name='tritom'"):
        import_utils.unavailable_reason("tritom")
    with pytest.raises(ValueError, match="operation='=>'"):
        import_utils.is_transformers_version("=>", "5.17")


@pytest.mark.parametrize(
    ("found", "operation", "reference", "expected"),
    [
        pytest.param("5.9.0", "<", "5.17", True, id="numeric"),
        pytest.param("5.20.0.dev0", ">=", "5.20", True, id="development-build"),
        pytest.param("5.17.0", "==", "5.17", True, id="trailing-zero"),
    ],
)
def test_transformers_version(monkeypatch, found, operation, reference, expected):
    """Catches version branches that take the wrong side on development builds or two-digit minors."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    import_utils._is_version.cache_clear()
    try:
        assert import_utils.is_transformers_version(operation, reference) is expected
    finally:
        import_utils._is_version.cache_clear()

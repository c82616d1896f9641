# Copyright 2026 The transformers_dflash2 authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the model cards: `template.md` filled with each folder's `card.yaml`.

python model_cards/build.py            # write README.md in every folder
python model_cards/build.py --check    # only say which ones are out of date
"""

import argparse
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData


__all__ = ["FOLDERS", "build_card", "main"]

HERE = Path(__file__).resolve().parent
FOLDERS = sorted(path.parent for path in HERE.glob("*/card.yaml"))


def build_card(folder: Path) -> str:
    """The card of one folder."""
    fields = yaml.safe_load((folder / "card.yaml").read_text(encoding="utf-8"))
    metadata, measured = fields.pop("metadata"), fields.pop("measured", [])
    if measured:
        metadata |= {"model_name": folder.name, "eval_results": [_result(**entry) for entry in measured]}
    data = ModelCardData(**metadata)
    texts = {key: value.strip() if isinstance(value, str) else value for key, value in fields.items()}
    for section in texts["sections"]:
        section["text"] = section["text"].strip()
    texts["acceptance"] = {
        key: value.strip() if isinstance(value, str) else value for key, value in texts["acceptance"].items()
    }
    return str(ModelCard.from_template(data, template_path=str(HERE / "template.md"), **texts)).rstrip() + "\n"


def _result(prompts: str, name: str, setting: str, value: float) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        # Results of one type are filed under one name.
        dataset_type=prompts,
        dataset_name=name,
        metric_type="accepted_length",
        metric_name=f"tokens committed per target pass, {setting}",
        metric_value=value,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a card is out of date")
    options = parser.parse_args(arguments)
    stale = []
    for folder in FOLDERS:
        path, text = folder / "README.md", build_card(folder)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path.relative_to(HERE.parent)))
            if not options.check:
                path.write_text(text, encoding="utf-8")
    print("\n".join(f"{'out of date' if options.check else 'wrote'}: {name}" for name in stale) or "up to date")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())

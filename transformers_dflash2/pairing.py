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
"""Which target a drafter was trained for, as far as its model card says."""

from pathlib import Path


def base_model_from_card(name_or_path: str | None) -> str | None:
    """
    Read a drafter's model card.

    Args:
        name_or_path (`str`, *optional*): Folder or Hub id of the drafter.

    Returns:
        `str` or `None`: The card's `base_model`; for a quantised copy of a drafter, which names that drafter as its
        base, the base of the latter. `None` where there is no card, no entry, or no way to fetch it.
    """
    from huggingface_hub import metadata_load
    from transformers.utils import cached_file

    if not name_or_path:
        return None
    try:
        card = cached_file(
            name_or_path,
            "README.md",
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        # No repository of that name: the drafter was built or moved.
        return None
    metadata = (metadata_load(Path(card)) if card else None) or {}
    base = metadata.get("base_model")
    base = base[0] if isinstance(base, list) and base else base
    if not isinstance(base, str):
        return None
    return base_model_from_card(base) if metadata.get("base_model_relation") == "quantized" else base


__all__ = ["base_model_from_card"]

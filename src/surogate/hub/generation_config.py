"""The tokens that stop generation, as a model's files name them.

transformers and vLLM stop at each token of `eos_token_id` in generation_config.json, a number or a list. Without the
file they read config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .config_json import read_json

GENERATION_CONFIG = "generation_config.json"

_KEY = "eos_token_id"
_AGAIN = "Download it again."


def stop_ids(folder: Path) -> list[int]:
    """Return the ids of the tokens that stop generation; none if the files name none.

    Raises ConfigError for a file that is no JSON object.
    """
    for name in (GENERATION_CONFIG, "config.json"):
        if (folder / name).is_file() and (found := _ids(read_json(folder / name, _AGAIN).get(_KEY))):
            return found
    return []


def with_stops(generation: Mapping[str, Any], more: Sequence[int], folder: Path | None) -> dict[str, Any]:
    """Return the content of a generation_config.json that also stops at the tokens `more`; unchanged if it does.

    folder: of the model's files, whose config.json counts where `generation` names no token.
    """
    given = _ids(generation.get(_KEY)) or (stop_ids(folder) if folder else [])
    new = [token for token in more if token not in given]
    if not new:
        return {**generation}
    # transformers makes a file that is "from the model's config" anew from config.json
    kept = {key: value for key, value in generation.items() if key != "_from_model_config"}
    return {**kept, _KEY: [*given, *new]}


def _ids(value: Any) -> list[int]:
    given = value if isinstance(value, list) else [value]
    return [token for token in given if isinstance(token, int) and not isinstance(token, bool)]

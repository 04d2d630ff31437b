"""JSON objects that have a key twice. json.loads would silently keep the last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError


class RepeatedKey(Exception):
    """A JSON object has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key!r} appears twice in one object")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, for `json.loads`. Raises RepeatedKey."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RepeatedKey(first_repeated([key for key, _ in pairs]) or "")
    return found


def first_repeated(names: Sequence[str]) -> str | None:
    return next((name for index, name in enumerate(names) if name in names[:index]), None)


def parse_json(text: str) -> Any:
    """Return the value of a JSON text in a cell.

    Raises ConfigError for an object with a key twice, ValueError or RecursionError for a text that is not JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKey as error:
        raise ConfigError(f"{error}: {text[:60]!r}. Correct or remove such rows.") from error

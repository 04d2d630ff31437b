"""JSON objects in files that others have written: one reader, whose errors are for the user."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .regular_file import refuse_special

LARGEST_BYTES = 256 << 20
"""The index of a model of a million tensors takes a fourth of that."""
DEEPEST = 100
"""Levels of lists and objects. What is read is copied, compared and written by functions that call themselves."""


def read_json_object(path: Path, remedy: str = "Download it again.", if_missing: str = "") -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises ConfigError, naming the file, if it is missing (then the message ends with `if_missing`), no regular file,
    larger than LARGEST_BYTES, not text in UTF-8 or not one object, nests deeper than DEEPEST levels or has a key twice
    in one object. The message ends with `remedy`.
    """
    refuse_special(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read() if size <= LARGEST_BYTES else b""
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. {if_missing or remedy}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot be read: {why}.") from None
    if size > LARGEST_BYTES:
        raise ConfigError(f"{path}: is larger than {LARGEST_BYTES >> 20} MiB, the most that is read. {remedy}")
    try:
        return json_object(data)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. {remedy}") from None


def json_object(data: bytes) -> dict[str, Any]:
    """Return the object in a text of JSON. Raises ValueError, saying what `read_json_object` refuses."""
    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys)
    except RepeatedKey as error:
        raise ValueError(f"has the key {error.key!r} twice in one object") from None
    except RecursionError:
        raise ValueError(f"is not valid JSON: it nests deeper than {DEEPEST} levels") from None
    except ValueError as error:
        reason = str(error).partition(";")[0]  # then advice to programmers, if a number is too long
        raise ValueError(f"is not valid JSON: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"must contain a JSON object, contains {type(content).__name__}")
    level: list[Any] = [content]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in _holders_in(value)]
        if not level:
            return content
    raise ValueError(f"is not valid JSON: it nests deeper than {DEEPEST} levels")


class RepeatedKey(Exception):
    """A JSON object has a key twice. json.loads would silently keep the last."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key!r} appears twice in one object")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, for `json.loads(object_pairs_hook=)`. Raises RepeatedKey."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RepeatedKey(first_repeated([key for key, _ in pairs]) or "")
    return found


def first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that is the same as one before it; None if there is none."""
    return next((name for index, name in enumerate(names) if name in names[:index]), None)


def _holders_in(value: Any) -> Iterator[Any]:
    inside = value.values() if isinstance(value, dict) else value
    yield from (inner for inner in inside if isinstance(inner, dict | list))

"""The values that were read of a file of another trainer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from surogate_core.api.json_object import RepeatedKey, unique_keys

from .leaves import Leaf

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass
class Rows:
    """Rows that a script trains or evaluates.

    load     the number of the call of load_dataset
    split    the split that the script takes of it
    samples  the number of its first rows that it takes
    share    the part of it that is split off
    """

    load: int
    split: str | None = None
    samples: int | None = None
    share: float | None = None


@dataclass
class Source:
    """The leaves of a file, and words in it that tell its tool. trained, evaluated: the rows that a script uses."""

    leaves: list[Leaf]
    words: set[str] = field(default_factory=set)
    trained: list[Rows] | None = None
    evaluated: list[Rows] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The outermost keys of the tool, each once."""
        return [*dict.fromkeys(leaf.place[0] for leaf in self.leaves if not leaf.table)]


def read_json(text: str) -> Any:
    """Return a value of JSON. Raises ValueError, for a key that is given twice too."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKey:
        raise ValueError("a key is given twice; keep one") from None


def typed(value: Any) -> Any:
    """Return numbers as numbers, which YAML 1.1 reads as text without a point (1e-4)."""
    if isinstance(value, dict):
        return {key: typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        number = float(value)
        return int(number) if number.is_integer() and not re.search(r"[.eE]", value) else number
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    return value

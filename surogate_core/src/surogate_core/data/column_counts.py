"""Columns of a dataset, counted once and kept in the cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .columns import Columns
from .sources import Source

_VERSION = 1


def count_columns(source: Source, cache: Path) -> Columns:
    """The columns of all rows of `source`. Reads every row once; later calls read a small file below `cache`.

    Raises ConfigError naming file and line for rows that cannot be read, and OSError when `cache` cannot be written.
    """
    path = cache / "columns" / f"{source.content_hash()}.json"
    known = _read(path)
    if known is not None:
        return known
    columns = source.count_columns()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps({"version": _VERSION, "rows": columns.rows, "filled": columns.filled}))
    fresh.replace(path)
    return columns


def _read(path: Path) -> Columns | None:
    """What an earlier call has counted; None when there is nothing, or it is damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["version"] != _VERSION:
            return None
        return Columns(int(known["rows"]), {str(name): int(count) for name, count in known["filled"].items()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None

"""The columns of a dataset, counted once and cached on disk."""

from __future__ import annotations

import json
from pathlib import Path

from ..machine.replaced_file import replaced
from .columns import Columns
from .sources import Source

_VERSION = 1


def count_columns(source: Source, cache: Path) -> Columns:
    """Count the columns of all rows of `source`. The first call reads every row, later calls a small file in `cache`.

    Raises ConfigError naming file and line if a row cannot be read, and OSError if `cache` cannot be written.
    """
    path = cache / "columns" / f"{source.content_hash()}.json"
    known = _read(path)
    if known is not None:
        return known
    columns = source.count_columns()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as fresh:
        fresh.write_text(json.dumps({"version": _VERSION, "rows": columns.rows, "filled": columns.filled}))
    return columns


def _read(path: Path) -> Columns | None:
    """Return the counts of an earlier call; None if there are none or the file is damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["version"] != _VERSION:
            return None
        return Columns(int(known["rows"]), {str(name): int(count) for name, count in known["filled"].items()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None

"""Causes of skipped rows: the errors of many rows as a few lines, which do not quote the rows."""

from __future__ import annotations

import re
from collections.abc import Sequence

_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_SHOWN = re.compile(r" ?\([^()]*\)|\d+(?:\.\d+)?")
_LONGEST = 160


def cause(error: Exception, columns: Sequence[str]) -> str:
    """Return what is wrong with a row: the first sentence of its error, without values. Columns keep their names."""
    said = str(error).partition("\n")[0].partition(". ")[0].removesuffix(".")
    kept = {repr(name) for name in columns}
    said = _QUOTED.sub(lambda found: found[0] if found[0] in kept else "'...'", said)
    said = _SHOWN.sub(lambda found: "" if "(" in found[0] else "N", said)[:_LONGEST]
    return f"bad_rows is skip, and their type refuses them: {said}"

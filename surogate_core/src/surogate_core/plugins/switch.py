"""`SUROGATE_PLUGINS=-name,-other:./acme.py` switches plugins off, by entry name or by distribution, and names files.

Imports only the standard library: `surogate --help` lists the commands of plugins from metadata alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from ..errors import PluginError

OFF_SWITCH: Final = "SUROGATE_PLUGINS"


def switched_off(name: str, distribution: str, environ: Mapping[str, str]) -> bool:
    """Return whether SUROGATE_PLUGINS switches off an entry point, by its name or by its distribution."""
    return any(is_called(name, distribution, word) for word in parse_switch(environ.get(OFF_SWITCH, ""))[0])


def parse_switch(text: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names that a value of SUROGATE_PLUGINS switches off, and the files of plugins in it.

    They are separated by `os.pathsep`; names begin with "-" and may share a part, as in `-name,-other`. Raises
    PluginError for any other form.
    """
    off: list[str] = []
    files: list[str] = []
    for part in filter(None, map(str.strip, text.split(os.pathsep))):
        names = [name.strip() for name in part.split(",") if name.strip()]
        if part.endswith(".py") and not part.startswith("-"):
            files.append(part)
        elif wrong := [name for name in names if not name.startswith("-") or name == "-"]:
            raise PluginError(
                f"{OFF_SWITCH}={text}: '{wrong[0]}' must be '-name', which switches a plugin off, or a file *.py "
                f"(separated by '{os.pathsep}')"
            )
        else:
            off += [name[1:] for name in names]
    return frozenset(off), tuple(files)


def is_called(name: str, distribution: str, word: str) -> bool:
    """Return whether a word of SUROGATE_PLUGINS names this entry point."""
    return word == name or _normal(word) == _normal(distribution)


def _normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")

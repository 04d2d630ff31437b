"""`SUROGATE_PLUGINS=-name,-other` switches plugins off, by entry name or by distribution.

Imports only the standard library: `surogate --help` lists the commands of plugins from metadata alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..errors import PluginError

OFF_SWITCH: Final = "SUROGATE_PLUGINS"


def switched_off(name: str, distribution: str, environ: Mapping[str, str]) -> bool:
    """Return whether SUROGATE_PLUGINS switches off an entry point, by its name or by its distribution."""
    return any(is_called(name, distribution, word) for word in parse_off_switch(environ.get(OFF_SWITCH, "")))


def parse_off_switch(text: str) -> frozenset[str]:
    """Return the names in a value of SUROGATE_PLUGINS, without their "-". Raise PluginError for any other form."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if not name.startswith("-") or name == "-":
            raise PluginError(f"{OFF_SWITCH}={text}: '{name}' must be '-name': plugins can only be switched off")
    return frozenset(name[1:] for name in names)


def is_called(name: str, distribution: str, word: str) -> bool:
    """Return whether a word of SUROGATE_PLUGINS names this entry point."""
    return word == name or _normal(word) == _normal(distribution)


def _normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")

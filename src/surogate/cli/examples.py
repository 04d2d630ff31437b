"""The examples at the end of a command's help."""

from __future__ import annotations

from collections.abc import Iterable


def examples(*commands: str) -> str:
    """Return the end of a help text with `surogate` in front of each of `commands`."""
    return last_of_help(f"surogate {command}" for command in commands)


def last_of_help(lines: Iterable[str]) -> str:
    """Return the end of a help text with these lines. The first line keeps click from wrapping the others."""
    return "\n".join(["\b", "Examples:", *(f"  {line.strip()}" for line in lines)])

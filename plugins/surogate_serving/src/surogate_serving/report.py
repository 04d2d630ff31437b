"""The results as text and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from surogate.cli.render import paint

from .result import Result

_WORDS: Final[Mapping[bool | None, tuple[str, str]]] = {
    True: ("equal  ", "green"),
    False: ("differs", "red"),
    None: ("skipped", "yellow"),
}
_INDENT: Final = " " * 9


def as_text(results: Sequence[Result]) -> str:
    """Return a line for each check, with a picture of it, and an example and a remedy where it fails."""
    lines = []
    for result in results:
        lines.append(f"{paint(*_WORDS[result.equal])}  {result.check:<10} {result.said}")
        lines += [f"{_INDENT}{line}" for line in result.picture]
        if result.equal is False:
            lines += [f"{_INDENT}{line}" for line in result.shown]
            lines.append(f"{_INDENT}{result.fault}: {result.remedy}")
    return "\n".join(lines)


def as_json(results: Sequence[Result], server: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results as data: the contract of `surogate check-serving --json`."""
    return {
        "equal": all_equal(results),
        "server": dict(server),
        "checks": {
            result.check: {"equal": result.equal, "said": result.said, **result.numbers}
            | (
                {"fault": result.fault, "remedy": result.remedy, "shown": list(result.shown)}
                if result.equal is False
                else {}
            )
            for result in results
        },
    }


def all_equal(results: Sequence[Result]) -> bool:
    """Return whether no check that was made has found a difference."""
    return all(result.equal is not False for result in results)

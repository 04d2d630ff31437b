"""The results as text and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate.cli.render import paint

from .result import Result


def as_text(results: Sequence[Result]) -> str:
    """Return a line for each check, with an example and a remedy where it fails."""
    lines = []
    for result in results:
        word = paint("equal  ", "green") if result.equal else paint("differs", "red")
        lines.append(f"{word}  {result.check:<10} {result.said}")
        if not result.equal:
            indent = " " * 9
            lines += [f"{indent}{line}" for line in result.shown]
            lines.append(f"{indent}{result.fault}: {result.remedy}")
    return "\n".join(lines)


def as_json(results: Sequence[Result], server: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results as data: the contract of `surogate check-serving --json`."""
    return {
        "equal": all(result.equal for result in results),
        "server": dict(server),
        "checks": {
            result.check: {"equal": result.equal, "said": result.said, **result.numbers}
            | ({} if result.equal else {"fault": result.fault, "remedy": result.remedy, "shown": list(result.shown)})
            for result in results
        },
    }

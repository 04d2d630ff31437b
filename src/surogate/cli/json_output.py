"""Output of `--json`: one document on stdout, the result of a command or why there is none. All else is on stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any, Final, TextIO

import typer

from surogate_core.errors import ConfigError

_stdout: TextIO | None = None
_SENTENCE_ENDS: Final = re.compile(r"(?:; |\. |\.\n)(?=\S)")


@contextmanager
def _reserved() -> Iterator[None]:
    global _stdout
    _stdout = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout = None


def _reserve(ctx: typer.Context, wanted: bool) -> bool:
    if wanted:
        ctx.with_resource(_reserved())
    return wanted


JsonOption = Annotated[
    bool, typer.Option("--json", callback=_reserve, help="Print one JSON document on stdout, all else on stderr.")
]


def print_json(document: Any) -> None:
    """Print a document on stdout: dataclasses as objects, paths as text, and null for numbers that are not finite."""
    from ..reporting.metrics import finite

    print(json.dumps(finite(document), indent=2, default=str), file=_stdout or sys.stdout)


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as data: its type, the exit status, and each problem with its remedy, if the message has one."""
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    problems = error.problems if isinstance(error, ConfigError) and error.problems else (text,)
    said = [_SENTENCE_ENDS.split(problem, maxsplit=1) for problem in problems]
    return {
        "error": {
            "type": type(error).__name__,
            "exit_status": getattr(error, "exit_code", 1),
            "problems": [{"problem": what, "remedy": remedy[0] if remedy else None} for what, *remedy in said],
        }
    }

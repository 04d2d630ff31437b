"""Text on a terminal: tables and messages, in colour if the output is a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from typing import Final, TextIO

from surogate_core.errors import PluginError

TRACEBACK: Final = "SUROGATE_TRACEBACK"
_COLOURS: Final = {"red": "31", "yellow": "33", "green": "32", "bold": "1", "dim": "2"}
_MINIMUM_LAST_COLUMN: Final = 24


def print_error(message: str) -> None:
    print(f"{paint('error:', 'red', sys.stderr)} {message}", file=sys.stderr)


def print_traceback(error: BaseException) -> str:
    """Print the traceback of an error that a plugin caused, if SUROGATE_TRACEBACK is set.

    Return what to append to the error's message: how to see the traceback, or "" if it is printed or there is none.
    """
    if not isinstance(error, PluginError) or error.__cause__ is None:
        return ""
    if not traceback_wanted():
        return f"{'' if str(error).endswith('.') else '.'} {TRACEBACK}=1 shows the traceback."
    print("".join(traceback.format_exception(error.__cause__)), end="", file=sys.stderr)
    return ""


def traceback_wanted() -> bool:
    return os.environ.get(TRACEBACK, "0") not in ("", "0")


def print_warning(message: str) -> None:
    print(f"{paint('warning:', 'yellow', sys.stderr)} {message}", file=sys.stderr)


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return the text in a colour if `stream` (stdout by default) is a terminal and NO_COLOR is not set."""
    stream = stream or sys.stdout
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def output_width() -> int | None:
    """Return the columns of the terminal; None if stdout is not one, because piped output must not be wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Return rows as aligned columns, two spaces apart.

    The last column is wrapped to `width`. If too little room is left for it, its text goes on lines of its own.
    """
    lead = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    indent = sum(lead) + 2 * len(lead)
    lines = []
    for row in rows:
        start = "".join(f"{cell:<{size}}  " for cell, size in zip(row[:-1], lead, strict=True))
        if width is None:
            lines.append((start + row[-1]).rstrip())
        elif width - indent >= _MINIMUM_LAST_COLUMN:
            wrapped = textwrap.wrap(row[-1], width - indent) or [""]
            lines += [((start if n == 0 else " " * indent) + part).rstrip() for n, part in enumerate(wrapped)]
        else:
            lines.append(start.rstrip())
            lines += textwrap.wrap(row[-1], width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def paragraph(text: str, width: int | None, indent: str = "") -> str:
    """Return text wrapped to `width`, each line indented. Words are not broken, so that commands can be copied."""
    if width is None:
        return indent + text
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )

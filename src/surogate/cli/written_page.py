"""The line about a page that a command has written."""

from __future__ import annotations

from pathlib import Path

from ..machine.progress import print_notice


def print_written(path: Path, nbytes: int) -> None:
    """Say on stderr where a page is: stdout has what the command prints without it."""
    print_notice(f"wrote {path}, {nbytes / 1024:,.0f} KB: a browser shows it, without a server")

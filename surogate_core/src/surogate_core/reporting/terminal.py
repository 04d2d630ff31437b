"""Terminals and pipes that go away while a run trains."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO


def ignoring_broken_pipe(notice: Callable[[str], None]) -> Callable[[str], None]:
    """`notice` while a run trains: when the reader of a pipe goes away, lines are lost and the run goes on."""

    def tell(line: str) -> None:
        try:
            notice(line)
        except (OSError, ValueError):  # a closed pipe, a terminal that hung up, a closed file
            silence(sys.stdout)

    return tell


def silence(out: TextIO) -> None:
    """Point `out` at nothing, so that what other code or the interpreter's exit still flushes to it cannot fail."""
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, out.fileno())
        os.close(devnull)
    except (OSError, ValueError):  # no file behind it (a test's buffer): nothing is flushed at exit either
        return

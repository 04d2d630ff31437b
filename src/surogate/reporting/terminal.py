"""Terminals and pipes that are closed while a run trains."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO


def ignoring_broken_pipe(notice: Callable[[str], None], out: TextIO | None = None) -> Callable[[str], None]:
    """Return `notice`, which prints on `out` or stdout, for use during a run: if the reader of a pipe exits, lines are
    lost and the run continues."""

    def guarded(line: str) -> None:
        try:
            notice(line)
        except (OSError, ValueError):  # a closed pipe, a terminal that hung up, a closed file
            silence(out or sys.stdout)

    return guarded


def failure_of(out: TextIO) -> str:
    """Return why `out` cannot be written to, as on a full disk, and silence it. If it can, end a line and return ""."""
    try:
        print(file=out, flush=True)  # a flush alone may not fail: what could not be written was dropped
    except OSError as error:
        silence(out)
        return error.strerror or str(error)
    return ""


def silence(out: TextIO) -> None:
    """Redirect `out` to /dev/null, so that later flushes by other code or at exit cannot fail."""
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, out.fileno())
        os.close(devnull)
    except (OSError, ValueError):  # not a file (a test's buffer): nothing is flushed at exit either
        return

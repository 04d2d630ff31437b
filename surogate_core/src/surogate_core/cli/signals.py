"""Signals that end a command, and the exit codes they lead to."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final, NoReturn

INTERRUPTED: Final = 130
TERMINATED: Final = 143


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle signals while a command runs.

    SIGTERM unwinds like Ctrl-C, so that half-written files are removed. SIGUSR1 asks a run to save; before its first
    step and after its last it only prints a message. A library may swallow the exception of a signal while it is
    imported and fail later because of that: the command then still exits with the code of the signal.
    """
    signalled: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        signalled.append(INTERRUPTED)
        raise KeyboardInterrupt

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        signalled.append(TERMINATED)
        raise SystemExit(TERMINATED)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, _nothing_to_save),
    }
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if signalled:
            raise SystemExit(signalled[-1]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing_to_save(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # os.write, because a signal may arrive in the middle of a print
        os.write(2, b"\nSIGUSR1: no steps are being taken, so there is nothing to save\n")

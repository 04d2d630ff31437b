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
HUNG_UP: Final = 129


class Unwind:
    """A handler that ends a command by an exception. `received`: whether its signal has come."""

    def __init__(self, code: int) -> None:
        self.received = False
        self.code = code

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        self.received = True
        raise KeyboardInterrupt if self.code == INTERRUPTED else SystemExit(self.code)


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle signals while a command runs.

    SIGTERM and SIGHUP unwind like Ctrl-C, so that half-written files are removed. SIGHUP stays ignored if it is, as
    under nohup. SIGUSR1 asks a run to save; before its first
    step and after its last it only prints a message. A library may swallow the exception of a signal while it is
    imported. If the command fails later because of that, it still exits with the code of the signal; if not,
    `train.interrupt` raises the exception again before the first step.
    """
    interrupt, terminate, hang_up = Unwind(INTERRUPTED), Unwind(TERMINATED), Unwind(HUNG_UP)
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, terminate),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, _nothing_to_save),
    }
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
    try:
        yield
    except Exception:
        for unwind in (terminate, hang_up, interrupt):
            if unwind.received:
                raise SystemExit(unwind.code) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _forget_interrupt()


def _forget_interrupt() -> None:
    """Let the process end with the exit code that it asks for.

    If a C extension runs Python code from text while it is imported, and Ctrl-C ends that code, CPython kills the
    process by SIGINT at its end, although the exception was handled. The next code that is run from text resets that.
    """
    exec("")


def _nothing_to_save(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # os.write, because a signal may arrive in the middle of a print
        os.write(2, b"\nSIGUSR1: no steps are being taken, so there is nothing to save\n")

"""Signals that end a command, and the exit codes they lead to."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
TERMINATED: Final = 143
HUNG_UP: Final = 129


class Unwind:
    """A handler that ends a command by an exception, while modules are imported only after that.

    A library may run Python code from C++ while it is imported. Some swallow an exception there, others let it reach a
    function that must not throw, which aborts the process.
    """

    def __init__(self) -> None:
        self._waits = False
        self._outer = _imports(sys._getframe())  # a module may run the command while it is imported itself

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _imports(frame) <= self._outer:
            self._waits = False
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if not self._waits:
            self._waits = True
            threading.Thread(target=self._send_after_import, args=(signal.Signals(number),), daemon=True).start()

    def _send_after_import(self, number: signal.Signals) -> None:
        while self._waits:
            handler = signal.getsignal(number)
            if _imports(sys._current_frames().get(threading.main_thread().ident or 0)) <= self._outer:
                os.kill(os.getpid(), number)
                if handler is not self:  # training takes signals by now
                    return
            time.sleep(0.01)

    def forget(self) -> None:
        """Send no signal again."""
        self._waits = False


def _imports(frame: FrameType | None) -> int:
    """The number of frames of the import system below a frame: 0 if no module is being imported."""
    number = 0
    while frame is not None:
        number += frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        frame = frame.f_back
    return number


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle signals while a command runs.

    SIGTERM and SIGHUP unwind like Ctrl-C, so that half-written files are removed. SIGHUP stays ignored if it is, as
    under nohup. SIGUSR1 asks a run to save; before its first step and after its last it only prints a message.
    """
    unwind = Unwind()
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, unwind),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, _nothing_to_save),
    }
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, unwind)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, unwind)
    try:
        yield
    finally:
        unwind.forget()
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing_to_save(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # os.write, because a signal may arrive in the middle of a print
        os.write(2, b"\nSIGUSR1: no steps are being taken, so there is nothing to save\n")

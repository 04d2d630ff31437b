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

from .early_interrupt import leave

INTERRUPTED: Final = 130
TERMINATED: Final = 143
HUNG_UP: Final = 129
ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Unwind:
    """A handler that ends a command by an exception, while modules are imported only after that.

    A library may run Python code from C++ while it is imported. Some swallow an exception there, others let it reach a
    function that must not throw, which aborts the process. Elsewhere, too, a library may raise an error of its own in
    place of the exception, or none: see `handled`.

    raised: the exception, once the signal has come.
    """

    def __init__(self) -> None:
        self.raised: KeyboardInterrupt | SystemExit | None = None
        self._waits = False
        self._outer = _imports(sys._getframe())  # a module may run the command while it is imported itself

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _imports(frame) <= self._outer:
            self._waits = False
            self.raised = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
            raise self.raised
        self.send_again(signal.Signals(number))

    def send_again(self, number: signal.Signals) -> None:
        """Let another thread send the signal when no module is being imported."""
        if not self._waits:
            self._waits = True
            threading.Thread(target=self._send, args=(number,), daemon=True).start()

    def _send(self, number: signal.Signals) -> None:
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
    """Return how many functions of the import system, and of `Unwind` itself, a frame was called by."""
    number = 0
    while frame is not None:
        code = frame.f_code
        number += code.co_filename == "<frozen importlib._bootstrap>" or code is Unwind.send_again.__code__
        frame = frame.f_back
    return number


def received() -> int:
    """Return the exit code of a signal that has come while a command runs, or 0."""
    for number in ENDING:
        handler = signal.getsignal(number)
        if isinstance(handler, Unwind) and handler.raised is not None:
            return 128 + number
    return 0


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Exit as an interrupted command, without a traceback, if Ctrl-C comes before the command is found."""
    try:
        yield
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle signals while a command runs.

    SIGTERM and SIGHUP unwind like Ctrl-C, so that half-written files are removed. SIGHUP stays ignored if it is, as
    under nohup. SIGUSR1 asks a run to save; before its first step and after its last it only prints a message.
    A library may discard the exception. If Python learns of it, the signal is sent again, else `train.interrupt` raises
    the exception before the first step. If a library raises an error in its place, the command ends with the code of
    the signal all the same (`CommandGroup`).
    """
    unwinds = {number: Unwind() for number in ENDING}
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, leave):  # background jobs ignore it
        del unwinds[signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del unwinds[signal.SIGHUP]
    before = {number: signal.signal(number, unwind) for number, unwind in unwinds.items()}
    if before.get(signal.SIGINT) is leave:
        before[signal.SIGINT] = signal.default_int_handler
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, _nothing_to_save)
    discarded = sys.unraisablehook

    def send_again(unraisable: sys.UnraisableHookArgs) -> None:
        for number, unwind in unwinds.items():
            if unwind.raised is not None and unraisable.exc_value is unwind.raised:
                return unwind.send_again(number)
        discarded(unraisable)

    sys.unraisablehook = send_again
    try:
        yield
    except Exception:
        if code := received():
            raise SystemExit(code) from None
        raise
    finally:
        sys.unraisablehook = discarded
        for unwind in unwinds.values():
            unwind.forget()
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing_to_save(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # os.write, because a signal may arrive in the middle of a print
        os.write(2, b"\nSIGUSR1: no steps are being taken, so there is nothing to save\n")

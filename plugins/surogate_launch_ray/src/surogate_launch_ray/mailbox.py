"""The lines of rank 0 on their way to the driver, and the driver's signals on their way to rank 0."""

from __future__ import annotations

import _thread
import io
import threading
import time
from typing import Any, Literal

import ray
from ray.exceptions import RayError

Kind = Literal["notice", "out", "err"]
Line = tuple[Kind, str]

_PERIOD = 0.2
"""Seconds between two exchanges of rank 0 with the mailbox."""


class Mailbox:
    """An actor beside rank 0, whose own actor is busy with the run. Both sides call it often, and it never waits."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._signals: list[int] = []

    def exchange(self, lines: list[Line]) -> list[int]:
        """Add lines of rank 0, and return the signals for it that came since the last call."""
        self._lines += lines
        taken, self._signals = self._signals, []
        return taken

    def take(self) -> list[Line]:
        """Return the lines that came since the last call, in order."""
        taken, self._lines = self._lines, []
        return taken

    def signal(self, number: int) -> None:
        """Keep a signal for rank 0."""
        self._signals.append(number)


class Correspondence:
    """The end of rank 0: sends what its process says, and raises in the main thread the signals that come back.

    A thread makes the calls, so that no step waits for one.
    """

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox
        self._lines: list[Line] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)
        self._thread.start()

    def notice(self, line: str) -> None:
        self.say("notice", line)

    def say(self, kind: Kind, text: str) -> None:
        self._lines.append((kind, text))

    def flush(self) -> None:
        """Wait until what was said is sent, a second at most."""
        deadline = time.monotonic() + 1
        while self._lines and time.monotonic() < deadline:
            time.sleep(_PERIOD / 10)

    def close(self) -> None:
        """Send what is left."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        last = False
        while not last:
            last = self._over.wait(_PERIOD)
            count = len(self._lines)
            lines = self._lines[:count]
            try:
                for number in ray.get(self._mailbox.exchange.remote(lines)):
                    # The handlers of Python, because Ray blocks SIGINT in the processes that it starts.
                    _thread.interrupt_main(number)
            except RayError:  # the mailbox ends with the driver
                return
            del self._lines[:count]


class Stream(io.TextIOBase):
    """stdout or stderr of rank 0's process, whose text appears at the driver."""

    encoding = "utf-8"

    def __init__(self, correspondence: Correspondence, kind: Kind) -> None:
        self._correspondence = correspondence
        self._kind = kind

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._correspondence.say(self._kind, text)
        return len(text)

    def flush(self) -> None:
        """Send the text at once, unless the main thread asks: no step waits for that. Others may end the process."""
        if threading.current_thread() is not threading.main_thread():
            self._correspondence.flush()

"""Ctrl-C and SIGTERM: the first asks the loop to save and end after the step it is in, the second ends it at once.

SIGUSR1 asks it to save after the step and to go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class Interrupt:
    """Context manager around the loop. `requested` is the signal that came to end it, or None.

    Handlers can only be set in the main thread; elsewhere signals keep their meaning.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    SAVE = signal.SIGUSR1

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._save_requested = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
            self._before[self.SAVE] = signal.signal(self.SAVE, self._handle_save)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.requested is None
        self.requested = signal.Signals(number)
        if first:
            with contextlib.suppress(OSError):  # os.write, since a signal may come in the middle of a print
                os.write(2, f"\n{self.requested.name}: saving after this step; once more to stop at once\n".encode())
            return
        for again, handler in self._before.items():
            signal.signal(again, handler)  # type: ignore[arg-type]
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _handle_save(self, number: int, frame: FrameType | None) -> None:
        self._save_requested = True

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last call."""
        requested, self._save_requested = self._save_requested, False
        return requested

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 0 if self.requested is None else 128 + self.requested

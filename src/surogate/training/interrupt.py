"""Ends of a run before its last step: by Ctrl-C, SIGTERM and SIGHUP, or a listener. SIGUSR1 saves a checkpoint.

The first Ctrl-C, SIGTERM or SIGHUP (a dropped connection) asks the loop to finish the current step or batch of an
evaluation, save and stop. The second ends the process at once. SIGUSR1 asks the loop to save after the current step and
continue. In a run of several processes a signal to any of them asks all, which agree on the step. A run that a listener
stops is saved too, and then finishes as after its last step: with an evaluation and outputs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from surogate_core.api import Logger, Report

from ..world.processes import Processes

STOPPED = "stopped the run"
"""The reason of a callback that gives none."""


class Interrupt:
    """Context manager that handles the signals.

    Python sets signal handlers in the main thread only; in another thread signals keep their handlers.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    SAVE = signal.SIGUSR1

    def __init__(self, processes: Processes | None = None) -> None:
        self._processes = None if processes is None or processes.alone else processes
        self._received: signal.Signals | None = None
        self._agreed: signal.Signals | None = None
        self._save_received = self._save_agreed = False
        self._stop_received = self._stop_agreed = False
        self._asked, self._seen = False, 0  # whether this process has asked to stop; requests that were taken over
        self._previous: dict[signal.Signals, object] = {}
        self.why = ""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:  # nohup
                    continue
                self._previous[number] = signal.signal(number, self._handle)
            self._previous[self.SAVE] = signal.signal(self.SAVE, self._handle_save)
            self._raise_swallowed()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore_handlers()

    def _raise_swallowed(self) -> None:
        """Call a handler again whose signal came before training, and whose exception a library swallowed."""
        for number, handler in self._previous.items():
            if callable(handler) and getattr(handler, "raised", None) is not None:
                self._restore_handlers()
                handler(number, None)

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._processes is not None and self._processes.failure is not None:
            self._restore_handlers()
            raise self._processes.failure  # nothing can be saved without the others
        first = self._received is None
        self._received = signal.Signals(number)
        if first:
            with contextlib.suppress(OSError):  # os.write, because a signal may arrive in the middle of a print
                os.write(
                    2, f"\n{self._received.name}: saving after this step; a second signal stops at once\n".encode()
                )
            return
        self._restore_handlers()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    @property
    def received(self) -> bool:
        """Whether a signal has come to this process, or a listener has asked to stop, agreed on or not."""
        return self._received is not None or self._stop_received

    def stop(self, why: str = "") -> None:
        """Ask for the run to finish after the step that is running. The first reason counts."""
        self.why = self.why or why
        self._stop_received = True

    def ends_steps(self) -> bool:
        """Return whether no step follows: a signal or a listener asked for that."""
        stopped = self._stop_received if self._processes is None else self._stop_agreed
        return stopped or self.requested is not None

    def _handle_save(self, number: int, frame: FrameType | None) -> None:
        self._save_received = True

    @property
    def requested(self) -> signal.Signals | None:
        """The signal that asked to stop, or None. Of several processes, what they last agreed on."""
        return self._received if self._processes is None else self._agreed

    def agree(self) -> None:
        """Take over what any process was asked for. All processes call this at the same places of the loop."""
        together = self._processes
        if together is None:
            return
        if self._received is not None and not self._asked:
            together.ask(f"{int(self._received)}")
            self._asked = True
        if self._save_received:
            self._save_received = False
            together.ask("save")
        if self._stop_received:
            self._stop_received = False
            together.ask("stop")
        new = together.asked(self._seen) if together.world.writer else []
        for request in together.share(new, "the next step"):
            self._seen += 1
            if request == "save":
                self._save_agreed = True
            elif request == "stop":
                self._stop_agreed = True
            elif self._agreed is None:
                self._agreed = signal.Signals(int(request))

    def take_save_request(self) -> bool:
        """Return whether a save was requested since the last call, and agreed on by several processes."""
        if self._processes is None:
            requested, self._save_received = self._save_received, False
        else:
            requested, self._save_agreed = self._save_agreed, False
        return requested

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 0 if self.requested is None else 128 + self.requested


class Listener(Logger):
    """A logger that calls a function with every report. If it returns True, the run finishes early."""

    def __init__(self, listen: Callable[[Report], bool | None], interrupt: Interrupt) -> None:
        self._listen, self._interrupt = listen, interrupt

    def report(self, report: Report) -> None:
        if self._listen(report):
            self._interrupt.stop()

"""The progress of work that takes long: a bar in a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_SILENT_SECONDS: Final = 2.0
_LINE_SECONDS: Final = 15.0


def print_notice(message: str) -> None:
    """Print to standard error: standard output may be read by a program."""
    print(message, file=sys.stderr)


class Progress:
    """Shows how much is done, if that takes more than two seconds.

    what: such as "datasets.0: tokenizing". unit: what is counted. total: all of them; None if they are not counted.
    notice: called with lines if standard error is no terminal. clock: seconds.
    """

    def __init__(
        self,
        what: str,
        unit: str,
        total: int | None,
        notice: Callable[[str], None] = print_notice,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._unit, self._total, self._notice, self._clock = what, unit, total, notice, clock
        self._due = clock() + _SILENT_SECONDS
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, detail: str = "") -> None:
        """Show that `done` of the units are done. `detail` is added to a line."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)
        elif self._clock() >= self._due:
            self._due = self._clock() + _LINE_SECONDS
            if sys.stderr.isatty():
                self._bar = self._started(done)
            else:
                of = "" if self._total is None else f" of {self._total:,}"
                self._notice(f"{self._what}: {done:,}{of} {self._unit}{detail}")

    def _started(self, done: int) -> Bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        parts = (text, BarColumn(), MofNCompleteColumn(), TextColumn(f"{self._unit}, left"), TimeRemainingColumn())
        bar = Progress(*parts, console=Console(stderr=True), transient=True)
        bar.add_task(self._what, total=self._total, completed=done)
        bar.start()
        return bar

"""The progress of tokenizing: a bar in a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from rich.progress import Progress

_SILENT_SECONDS: Final = 2.0
_LINE_SECONDS: Final = 15.0


class TokenizingProgress:
    """Shows how many rows of a dataset are tokenized, if that takes more than two seconds.

    where: the entry ("datasets.0"). total: its rows; None if they are not counted. notice: called with lines if
    standard error is no terminal. clock: seconds.
    """

    def __init__(
        self,
        where: str,
        total: int | None,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._where, self._total, self._notice, self._clock = where, total, notice, clock
        self._due = clock() + _SILENT_SECONDS
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, rows: int, tokens: int) -> None:
        """Show that the first `rows` rows are done, with `tokens` tokens."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=rows)
        elif self._clock() >= self._due:
            self._due = self._clock() + _LINE_SECONDS
            if sys.stderr.isatty():
                self._bar = self._started(rows)
            else:
                of = "" if self._total is None else f" of {self._total:,}"
                self._notice(f"{self._where}: tokenized {rows:,}{of} rows ({tokens:,} tokens)")

    def _started(self, rows: int) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        parts = (text, BarColumn(), MofNCompleteColumn(), TextColumn("rows, left"), TimeRemainingColumn())
        bar = Progress(*parts, console=Console(stderr=True), transient=True)
        bar.add_task(f"{self._where}: tokenizing", total=self._total, completed=rows)
        bar.start()
        return bar

"""The display of a run in a terminal: two lines at the bottom, with evaluations above them. Imports Rich."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surogate_core.api import (
    CallbackReport,
    EvalReport,
    Logger,
    NumericsReport,
    Report,
    RunInfo,
    SampleReport,
    StepReport,
)

from .console import RunClock, callback_lines, eval_line, numerics_lines, sample_lines
from .terminal import silence
from .text import count_text, eta_text, loss_text, lr_text, mfu_text, norm_text, step_time_text

REFRESH_SECONDS = 0.1


class TerminalConsole(Console):
    """A console that raises if stdout is a closed pipe. Rich's own ends the process, but a run must continue."""

    def on_broken_pipe(self) -> None:
        raise sys.exception() or BrokenPipeError()


class LiveLogger(Logger):
    """A progress bar with step, part of the time and time left, and below it the numbers of the latest step.

    It is drawn on the loop's thread when a report arrives, at most ten times a second. So if the terminal is closed,
    the exception is raised where it can be caught: the display ends and the run continues. Other output appears above
    it.
    """

    def __init__(self, info: RunInfo, out: TextIO, console: Console | None = None) -> None:
        self._info = info
        self._out = out
        self._clock = RunClock(info)
        self._report: StepReport | None = None
        self._eval: EvalReport | None = None
        self._skipped = 0
        self._drawn_at = 0.0
        self._alive = True
        self._console = console or TerminalConsole(file=out, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._draw(self._live.start)
        # A process that dies while the cursor is hidden would leave a shell without a cursor.
        self._draw(lambda: self._console.show_cursor(True))

    def report(self, report: Report) -> None:
        if isinstance(report, StepReport):
            self._step(report)
        elif isinstance(report, EvalReport):
            self._clock.eval(report)
            self._eval = report
            self._refresh()
            self._draw(lambda: self._console.print(Text(eval_line(report)), soft_wrap=True))
        elif isinstance(report, NumericsReport):
            lines = Text("\n".join(numerics_lines(report)))
            self._draw(lambda: self._console.print(lines, soft_wrap=True))
        elif isinstance(report, SampleReport):
            sample = Text("\n".join(sample_lines(report)))
            self._draw(lambda: self._console.print(sample, soft_wrap=True))
        elif isinstance(report, CallbackReport):
            logged = Text("\n".join(callback_lines(report)))
            self._draw(lambda: self._console.print(logged, soft_wrap=True))

    def _step(self, report: StepReport) -> None:
        self._clock.step(report)
        self._report = report
        self._skipped += report.skipped
        now = time.monotonic()
        if now - self._drawn_at >= REFRESH_SECONDS or report.step == self._info.total_steps:
            self._drawn_at = now
            self._refresh()

    def close(self, status: str) -> None:
        self._refresh()
        self._draw(self._live.stop)

    def display(self) -> RenderableType:
        """Return the two lines, as wide as the console. What does not fit is cut, never wrapped."""
        report, total = self._report, self._info.total_steps
        step = report.step if report else 0
        done, left = self._clock.seconds()
        share, eta = done / (done + left or 1.0), eta_text(left) if report else "-"
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            ProgressBar(total=1.0, completed=share),
            Text.assemble(f"{step:>{len(str(total))}}/{total} {share:>4.0%}  ", ("eta ", "dim"), f"{eta:>5}"),
        )
        return Group(bar, self._numbers())

    def _numbers(self) -> Text:
        report = self._report
        if report is None:
            return Text("waiting for the first step", style="dim")
        fields = [
            ("loss", f"{loss_text(report.loss):<6}", "bold"),
            ("norm", f"{norm_text(report.norm):<4}", ""),
            ("lr", f"{lr_text(report.lr):<6}", ""),
            ("", f"{count_text(report.tokens_per_second):>5} tok/s", ""),
            ("", f"{step_time_text(report.duration_ms):>5}", ""),
        ]
        if report.mfu is not None:
            fields.append(("", mfu_text(report.mfu), ""))
        if report.groups_per_second:
            fields.append(("", f"{report.groups_per_second:.3g} {self._info.group}/s", ""))
        if self._eval is not None:
            fields.append(("eval", loss_text(self._eval.loss), "bold"))
        if self._skipped:
            fields.append(("skipped", str(self._skipped), "bold red"))
        line = Text(no_wrap=True, overflow="ellipsis")
        for i, (label, value, style) in enumerate(fields):
            line.append("  " * (i > 0))
            line.append(f"{label} " if label else "", style="dim")
            line.append(value, style=style)
        return line

    def _refresh(self) -> None:
        self._draw(lambda: self._live.update(self.display(), refresh=True))

    def _draw(self, action: Callable[[], object]) -> None:
        if not self._alive:
            return
        try:
            action()
        except (OSError, ValueError):  # the terminal hung up, or its file is closed
            self._alive = False
            silence(self._out)
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()  # gives sys.stdout back

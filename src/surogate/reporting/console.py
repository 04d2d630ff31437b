"""Reports on stdout as plain lines. `live.py` has the display of a terminal, with the same wording."""

from __future__ import annotations

import math
import statistics
import textwrap
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TextIO

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

from .terminal import ignoring_broken_pipe
from .text import LINE_WIDTH, count_text, eta_text, loss_text, lr_text, mfu_text, norm_text, printable, step_time_text

_COLUMN_WIDTH = 12
_SAMPLE_LINES = 6
"""Lines that a sample has on the console."""
_SHOWN_PROMPT = 48
"""Characters of its prompt."""


def numerics_lines(report: NumericsReport) -> list[str]:
    """Return the table of a report. Every figure is followed by the block that it belongs to, in brackets.

    Names are those within a block.
    """
    groups = {name.partition("*.")[2] or name: figures for name, figures in report.largest().items()}
    width = max((len(name) for name in groups), default=0)
    names = "".join(f"{column.name:>{_COLUMN_WIDTH}}" for column in report.columns)
    lines = [f"numerics at step {report.step}: largest figure, and its block", f"{'':{width}}{names}"]
    for name, figures in groups.items():
        cells = (
            f"{_figure(value, column.unit)}{f' [{block}]' if block >= 0 else ''}"
            for (value, block), column in zip(figures, report.columns, strict=True)
        )
        lines.append(f"{name:{width}}" + "".join(f"{cell:>{_COLUMN_WIDTH}}" for cell in cells))
    return lines


def _figure(value: float, unit: str) -> str:
    if unit == "steps":
        return f"{value:.0f}"
    if unit == "magnitude":
        return f"{value:.2g}"
    percent = 100 * value
    return "0%" if value == 0 else f"{percent:.1f}%" if percent >= 9.95 else f"{percent:.1g}%"


class PlainLogger(Logger):
    """Prints a line every `logging_steps` steps, for the first, last and every skipped step, and for each evaluation.

    No escape codes, at most 80 columns, ASCII only but for texts of samples and names of callbacks, in which characters
    that `out` lacks are escaped. If the reader of a pipe exits, the lines stop and the run continues.
    """

    def __init__(self, info: RunInfo, out: TextIO) -> None:
        self._line = ignoring_broken_pipe(partial(print, file=out, flush=True), out)
        self._encoding = out.encoding or "utf-8"  # None: a buffer of text
        self._total_steps = info.total_steps
        self._every = max(1, int(info.config.get("logging_steps") or 1))
        self._clock = RunClock(info)
        self._group = info.group
        self._stepped = False

    def report(self, report: Report) -> None:
        if isinstance(report, StepReport):
            self._step(report)
        elif isinstance(report, EvalReport):
            self._clock.eval(report)
            for line in in_lines(eval_line(report).split(", "), first=0):
                self._line(line)
        elif isinstance(report, NumericsReport):
            for line in numerics_lines(report):
                self._line(line)
        elif isinstance(report, SampleReport):
            for line in sample_lines(report):
                self._text(line)
        elif isinstance(report, CallbackReport):
            for line in callback_lines(report):
                self._text(line)

    def _text(self, line: str) -> None:
        self._line(line.encode(self._encoding, "backslashreplace").decode(self._encoding))

    def _step(self, report: StepReport) -> None:
        self._clock.step(report)
        first, self._stepped = not self._stepped, True
        if first or report.skipped or report.step % self._every == 0 or report.step == self._total_steps:
            self._line(step_line(report, self._total_steps, self._clock.seconds()[1]))
            if report.metrics:
                rate = [f"{report.groups_per_second:.3g} {self._group}/s"] if self._group else []
                for line in in_lines([*figures(report), *rate]):
                    self._line(line)


class RunClock:
    """The time that the steps and evaluations of a run take. Checkpoints are not counted.

    A step takes the median of the latest ones, which ignores single slow ones (a first step, a busy machine). An
    evaluation takes as long as the last one; before the first, as planned.
    """

    def __init__(self, info: RunInfo, window: int = 32) -> None:
        self._total, self._evaluated = info.total_steps, info.evaluated
        self._steps, self._evals = info.done_steps, bisect_right(info.evaluated, info.done_steps)
        self._planned, self._evaluation = info.eval_time, 0.0
        self._durations: deque[float] = deque(maxlen=window)

    def step(self, report: StepReport) -> None:
        self._durations.append(report.duration_ms / 1000)
        self._steps, self._evals = report.step, bisect_left(self._evaluated, report.step)

    def eval(self, report: EvalReport) -> None:
        self._evaluation, self._evals = report.duration_ms / 1000, bisect_right(self._evaluated, report.step)

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of what is done, and those until the last evaluation is done."""
        step = statistics.median(self._durations or [1.0])
        evaluation = self._evaluation or self._planned * step
        evals_left = len(self._evaluated) - self._evals
        done = self._steps * step + self._evals * evaluation
        return done, (self._total - self._steps) * step + evals_left * evaluation


def step_line(report: StepReport, total_steps: int, eta_seconds: float) -> str:
    """Return a step in at most 80 columns, aligned over a run. Without room the duration is left out, then the lr."""
    digits = len(str(total_steps))
    head = f"step {report.step:>{digits}}/{total_steps}  loss {loss_text(report.loss):<6}"
    head += f"  norm {norm_text(report.norm):<4}"
    if report.skipped:
        return f"{head}  skipped: not finite"
    rate = f"{count_text(report.tokens_per_second):>5} tok/s"
    fields = [head, f"lr {lr_text(report.lr):<6}", rate, f"{step_time_text(report.duration_ms):>5}"]
    fields += [] if report.mfu is None else [mfu_text(report.mfu)]
    fields.append(f"eta {eta_text(eta_seconds)}")
    if len("  ".join(fields)) > LINE_WIDTH or digits > 4:
        del fields[3]
    if len("  ".join(fields)) > LINE_WIDTH:
        del fields[1]
    return "  ".join(fields)


def eval_line(report: EvalReport) -> str:
    line = f"eval at step {report.step}: loss {loss_text(report.loss)}"
    if report.in_nats and report.loss < 20:  # above that the perplexity means nothing, and above 709 exp() overflows
        line += f" (perplexity {math.exp(report.loss):.4g})"
    line = ", ".join([line, *figures(report)])
    if report.best_step is not None:
        line += ", the best so far" if report.best_step == report.step else f", best at step {report.best_step}"
    return f"{line}, {count_text(report.valid_tokens)} tokens in {step_time_text(report.duration_ms)}"


def sample_lines(report: SampleReport) -> list[str]:
    """Return the end of the prompt and the beginning of the text, in a few lines. The metrics file has all of both."""
    prompt = " ".join(printable(report.prompt).split())
    shown = prompt if len(prompt) <= _SHOWN_PROMPT else f"...{prompt[-_SHOWN_PROMPT:]}"
    lines = [line for part in printable(report.text).splitlines() for line in textwrap.wrap(part, LINE_WIDTH - 2)]
    more = [] if len(lines) <= _SAMPLE_LINES else ["..."]
    said = [*lines[:_SAMPLE_LINES], *more] or ["(nothing that can be seen)"]
    return [f"sample at step {report.step}: {shown}", *(f"  {line}" for line in said)]


def callback_lines(report: CallbackReport) -> list[str]:
    """Return what a callback has logged, in lines of 80 columns."""
    first, *others = figures(report)
    return in_lines([f"callback at step {report.step}: {first}", *others], first=0)


def figures(report: StepReport | EvalReport | CallbackReport) -> list[str]:
    """Return ["margin 0.12", "accuracy 0.75"]."""
    return [f"{name.replace('_', ' ')} {value:.4g}" for name, value in report.metrics.items()]


def in_lines(items: Sequence[str], first: int = 2) -> list[str]:
    """Return the items, with commas, in lines of 80 columns that begin with two spaces, the first one with `first`."""
    lines = [" " * first + items[0]]
    for item in items[1:]:
        if len(lines[-1]) + len(item) + 3 > LINE_WIDTH:
            lines[-1] += ","
            lines.append(f"  {item}")
        else:
            lines[-1] += f", {item}"
    return lines

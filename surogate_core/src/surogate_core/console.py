"""Reports on stdout: plain lines here, the live display of a terminal in `live.py`; the words are the same."""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections import deque
from collections.abc import Callable
from typing import TextIO

from .api import EvalReport, GpuReport, Logger, RunInfo, StepReport
from .summary import LINE_WIDTH, count_text


def open_console(info: RunInfo) -> Logger:
    """The live display when stdout is a terminal that can move its cursor, else plain lines."""
    if sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        from .live import LiveLogger

        return LiveLogger(info, sys.stdout)
    return PlainLogger(info, sys.stdout)


class PlainLogger:
    """One line per `logging_steps` steps, plus the first, the last and every skipped step; one per evaluation.

    No escape codes, ASCII only, at most 80 columns. When the reader of a pipe goes away the lines stop and the run
    goes on.
    """

    def __init__(self, info: RunInfo, out: TextIO) -> None:
        self._out: TextIO | None = out
        self._total_steps = info.total_steps
        self._every = max(1, int(info.config.get("logging_steps") or 1))
        self._times = StepTimes()
        self._stepped = False

    def step(self, report: StepReport) -> None:
        self._times.add(report.duration_ms)
        first, self._stepped = not self._stepped, True
        if first or report.skipped or report.step % self._every == 0 or report.step == self._total_steps:
            self._line(step_line(report, self._total_steps, self._times.eta_seconds(report.step, self._total_steps)))

    def eval(self, report: EvalReport) -> None:
        self._line(eval_line(report))

    def gpu(self, report: GpuReport) -> None:
        return  # for the record, not for the eye

    def close(self, status: str) -> None:
        return  # how a run ended is for its caller to say

    def _line(self, text: str) -> None:
        if self._out is None:
            return
        try:
            print(text, file=self._out, flush=True)
        except (OSError, ValueError):  # a closed pipe, a terminal that hung up, a closed file
            silence(self._out)
            self._out = None


class StepTimes:
    """The durations of the latest steps. Their median ignores the odd slow one (a first step, a busy machine)."""

    def __init__(self, window: int = 32) -> None:
        self._durations_ms: deque[float] = deque(maxlen=window)

    def add(self, duration_ms: float) -> None:
        self._durations_ms.append(duration_ms)

    def eta_seconds(self, step: int, total_steps: int) -> float:
        """Seconds until the last step is done. Evaluations and checkpoints are not counted."""
        return statistics.median(self._durations_ms) / 1000 * max(0, total_steps - step)


def step_line(report: StepReport, total_steps: int, eta_seconds: float) -> str:
    """A step in at most 80 columns. Columns line up over a run; the duration is left out when there is no room."""
    digits = len(str(total_steps))
    head = f"step {report.step:>{digits}}/{total_steps}  loss {loss_text(report.loss):<6}"
    head += f"  norm {norm_text(report.norm):<4}"
    if report.skipped:
        return f"{head}  skipped: not finite"
    rate = f"{count_text(report.tokens_per_second):>5} tok/s"
    fields = [head, f"lr {lr_text(report.lr):<6}", rate, f"{step_time_text(report.duration_ms):>5}"]
    fields.append(f"eta {eta_text(eta_seconds)}")
    if len("  ".join(fields)) > LINE_WIDTH or digits > 4:
        del fields[3]
    return "  ".join(fields)


def eval_line(report: EvalReport) -> str:
    line = f"eval at step {report.step}: loss {loss_text(report.loss)}"
    if report.loss < 20:  # beyond that the number says nothing, and from 710 on exp() overflows
        line += f" (perplexity {math.exp(report.loss):.4g})"
    return f"{line}, {count_text(report.valid_tokens)} tokens in {step_time_text(report.duration_ms)}"


def loss_text(loss: float) -> str:
    """At most 6 characters for a loss below 1000: 2.3456, 10.812, 123.46."""
    if not math.isfinite(loss):
        return str(loss)
    decimals = 4 if abs(loss) < 10 else 3 if abs(loss) < 100 else 2
    return f"{loss:.{decimals}f}" if abs(loss) < 1000 else f"{loss:.1e}"


def norm_text(norm: float) -> str:
    """At most 5 characters: 0.12, 12.3, 123, 5e-3, 1e+4 as 1e4; 0.0 below 1e-99, 9e99 above it."""
    if not math.isfinite(norm) or norm < 1e-99:
        return str(norm if norm != norm or norm > 1 else 0.0)
    norm = min(norm, 9e99)
    if 0.01 <= norm < 999.5:
        return f"{norm:.2f}" if norm < 9.995 else f"{norm:.1f}" if norm < 99.95 else f"{norm:.0f}"
    return _short_exponent(f"{norm:.0e}")


def lr_text(lr: float) -> str:
    """At most 6 characters for a rate above 1e-10: 3.0e-4; 0 for none, or next to none (below 1e-99)."""
    return _short_exponent(f"{lr:.1e}") if lr >= 1e-99 else "0"


def _short_exponent(text: str) -> str:
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}"


def step_time_text(duration_ms: float) -> str:
    """At most 5 characters: 8.4ms, 156ms, 1.23s, 12.3s, 123s."""
    if duration_ms < 999.5:
        return f"{duration_ms:.1f}ms" if duration_ms < 9.95 else f"{duration_ms:.0f}ms"
    seconds = duration_ms / 1000
    return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s" if seconds < 99.95 else f"{seconds:.0f}s"


def eta_text(seconds: float) -> str:
    """At most 5 characters, no more precise than a forecast is: 45s, 2m15s, 42m, 3h05m, 12h, 2d04h, 12d, 9999d."""
    whole = round(min(seconds, 9999 * 86400))
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            count, rest = divmod(whole, unit)
            return f"{count}{name}" if count >= 10 else f"{count}{name}{rest // smaller:02d}{smaller_name}"
    return f"{whole}s"


def unbroken(notice: Callable[[str], None]) -> Callable[[str], None]:
    """`notice` while a run trains: when the reader of a pipe goes away, lines are lost and the run goes on."""

    def tell(line: str) -> None:
        try:
            notice(line)
        except (OSError, ValueError):  # a closed pipe, a terminal that hung up, a closed file
            silence(sys.stdout)

    return tell


def silence(out: TextIO) -> None:
    """Point `out` at nothing, so that what other code or the interpreter's exit still flushes to it cannot fail."""
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, out.fileno())
        os.close(devnull)
    except (OSError, ValueError):  # no file behind it (a test's buffer): nothing is flushed at exit either
        return

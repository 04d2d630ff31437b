"""Times the phases of a command. With SUROGATE_TIMING=1 they are printed as a table on stderr at its end."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ..api import Logger, Report, StepReport

SWITCH = "SUROGATE_TIMING"


class Phase(NamedTuple):
    """A phase that ended `at` seconds after the start of the process. cpu: CPU seconds of all threads until then."""

    name: str
    at: float
    cpu: float


_phases: list[Phase] = []


def mark(name: str) -> None:
    """End the phase `name` now and begin the next one. Calls from threads other than the main thread are ignored."""
    if os.environ.get(SWITCH, "") in ("", "0") or threading.current_thread() is not threading.main_thread():
        return
    _phases.append(Phase(name, seconds_since_start(), time.process_time()))


class FirstStep(Logger):
    """A logger that marks when the first step was reported."""

    def __init__(self) -> None:
        self._reported = False

    def report(self, report: Report) -> None:
        if isinstance(report, StepReport) and not self._reported:
            mark("first step")
            self._reported = True


def print_phases() -> None:
    """Print the phases, if there are any."""
    if not _phases:
        return
    mark("end")
    print(f"\n{'seconds':>9}{'cpu':>9}{'at':>9}  phase", file=sys.stderr)
    before = Phase("", 0.0, 0.0)
    for phase in _phases:
        wall, cpu = phase.at - before.at, phase.cpu - before.cpu
        print(f"{wall:>9.2f}{cpu:>9.2f}{phase.at:>9.2f}  {phase.name}", file=sys.stderr)
        before = phase
    _phases.clear()


def seconds_since_start() -> float:
    """Return the seconds since the system started this process, including the start of the interpreter."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started

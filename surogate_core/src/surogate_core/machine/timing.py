"""Where the time of a command goes: with SUROGATE_TIMING=1 it ends by printing a table of its phases on stderr."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ..api import EvalReport, GpuReport, StepReport

SWITCH = "SUROGATE_TIMING"


class Phase(NamedTuple):
    """What ended `at` seconds after the process began; cpu: seconds of all its threads so far."""

    name: str
    at: float
    cpu: float


_phases: list[Phase] = []


def mark(name: str) -> None:
    """The phase `name` of this process ends now, and the next one begins. Marks of other threads do not count."""
    if os.environ.get(SWITCH, "") in ("", "0") or threading.current_thread() is not threading.main_thread():
        return
    _phases.append(Phase(name, seconds_since_start(), time.process_time()))


class FirstStep:
    """A logger that marks when the first step was reported."""

    def __init__(self) -> None:
        self._reported = False

    def step(self, report: StepReport) -> None:
        if not self._reported:
            mark("first step")
        self._reported = True

    def eval(self, report: EvalReport) -> None:
        return

    def gpu(self, report: GpuReport) -> None:
        return

    def close(self, status: str) -> None:
        return


def print_phases() -> None:
    """Print what was marked, if anything was."""
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
    """Since the system started this process, to a hundredth of a second: the interpreter's own start counts."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started

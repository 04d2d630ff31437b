"""The report of the error, or of the signal, that ends a run."""

from __future__ import annotations

import signal
import time

from surogate_core.api import EndReport
from surogate_core.errors import SurogateError, described


def end_report(error: BaseException, step: int) -> EndReport:
    """Return the report of a run that ends after `step` by an error, or by the exception of a signal."""
    number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        number = error.code - 128
    if number:
        return EndReport(step=step, status="interrupted", message=signal.Signals(number).name, time=time.time())
    message = " ".join(str(error).split()) if isinstance(error, SurogateError) else described(error)
    return EndReport(step=step, status="failed", message=message, time=time.time())

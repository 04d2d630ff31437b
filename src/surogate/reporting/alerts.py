"""Alerts: NaN, spikes of the loss, a stall, a failure and the end of a run are told to a webhook, once each time."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from surogate_core.api import EndReport, Logger, Report, StepReport

from ..config.alerts import Alerts, Event, alerts_of
from .webhook import Webhook

WINDOW = 50
"""Steps whose losses a loss is compared with."""

FEWEST = 20
_LONGEST_END = 500
"""Characters of an error in a message."""

_OF_MAD = 1.4826
"""Of the median absolute deviation of a normal distribution, its standard deviation."""

_LEAST_RISE = 0.05
"""Part of the median that a spike rises above it at least: losses that hardly vary have no spikes."""


def open_alerts(given: Mapping[str, Any], run_name: str, notice: Callable[[str], None]) -> AlertLogger:
    """Return the logger for the key `alerts`. Raises ConfigError if there is no address."""
    settings, _ = alerts_of(given)  # checked with the config
    assert settings is not None
    return AlertLogger(settings, run_name, Webhook(settings.address(), notice))


class AlertLogger(Logger):
    """Sends an alert when something begins, and none again before it has ended: a series of NaN steps is one alert.

    A thread looks once a second whether a report has come for `stall_seconds`. An evaluation or a save that takes
    longer is a stall.
    """

    def __init__(self, settings: Alerts, run_name: str, webhook: Webhook, clock: Callable[[], float] = time.monotonic):
        self._settings, self._run, self._webhook, self._clock = settings, run_name, webhook, clock
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._going_on: set[Event] = set()
        self._step, self._seen, self._end = 0, clock(), ""
        self._ended = threading.Event()
        if "stall" in settings.events:
            threading.Thread(target=self._watch, name="alerts of a stall", daemon=True).start()

    def report(self, report: Report) -> None:
        self._seen = self._clock()
        self._going_on.discard("stall")
        if isinstance(report, EndReport):
            self._end = f": {report.message[:_LONGEST_END]}"
        if not isinstance(report, StepReport):
            return
        self._step = report.step
        finite = math.isfinite(report.loss) and not report.skipped
        self._while("nan", not finite, f"loss {report.loss}, norm {report.norm}: the step was skipped")
        if finite:
            limit = self._limit()
            self._while("spike", report.loss > limit, f"loss {report.loss:.4f}, above {limit:.4f}")
            self._losses.append(report.loss)

    def close(self, status: str) -> None:
        self._ended.set()
        event: Event = "done" if status == "done" else "failed"
        self._while(event, True, f"ended: {status}{self._end}")
        self._webhook.close()

    def look(self) -> None:
        """Tell of a stall if there is one."""
        idle = self._clock() - self._seen
        if idle >= self._settings.stall_seconds:
            self._while("stall", True, f"nothing was reported for {idle:.0f} s")

    def _limit(self) -> float:
        """Return the loss above which one is a spike; infinite before there are enough steps."""
        if len(self._losses) < FEWEST:
            return math.inf
        middle = statistics.median(self._losses)
        deviation = _OF_MAD * statistics.median(abs(loss - middle) for loss in self._losses)
        return middle + max(self._settings.spike_deviations * deviation, _LEAST_RISE * abs(middle))

    def _while(self, event: Event, holds: bool, what: str) -> None:
        if not holds:
            self._going_on.discard(event)
        elif event in self._settings.events and event not in self._going_on:
            self._going_on.add(event)
            text = f"{self._run}: {event} at step {self._step}: {what}"
            # the names by which Slack and Discord show a message
            self._webhook.send({"event": event, "run": self._run, "step": self._step, "text": text, "content": text})

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self.look()

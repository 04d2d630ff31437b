"""Doubts: what metrics say against a training (`Metric.doubt`), shown once, when most steps say it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from surogate_core.assembly.assembly import Reported

_FEWEST_STEPS = 20


class Doubts:
    """Counts the steps in which a metric says something, and tells the user as soon as that is most of them.

    Steps count from the start or the resume of the run, and not before there are 20.
    """

    def __init__(self, reported: Sequence[Reported], notice: Callable[[str], None]) -> None:
        self._reported, self._notice = reported[1:], notice
        self._steps, self._said = 0, Counter[str]()
        self._shown: set[str] = set()

    def see(self, figures: Sequence[Any]) -> None:
        """Take the figures of a step, of `reported` after the loss. Raises PluginError if a `doubt` fails."""
        self._steps += 1
        for figure, value in zip(self._reported, figures, strict=True):
            if figure.name in self._shown or not (said := figure.doubt(value)):
                continue
            self._said[figure.name] += 1
            if self._steps >= _FEWEST_STEPS and 2 * self._said[figure.name] > self._steps:
                self._shown.add(figure.name)
                self._notice(f"{figure.name}: {said}")

"""The date that chat templates write which ask for one: the same in every row of a run.

Templates call `strftime_now`, which in transformers gives the present time. Rows that are tokenised at different times
would have different dates, and a resumed run other tokens than the one that it goes on with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, time

NAME = "strftime_now"
_ASKS = re.compile(rf"\b{NAME}\b")


class DayOfRendering:
    """The date of the rendering that is running. day: None is the present time."""

    day: date | None = None

    def writer(self, now: Callable[[str], str]) -> Callable[[str], str]:
        """Return what templates call: writes midnight of the day in a format of `strftime`; without a day, `now`."""

        def strftime_now(format: str) -> str:
            return now(format) if self.day is None else datetime.combine(self.day, time()).strftime(format)

        return strftime_now


def asks_for_date(source: str) -> bool:
    """Return whether a template may write the date."""
    return _ASKS.search(source) is not None

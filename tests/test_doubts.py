"""What a metric says against a training is shown once, when most steps say it."""

from __future__ import annotations

import pytest

from surogate.training.doubts import Doubts
from surogate_core.api import Init
from surogate_core.assembly.assembly import Reported
from surogate_core.program.value import Value

STATE = Value("state", (), "fp32", "state", init=Init(kind="zeros"))
REPORTED = [
    Reported(name, "token", STATE, STATE, float, lambda value: "too high" if value > 1 else "")
    for name in ("loss", "first", "second")
]


@pytest.mark.parametrize(
    ("values", "shown_at"),
    [([2] * 30, 20), ([2] * 19, None), ([0] * 30 + [2] * 29, None), ([0] * 30 + [2] * 31, 61), ([0, 2] * 20, None)],
)
def test_the_user_is_told_once_when_most_of_twenty_steps_or_more_say_it(
    values: list[float], shown_at: int | None
) -> None:
    lines: list[tuple[int, str]] = []
    doubts = Doubts(REPORTED, lambda line: lines.append((step, line)))
    for step, value in enumerate([*values, *[2] * (200 if shown_at else 0)], start=1):  # noqa: B007 (a closure reads it)
        doubts.see([0, value])
    assert lines == ([(shown_at, "second: too high")] if shown_at else [])

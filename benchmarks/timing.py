"""Times steps: ours and those of the peer, by the same loop."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any


def timed(step: Callable[[int], None], warm_up: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of the median step and of all, and when timing began and ended (`time.time`).

    `step` is called with 1, 2, ... and waits until its work is done. The first `warm_up` steps do not count. Then
    `arguments.steps` are timed, or at least 3 within `arguments.seconds`.
    """
    times: list[float] = []
    window = [0.0, 0.0]
    while len(times) < warm_up + arguments.steps:
        if len(times) == warm_up:
            window[0] = time.time()
        if len(times) >= warm_up + 3 and sum(times[warm_up:]) > 1000 * arguments.seconds:
            break
        began = time.perf_counter()
        step(len(times) + 1)
        times.append((time.perf_counter() - began) * 1000)
    window[1] = time.time()
    times = times[warm_up:]
    return {"step_ms": round(statistics.median(times), 3), "all_ms": [round(t, 3) for t in times], "window": window}

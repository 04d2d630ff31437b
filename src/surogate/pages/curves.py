"""Curves of a page: few enough points that it opens at once, and no spike lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from .records import Json, Numbers, RunRecords, names_of, of

POINTS = 1500
"""Points of a curve at most. Of longer ones each point is the mean of a range, with its least and most as a band."""


def ranges(count: int) -> list[int]:
    """Return the first index of each of at most POINTS equal ranges of `count` values, then `count`."""
    found: list[int] = np.linspace(0, count, min(count, POINTS) + 1).astype(int).tolist()
    return found


def short(values: Iterable[float]) -> list[float | None]:
    """Return numbers with five digits; None for one that is not finite."""
    return [None if not np.isfinite(v) else int(v) if v == int(v) else float(f"{v:.5g}") for v in map(float, values)]


def curve(values: Numbers) -> Json:
    """Return the points of a curve: `y`, and of a long one the band from `lo` to `hi`."""
    parts = [values[a:b][np.isfinite(values[a:b])] for a, b in itertools.pairwise(ranges(len(values)))]
    mean, low, high = (short(float(f(p)) if len(p) else np.nan for p in parts) for f in (np.mean, np.min, np.max))
    return {"y": mean} | ({"lo": low, "hi": high} if len(values) > POINTS else {})


def axes(run: RunRecords) -> Json:
    """Return the points of a run's curves along steps, tokens and seconds: of steps, evaluations and GPU reports."""
    steps = of(run.steps, "step")
    along = {
        "step": steps,
        "tokens": np.nancumsum(of(run.steps, "tokens")),
        "time": np.nancumsum(of(run.steps, "duration_ms")) / 1000,
    }
    last = np.array(ranges(len(steps))[1:], int) - 1

    def at(records: Sequence[Json]) -> Json:
        found = np.searchsorted(steps, of(records, "step"), side="right") - 1
        exact = {"step": of(records, "step")}  # an evaluation before the first step is at 0
        values = {
            key: np.where(found < 0, 0.0, v[found]) if len(v) else np.zeros(len(found)) for key, v in along.items()
        }
        return {key: short(v) for key, v in (values | exact).items()}

    train = {key: short(values[last]) for key, values in along.items()} if len(steps) else {key: [] for key in along}
    return {"train": train, "eval": at(run.evals), "gpu": at(first_gpu(run))}


def first_gpu(run: RunRecords) -> list[Json]:
    """Return the telemetry of a run's first GPU."""
    first = min((record.get("gpu", 0) for record in run.gpus), default=0)
    return [record for record in run.gpus if record.get("gpu", 0) == first]


def lines(
    runs: Sequence[RunRecords], key: str, title: str = "training", *, smooth: bool = True, colours: bool = True
) -> Iterator[Json]:
    """Yield the lines of a figure of each run: of its steps, and of its evaluations if they have it."""
    for index, (run, name) in enumerate(zip(runs, names_of(runs), strict=True)):
        before = f"{name}: " if len(runs) > 1 else ""
        own = {"run": index, "colour": f"c{1 + 2 * index}"}
        values = of(run.steps, key)
        if np.isfinite(values).any():
            yield own | {"name": before + title, "x": "train", "smooth": smooth, **curve(values)}
        held = of(run.evals, key)
        if np.isfinite(held).any():
            colour = f"c{2 + 2 * index}" if colours else own["colour"]
            yield own | {"colour": colour, "name": f"{before}validation", "x": "eval", "y": short(held)}

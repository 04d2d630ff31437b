"""The sections of a plan, from its document: what holds the memory over the ops of a step, and what takes the time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from surogate_core.errors import ConfigError

from ..reporting.text import counted
from .curves import ranges
from .headline import seconds_text, size_text
from .records import Json

CAUSES = 7
"""Causes that have a colour of their own. The others are one area."""

KINDS = 14
"""Kinds of ops that the table shows."""

_FIXED = {
    "weights": "all params, and copies in other dtypes",
    "gradients": "of trained params",
    "optimizer": "its states",
    "runtime": "an estimate: inputs, and what the driver takes",
    "pinned": "memory for offloading, which is the device's here",
}


@dataclass(frozen=True)
class Memory:
    """The memory section: a sentence, the rows of what is held at the peak, and what the page draws.

    rows  (name, bytes, share of the total, what it is, whether it does not change)
    """

    says: str
    total: int
    limit: int
    rows: list[tuple[str, int, float, str, bool]]
    drawn: Json


class KindTime(NamedTuple):
    """The time of a kind of op in a step. planned: beside a measured time; None: `seconds` are the planned ones."""

    kind: str
    seconds: float
    planned: float | None
    share: float
    calls: float
    flops: float
    nbytes: float


@dataclass(frozen=True)
class Times:
    """The section of a step's time. more: kinds that are left.

    most      seconds of the longest bar
    phases    (phase, planned seconds, share)
    measured  whether the rows are of a profile
    """

    says: str
    rows: list[KindTime]
    more: int
    most: float
    phases: list[tuple[str, float, float]]
    measured: bool = False


def memory_of(plan: Json) -> Memory:
    """Return the memory section of a plan's document with a timeline."""
    timeline, device = plan["timeline"], plan["device"]
    count, peak = len(timeline["kind"]), timeline["peak"]
    live = {title(cause): expanded(changes, count) for cause, changes in timeline["causes"].items()}
    ranked = sorted(live, key=lambda cause: -(4 * int(live[cause][peak]) + int(live[cause].max())))
    fixed = {name: np.full(count, n) for name, n in timeline["fixed"].items()}
    areas = fixed | {cause: live[cause] for cause in ranked[:CAUSES]}
    others = ranked[CAUSES:]
    if others:
        areas["other activations"] = np.sum([live[cause] for cause in others], axis=0)
    total: npt.NDArray[np.int64] = np.sum([*areas.values(), np.zeros(count, np.int64)], axis=0)
    kept = [a + int(total[a:b].argmax()) for a, b in itertools.pairwise(ranges(count))] if count else []
    at_peak, limit = int(plan["device_bytes"]["total"]), int(device["bytes"])
    held = {title(cause): of for cause, of in plan["memory"]["causes"].items()}
    what = {name: _FIXED.get(name, "") for name in fixed}
    what |= {cause: _values(of) for cause, of in held.items()} | {"other activations": f"{len(others)} more causes"}
    rows = [(name, int(v[peak]), v[peak] / at_peak, what.get(name, ""), name in fixed) for name, v in areas.items()]
    if gaps := plan["memory"]["gaps"]:
        rows.append(("gaps", gaps, gaps / at_peak, "between values, because no placement is perfect", True))
    drawn = {
        "areas": [{"name": k, "y": _steps(v[kept]), "fixed": k in fixed} for k, v in areas.items()],
        "op": kept,
        "peak": int(np.argmax(total[kept])) if kept else 0,
        "limit": limit,
        "kinds": timeline["kinds"],
        "kind": [timeline["kind"][at] for at in kept],
        "phases": timeline["phases"],
        "phase": [timeline["phase"][at] for at in kept],
        "block": [timeline["block"][at] for at in kept],
    }
    return Memory(_says(plan, at_peak, limit), at_peak, limit, [row for row in rows if row[1]], drawn)


def _says(plan: Json, total: int, limit: int) -> str:
    peak, room = plan["memory"]["peak"], limit - total
    block = f" of block {peak['block']}" if peak["block"] is not None else ""
    spare = f"{size_text(room)} are free" if room >= 0 else f"{size_text(-room)} too much"
    said = f"{size_text(total)} of {size_text(limit)} on {plan['device']['title']}: {spare}."
    if not peak["kind"]:
        return said
    return f"{said} The peak is at {peak['kind']}{block}, op {peak['op']:,} of {plan['memory']['ops']:,}."


def _values(of: Mapping[str, Any]) -> str:
    each = f"of {size_text(of['largest'])}" if of["values"] > 1 else ""
    return f"{counted(of['values'], 'value')} {each}".strip()


def title(cause: str) -> str:
    """Return a label of values in words: "d_gate_up" as "gradient of gate up"."""
    if cause == "workspace":
        return "workspace of ops"
    return ("gradient of " if cause.startswith("d_") else "") + cause.removeprefix("d_").replace("_", " ")


def expanded(changes: list[list[int]], count: int) -> npt.NDArray[np.int64]:
    """Return the bytes at each of `count` ops, from pairs of an op and the bytes from there on."""
    found = np.zeros(count, np.int64)
    for (start, nbytes), (stop, _) in itertools.pairwise([*changes, [count, 0]]):
        found[start:stop] = nbytes
    return found


def _steps(values: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return pairs of an index and the value from there on."""
    at = np.flatnonzero(np.diff(values, prepend=-1))
    return [[int(i), int(values[i])] for i in at]


def times_of(plan: Json) -> Times:
    """Return the section of a step's time of a plan's document."""
    kinds, phases, step = plan["kinds"], plan["phases"], plan["step"]
    total = sum(kind["seconds"] for kind in kinds) or 1.0
    rows = [
        KindTime(of["kind"], of["seconds"], None, of["seconds"] / total, of["calls"], of["flops"], of["bytes"])
        for of in kinds
    ]
    says = f"{step['tokens_per_second']:,.0f} tokens/s planned: a step of {step['tokens']:,} tokens."
    if step["flops"] and (again := 1 - step["model_flops"] / step["flops"]) > 0.005:
        says += f" {again:.0%} of its FLOPs recompute."
    shares = [(phase, seconds, seconds / total) for phase, seconds in phases.items() if seconds > 0.005 * total]
    return Times(says, rows[:KINDS], len(rows[KINDS:]), max([row.seconds for row in rows], default=0.0), shares)


def measured_times_of(profile: Json) -> Times:
    """Return the section of a step's time of the document of `surogate profile --json`, beside the planned times."""
    step, kinds = profile["step"], sorted(profile["kinds"], key=lambda kind: -kind["seconds"])
    total = sum(kind["seconds"] for kind in kinds) or 1.0
    rows = [
        KindTime(
            *(of["kind"], of["seconds"], of["planned_seconds"]),
            *(of["seconds"] / total, of["calls"], of["flops"], of["bytes"]),
        )
        for of in kinds
    ]
    says = (
        f"{seconds_text(step['seconds'])} measured on {profile['device']['title']}, "
        f"{seconds_text(step['planned_seconds'])} planned: a step of {step['tokens']:,.0f} tokens."
    )
    most = max([max(row.seconds, row.planned or 0.0) for row in rows], default=0.0)
    return Times(says, rows[:KINDS], len(rows[KINDS:]), most, [], measured=True)


def read_profile(path: Path) -> Times:
    """Return the section of a profile in a file. Raises ConfigError for a file that holds none."""
    try:
        if not path.is_file():
            raise FileNotFoundError("no such file")
        return measured_times_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, OSError) else "holds no profile"
        raise ConfigError(
            f"--profile {path}: {what}. Write one: surogate profile run.yaml --json > profile.json"
        ) from None

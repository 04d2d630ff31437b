"""The results of a run at one glance, and what sets two runs apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..reporting.text import count_text, counted, duration_text, parameters_text
from .charts import words
from .records import RunRecords, names_of, number, of

_OWN_OF_A_RUN = {"output_dir", "run_name", "checkpoint_dir", "log_file"}


class Tile(NamedTuple):
    """A figure, the word for it, and a word beside it."""

    what: str
    figure: str
    beside: str


def facts(run: RunRecords) -> str:
    """Return what was trained, how and on what, in one line."""
    head, config, parts = run.head, run.config, list[str]()
    every, trained = number(head.get("parameters")), number(head.get("trainable_parameters"))
    if trained > 0 and every > 0:
        share = f"{parameters_text(int(trained))} of " if trained < every else "all "
        parts.append(f"{share}{parameters_text(int(every))} parameters")
    if run.total or run.done:
        tokens = number(head.get("tokens_per_step"))
        each = f" of {tokens:,.0f} tokens" if tokens > 0 else ""
        parts.append(f"{counted(run.done, 'step')}{each}")
    parts += [f"{key} {config[key]}" for key in ("recipe", "optimizer") if isinstance(config.get(key), str)]
    if isinstance(device := head.get("device") or (run.plan or {}).get("device", {}).get("title"), str):
        parts.append(device)
    return ", ".join(parts)


def state_text(run: RunRecords) -> str:
    """Return the state of a run: "finished", "running, step 10 of 240"."""
    at = f"step {run.done:,}" + (f" of {run.total:,}" if run.total else "")
    if run.state == "finished" and run.stop_reason:
        return f"finished early, {at}"
    if run.state in ("finished", "not started"):
        return run.state
    return {"running": f"running, {at}" if run.done else "starting", "killed": f"killed after {at}"}.get(
        run.state, f"stopped after {at}"
    )


def tiles(run: RunRecords) -> Iterator[Tile]:
    """Yield the figures that are known: losses, accuracies, speed, memory, time."""
    losses, training = of(run.evals, "loss"), of(run.steps, "loss")
    known = np.flatnonzero(np.isfinite(losses))
    if len(known):
        best, last = known[np.argmin(losses[known])], known[-1]
        shown, beside = last, f"best: {losses[best]:.4f} at {run.evals[best]['step']:,}"
        chosen = [index for index in known if run.evals[index]["step"] == run.outputs.get("weights_step")]
        if chosen and chosen[-1] != last:
            shown = chosen[-1]
            beside = f"of the outputs, step {run.evals[shown]['step']:,}; {losses[last]:.4f} at the end"
        elif best == last:
            first = f"{losses[known[0]]:.4f} at step {run.evals[known[0]]['step']:,}"
            beside = first if len(known) > 1 else f"at step {run.evals[last]['step']:,}"
        yield Tile("validation loss", f"{losses[shown]:.4f}", beside)
    last_steps = max(1, len(training) // 20)
    if np.isfinite(training[-last_steps:]).any():
        what = f"mean of the last {last_steps:,}" if last_steps > 1 else f"step {run.done:,}"
        yield Tile("training loss", f"{np.nanmean(training[-last_steps:]):.4f}", what)
    for name in run.metrics:
        if name.endswith(("accuracy", "accuracies", "margin", "margins")):
            held, where = of(run.evals, name), "held out"
            if not np.isfinite(held).any():
                held, where = of(run.steps, name), "last step"
            held = held[np.isfinite(held)]
            if len(held):
                form = ".1%" if "accurac" in name else "+.3f"
                yield Tile(words(name).lower(), format(float(held[-1]), form), where)
    planned = number(run.planned.get("tokens_per_second"))
    if math.isfinite(run.rate):
        yield Tile("tokens/s", count_text(run.rate), f"plan {count_text(planned)}" if planned > 0 else "median")
    elif planned > 0:
        yield Tile("tokens/s", count_text(planned), "planned")
    if (held_bytes := number(run.planned.get("device_bytes"))) > 0:
        used = of(run.gpus, "memory_used_bytes")
        most = f"{size_text(float(np.nanmax(used)))} in use" if np.isfinite(used).any() else "planned, each device"
        yield Tile("memory", size_text(held_bytes), most)
    seconds, tokens = np.nansum(of(run.steps, "duration_ms")) / 1000, np.nansum(of(run.steps, "tokens"))
    if run.steps:
        yield Tile("time", duration_text(float(seconds)), f"{count_text(float(tokens))} tokens")


def side_by_side(runs: Sequence[RunRecords]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (what, the figure of each run and the word beside it); "" for a run that has no such figure."""
    found = [{tile.what: (tile.figure, tile.beside) for tile in tiles(run)} for run in runs]
    return [
        (what, [one.get(what, ("", "")) for one in found]) for what in dict.fromkeys(w for one in found for w in one)
    ]


def size_text(nbytes: float) -> str:
    """Return bytes with three digits: 512 B, 1.50 MiB, 23.4 GiB."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            scaled = nbytes / unit
            return f"{scaled:.{2 if abs(scaled) < 10 else 1 if abs(scaled) < 100 else 0}f} {name}"
    return f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """Return a short time with three digits: 12.3 us, 4.56 ms, 1.23 s."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}" if seconds < 1000 * unit else f"{seconds / unit:,.0f} {name}"
    return f"{seconds * 1e6:.2g} us" if seconds else "0 s"


def compared(runs: Sequence[RunRecords]) -> str:
    """Return which of two runs has the lower validation loss, or training loss; "" if that cannot be told."""
    one, other = runs
    for key, what in (("evals", "validation"), ("steps", "training")):
        ends = []
        for run in runs:
            values = of(getattr(run, key), "loss")
            values = values[np.isfinite(values)]
            last = max(1, len(values) // 20) if key == "steps" else 1
            ends.append(float(values[-last:].mean()) if len(values) else math.nan)
        if all(map(math.isfinite, ends)) and one.in_nats == other.in_nats:
            names, better = names_of(runs), int(ends[1] < ends[0])
            lower, higher = ends[better], ends[1 - better]
            if lower == higher:
                return f"Both runs end with a {what} loss of {lower:.4f}."
            return (
                f"{names[better]} ends with the lower {what} loss: {lower:.4f}, {higher - lower:.4f} below "
                f"{names[1 - better]} ({higher:.4f})."
            )
    return ""


def differences(runs: Sequence[RunRecords]) -> list[tuple[str, list[Any]]]:
    """Return (key, its value in each run) of the keys of the config that differ, and versions, devices and data."""
    configs = [run.config for run in runs]
    keys = sorted({key for config in configs for key in config if isinstance(key, str)} - _OWN_OF_A_RUN)
    found = [(key, [config.get(key) for config in configs]) for key in keys]
    heads = [run.head for run in runs]
    versions = [head["versions"] if isinstance(head.get("versions"), dict) else {} for head in heads]
    found += [(name, [version.get(name) for version in versions]) for name in sorted({n for v in versions for n in v})]
    found += [("parameters", [head.get("parameters") for head in heads])]
    return [(key, values) for key, values in found if any(value != values[0] for value in values[1:])]

"""The charts of runs: for each what it says in a sentence, and the lines that the page draws."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..reporting.text import count_text, lr_text
from .curves import curve, first_gpu, lines, short
from .records import Json, RunRecords, number, of

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "preferences": ("reward", "mean_reward", "logps", "logits", "nll", "kl", "odds", "log_odds", "margin", "accurac"),
    "routing": ("expert", "router"),
    "metrics": ("",),
}
"""Sections of metrics, by what the names of metrics begin with."""


@dataclass(frozen=True)
class Chart:
    """A chart: `says` what it shows in a sentence, which is its name for screen readers; `drawn` is what it draws.

    drawn   lines, and: `log` if its heights may be logarithmic, `zero` if they begin at 0, `unit`, `tall`, `refs`
            (horizontal lines), `marks` (steps that were not applied). Of a line: `best`, the index of the value with a
            ring, which is `said` in the key
    """

    id: str
    says: str
    drawn: Json


def loss_chart(runs: Sequence[RunRecords]) -> Chart:
    """Return the chart of the losses of training and validation."""
    run = runs[0]
    marks = [record["step"] for record in run.steps if record.get("skipped")][:200]
    shown = list(lines(runs, "loss"))
    drawn = {"log": True, "tall": True, "marks": marks, "lines": shown}
    if (best := run.best_eval) is not None:
        held = next(line for line in shown if line["x"] == "eval" and line["run"] == 0)
        held |= {"best": best, "said": f"step {run.evals[best]['step']:,}"}
    return Chart("loss", _loss_says(run), drawn)


def _loss_says(run: RunRecords) -> str:
    unit = " nats per token" if run.in_nats else ""
    losses = of(run.evals, "loss")
    known = np.flatnonzero(np.isfinite(losses))
    if len(known):
        best, last = known[np.argmin(losses[known])], known[-1]
        where = "the last is the best" if best == last else f"the best was {losses[best]:.4f} {_at(run.evals[best])}"
        return f"Validation loss {losses[last]:.4f}{unit} {_at(run.evals[last])}; {where}."
    training = of(run.steps, "loss")
    if not np.isfinite(training).any():
        return "No step has a loss that is a number."
    last = max(1, len(training) // 20)
    return f"Training loss {np.nanmean(training[-last:]):.4f} in the last {_steps(last)}; nothing is held out."


def _at(record: Json) -> str:
    return f"at step {record['step']:,}"


def _steps(count: int) -> str:
    return f"{count:,} steps" if count != 1 else "step"


def step_charts(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    """Yield the charts that every run has: norm, rate, tokens per second, and of the device what is known."""
    run = runs[0]
    clip, norms = number(run.config.get("max_grad_norm")), of(run.steps, "norm")
    clipped = float((norms > clip).mean()) if clip > 0 and len(norms) else 0.0
    says = f"Gradient norm. {clipped:.0%} of the steps were clipped to {clip:g}." if clipped else "Gradient norm."
    refs = [{"name": "clipped above", "y": clip}] * (clipped > 0)
    yield Chart("norm", says, {"log": True, "refs": refs, "lines": list(lines(runs, "norm", "norm"))})
    rates, schedule = of(run.steps, "lr"), run.config.get("lr_scheduler_type")
    says = f"Learning rate: {lr_text(float(np.nanmax(rates)))} at most" if np.isfinite(rates).any() else "Learning rate"
    says += f", {schedule}." if isinstance(schedule, str) else "."
    yield Chart("lr", says, {"zero": True, "lines": list(lines(runs, "lr", "rate", smooth=False))})
    yield _speed(runs)
    mfu = of(run.steps, "mfu")
    if np.isfinite(mfu).any():
        percent = {"name": "MFU", "run": 0, "x": "train", "colour": "c1", "smooth": True, **curve(100 * mfu)}
        says = f"Model FLOPs utilization: {100 * np.nanmedian(mfu):.1f} % in the median."
        yield Chart("mfu", says, {"zero": True, "unit": "%", "lines": [percent]})
    elif found := _flops(run):
        yield found
    yield from _telemetry(run)


def _speed(runs: Sequence[RunRecords]) -> Chart:
    run = runs[0]
    planned = number(run.planned.get("tokens_per_second"))
    says = f"{count_text(run.rate)} tokens/s in the median" if math.isfinite(run.rate) else "Tokens per second"
    if planned > 0 and math.isfinite(run.rate):
        says += f": {run.rate / planned:.0%} of the {count_text(planned)} that the plan expects"
    refs = [{"name": "plan", "y": planned}] * (planned > 0)
    drawn = {"zero": True, "refs": refs, "lines": list(lines(runs, "tokens_per_second", "tokens/s"))}
    return Chart("speed", f"{says}.", drawn)


def _flops(run: RunRecords) -> Chart | None:
    """Return the chart of the arithmetic of each device, by the FLOPs that the plan counts."""
    if run.plan is None or not run.plan["step"].get("model_flops"):
        return None
    step, devices = run.plan["step"], run.plan["device"]["count"]
    a_token = step["model_flops"] / step["tokens"]
    used = of(run.steps, "tokens_per_second") * a_token / devices
    if not np.isfinite(used).any():
        return None
    unit, name = (1e12, "TFLOP/s") if np.nanmedian(used) >= 1e12 else (1e9, "GFLOP/s")
    each = " of each device" if devices > 1 else ""
    says = f"{np.nanmedian(used) / unit:.3g} {name}{each} in the median: {a_token / 1e6:,.4g} MFLOP a token, "
    one = {"name": name, "run": 0, "x": "train", "colour": "c1", "smooth": True, **curve(used / unit)}
    return Chart("flops", f"{says}nothing recomputed.", {"zero": True, "lines": [one]})


def _telemetry(run: RunRecords) -> Iterator[Chart]:
    records = first_gpu(run)
    used, power = of(records, "memory_used_bytes") / 2**30, of(records, "power_watts")
    line = {"run": 0, "x": "gpu", "colour": "c1"}
    if np.isfinite(used).any():
        planned = number(run.planned.get("device_bytes")) / 2**30
        refs = [{"name": "plan", "y": planned}] * (planned > 0)
        says = f"Memory of the GPU: {np.nanmax(used):.2f} GiB at most."
        one = line | {"name": "used", "y": short(used)}
        yield Chart("gpu-memory", says, {"zero": True, "unit": "GiB", "refs": refs, "lines": [one]})
    if np.isfinite(power).any():
        says = f"Power of the GPU: {np.nanmedian(power):.0f} W in the median."
        one = line | {"name": "power", "y": short(power)}
        yield Chart("power", says, {"zero": True, "unit": "W", "lines": [one]})


def metric_charts(runs: Sequence[RunRecords]) -> dict[str, list[Chart]]:
    """Return {section: charts} of what only some losses and models report. A plugin's metric needs no code here."""
    run, found = runs[0], defaultdict[str, list[Chart]](list)
    names = run.metrics
    for index, name in enumerate(names):
        section = next(section for section, starts in SECTIONS.items() if name.lower().startswith(starts))
        chart = f"metric-{index}"  # names of plugins may hold anything
        other = name.replace("chosen", "rejected")
        if name != other and other in names:
            found[section].append(_both(run, chart, name, other))
        elif name == name.replace("rejected", "chosen") or name.replace("rejected", "chosen") not in names:
            refs = [{"name": "chance", "y": 0.5}] * name.endswith(("accuracy", "accuracies"))
            drawn = {"refs": refs, "lines": list(lines(runs, name))}
            found[section].append(Chart(chart, _metric_says(run, name), drawn))
    return {section: found[section] for section in SECTIONS if found[section]}


def _metric_says(run: RunRecords, name: str) -> str:
    title = words(name)
    held, trained = of(run.evals, name), of(run.steps, name)
    form = ".1%" if "accurac" in name else ".4g"
    if np.isfinite(held).any():
        return f"{title}: {held[np.isfinite(held)][-1]:{form}} in the last evaluation."
    finite = trained[np.isfinite(trained)]
    return f"{title}: {finite[-1]:{form}} in the last step." if len(finite) else f"{title}."


def _both(run: RunRecords, chart: str, chosen: str, rejected: str) -> Chart:
    """Return one chart of a metric of chosen answers and of rejected ones."""
    drawn: list[Json] = []
    for name, side, colour in ((chosen, "chosen", "c1"), (rejected, "rejected", "c2")):
        for one in lines([run], name, side, colours=False):
            held = {"dash": True, "name": f"{side}, held out"} if one["x"] == "eval" else {}
            drawn.append(one | {"colour": colour} | held)
    dashed = "; dashed: held out" if any(one.get("dash") for one in drawn) else ""
    what = words(chosen).replace("chosen", "").strip(" /")
    return Chart(chart, f"{what} of chosen and rejected answers{dashed}.", {"lines": drawn})


def words(name: str) -> str:
    """Return the name of a metric as words: "rewards/margins" as "Rewards margins"."""
    text = name.replace("_", " ").replace("logps/", "log probability ").replace("/", " ").strip()
    return text[:1].upper() + text[1:]

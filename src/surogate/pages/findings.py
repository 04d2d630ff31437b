"""Findings of a run: what a reader of its curves should not have to look for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from ..reporting.text import count_text
from .records import Numbers, RunRecords, number, of

LEAST_STEPS = 60
"""Steps of a run below which its loss has no usual value."""


_EARLIER = 3
"""Most ends before the last start that are reported: the latest."""


class Finding(NamedTuple):
    """A sentence, and how much it matters."""

    weight: Literal["bad", "warn", "note"]
    text: str


Rule = Callable[[RunRecords], Iterator[Finding]]


def findings(run: RunRecords) -> list[Finding]:
    """Return what stands out, the most important first."""
    found = [finding for rule in RULES for finding in rule(run)]
    order = ("bad", "warn", "note")
    return sorted(found, key=lambda finding: order.index(finding.weight))


def _ended(run: RunRecords) -> Iterator[Finding]:
    of_total = f" of {run.total:,}" if run.total else ""
    if run.end and run.state != "running":
        failed = run.end.get("status") != "interrupted"
        why = f": {run.end['message']}" if failed else f", by {run.end['message']}."
        yield Finding("bad" if failed else "warn", f"The run ended after step {run.done:,}{of_total}{why}")
    elif run.state == "killed":
        yield Finding("bad", f"The process of the run is gone after step {run.done:,}{of_total}: it was killed.")
    elif run.state == "stopped" and run.done < run.total:
        yield Finding("warn", f"The run ended after step {run.done:,}{of_total}.")
    elif run.stop_reason:
        yield Finding("note", f"The run ended after step {run.done:,}{of_total}, by {run.stop_reason}.")


def _best_weights(run: RunRecords) -> Iterator[Finding]:
    weights = run.outputs.get("weights_step")
    if isinstance(weights, int) and weights != run.done:
        by = f"{run.outputs.get('metric')} ({number(run.outputs.get('best_value')):.4f})"
        yield Finding("note", f"The outputs have the weights after step {weights:,}, the best by {by}.")


def _not_finite(run: RunRecords) -> Iterator[Finding]:
    if skipped := [record["step"] for record in run.steps if record.get("skipped")]:
        yield Finding("bad", f"{_steps(skipped)} not applied, because a number was not finite.")
    applied = [record for record in run.steps if not record.get("skipped")]
    wrong = [record["step"] for record in applied if "loss" in record and math.isnan(number(record["loss"]))]
    if wrong:
        yield Finding("bad", f"{_steps(wrong)} with a loss that is NaN or infinite.")
    held = [record["step"] for record in run.evals if "loss" in record and math.isnan(number(record["loss"]))]
    if held:
        yield Finding(
            "bad",
            f"Validation loss NaN or infinite at step {held[0]:,}" + f" and {len(held) - 1:,} more." * (len(held) > 1),
        )


def _steps(steps: list[int]) -> str:
    return f"Step {steps[0]:,}" if len(steps) == 1 else f"{len(steps):,} steps, the first {steps[0]:,},"


def _spikes(run: RunRecords) -> Iterator[Finding]:
    loss = of(run.steps, "loss")
    if np.isfinite(loss).sum() < LEAST_STEPS or (run.evals and not run.in_nats):
        return  # a loss of a few pairs jumps by its nature
    usual = _running_median(loss, 25)
    off, late = loss - usual, np.arange(len(loss)) > min(len(loss) // 20, 100)  # it may begin high
    spikes = np.flatnonzero((off > np.maximum(4 * np.nanpercentile(np.abs(off[late]), 95), 1e-3)) & late)
    if len(spikes):
        at = spikes[np.argmax(off[spikes])]
        largest = f"{loss[at]:.3f} at step {run.steps[at]['step']:,}, where {usual[at]:.3f} is usual"
        what = "The loss has a spike:" if len(spikes) == 1 else f"The loss has {len(spikes):,} spikes. The largest is"
        yield Finding("warn", f"{what} {largest}.")


def _running_median(values: Numbers, half: int) -> Numbers:
    padded = np.concatenate([np.full(half, np.nan), values, np.full(half, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    ordered = np.sort(windows, axis=1)  # NaN last, which np.nanmedian would look for in each window by itself
    known = np.isfinite(windows).sum(axis=1)
    found: Numbers = ordered[np.arange(len(values)), np.maximum(known - 1, 0) // 2]
    return found


def _validation_rises(run: RunRecords) -> Iterator[Finding]:
    losses = of(run.evals, "loss")
    known = np.flatnonzero(np.isfinite(losses))
    if len(known) < 2 or run.outputs.get("weights_step", run.done) != run.done:
        return  # the outputs have the best weights
    best, last = known[np.argmin(losses[known])], known[-1]
    if losses[last] > losses[best] + 0.01 * abs(losses[best]):
        yield Finding(
            "warn",
            f"Validation was best at step {run.evals[best]['step']:,} ({losses[best]:.4f}) and has risen to "
            f"{losses[last]:.4f} since: fewer steps, a lower rate or more data may be better.",
        )


def _chosen_fall(run: RunRecords) -> Iterator[Finding]:
    for chosen in (name for name in run.metrics if "chosen" in name and name.startswith("reward")):
        values = of(run.evals or run.steps, chosen)
        margins = values - of(run.evals or run.steps, chosen.replace("chosen", "rejected"))
        known = np.flatnonzero(np.isfinite(margins))
        if len(known) > 1 and values[known[-1]] < min(0.0, values[known[0]]) and margins[known[-1]] > margins[known[0]]:
            yield Finding(
                "warn",
                f"The margin grows while chosen answers become less likely too (reward {values[known[-1]]:.3g}): a "
                "lower rate, or a loss that also trains the chosen answers, keeps them.",
            )


def _clipping(run: RunRecords) -> Iterator[Finding]:
    clip = number(run.config.get("max_grad_norm"))
    norms = of(run.steps, "norm")[len(run.steps) // 2 :]
    if clip > 0 and len(norms) >= LEAST_STEPS // 2 and (share := float((norms > clip).mean())) > 0.9:
        yield Finding(
            "note",
            f"The gradient is clipped in {share:.0%} of the later steps (usual norm {np.nanmedian(norms):.3g}, "
            f"max_grad_norm {clip:g}): the rate is in effect lower than it says.",
        )


def _speed(run: RunRecords) -> Iterator[Finding]:
    planned = number(run.planned.get("tokens_per_second"))
    if planned > 0 and math.isfinite(run.rate) and not 0.7 < run.rate / planned < 1.4:
        slower = run.rate < planned
        yield Finding(
            "note",
            f"{count_text(run.rate)} tokens/s, where the plan expects {count_text(planned)}"
            + (": surogate profile shows which ops take the time." if slower else "."),
        )


def _devices(run: RunRecords) -> Iterator[Finding]:
    power, limit = of(run.gpus, "power_watts"), of(run.gpus, "power_limit_watts")
    if np.isfinite(power).any() and (share := float((power > 0.97 * limit).mean())) > 0.2:
        yield Finding("note", f"The power limit was reached in {share:.0%} of the samples.")
    used, planned = of(run.gpus, "memory_used_bytes"), number(run.planned.get("device_bytes"))
    if np.isfinite(used).any() and planned > 0 and (most := float(np.nanmax(used))) > 1.05 * planned:
        yield Finding(
            "note",
            f"A GPU had {most / 2**30:.2f} GiB in use, of which the run planned {planned / 2**30:.2f}: another "
            "program was on it too.",
        )


def _resumed(run: RunRecords) -> Iterator[Finding]:
    if run.resumed:
        steps = list(dict.fromkeys(run.resumed))
        where = ", ".join(f"{step:,}" for step in steps[:5]) + ", ..." * (len(steps) > 5)
        yield Finding("note", f"Resumed after step {where}.")
    for end in run.earlier[-_EARLIER:]:
        yield Finding("note", f"It had ended before: {end['message']}")


def _problems(run: RunRecords) -> Iterator[Finding]:
    yield from (Finding("note", problem) for problem in run.problems)


RULES: tuple[Rule, ...] = (
    *(_ended, _best_weights, _not_finite, _spikes, _validation_rises, _chosen_fall),
    *(_clipping, _speed, _devices, _resumed, _problems),
)

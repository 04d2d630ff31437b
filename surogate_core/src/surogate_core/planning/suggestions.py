"""What to change when a run does not fit.

Every combination of changes is estimated, which is cheap; the best ones are planned before they are suggested. So the
savings and the cost of a suggestion are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ..config.keys import ADAPTER_FLAG
from ..config.load import load_config, resolved
from ..errors import ConfigError, SurogateError
from ..machine.devices import GIB
from .candidates import Candidate, candidates
from .plan import Plan, plan_inputs, plan_run
from .report import Report
from .run import Run, open_run

_TRIES = 3
"""How many combinations whose estimate fits are planned at most."""


@dataclass(frozen=True)
class Suggestion:
    """Changes of the config to make together. Each is a line of YAML, or several separated by ", ".

    saves    bytes on the device
    costs    additional seconds per step; a step keeps its tokens
    missing  bytes that still do not fit; 0 if the run fits
    """

    changes: tuple[str, ...]
    saves: int
    costs: float
    missing: int


def suggest(run: Run, plan: Plan, count: int = 3) -> list[Suggestion]:
    """Return up to `count` alternatives that make a run fit, the cheapest in time first.

    If one change is enough, the suggestions are single changes. Otherwise they are the cheapest combination that fits;
    before it, if it needs shorter rows, the one that saves most without; and training an adapter, if the run trains all
    weights. Empty for a run that fits, and if nothing can be changed.
    """
    if plan.report.fits:
        return []
    room, step = plan.report.device.memory_bytes, plan.report.step.seconds
    every = sorted(candidates(run, plan), key=lambda c: (c.halvings, round(c.costs / step, 2), len(c.changes)))
    hopeful = [c for c in every if c.total <= room]
    single = [c for c in hopeful if len(c.changes) == 1 and not c.halvings]
    planned = list(islice(_planned(plan, single), count + 1))
    enough = sorted((s for s in planned if not s.missing), key=lambda s: (s.costs, -s.saves))
    return enough[:count] or [*_combined(plan, every, hopeful), *_adapter(run, plan)][:count]


def one_line(suggestion: Suggestion) -> str:
    """Return a suggestion as part of a sentence: `a: true, b: 1 (saves 5.1 GiB)`."""
    missing = f", {suggestion.missing / GIB:.1f} GiB still missing" if suggestion.missing else ""
    return f"{', '.join(suggestion.changes)} (saves {suggestion.saves / GIB:.1f} GiB{missing})"


def _combined(plan: Plan, every: list[Candidate], hopeful: list[Candidate]) -> Iterator[Suggestion]:
    """Yield the first of `hopeful` that fits when planned; before it, if its rows are shorter, the best without."""
    whole = [c for c in every if not c.halvings]
    if whole and not (hopeful and not hopeful[0].halvings):
        most = next(_planned(plan, sorted(whole, key=lambda c: c.total)), None)
        if most and most.saves > 0:
            yield most
        if most and not most.missing:
            return
    for planned in islice(_planned(plan, hopeful), _TRIES):
        if not planned.missing:
            yield planned
            return


def _adapter(run: Run, plan: Plan) -> Iterator[Suggestion]:
    """Suggest training an adapter with the other keys unchanged, if all weights are trained now."""
    loaded = run.loaded
    if loaded.config.adapter is not None:
        return
    try:
        raw = {**resolved(loaded), ADAPTER_FLAG.key: True}
        changed = load_config(raw, registry=run.registry, mode=loaded.mode, source=loaded.source)
        adapted = open_run(changed, run.registry)
        after = plan_run(adapted, plan.target.device, plan.report.world_size)
    except SurogateError:  # no adapter is installed, or this run cannot have one
        return
    own = _suggestion(plan, (f"{ADAPTER_FLAG.key}: true",), after.report)
    further = next((s for s in suggest(adapted, after, 1) if not s.missing), None)
    if further:
        yield Suggestion((*own.changes, *further.changes), own.saves + further.saves, own.costs + further.costs, 0)
    elif own.saves > 0:
        yield own


def _planned(plan: Plan, hopeful: Iterable[Candidate]) -> Iterator[Suggestion]:
    """Plan candidates in order. Those of a size that is refused, such as by the recipe, are left out."""
    refused: set[tuple[int, int]] = set()
    for candidate in hopeful:
        size = candidate.inputs.batch_size, candidate.inputs.seq_len
        if size in refused:
            continue
        try:
            after = plan_inputs(candidate.inputs)
        except ConfigError:
            refused.add(size)
            continue
        yield _suggestion(plan, candidate.changes, after.report)


def _suggestion(plan: Plan, changes: tuple[str, ...], after: Report) -> Suggestion:
    before, total = plan.report, after.device_bytes["total"]
    seconds = after.step.seconds * before.tokens / after.tokens
    missing = max(0, total - before.device.memory_bytes)
    return Suggestion(changes, before.device_bytes["total"] - total, seconds - before.step.seconds, missing)

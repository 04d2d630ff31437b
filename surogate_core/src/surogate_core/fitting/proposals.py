"""Settings that fit a device, the fastest first: what `--fit` shows, and the suggestions of a run that does not fit.

One search serves both. It estimates every combination of micro-batch, recomputation and offloading, and plans the best
ones. An optimizer step keeps its rows, so these settings change nothing but the order in which gradients are summed.
Last resorts change what the run learns: gradients and optimizer states in bf16, an adapter, shorter rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ..errors import SurogateError
from ..machine.devices import GIB
from ..planning.plan import Plan, plan_run
from ..planning.run import Run
from .changes import LAST_RESORTS, Changes, adapter_change, changed, yaml_lines
from .estimates import Candidate, Estimates

_EFFORT = 9
"""Families of programs that are assembled to verify candidates, more only until one fits. A plan that chooses
recomputation takes about three."""
_MOST_EFFORT = 18
_ALIKE = 0.005
"""Steps whose times differ by less than this are equally fast: the fewer changes win."""
_LESS = 0.98
"""A slower proposal is shown if it takes at most this share of the device memory of a faster one."""
_LESS_HOST = 0.75
"""The same of the host memory."""
_SLOWER = 1.25
"""A proposal that takes longer than this, over the fastest, is not shown."""
_FASTER = 0.95
"""A last resort is shown next to what needs none if its step takes at most this share of the time."""
_ENOUGH = 1.01
"""Offloading is not tried if what fits without it is at most this many times as slow as without a limit of memory."""


@dataclass(frozen=True)
class Proposal:
    """Changes of the config to make together, and the plan of the run with them. A step keeps its tokens."""

    changes: Changes
    plan: Plan

    @property
    def resort(self) -> str:
        """What the run gives up, if the changes are a last resort; "" if they keep what it learns."""
        return ", ".join(dict.fromkeys(LAST_RESORTS[key] for key in self.changes if key in LAST_RESORTS))

    @property
    def fits(self) -> bool:
        return self.plan.report.fits

    @property
    def lines(self) -> list[str]:
        """The changes as lines of YAML."""
        return yaml_lines(self.changes)

    def saves(self, before: Plan) -> int:
        """Return by how many bytes a device needs less than in the plan `before`."""
        return before.report.device_bytes["total"] - self.plan.report.device_bytes["total"]

    def costs(self, before: Plan) -> float:
        """Return the time that is added to a step, over the time of a step in the plan `before`."""
        after, step = self.plan.report, before.report.step.seconds
        return after.step.seconds * before.report.tokens / after.tokens / step - 1


def propose(run: Run, plan: Plan, count: int = 5) -> list[Proposal]:
    """Return up to `count` settings that fit the device of `plan`, the fastest first; if none does, last resorts.

    The first one has no changes if the run as it is is the fastest.
    """
    search = _Search(run, plan)
    return search.fastest(count) or [p for p in search.last_resorts() if p.fits][:count]


def suggest(run: Run, plan: Plan, count: int = 3) -> list[Proposal]:
    """Return up to `count` changes for a run that does not fit: the fastest that fit, then faster last resorts.

    If nothing fits, a last resort may not either, but saves memory: `plan.report` says what is missing. Empty for a run
    that fits.
    """
    if plan.report.fits:
        return []
    search = _Search(run, plan)
    same = search.fastest(1 if adapter_change(run) else count - 1)
    return [*same, *search.last_resorts(same, shorter=not same)][:count]


def one_line(proposal: Proposal, before: Plan) -> str:
    """Return a proposal as part of a sentence: `a: true, b: 1 (saves 5.1 GiB)`."""
    saved, missing = proposal.saves(before), proposal.plan.report.missing_bytes
    effect = (
        f"saves {saved / GIB:.1f} GiB" if before.report.missing_bytes > 0 else f"{proposal.costs(before):+.0%} time"
    )
    rest = f", {missing / GIB:.1f} GiB still missing" if missing > 0 else ""
    return f"{', '.join(proposal.lines)} ({effect}{rest})"


class _Search:
    def __init__(self, run: Run, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._estimates = Estimates(run, plan)

    def fastest(self, count: int) -> list[Proposal]:
        """Return what fits without last resorts."""
        hopeful = self._hopeful(self._estimates.candidates())
        enough = _ENOUGH * self._estimates.fastest_without_limit()
        if min((candidate.seconds for candidate in hopeful), default=inf) > enough:
            hopeful = self._hopeful(self._estimates.candidates(offload=True))
        return self._verified(hopeful, count)

    def last_resorts(self, same: Sequence[Proposal] = (), *, shorter: bool = False) -> Iterator[Proposal]:
        """Yield what fits with bf16 gradients and states, or else what saves most; then an adapter.

        same     what fits without last resorts. Dtypes must then be worth their price: faster than all of it
        shorter  if dtypes are not enough, with shorter rows too
        """
        limit = _FASTER * min((p.plan.report.step.seconds for p in same), default=inf)
        every = list(self._estimates.candidates(dtypes=True, offload=True))
        resorts = (c for c in every if c.seconds <= limit and c.changes.keys() & LAST_RESORTS.keys())
        found = self._verified(self._hopeful(resorts), 1)
        yield from (proposal for proposal in found if proposal.plan.report.step.seconds <= limit)
        if not found and not same:
            smallest = sorted(filter(self._suits_host, every), key=lambda c: (c.total, len(c.changes)))[:1]
            yield from (proposal for proposal in self._planned(smallest) if proposal.saves(self._plan) > 0)
            if shorter:
                rows = self._estimates.candidates(dtypes=True, offload=True, shorter=True)
                yield from self._verified(self._hopeful(rows), 1)
        yield from self._adapter()

    def _adapter(self) -> Iterator[Proposal]:
        """Yield an adapter in place of all weights, with the changes that it needs."""
        change = adapter_change(self._run)
        report = self._plan.report
        if not change:
            return
        try:
            run = changed(self._run, change)
            plan = plan_run(run, report.device, report.world_size, host_memory=self._plan.inputs.host_memory)
        except SurogateError:  # no adapter is installed, or this run cannot have one
            return
        found = Proposal({}, plan) if plan.report.fits else next(iter(_Search(run, plan).fastest(1)), None)
        adapted = found or Proposal({}, plan)
        if adapted.saves(self._plan) > 0:
            yield Proposal({**change, **adapted.changes}, adapted.plan)

    def _hopeful(self, every: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates whose estimates fit."""
        device = self._plan.report.device
        return [c for c in every if c.total <= device.memory_bytes and self._suits_host(c)]

    def _suits_host(self, candidate: Candidate) -> bool:
        host = self._plan.inputs.host_memory
        return host is None or candidate.host <= max(host, 0)

    def _verified(self, hopeful: list[Candidate], count: int) -> list[Proposal]:
        """Return up to `count` of the candidates that fit when they are planned, the fastest first."""
        found: list[Proposal] = []
        effort = 0
        for proposal in self._planned(hopeful):
            effort += 1 if proposal.plan.chosen is None else 3
            found += [proposal] if proposal.fits else []
            if len(found) == count or effort >= (_EFFORT if found else _MOST_EFFORT):
                break
        best = min((p.plan.report.step.seconds for p in found), default=0.0)
        found = [p for p in found if p.plan.report.step.seconds <= _SLOWER * best]
        shown: list[Proposal] = []
        for proposal in sorted(found, key=lambda p: (_grade(p.plan.report.step.seconds, best), len(p.changes))):
            after = proposal.plan.report
            sizes = after.device_bytes["total"], after.pinned_bytes
            shown += [] if any(_is_no_smaller(*sizes, faster.plan) for faster in shown) else [proposal]
        return shown

    def _planned(self, candidates: Iterable[Candidate]) -> Iterator[Proposal]:
        """Plan candidates, the fastest first; equally fast ones by the number of changes.

        Left out are those that are no better in any respect than one before them that fits, those much slower, and
        those like one that a plugin refuses, such as a recipe its micro-batch. A plan that takes longer than estimated
        corrects the estimates of those that offload the same or more.
        """
        refused: list[Candidate] = []
        fitting: list[tuple[Candidate, Plan]] = []
        late: list[tuple[Candidate, float]] = []
        left = _sorted(candidates, late)
        while left:
            candidate = left.pop(0)
            if any(_is_more(candidate, other) for other in refused):
                continue
            if any(
                _is_more(candidate, other) or _is_no_smaller(candidate.total, candidate.host, plan)
                for other, plan in fitting
            ):
                continue
            if any(candidate.seconds > _SLOWER * plan.report.step.seconds for _, plan in fitting):
                continue
            try:
                plan = self._estimates.planned(candidate.changes)
            except SurogateError:
                refused.append(candidate)
                continue
            if plan.report.fits:
                fitting.append((candidate, plan))
            yield Proposal(candidate.changes, plan)
            late.append((candidate, plan.report.step.seconds / candidate.seconds))
            left = _sorted(left, late)


def _sorted(candidates: Iterable[Candidate], late: Sequence[tuple[Candidate, float]]) -> list[Candidate]:
    """Return candidates in the order in which they are planned, shorter rows last.

    late  candidates that were planned, and the time of the plan over that of the estimate
    """

    def seconds(candidate: Candidate) -> float:
        like = (by for other, by in late if other.offload and _is_more(candidate, other))
        return candidate.seconds * max((1.0, *like))

    every = [(candidate, seconds(candidate)) for candidate in candidates]
    best = min((seconds for _, seconds in every), default=0.0)
    every.sort(key=lambda one: (one[0].batch.halvings, _grade(one[1], best), len(one[0].changes), one[1]))
    return [candidate for candidate, _ in every]


def _is_more(candidate: Candidate, other: Candidate) -> bool:
    """Return whether a candidate has the micro-batch of another and offloads the same or more."""
    return candidate.batch == other.batch and candidate.offload >= other.offload


def _is_no_smaller(device: float, host: float, plan: Plan) -> bool:
    """Return whether these bytes of device and pinned memory are about as much as `plan` takes, or more."""
    report = plan.report
    return device > _LESS * report.device_bytes["total"] and host >= _LESS_HOST * report.pinned_bytes


def _grade(seconds: float, best: float) -> int:
    """Return how much slower than `best`, in steps that are worth a change."""
    return round((seconds / best - 1) / _ALIKE) if best else 0

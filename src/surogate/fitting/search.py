"""The search for the fastest settings that fit: one change after another, each planned, and kept if the run is faster.

A run has axes: its recomputation, what its ranks divide, each offload strategy, and its micro-batch. The settings of an
axis are ordered by the device memory that they leave free. The search starts from the run's own settings. If these do
not fit, it takes as many axes as it must to their last setting. Then it moves along one axis after another, as long as
the run gets faster by what sketches let expect. Only the end of the way is finished, with the recomputation that it
needs. If that is slower than expected, the search takes another way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Sequence
from functools import cache
from math import inf
from typing import Any

from surogate_core.assembly.assemble import offloaded, record
from surogate_core.assembly.draft import Draft
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.errors import SurogateError
from surogate_core.memory.alignment import align
from surogate_core.planning.plan import Plan
from surogate_core.planning.report import memory_is_the_hosts
from surogate_core.program.value import Value

from ..runs.inputs import run_inputs
from ..runs.plan import sketch_run
from ..runs.run import Run
from .changes import (
    ALIKE,
    WORTH,
    Axis,
    Changes,
    Proposal,
    batch_axis,
    changed,
    divided_axes,
    offload_axes,
    recompute_axis,
    with_level,
)

_LITTLE = 0.01
"""Offloading is not tried if recomputation takes at most this share of a step."""

Settings = tuple[int, ...]
"""The index of a setting for each axis."""


class Search:
    """The search for a run whose plan is `plan`, with at most `most` plans, for what takes less than `seconds`.

    strategies  an axis for each offload strategy that moves enough to be worth it, what is copied least often first
    """

    def __init__(self, run: Run, plan: Plan, most: int, seconds: float = inf) -> None:
        self._run, self._plan, self._most = run, plan, most
        recompute, batch = recompute_axis(run, plan.target.device), batch_axis(run.config)
        divided = list(filter(self._is_allowed, divided_axes(run, plan))) if plan.inputs.world_size > 1 else []
        self._recordings: dict[Hashable, Draft] = {programs_of(plan.inputs): plan.recording}
        self._on_host = cache(self._find_on_host)
        self._judged_with: Changes = {} if plan.report.fits else self._judging(divided, batch)
        strategies = sorted(map(self._useful, offload_axes(run)), key=self._traffic)
        self.strategies: Sequence[Axis] = strategies
        self._axes, self._n_divided = [recompute, *divided, *strategies, batch], len(divided)
        self._own = tuple(axis.own for axis in self._axes)
        self._tried: dict[Settings, Proposal | None] = {}
        self._limit = seconds
        if not self._changes(self._own):
            self._tried[self._own] = Proposal({}, plan)

    def proposals(self) -> list[Proposal]:
        """Return what was tried: the fastest one finished, others as sketches."""
        while True:
            at = self._own if self._fits(self._own) else self._first_that_fits(self._own)
            if self._fits(at):
                at = self._climbed(at)
            found = self._planned(at)
            if not found or not found.plan.recompute_levels or found.seconds >= self._limit:
                return [proposal for proposal in self._tried.values() if proposal]
            self._tried[at] = found.finished()

    # --------------------------------------------------------------------------------------------------------- the way

    def _first_that_fits(self, own: Settings) -> Settings:
        """Return settings that fit, with as few of the first axes at their last setting as that takes: not slower than
        with all of them.

        Nothing is offloaded if all else is enough for several ranks. If the host has no room for all that can be
        offloaded, the last strategies are turned off. If nothing fits, return the settings that take least of the
        device.
        """
        order = [len(own) - 1, *range(len(own) - 1)]  # micro-batch first: the split of the file must not matter
        last = tuple(len(axis.settings) - 1 for axis in self._axes)

        def prefix(count: int) -> Settings:
            return tuple(last[i] if i in order[:count] else own[i] for i in range(len(own)))

        counts = range(1, 3 + self._n_divided)
        if not (self._n_divided and self._fits(prefix(counts[-1]))):
            counts = range(1, len(own) + 1)
            optional = [index for index, axis in enumerate(self._axes) if axis.transfers]
            while not self._fits(last):
                found = self._planned(last)
                if not optional or (found and not found.plan.report.missing_host_bytes):
                    return last
                index = optional.pop()
                last = (*last[:index], 0, *last[index + 1 :])
        longest = self._seconds(prefix(counts[-1]))
        return prefix(counts[bisect_left(counts, True, key=lambda count: self._fits(prefix(count), longest))])

    def _climbed(self, at: Settings) -> Settings:
        """Return the settings from which no move is expected to make the run faster."""
        *others, batch = range(len(at))
        moves = [
            (batch, 1),
            (batch, -1),
            *((index, -1) for index in reversed(others)),
            *((index, 1) for index in others),
        ]
        before = None
        while before != at:
            before = at
            for index, by in moves:
                while (to := self._next(at, index, by)) is not None and self._is_better(to, at):
                    at = to
        return at

    def _next(self, at: Settings, index: int, by: int) -> Settings | None:
        """Return the next settings in a direction that no plugin refuses. None: there are none, or no need of them."""
        axis, found = self._axes[index], self._planned(at)
        if axis.transfers and by > 0 and (found is None or found.plan.expected.share <= _LITTLE):
            return None
        rest = range(at[index] + by, len(axis.settings)) if by > 0 else range(at[index] - 1, -1, -1)
        others = ((*at[:index], to, *at[index + 1 :]) for to in rest)
        return next((to for to in others if not self._is_too_large(to) and self._planned(to)), None)

    def _is_better(self, to: Settings, at: Settings) -> bool:
        if not self._fits(to, self._seconds(at)):
            return False
        faster = self._seconds(to) / self._seconds(at)
        return faster < 1 - ALIKE or len(self._changes(to)) < len(self._changes(at))

    # ----------------------------------------------------------------------------------------------------------- plans

    def _changes(self, at: Settings) -> Changes:
        *others, batch = (axis.settings[index] for axis, index in zip(self._axes, at, strict=True))
        return with_level(self._run.config, {key: value for part in (batch, *others) for key, value in part.items()})

    def _fits(self, at: Settings, longest: float = inf) -> bool:
        """Return whether a run is expected to fit and to take no longer. Finishes what is uncertain."""
        if self._is_too_large(at) or not self._seconds(at) <= longest:
            return False
        found = self._planned(at)
        if found and not found.plan.expected.certain:
            self._tried[at] = found.finished()
        return self._seconds(at) < inf and self._seconds(at) <= longest

    def _is_too_large(self, at: Settings) -> bool:
        """Return whether weights, gradients and states alone are more than the device has: such a run is not planned.

        Not known if the run itself holds some on the host, or ranks divide others than in its plan.
        """
        parts = slice(1, 1 + self._n_divided)
        if at in self._tried or at[parts] != self._own[parts] or self._on_host(()):
            return False
        chosen = [axis.settings[index].items() for axis, index in zip(self._axes, at, strict=True) if axis.transfers]
        try:
            on_host = _bytes({value for setting in chosen for value in self._on_host((*setting,))})
        except SurogateError:
            return False
        if on_host and self._n_divided:
            return False
        report = self._plan.report
        lasting = sum(report.device_bytes[part] for part in ("weights", "gradients", "optimizer"))
        return lasting - on_host * self._plan.inputs.ranks_per_device > report.device.memory_bytes

    def _seconds(self, at: Settings) -> float:
        """Return the seconds of a step (`Proposal.seconds`); infinite if it does not fit."""
        found = self._planned(at)
        return found.seconds if found else inf

    def _planned(self, at: Settings) -> Proposal | None:
        """Return the plan with these settings. None: a plugin refuses them, or enough plans are made."""
        if at not in self._tried and len(self._tried) < self._most:
            try:
                self._tried[at] = self._sketched(at)
            except SurogateError:
                self._tried[at] = None
        return self._tried.get(at)

    def _sketched(self, at: Settings) -> Proposal:
        changes, device, own = dict(self._changes(at)), self._plan.target.device, self._plan.inputs
        run = changed(self._run, changes)
        recorded = programs_of(self._inputs(run))
        known = self._recordings.get(recorded)
        plan = sketch_run(run, device, own.world_size, host_memory=own.host_memory, recording=known, nodes=own.nodes)
        self._recordings[recorded] = plan.recording
        if self._run.config.recompute == "false" and changes.get("recompute") == "auto" and not plan.recompute_levels:
            del changes["recompute"]
        return Proposal(changes, plan)

    def _inputs(self, run: Run) -> PlanInputs:
        own = self._plan.inputs
        return run_inputs(run, self._plan.target.device, own.world_size, own.nodes)

    # ------------------------------------------------------------------------------------------ dividing and offloading

    def _is_allowed(self, axis: Axis) -> bool:
        try:
            return all(self._inputs(changed(self._run, setting)) for setting in axis.settings)
        except SurogateError:  # the optimizer cannot, or the files of the model
            return False

    def _judging(self, divided: Sequence[Axis], batch: Axis) -> Changes:
        """Return the changes of a run that does not fit with which strategies are judged: ranks may have to divide
        what the host holds. Records the programs, which the first plans need too.
        """
        levels = {key: value for axis in divided for key, value in axis.settings[-1].items()}
        if not levels:
            return {}
        changes = with_level(self._run.config, {**batch.settings[-1], **levels})
        try:
            inputs = self._inputs(changed(self._run, changes))
            self._recordings[programs_of(inputs)] = record(inputs)
        except SurogateError:
            return {}
        return changes

    def _useful(self, axis: Axis) -> Axis:
        """Return an axis without the settings that are refused, or that hold the bytes of another or hardly more.

        Where the host's memory is the device's, nothing more is offloaded.
        """
        kept, by_bytes, least = [axis.own], dict[int, int](), WORTH * self._plan.target.device.memory_bytes
        own = _bytes(self._on_host(()))
        on_host = memory_is_the_hosts(self._plan.target.device)
        for index, setting in enumerate(axis.settings[: axis.own + 1] if on_host else axis.settings):
            try:
                moved = _bytes(self._on_host((*setting.items(),))) - own
            except SurogateError:
                continue
            if not moved and index != axis.own:  # it moves activations
                kept.append(index)
            elif moved < 0 or moved >= least:
                by_bytes[moved] = index
        kept = sorted([*kept, *by_bytes.values()])
        return Axis([axis.settings[index] for index in kept], kept.index(axis.own), transfers=True)

    def _traffic(self, axis: Axis) -> int:
        """Return the order of an axis: by how often a step copies what its strategy holds.

        States are copied once a step, what micro-steps read is copied in each, and gradients in both directions.
        """
        order = {"state": 1, "param": 2, "grad": 3}
        on_host = self._on_host((*axis.settings[-1].items(),))
        return max((order["param" if value.derived else value.role] for value in on_host), default=0)

    def _find_on_host(self, changes: tuple[tuple[str, Any], ...]) -> Sequence[Value]:
        """Return the values that the strategies of the run with `changes` keep on the host. Raises like `assemble`."""
        judged = changed(self._run, self._judged_with)
        recording = self._recordings[programs_of(self._inputs(judged))]
        return offloaded(self._inputs(changed(judged, dict(changes))), recording).on_host


def programs_of(inputs: PlanInputs) -> Hashable:
    """Return what tells the recorded programs of the settings of a run apart."""
    return inputs.batch_size, inputs.sharding, inputs.grouping


def _bytes(values: Collection[Value]) -> int:
    return sum(align(value.nbytes) for value in values)

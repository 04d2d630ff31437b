"""Estimates of the memory and time of every combination of changes to a run, from a few plans.

Each of these plans is exact. Between and beyond them, activations grow with the tokens of a micro-step, and the time of
a step grows with its micro-steps. The ladder prices recomputation. What an offload strategy saves and costs is measured
alone, and added. So a combination costs no plan, and those that look best are planned afterwards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from ..errors import ConfigError, SurogateError
from ..memory.cost import program_cost
from .changes import Batch, Changes, Toggle, batch_changes, batches, changed, narrower, recompute_changes, toggles
from .plan import Plan, plan_exactly, plan_run, run_inputs
from .recompute_ladder import Rung, arena_bytes, ladder
from .run import Run

_T = TypeVar("_T")

_LARGER_BY = 16
"""Micro-batches are estimated up to this many times as large, and as small, as the config's."""


@dataclass(frozen=True)
class Candidate:
    """A combination of changes with estimates.

    total, host  bytes on the device, and of pinned memory for all devices
    seconds      of an optimizer step
    offload      names of the strategies that are turned on or off
    """

    changes: Changes
    batch: Batch
    offload: frozenset[str]
    total: float
    host: float
    seconds: float


@dataclass(frozen=True)
class _Recomputing:
    """Changes of the recomputation, and the rungs that the planner chooses from, the fastest first."""

    changes: Changes
    rungs: Sequence[Rung]


@dataclass(frozen=True)
class _Strategy:
    """What turning an offload strategy on or off adds, measured with the micro-batch of the config.

    total, arena       bytes on the device, and the part that grows with the tokens of a micro-step
    host, activations  the same of pinned memory
    seconds, each      of a step, and besides of each of its micro-steps
    copies             seconds of all copies of a step
    """

    toggle: Toggle
    total: int
    arena: int
    host: int
    activations: int
    seconds: float
    each: float
    copies: float


class Estimates:
    """Estimates for the changes of a run whose plan is `plan`."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._batches = batches(run.config)
        self._own = self._batches[0]
        self._plain = self.planned(recompute_changes(run.config, "false")) if plan.inputs.recomputation else plan
        self._points = [(self._own, self._plain), *self._another()]
        plain = replace(self._plain.inputs, recompute=frozenset[str]())
        self._rungs = ladder(self._plain.assembly, plain)
        arena = self._plain.assembly.memory.arena_bytes
        self._most = max(0, arena - arena_bytes(self._plain.assembly, plain, self._rungs[-1]))
        self._strategies: list[_Strategy] | None = None

    def fastest_without_limit(self) -> float:
        """Return the seconds of a step with the best micro-batch, if memory were no limit."""
        return min(self._seconds(batch) for batch in self._sizes(shorter=False))

    def candidates(self, *, dtypes: bool = False, shorter: bool = False, offload: bool = False) -> Iterator[Candidate]:
        """Yield combinations of micro-batch and recomputation; with offload strategies, dtypes and shorter rows too."""
        report = self._plan.report
        narrow = narrower(self._plan.inputs.precision) if dtypes else []
        halved = {"param_grad_dtype": "gradients", "optimizer_state_dtype": "optimizer"}
        chosen_dtypes = [_merged(keys) for keys in _subsets(narrow)]
        strategies = list(_subsets(self._all_strategies() if offload else ()))
        for batch, recomputing, chosen, keys in product(
            self._sizes(shorter), self._recomputings(), strategies, chosen_dtypes
        ):
            share, sizes = batch.tokens / self._own.tokens, batch_changes(self._run.config, batch)
            total = self._total(share) - sum(report.device_bytes[halved[key]] / 2 for key in keys)
            total += sum(s.total + s.arena * (share - 1) for s in chosen)
            host = report.pinned_bytes + report.host_bytes.get("activations", 0) * (share - 1)
            host += sum(s.host + s.activations * (share - 1) for s in chosen)
            freed, seconds = self._recomputed(recomputing.rungs, max(0.0, total - report.device.memory_bytes) / share)
            seconds += self._seconds(batch) + sum(s.seconds + s.each * batch.steps for s in chosen)
            yield Candidate(
                changes=_merged([sizes, recomputing.changes, *(s.toggle.changes for s in chosen), keys]),
                batch=batch,
                offload=frozenset(s.toggle.name for s in chosen),
                total=total - freed * share,
                host=host,
                seconds=max(seconds, sum(s.copies for s in chosen)),
            )

    def planned(self, changes: Changes) -> Plan:
        """Plan the run with changes, exactly as if they were in the file. Raises ConfigError or PluginError."""
        if not changes:
            return self._plan
        inputs = self._plan.inputs
        run = changed(self._run, changes)
        return plan_run(run, self._plan.report.device, inputs.world_size, host_memory=inputs.host_memory)

    # ----------------------------------------------------------------------------------------------------- micro-batch

    def _sizes(self, shorter: bool) -> list[Batch]:
        every = batches(self._run.config, shorter=shorter)
        least, most = self._own.tokens / _LARGER_BY, self._own.tokens * _LARGER_BY
        return [batch for batch in every if batch == self._own or least <= batch.tokens <= most]

    def _another(self) -> Iterator[tuple[Batch, Plan]]:
        """Yield the plan of another micro-batch, the nearest that the recipe does not refuse."""
        plain = recompute_changes(self._run.config, "false")
        for batch in self._batches[1:]:
            try:
                yield batch, self.planned({**plain, **batch_changes(self._run.config, batch)})
            except ConfigError:
                continue
            return

    def _total(self, share: float) -> float:
        """Return the bytes without recomputation; `share`: tokens of a micro-step, over those of the config's."""
        arena = self._plain.assembly.memory.arena_bytes
        grows = float(arena)
        if len(self._points) > 1:
            batch, other = self._points[1]
            grows = (other.assembly.memory.arena_bytes - arena) / (batch.tokens / self._own.tokens - 1)
        return self._plain.report.device_bytes["total"] + grows * (share - 1)

    def _seconds(self, batch: Batch) -> float:
        """Return the time of a step without recomputation."""
        seconds, each = self._plain.report.step.seconds, 0.0
        if len(self._points) > 1:
            other, plan = self._points[1]
            each = (plan.report.step.seconds - seconds) / (other.steps - self._own.steps)
        return seconds + each * (batch.steps - self._own.steps)

    # --------------------------------------------------------------------------------------------------- recomputation

    def _recomputings(self) -> Iterator[_Recomputing]:
        """Yield the config's own recomputation, then what may take its place."""
        config, inputs = self._run.config, self._plan.inputs
        own = ladder(self._plain.assembly, inputs)
        yield _Recomputing({}, own if inputs.recompute_more else own[:1])
        free = recompute_changes(config, "auto")
        if self._plan.target.device.sm is not None or config.device_memory_limit is not None:
            if free:
                yield _Recomputing(free, self._rungs)
        elif config.recompute != "true" and len(own) > 1:
            yield _Recomputing({"recompute": True}, own[-1:])

    def _recomputed(self, rungs: Sequence[Rung], missing: float) -> tuple[float, float]:
        """Return the bytes freed and the seconds added by the first rung that frees what is missing, or by the last."""
        kept = self._rungs[0].kept
        index = bisect_left(rungs, missing, key=lambda rung: kept - rung.kept)
        rung = rungs[min(index, len(rungs) - 1)]
        return min(kept - rung.kept, self._most), rung.seconds - self._rungs[0].seconds

    # ------------------------------------------------------------------------------------------------------ offloading

    def _all_strategies(self) -> list[_Strategy]:
        if self._strategies is None:
            self._strategies = list(self._measured())
        return self._strategies

    def _measured(self) -> Iterator[_Strategy]:
        """Yield the strategies that serve this run and change it, with the recomputation of its plan."""
        before = self._plan
        for toggle in toggles(self._run):
            try:
                inputs = run_inputs(changed(self._run, toggle.changes), before.report.device, before.report.world_size)
                fixed = {name: getattr(before.inputs, name) for name in ("recompute", "recompute_chosen")}
                after = plan_exactly(replace(inputs, **fixed))
            except SurogateError:  # it cannot serve this run
                continue
            found = _added(toggle, before, after)
            if found.total < 0 or found.host < 0:
                yield found


def _added(toggle: Toggle, before: Plan, after: Plan) -> _Strategy:
    old, new = before.report, after.report
    host = new.pinned_bytes - old.pinned_bytes
    activations = new.host_bytes.get("activations", 0) - old.host_bytes.get("activations", 0)
    update = _update_seconds(after) - _update_seconds(before)
    waiting = new.step.seconds - old.step.seconds - update
    by_tokens = host == activations  # the same tokens a step, so the same copies, whatever the micro-batch
    return _Strategy(
        toggle=toggle,
        total=new.device_bytes["total"] - old.device_bytes["total"],
        arena=after.assembly.memory.arena_bytes - before.assembly.memory.arena_bytes,
        host=host,
        activations=activations,
        seconds=update + (waiting if by_tokens else 0.0),
        each=0.0 if by_tokens else waiting / before.inputs.grad_accum_steps,
        copies=new.step.copy_seconds - old.step.copy_seconds,
    )


def _update_seconds(plan: Plan) -> float:
    programs, ops, device = plan.assembly.programs, plan.inputs.ops, plan.target.device
    return sum(program_cost(p, ops, device).seconds for p in programs.values() if p.stage == "update")


def _subsets(items: Collection[_T]) -> Iterator[list[_T]]:
    """Yield every subset, the empty one first."""
    for chosen in product((False, True), repeat=len(items)):
        yield [item for item, wanted in zip(items, chosen, strict=True) if wanted]


def _merged(parts: Collection[Changes]) -> Changes:
    return {key: value for part in parts for key, value in part.items()}

"""Estimates of the memory and time of every combination of changes to a run, from a few plans.

Each of these plans is exact. Between and beyond them, activations grow with the tokens of a micro-step, and the work of
a step grows with its micro-steps. The ladder prices recomputation. Each offload strategy is tried alone, and what it
adds to memory and to the lanes of a step is added up. So a combination costs no plan, and those that look best are
planned afterwards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..assembly.assemble import Recording, record
from ..assembly.inputs import PlanInputs
from ..assembly.recomputed import Recomputation
from ..errors import ConfigError, SurogateError
from ..planning.plan import Plan, plan_run, run_inputs
from ..planning.recompute_ladder import Rung, arena_bytes, ladder
from ..planning.report import memory_is_the_hosts
from ..planning.run import Run
from .changes import Batch, Changes, Toggle, batch_changes, batches, changed, narrower, recompute_changes, toggles
from .trial import Trial, held_bytes, try_run
from .work import Work, step_work

_LARGER_BY = 64
"""Micro-batches are estimated up to this many times as large, and as small, as the config's."""

_WORTH = 0.02
"""A strategy is not turned on for values of less than this share of the device's memory."""


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
class _Copies:
    """What an offload strategy adds to the host and to the lanes of a step, with the micro-batch of the config.

    host, activations  bytes of pinned memory for all devices, and the part that grows with the tokens of a micro-step
    work               of a step
    """

    host: int
    activations: int
    work: Work

    def with_batch(self, times: float) -> Work:
        """Return the work of a step with `times` as many micro-steps, of the same tokens altogether."""
        by_tokens = self.host == self.activations  # it copies activations alone
        return self.work if by_tokens else Work().plus(self.work, times)


@dataclass(frozen=True)
class _Option:
    """What turning an offload strategy on or off adds, with the micro-batch of the config.

    device         bytes of the device for values that live as long as the run
    arena, update  and for activations of a micro-step, which grow with its tokens, and of the update
    copies         with little recomputation
    fewest         with the recomputation of the plan, where more is recomputed than copied
    """

    name: str
    changes: Changes
    device: int
    arena: int
    update: int
    copies: _Copies
    fewest: _Copies


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
        self._shares = memory_is_the_hosts(plan.report.device)
        on_device = self._plain.report.device_bytes
        self._device = on_device["total"] - on_device.get("pinned", 0) - arena
        self._works = [step_work(p.assembly.programs.values(), p.inputs) for _, p in self._points]
        self._options: list[list[_Option]] | None = None

    def fastest_without_limit(self) -> float:
        """Return the seconds of a step with the best micro-batch, if memory were no limit."""
        return min(self._work(batch).seconds for batch in self._sizes(shorter=False))

    def candidates(self, *, dtypes: bool = False, shorter: bool = False, offload: bool = False) -> Iterator[Candidate]:
        """Yield combinations of micro-batch and recomputation; with offload strategies, dtypes and shorter rows too."""
        report = self._plan.report
        narrow = narrower(self._plan.inputs.precision, self._plan.inputs.optimizer) if dtypes else []
        halved = {"param_grad_dtype": "gradients", "optimizer_state_dtype": "optimizer"}
        chosen_dtypes = [_merged(keys) for keys in product(*(({}, change) for change in narrow))]
        strategies = list(product(*((None, *options) for options in (self._all_options() if offload else ()))))
        recomputings = list(self._recomputings())
        for batch, taken in product(self._sizes(shorter), strategies):
            chosen = [option for option in taken if option]
            share, sizes = batch.tokens / self._own.tokens, batch_changes(self._run.config, batch)
            device, arena = self._device + sum(s.device for s in chosen), self._arena(share)
            arena += sum(s.arena for s in chosen) * share
            most = self._copying(batch, [s.copies for s in chosen])
            fewest = self._copying(batch, [s.fewest for s in chosen])
            for recomputing, keys in product(recomputings, chosen_dtypes):
                lasting = device - sum(report.device_bytes[halved[key]] / 2 for key in keys)
                shared = most[0] if self._shares else 0.0
                missing = max(0.0, lasting + arena + shared - report.device.memory_bytes) / share
                rung = self._rung(recomputing.rungs, missing)
                freed = min(self._rungs[0].kept - rung.kept, self._most)
                host, work = fewest if rung is recomputing.rungs[-1] else most
                on_device = lasting + max(arena - freed * share, sum(s.update for s in chosen))
                yield Candidate(
                    changes=_merged([sizes, recomputing.changes, *(s.changes for s in chosen), keys]),
                    batch=batch,
                    offload=frozenset(s.name for s in chosen),
                    total=on_device + (host if self._shares else 0.0),
                    host=host,
                    seconds=work.recomputing(rung.seconds - self._rungs[0].seconds).seconds,
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

    def _arena(self, share: float) -> float:
        """Return the bytes of activations without recomputation.

        share  tokens of a micro-step, over those of the config's
        """
        arena = self._plain.report.arena_bytes
        grows = float(arena)
        if len(self._points) > 1:
            batch, other = self._points[1]
            grows = (other.report.arena_bytes - arena) / (batch.tokens / self._own.tokens - 1)
        return arena + grows * (share - 1)

    def _work(self, batch: Batch) -> Work:
        """Return the work of a step without recomputation."""
        if len(self._points) == 1:
            return self._works[0]
        steps = (batch.steps - self._own.steps) / (self._points[1][0].steps - self._own.steps)
        return self._works[0].plus(self._works[1], steps, 0.0).plus(self._works[0], -steps, 0.0)

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

    def _rung(self, rungs: Sequence[Rung], missing: float) -> Rung:
        """Return the first rung that frees what is missing, or the last."""
        kept = self._rungs[0].kept
        index = bisect_left(rungs, missing, key=lambda rung: kept - rung.kept)
        return rungs[min(index, len(rungs) - 1)]

    # ------------------------------------------------------------------------------------------------------ offloading

    def _copying(self, batch: Batch, chosen: Sequence[_Copies]) -> tuple[float, Work]:
        """Return the bytes of pinned memory, and the work of a step, with offload strategies."""
        report, share = self._plan.report, batch.tokens / self._own.tokens
        host = report.pinned_bytes + report.host_bytes.get("activations", 0) * (share - 1)
        host += sum(copies.host + copies.activations * (share - 1) for copies in chosen)
        times = batch.steps / self._own.steps
        return host, self._work(batch).offloading([copies.with_batch(times) for copies in chosen])

    def _all_options(self) -> list[list[_Option]]:
        """Return the options of each strategy."""
        if self._options is None:
            found: dict[str, list[_Option]] = {}
            for option in reversed(list(self._tried())):
                found.setdefault(option.name, []).append(option)
            self._options = list(found.values())
        return self._options

    def _tried(self) -> Iterator[_Option]:
        """Yield what serves this run and makes a difference, the last first.

        Of options that move the same bytes, the last is yielded.
        """
        own, recording = self._plan.inputs, self._plan.recording
        tried, seen = _Tried(recording, own), set[tuple[str, int]]()
        held = held_bytes(recording, own)
        for toggle in reversed(list(toggles(self._run))):
            again = changed(self._run, toggle.changes)
            inputs = replace(own, offload=run_inputs(again, self._plan.report.device, own.world_size).offload)
            try:
                moved = held_bytes(recording, inputs) - held
                if (toggle.name, moved) in seen or 0 < moved < _WORTH * self._plan.report.device.memory_bytes:
                    continue
                seen.add((toggle.name, moved))
                fewest = tried.added(inputs)
                copies = fewest if moved else tried.added(replace(inputs, recompute_chosen=None))
            except SurogateError:  # it cannot serve this run
                continue
            makes_room = fewest.device + fewest.arena < 0 and not self._shares
            if makes_room or fewest.host + fewest.host_arena < 0:
                yield _option(toggle, fewest, copies, own.world_size)


class _Tried:
    """Trials of a run and of others that differ in their offloading and recomputation."""

    def __init__(self, recording: Recording, inputs: PlanInputs) -> None:
        self._own = inputs
        self._recordings = {inputs.grouping: recording}
        self._without: dict[Recomputation | None, Trial] = {}

    def added(self, inputs: PlanInputs) -> Trial:
        """Return what a run takes besides the run with its own offloading and the same recomputation."""
        if inputs.grouping not in self._recordings:
            self._recordings[inputs.grouping] = record(inputs)
        chosen = inputs.recompute_chosen
        after = try_run(self._recordings[inputs.grouping], inputs)
        if chosen not in self._without:
            own = replace(self._own, recompute_chosen=chosen)
            self._without[chosen] = try_run(self._recordings[own.grouping], own)
        return after.minus(self._without[chosen])


def _option(toggle: Toggle, fewest: Trial, copies: Trial, world_size: int) -> _Option:
    def copying(trial: Trial) -> _Copies:
        return _Copies((trial.host + trial.host_arena) * world_size, trial.host_arena * world_size, trial.work)

    sizes = fewest.device, fewest.arena, fewest.update
    return _Option(toggle.name, toggle.changes, *sizes, copying(copies), copying(fewest))


def _merged(parts: Iterable[Changes]) -> Changes:
    return {key: value for part in parts for key, value in part.items()}

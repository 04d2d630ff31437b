"""The result of a profile: time, work and planned time of every op, and sums over ops that are alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from surogate_core.api import DeviceInfo
from surogate_core.memory.cost import Cost
from surogate_core.program.op import Op


@dataclass(frozen=True)
class OpTime:
    """An op of one program.

    index: place in the program. calls: a step, on average. seconds: of a call, the mean. cost: work and planned
    seconds of a call. rate: FLOP/s that price the op.
    """

    program: str
    index: int
    op: Op
    calls: float
    seconds: float
    cost: Cost
    rate: float


def _summed(of_call: Callable[[OpTime], float]) -> cached_property[float]:
    """Return the property of a `Group` that sums a figure of its calls."""
    return cached_property(lambda group: sum(timed.calls * of_call(timed) for timed in group.ops))


@dataclass(frozen=True)
class Group:
    """Ops that are reported together. Figures are sums over a step; `planned_seconds` is the plan's estimate."""

    ops: tuple[OpTime, ...]
    device: DeviceInfo

    @property
    def kind(self) -> str:
        return self.ops[0].op.kind

    calls = _summed(lambda timed: 1)
    seconds = _summed(lambda timed: timed.seconds)
    bytes = _summed(lambda timed: timed.cost.bytes)
    flops = _summed(lambda timed: timed.cost.flops)
    planned_seconds = _summed(lambda timed: timed.cost.seconds)

    @property
    def bandwidth_share(self) -> float:
        """Bytes per second over the device's bandwidth."""
        return _ratio(self.bytes / self.device.bandwidth, self.seconds)

    @property
    def peak_share(self) -> float:
        """FLOP/s over the device's rate."""
        return _ratio(sum(t.calls * t.cost.flops / t.rate for t in self.ops), self.seconds)


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """A step of a run, op by op.

    model, recipe, weights, batches, method: descriptions. steps: seconds of each step as training runs it. tokens: of a
    step, padding excluded. planned_seconds: of a step, by the plan. event_seconds: what was subtracted from every call
    for the events that time it.
    """

    model: str
    recipe: str
    device: DeviceInfo
    weights: str
    batches: str
    method: str
    steps: tuple[float, ...]
    tokens: float
    planned_seconds: float
    event_seconds: float
    ops: tuple[OpTime, ...]

    @property
    def seconds(self) -> float:
        return fmean(self.steps)

    @cached_property
    def total(self) -> Group:
        return Group(self.ops, self.device)

    @property
    def gaps(self) -> float:
        """Seconds of a step that are in no op: between graphs on a GPU, the loop's own on a CPU."""
        return self.seconds - self.total.seconds

    def by_kind(self) -> list[Group]:
        """The ops of each kind, the longest first."""
        return self._groups(lambda timed: timed.op.kind)

    def alike(self) -> list[Group]:
        """Ops that do the same work, such as one op of every block, the longest first."""

        def work(timed: OpTime) -> Hashable:
            op = timed.op
            return op.kind, op.phase, op.accumulate, tuple((v.shape, v.dtype) for v in (*op.ins, *op.outs))

        return self._groups(work)

    def by_program(self) -> list[Group]:
        """The ops of each program, in the order of the programs."""
        return _grouped(self.ops, lambda timed: timed.program, self.device)

    def _groups(self, key: Callable[[OpTime], Hashable]) -> list[Group]:
        return sorted(_grouped(self.ops, key, self.device), key=lambda group: -group.seconds)


def _grouped(ops: Iterable[OpTime], key: Callable[[OpTime], Hashable], device: DeviceInfo) -> list[Group]:
    groups: dict[Hashable, list[OpTime]] = {}
    for timed in ops:
        groups.setdefault(key(timed), []).append(timed)
    return [Group(tuple(members), device) for members in groups.values()]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0

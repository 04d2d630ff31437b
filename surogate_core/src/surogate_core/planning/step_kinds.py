"""The planned work of an optimizer step by kind of op and by phase, and the model's own share of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..memory.cost import OpCosts
from .report import Report, step_runs

if TYPE_CHECKING:
    from ..assembly.assembly import Assembly
    from ..assembly.inputs import PlanInputs


@dataclass(frozen=True)
class KindWork:
    """The ops of one kind in an optimizer step of one rank.

    seconds  estimated, as if no op overlapped with another
    calls    launches of such ops
    flops    floating-point operations
    bytes    bytes read and written
    """

    kind: str
    seconds: float
    calls: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class StepWork:
    """The planned work of an optimizer step.

    kinds        of one rank, those that take longest first
    phases       {phase: seconds of its ops on one rank}
    model_flops  of forward and backward on all ranks, with nothing recomputed
    """

    kinds: Sequence[KindWork]
    phases: Mapping[str, float]
    model_flops: int


def step_work(assembly: Assembly, inputs: PlanInputs, report: Report) -> StepWork:
    """Return the work of a plan's optimizer step. Ops that single ranks own count for all of them together."""
    costs = OpCosts(inputs.ops, report.device, assembly.kernels.kernel, report.route)
    seconds: dict[str, float] = defaultdict(float)
    phases: dict[str, float] = defaultdict(float)
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for program, times in step_runs(assembly, inputs).items():
        for op in program.ops:
            cost = costs(op)
            seconds[op.kind] += cost.seconds * times
            phases[op.phase] += cost.seconds * times
            for at, amount in enumerate((1, cost.flops, cost.bytes)):
                counts[op.kind][at] += amount * times
    kinds = [KindWork(kind, seconds[kind], *count) for kind, count in counts.items()]
    own = sum(inputs.ops[op.kind].flops(op) for op in assembly.micro.ops)
    micro_steps = inputs.grad_accum_steps * inputs.world_size
    return StepWork(sorted(kinds, key=lambda kind: -kind.seconds), dict(phases), own * micro_steps)

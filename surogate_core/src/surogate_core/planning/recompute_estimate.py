"""Estimates the memory and time of a planned run with more recomputation, from the lives of its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate

from ..memory.cost import OpCosts
from ..memory.lifetimes import live_bytes
from ..memory.plan import ArenaPlan
from ..program.op import Program
from ..program.value import Value
from .plan import Plan
from .recomputed import selector


@dataclass(frozen=True, kw_only=True)
class RecomputeEstimate:
    """What dropping values of the largest micro-step after the forward pass changes.

    Whether a value is dropped depends on its label. So values are grouped by label and ops by the labels that they
    write, and each group is represented by one of its values or ops.

    live        live bytes at each op
    freed       {a value: by how much the bytes that dropping its group frees change at each op}
    recomputed  {outputs of an op: seconds per step that it takes to run the ops of its group again}
    packing     bytes of the arena for each live byte at the peak
    others      bytes of the largest arena of the other programs
    """

    live: list[int]
    freed: Mapping[Value, list[int]]
    recomputed: Mapping[tuple[Value, ...], float]
    packing: float
    others: int

    @classmethod
    def of(cls, plan: Plan) -> RecomputeEstimate:
        programs, arenas = plan.assembly.programs, plan.assembly.memory.arenas
        micro = {name: p for name, p in programs.items() if p.stage == "micro"}
        name = max(micro, key=lambda name: arenas[name].arena_bytes)
        program, arena = micro[name], arenas[name]
        return cls(
            live=live_bytes(arena.lives, len(program.ops)),
            freed=_freed(program, arena),
            recomputed=_recomputed(program, plan),
            packing=arena.arena_bytes / max(arena.lower_bound, 1),
            others=max(arenas[other].arena_bytes for other in programs if other not in micro),
        )

    def arena_bytes(self, parts: Collection[str]) -> float:
        """Return the bytes of the arena if `parts` (recompute keys) are recomputed too."""
        drops = selector(parts)
        changes = [changes for value, changes in self.freed.items() if drops(value)]
        freed = accumulate(map(sum, zip(*changes, strict=True))) if changes else [0] * len(self.live)
        peak = max((live - less for live, less in zip(self.live, freed, strict=True)), default=0)
        return max(peak * self.packing, self.others)

    def seconds(self, parts: Collection[str]) -> float:
        """Return the additional seconds per step if `parts` (recompute keys) are recomputed too."""
        drops = selector(parts)
        return sum(seconds for outs, seconds in self.recomputed.items() if any(map(drops, outs)))


def _freed(program: Program, arena: ArenaPlan) -> dict[Value, list[int]]:
    """Dropping a value frees it between its last reader in the forward pass and its first in the backward pass."""
    backward = next((i for i, op in enumerate(program.ops) if op.phase == "backward"), len(program.ops))
    last_forward: dict[Value, int] = {}
    first_backward: dict[Value, int] = {}
    for index, op in enumerate(program.ops):
        for value in (*op.ins, *op.outs):
            if index < backward:
                last_forward[value] = index
            else:
                first_backward.setdefault(value, index)
    by_label: dict[str, Value] = {}
    freed: dict[Value, list[int]] = {}
    for life in arena.lives:
        value = life.value
        if value.block >= 0 and value in last_forward and value in first_backward:
            group = by_label.setdefault(value.label, value)
            changes = freed.setdefault(group, [0] * len(program.ops))
            changes[last_forward[value] + 1] += life.nbytes
            changes[first_backward[value]] -= life.nbytes
    return freed


def _recomputed(program: Program, plan: Plan) -> dict[tuple[Value, ...], float]:
    costs = OpCosts(plan.inputs.ops, plan.report.device)
    by_labels: dict[tuple[str, ...], tuple[Value, ...]] = {}
    seconds: dict[tuple[Value, ...], float] = {}
    for op in program.ops:
        if op.phase == "forward" and op.block >= 0:
            group = by_labels.setdefault(tuple(value.label for value in op.outs), op.outs)
            seconds[group] = seconds.get(group, 0.0) + costs(op).seconds * plan.inputs.grad_accum_steps
    return seconds

"""The work of an optimizer step, by part and lane: what its time is estimated from when strategies are combined.

The lanes of a part overlap. So a part takes as long as its busiest lane, besides what lanes wait for each other at its
beginning and end. Strategies that copy in the same direction share a lane, on which small copies queue behind large
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations

from ..assembly.inputs import PlanInputs
from ..memory.cost import COPIES, OpCosts, program_cost
from ..program.op import Lane, Program
from ..program.passes.reduce import MicroStep, micro_step_counts

_AHEAD = 2
"""Blocks by which copies to the device begin ahead of their use."""


@dataclass(frozen=True)
class Part:
    """Seconds of a part of a step.

    waiting  by which the part takes longer than its busiest lane
    copies   how often "compute" goes on between two copies of a lane, at most
    """

    compute: float = 0.0
    to_host: float = 0.0
    to_device: float = 0.0
    waiting: float = 0.0
    copies: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.compute, self.to_host, self.to_device) + self.waiting

    def plus(self, other: Part, times: float = 1.0) -> Part:
        """Return this work and `times` that of another."""
        return Part(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(self)))

    def queued(self, added: Sequence[Part]) -> float:
        """Return the seconds for which copies that are added to this part wait for larger ones of the same lane.

        A small copy that begins behind a large one is late, unless the compute ahead of its use takes as long.
        """
        late = 0.0
        for one, other in combinations((part for part in added if part.copies > 0), 2):
            for lane in COPIES:
                small, large = sorted((one, other), key=lambda part: getattr(part, lane) / part.copies)
                if getattr(small, lane) > 0:
                    ahead = _AHEAD * self.compute / small.copies
                    late += large.copies * max(0.0, getattr(large, lane) / large.copies - ahead)
        return late


@dataclass(frozen=True)
class Work:
    """The parts of a step: the forward and the backward passes of its micro-steps, and the update."""

    forward: Part = Part()
    backward: Part = Part()
    update: Part = Part()

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds + self.update.seconds

    def plus(self, other: Work, micro_steps: float = 1.0, updates: float = 1.0) -> Work:
        """Return this work and that of another, with its passes and its updates counted that often."""
        return Work(
            self.forward.plus(other.forward, micro_steps),
            self.backward.plus(other.backward, micro_steps),
            self.update.plus(other.update, updates),
        )

    def offloading(self, added: Sequence[Work]) -> Work:
        """Return this work and what strategies add to it."""
        work = self
        for other in added:
            work = work.plus(other)
        late = self.forward.queued([other.forward for other in added])
        late += self.backward.queued([other.backward for other in added])
        return work.plus(Work(backward=Part(waiting=late)))  # an update copies what a block needs together

    def recomputing(self, seconds: float) -> Work:
        """Return this work with more of it in the backward pass."""
        return replace(self, backward=self.backward.plus(Part(compute=seconds)))


def step_work(programs: Iterable[Program], inputs: PlanInputs) -> Work:
    """Return the work of an optimizer step."""
    every = list(programs)
    micro = {MicroStep(p.first, p.last): p for p in every if p.stage == "micro" and p.purpose == "train"}
    work = Work()
    for kind, count in micro_step_counts(inputs.grad_accum_steps, inputs.world_size).items():
        work = work.plus(_program_work(micro[kind], inputs), micro_steps=count)
    for program in (p for p in every if p.stage == "update"):
        work = work.plus(_program_work(program, inputs))
    return work


def _program_work(program: Program, inputs: PlanInputs) -> Work:
    assert inputs.target is not None
    costs = OpCosts(inputs.ops, inputs.target.device)
    busy: dict[tuple[str, Lane], float] = {}
    copies: Counter[tuple[str, Lane]] = Counter()
    queued: set[Lane] = set()
    for op in program.ops:
        part = op.phase if op.phase in ("forward", "update") else "backward"
        busy[part, op.lane] = busy.get((part, op.lane), 0.0) + costs(op).seconds
        if op.lane == "compute":
            queued.clear()
        elif op.lane not in queued:
            queued.add(op.lane)
            copies[part, op.lane] += 1

    def found(part: str) -> Part:
        return Part(
            compute=busy.get((part, "compute"), 0.0),
            to_host=busy.get((part, "to_host"), 0.0),
            to_device=busy.get((part, "to_device"), 0.0),
            copies=max(copies[part, "to_host"], copies[part, "to_device"]),
        )

    work = Work(found("forward"), found("backward"), found("update"))
    waiting = Part(waiting=program_cost(program, inputs.ops, inputs.target.device).seconds - work.seconds)
    return work.plus(Work(update=waiting) if program.stage == "update" else Work(backward=waiting))

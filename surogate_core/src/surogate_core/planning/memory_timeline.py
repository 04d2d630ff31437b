"""Bytes of a device over the ops of a step: what holds its memory, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ..memory.lifetimes import Lifetime
from ..program.op import Op, Program

if TYPE_CHECKING:
    from ..assembly.assembly import Assembly
    from ..assembly.inputs import PlanInputs
    from .report import Report

WORKSPACE = "workspace"
_IN_ARENA = ("total", "activations", "workspace")
"""Entries of `Report.device_bytes` that the arena holds."""


class Held(NamedTuple):
    """Values of one cause that are live at the peak: their number and the bytes of the largest, of one rank."""

    values: int
    largest: int


@dataclass(frozen=True)
class MemoryTimeline:
    """The bytes that a device holds while each op of its fullest program runs, by cause.

    Each op counts all values that are live while it runs; one place that values hold in turn counts for the value that
    was written last. The sum of `causes` at the peak is the arena's `lower_bound`, times the ranks of the device.

    program  name of the program whose arena holds the most live bytes
    ops      its ops, in order
    peak     index of the op at which most is live
    causes   {label of values: bytes while each op runs}; "workspace" is scratch of single ops
    held     {label: the values that are live at the peak}
    fixed    {segment of `Report.device_bytes`: bytes}, which do not change during a step
    gaps     bytes of the arena that no value holds at the peak, because no placement is perfect
    """

    program: str
    ops: tuple[Op, ...]
    peak: int
    causes: Mapping[str, Sequence[int]]
    held: Mapping[str, Held]
    fixed: Mapping[str, int]
    gaps: int

    @property
    def totals(self) -> list[int]:
        """Bytes of all causes and all that is fixed, while each op runs."""
        fixed = sum(self.fixed.values())
        return [fixed + sum(values) for values in zip(*self.causes.values(), strict=True)] or [fixed] * len(self.ops)


def memory_timeline(assembly: Assembly, inputs: PlanInputs, report: Report) -> MemoryTimeline:
    """Return the bytes of the fullest program of a plan, over its ops. All ranks of a device count alike."""
    memory, ranks = assembly.memory, inputs.ranks_per_device
    name, arena = max(memory.arenas.items(), key=lambda item: item[1].lower_bound)
    program = assembly.programs[name]
    changes: dict[str, list[int]] = defaultdict(lambda: [0] * (len(program.ops) + 1))
    held: dict[str, Held] = {}
    for label, nbytes, start, stop in _stays(arena.lives, program):
        changes[label][start] += nbytes * ranks
        changes[label][stop] -= nbytes * ranks
        if start <= arena.peak_op < stop:
            before = held.get(label, Held(0, 0))
            held[label] = Held(before.values + 1, max(before.largest, nbytes))
    in_arena = report.device_bytes["activations"] + report.device_bytes["workspace"]
    return MemoryTimeline(
        program=name,
        ops=program.ops,
        peak=arena.peak_op,
        causes={label: list(accumulate(change[:-1])) for label, change in changes.items()},
        held=held,
        fixed={part: n for part, n in report.device_bytes.items() if part not in _IN_ARENA and n},
        gaps=in_arena - arena.lower_bound * ranks,
    )


def _stays(lives: Sequence[Lifetime], program: Program) -> list[tuple[str, int, int, int]]:
    """Return (label, bytes, first op, op behind the last) of each value, in places that values hold in turn."""
    written = {value: index for index, op in enumerate(program.ops) for value in op.outs}
    found = []
    for life in lives:
        if life.scratch:
            found.append((WORKSPACE, life.nbytes, life.first, life.last + 1))
            continue
        values = (*life.overwritten, life.value)
        starts = [life.first, *(max(life.first, written.get(value, 0)) for value in values[1:])]
        for value, start, stop in zip(values, starts, [*starts[1:], life.last + 1], strict=True):
            if start < stop:
                found.append((value.label, life.nbytes, start, stop))
    return found

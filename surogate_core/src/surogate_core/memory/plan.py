"""The memory plan: a byte offset for every value, determined before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from operator import is_not

from ..program.op import Op, Program
from ..program.value import Place, Value
from .alignment import align
from .lifetimes import Lifetime, lifetimes, live_bytes
from .placement import place


@dataclass(frozen=True)
class ArenaPlan:
    """The places of a program's activations in the arena.

    They are found when they are first asked for: that takes half of the time of a plan, and many a plan is dropped
    because its live bytes alone do not fit.

    lower_bound  largest number of live bytes at any op
    peak_op      index of that op
    """

    lives: tuple[Lifetime, ...]
    lower_bound: int
    peak_op: int

    @cached_property
    def _places(self) -> list[tuple[Lifetime, int]]:
        order = sorted(self.lives, key=lambda life: (-life.nbytes, life.first, life.value.name))
        offsets = place([(life.nbytes, life.first, life.last) for life in order])
        return list(zip(order, offsets, strict=True))

    @cached_property
    def offsets(self) -> Mapping[Value, int]:
        """In bytes, multiples of ALIGNMENT."""
        return {v: at for life, at in self._places if not life.scratch for v in (life.value, *life.overwritten)}

    @cached_property
    def workspace(self) -> Mapping[int, tuple[int, int]]:
        """(offset, bytes) of the workspace of an op, by the op's index."""
        return {life.first: (at, life.nbytes) for life, at in self._places if life.scratch}

    @cached_property
    def arena_bytes(self) -> int:
        """End of the last value."""
        return max((at + life.nbytes for life, at in self._places), default=0)


def plan(program: Program, workspace: Sequence[int]) -> dict[Place, ArenaPlan]:
    """Return the arena of each place, in which each activation has a byte offset. `workspace`: the bytes of each op.

    Two values overlap in memory only if their lifetimes do not, or if an op writes one in the place of the other. The
    largest values are placed first, each at the lowest offset that is free during its lifetime ("greedy by size",
    Pisarchyk & Lee 2020).
    """
    return {on: _arena(lives, len(program.ops)) for on, lives in lifetimes(program, workspace).items()}


def _arena(lives: Sequence[Lifetime], n_ops: int) -> ArenaPlan:
    live = live_bytes(lives, n_ops)
    peak_op = max(range(n_ops), key=live.__getitem__, default=0)
    return ArenaPlan(tuple(lives), live[peak_op] if live else 0, peak_op)


@dataclass(frozen=True)
class Segment:
    """Values that live as long as the run, at consecutive offsets in bytes."""

    offsets: Mapping[Value, int]
    nbytes: int


def lay_out(values: Iterable[Value]) -> Segment:
    """Assign offsets to values in the given order. Only those of different owners, which come last, share memory."""
    offsets: dict[Value, int] = {}
    ends: dict[int | None, int] = {None: 0}
    for value in values:
        at = ends.get(value.owner, ends[None])
        offsets[value] = at
        ends[value.owner] = at + align(value.memory)
    return Segment(offsets, max(ends.values()))


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a run on one device: segments by role, and an arena that all programs share.

    host    the same for values in pinned memory of the host; None if there are none
    """

    segments: Mapping[str, Segment]
    arenas: Mapping[str, ArenaPlan]
    host: MemoryPlan | None = None

    @property
    def arena_bytes(self) -> int:
        """Size of the shared arena: the maximum over all programs, because they run one at a time."""
        return max((arena.arena_bytes for arena in self.arenas.values()), default=0)

    @property
    def live_bytes(self) -> int:
        """The least that `arena_bytes` can be. Places nothing."""
        return max((arena.lower_bound for arena in self.arenas.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments and the arena."""
        return self.arena_bytes + sum(segment.nbytes for segment in self.segments.values())


def plan_programs(
    programs: Iterable[Program],
    declared: Iterable[Value],
    workspace: Callable[[Op], int],
    variants: Mapping[str, Sequence[Program]] | None = None,
) -> MemoryPlan:
    """Plan the segments "param", "grad", "state" and "input" of the programs of a run, and the arena of each program.

    variants: by the name of a program, others that touch the same activations op for op. They share its arena plan, in
    which every op has the scratch that the most demanding of them needs. Programs that touch the same values, such as
    the first and the later micro-steps with gradients in fp32, are planned once.
    """
    every, values = list(programs), list(declared)
    arenas = _arenas(every, workspace, variants or {})
    memory = MemoryPlan(_segments(values, "device"), {name: found["device"] for name, found in arenas.items()})
    if any(v.place == "host" for v in values) or any(op.lane == "to_host" for p in every for op in p.ops):
        host = MemoryPlan(_segments(values, "host"), {name: found["host"] for name, found in arenas.items()})
        return replace(memory, host=host)
    return memory


def _segments(values: Sequence[Value], on: Place) -> dict[str, Segment]:
    """Lay out the values of each role. Parts come last: all before them is the same on every rank."""
    by_role: dict[str, list[Value]] = {"param": [], "grad": [], "state": [], "input": []}
    for value in sorted(values, key=lambda v: (v.shard is not None, v.owner is not None)):
        if value.place == on:
            by_role[value.role].append(value)
    return {role: lay_out(found) for role, found in by_role.items()}


def _arenas(
    programs: Iterable[Program], workspace: Callable[[Op], int], variants: Mapping[str, Sequence[Program]]
) -> dict[str, dict[Place, ArenaPlan]]:
    arenas: dict[str, dict[Place, ArenaPlan]] = {}
    planned: list[tuple[Program, list[int], dict[Place, ArenaPlan]]] = []
    for program in programs:
        nbytes = [workspace(op) for op in program.ops]
        fewer = variants.get(program.name, ())
        for other in fewer:
            for index in compress(range(len(nbytes)), map(is_not, program.ops, other.ops)):
                nbytes[index] = max(nbytes[index], workspace(other.ops[index]))
        found = next((arena for p, of, arena in planned if of == nbytes and _touches_alike(p, program)), None)
        if found is None:
            found = plan(program, nbytes)
            planned.append((program, nbytes, found))
        arenas |= dict.fromkeys((p.name for p in (program, *fewer)), found)
    return arenas


def _touches_alike(a: Program, b: Program) -> bool:
    """Return whether each op of two programs uses the same values, in the same places."""
    return a.outputs == b.outputs and all(
        x is y or (x.ins == y.ins and x.outs == y.outs and x.in_place == y.in_place)
        for x, y in zip(a.ops, b.ops, strict=True)
    )

"""The memory plan: a byte offset for every value, determined before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from operator import is_not

from ..program.op import Op, Program
from ..program.value import Place, Value
from .alignment import align
from .lifetimes import Lifetime, lifetimes, live_bytes
from .placement import place


@dataclass(frozen=True)
class ArenaPlan:
    """The places of a program's activations in the arena.

    offsets      in bytes, multiples of ALIGNMENT
    workspace    (offset, bytes) of the workspace of an op, by the op's index
    arena_bytes  end of the last value
    lower_bound  largest number of live bytes at any op
    peak_op      index of that op
    """

    offsets: Mapping[Value, int]
    workspace: Mapping[int, tuple[int, int]]
    arena_bytes: int
    lower_bound: int
    peak_op: int
    lives: tuple[Lifetime, ...]


def plan(program: Program, workspace: Callable[[Op], int], on: Place = "device") -> ArenaPlan:
    """Assign each activation that is placed `on` the device, or the host, a byte offset in one arena.

    Two values overlap in memory only if their lifetimes do not, or if an op writes one in the place of the other. The
    largest values are placed first, each at the lowest offset that is free during its lifetime ("greedy by size",
    Pisarchyk & Lee 2020).
    """
    lives = lifetimes(program, workspace, on)
    order = sorted(lives, key=lambda life: (-life.nbytes, life.first, life.value.name))
    offsets = place([(life.nbytes, life.first, life.last) for life in order])
    placed = list(zip(order, offsets, strict=True))
    live = live_bytes(lives, len(program.ops))
    peak_op = max(range(len(live)), key=live.__getitem__, default=0)
    return ArenaPlan(
        offsets={v: at for life, at in placed if not life.scratch for v in (life.value, *life.overwritten)},
        workspace={life.first: (at, life.nbytes) for life, at in placed if life.scratch},
        arena_bytes=max((at + life.nbytes for life, at in placed), default=0),
        lower_bound=live[peak_op] if live else 0,
        peak_op=peak_op,
        lives=tuple(lives),
    )


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
    def nbytes(self) -> int:
        """Bytes of all segments and the arena."""
        return self.arena_bytes + sum(segment.nbytes for segment in self.segments.values())


def plan_programs(
    programs: Iterable[Program],
    declared: Iterable[Value],
    workspace: Callable[[Op], int],
    variants: Mapping[str, Sequence[Program]] | None = None,
) -> MemoryPlan:
    """Plan the segments "param", "grad", "state" and "input" of a family of programs, and the arena of each program.

    variants: by the name of a program, others that touch the same activations op for op. They share its arena plan, in
    which every op has the scratch that the most demanding of them needs. Programs that touch the same values, such as
    the first and the later micro-steps with gradients in fp32, are planned once.
    """
    every, values = list(programs), list(declared)
    memory = MemoryPlan(_segments(values, "device"), _arenas(every, workspace, variants or {}))
    on_host = any(v.place == "host" for v in values) or any(op.lane == "to_host" for p in every for op in p.ops)
    if not on_host:
        return memory
    arenas: dict[str, ArenaPlan] = {}
    planned: dict[int, ArenaPlan] = {}  # by the plan on the device, which programs that touch the same values share
    for p in every:
        key = id(memory.arenas[p.name])
        if key not in planned:
            planned[key] = plan(p if _uses_arena_of_host(p) else replace(p, ops=()), lambda op: 0, "host")
        arenas |= dict.fromkeys((one.name for one in (p, *(variants or {}).get(p.name, ()))), planned[key])
    return replace(memory, host=MemoryPlan(_segments(values, "host"), arenas))


def _segments(values: Sequence[Value], on: Place) -> dict[str, Segment]:
    """Lay out the values of each role. Parts come last: all before them is the same on every rank."""
    by_role: dict[str, list[Value]] = {"param": [], "grad": [], "state": [], "input": []}
    for value in sorted(values, key=lambda v: (v.shard is not None, v.owner is not None)):
        if value.place == on:
            by_role[value.role].append(value)
    return {role: lay_out(found) for role, found in by_role.items()}


def _uses_arena_of_host(program: Program) -> bool:
    values = set(chain.from_iterable(values for op in program.ops for values in (op.ins, op.outs)))
    return any(v.place == "host" and v.role in ("act", "staged") for v in values)


def _arenas(
    programs: Iterable[Program], workspace: Callable[[Op], int], variants: Mapping[str, Sequence[Program]]
) -> dict[str, ArenaPlan]:
    arenas: dict[str, ArenaPlan] = {}
    planned: dict[Hashable, ArenaPlan] = {}
    for program in programs:
        fewer = variants.get(program.name, ())
        nbytes = {op: workspace(op) for op in program.ops}
        for other in fewer:
            for before, after in compress(
                zip(program.ops, other.ops, strict=True), map(is_not, program.ops, other.ops)
            ):
                nbytes[before] = max(nbytes[before], workspace(after))
        scratch = nbytes.__getitem__
        touched = (program.outputs, *((op.ins, op.outs, *op.in_place.items(), scratch(op)) for op in program.ops))
        if touched not in planned:
            planned[touched] = plan(program, scratch)
        arenas |= dict.fromkeys((p.name for p in (program, *fewer)), planned[touched])
    return arenas

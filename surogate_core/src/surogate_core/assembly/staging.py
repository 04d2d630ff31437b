"""Staged params: those that only `derive` reads, such as a frozen matrix of which training reads a quantized copy.

They have no memory of their own. At the start of a run the loader writes the params of one block to the arena, `derive`
makes the derived states of them, and the next block takes their place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import ProgramError
from ..program.builder import Builder
from ..program.op import Op, Program
from ..program.passes.decode_some import equal_parts, part_of_op
from ..program.value import Value


@dataclass(frozen=True)
class Staged:
    """The part of `derive` that reads the staged params of one block, or some rows of one of them.

    places  {param: its value in `program`}
    row     of a param of which `program` reads some rows, the first one; None: it reads whole params
    """

    program: Program
    places: Mapping[Value, Value]
    row: int | None = None

    @property
    def divides(self) -> bool:
        """Whether the program keeps this rank's parts of what it reads or makes."""
        return any(v.shard for op in self.program.ops for v in op.outs)

    def makes(self, stored: Collection[str]) -> bool:
        """Return whether states of other params than those that are `stored` in files are made here."""
        return any(param.name not in stored for param in self.places)


def staged_place(param: Value) -> Value:
    """Return where the loader writes a param in the arena."""
    return replace(param, name=f"staged.{param.name}", role="staged", label="staged")


def staged_params(
    derive: Program, others: Iterable[Program], declared: Iterable[Value], trained: Iterable[Value]
) -> frozenset[Value]:
    """Return the frozen params that `derive` reads and no other program uses."""
    read = {v for op in derive.ops for v in op.ins if v.role == "param"}.difference(trained)
    for program in others if read else ():
        for op in program.ops:
            read.difference_update(op.ins, op.outs)
        read.difference_update(program.outputs)
    return frozenset(v for v in declared if v in read)


def split_staged(derive: Program, staged: frozenset[Value]) -> tuple[Program, tuple[Staged, ...]]:
    """Return `derive` without the ops that depend on `staged` params, and those ops by block.

    An op that reads states alone, which such an op wrote, stays in `derive`: a loader may fill these states itself.
    Raises ProgramError if an op depends on staged params of several blocks.
    """
    block_of: dict[Value, int] = {param: param.block for param in staged}
    rest: list[Op] = []
    by_block: dict[int, list[Op]] = {}
    for op in derive.ops:
        blocks = {block_of[v] for v in op.ins if v in block_of}
        if not blocks:
            rest.append(op)
            continue
        if len(blocks) > 1:
            raise ProgramError(
                f"derive: {op.kind} ({op.where}) reads params of several blocks that no other program reads. Emit it "
                "for the params of one block."
            )
        (block,) = blocks
        by_block.setdefault(block, []).append(op)
        block_of.update((value, block) for value in op.outs if value.role == "act")
    return replace(derive, ops=tuple(rest)), tuple(_staged(derive, block, ops) for block, ops in by_block.items())


def _staged(derive: Program, block: int, ops: Sequence[Op]) -> Staged:
    params = dict.fromkeys(v for op in ops for v in op.ins if v.role == "param")
    places = {v: staged_place(v) for v in params}
    moved = tuple(op.on(places) for op in ops)
    return Staged(replace(derive, name=f"derive.{block}" if block >= 0 else "derive.outside", ops=moved), places)


def in_parts(staged: Staged, most: int, builder: Builder) -> list[Staged]:
    """Return programs that encode at most `most` bytes of a staged param at a time, or one matrix, in place of one.

    A param stays whole if ops read it that cannot do so, or if the states are not in the device's memory.
    """
    readers, found, divided = staged.program.readers(), list[Staged](), set[Op]()
    for param, place in staged.places.items():
        op, *others = readers[place]
        count = 0 if others or place.nbytes <= most or not _writes_states(op) else _at_a_time(op, most, builder)
        for first in range(0, len(op.attrs["rows"]), count) if count else ():
            found.append(_part(staged, f"{len(found)}", param, op, first, count, builder))
            divided.add(op)
    if not found:
        return [staged]
    kept = tuple(op for op in staged.program.ops if op not in divided)
    places = {param: place for param, place in staged.places.items() if readers[place][0] not in divided}
    return [*([replace(staged, program=replace(staged.program, ops=kept), places=places)] if places else []), *found]


def _writes_states(op: Op) -> bool:
    return all((v.role, v.place, v.shard) == ("state", "device", None) for v in op.outs)


def _at_a_time(op: Op, most: int, builder: Builder) -> int:
    """Return how many of the matrices that an op encodes take at most `most` bytes; 0: it cannot be divided."""
    apart = builder.ops[op.kind].apart(op)
    return 0 if apart is None else equal_parts(op, apart, len(op.attrs["rows"]), most)


def _part(staged: Staged, name: str, param: Value, op: Op, first: int, count: int, builder: Builder) -> Staged:
    (place,), matrices, apart = op.ins, len(op.attrs["rows"]), builder.ops[op.kind].apart(op)
    assert apart is not None
    rows = place.shape[0] // matrices

    def share(value: Value, axis: int, row: int, height: int) -> Value:
        if value is place:
            return replace(place, name=f"{place.name}[{row}:{row + height}]", shape=(height, *place.shape[1:]))
        return builder.rows(value, row, height)

    one = part_of_op(op, apart, matrices, first, min(count, matrices - first), share)
    program = replace(staged.program, name=f"{staged.program.name}.{name}", ops=(one,))
    return Staged(program, {param: one.ins[0]}, first * rows)

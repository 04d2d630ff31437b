"""Staged params: those that only `derive` reads, such as a frozen matrix of which training reads a quantized copy.

They have no memory of their own. At the start of a run the loader writes the params of one block to the arena, `derive`
makes the derived states of them, and the next block takes their place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import ProgramError
from ..program.op import Op, Program
from ..program.value import Value


@dataclass(frozen=True)
class Staged:
    """The part of `derive` that reads the staged params of one block. places: {param: its value in `program`}."""

    program: Program
    places: Mapping[Value, Value]

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

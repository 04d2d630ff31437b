"""Fused recomputation: a backward op that reads what a recomputed op reads computes its output as well.

`swiglu_bwd` reads `gate_up`, of which `swiglu` is a function, so an op that computes both only has to write one value
more. The backward ops that read the value earlier follow that op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..op import Op, Program
from ..opdef import OpDef
from ..value import Value


def fuse_recompute(program: Program, ops: Mapping[str, OpDef]) -> Program:
    """Remove recomputed ops whose first output a backward op can write (`Rewrites.recompute_kind`).

    Only backward ops may read that output, and nothing the others. If one of its readers cannot move, the op stays.
    """
    readers = program.readers()
    position = {op: index for index, op in enumerate(program.ops)}
    fused: dict[Op, Op] = {}
    followers: dict[Op, list[Op]] = {}
    gone: set[Op] = set()
    for op in (op for op in program.ops if op.phase == "recompute"):
        at, kind = _where(op, readers, ops)
        if at is None:
            continue
        early = [reader for reader in readers[op.outs[0]] if position[reader] < position[at]]
        passed = {reader: program.ops[position[reader] + 1 : position[at] + 1] for reader in early}
        is_free = gone.isdisjoint((at, *early)) and fused.keys().isdisjoint((at, *early))
        if is_free and all(_may_pass(reader, others, early) for reader, others in passed.items()):
            fused[at] = at.changed(kind=kind, outs=(*at.outs, op.outs[0]))
            followers[at] = early
            gone.update((op, *early))
    left = (op for op in program.ops if op not in gone)
    return replace(program, ops=tuple(new for op in left for new in (fused.get(op, op), *followers.get(op, ()))))


def _where(op: Op, readers: Mapping[Value, Sequence[Op]], ops: Mapping[str, OpDef]) -> tuple[Op | None, str]:
    """Return the backward op that can compute the only output of `op` that is read, and the kind that does so."""
    first, *others = op.outs
    reading = readers.get(first, ())
    if {reader.phase for reader in reading} != {"backward"} or any(value in readers for value in others):
        return None, ""
    for candidate in dict.fromkeys(reader for value in op.ins for reader in readers[value]):
        rule = ops[candidate.kind].rewrites.recompute_kind
        fits = (candidate.phase, candidate.block) == ("backward", op.block) and candidate not in reading
        if rule and fits and (kind := rule(candidate, op)):
            return candidate, kind
    return None, ""


def _may_pass(moving: Op, passed: Sequence[Op], followers: Sequence[Op]) -> bool:
    """Whether an op may run after others that it precedes now, of which `followers` move as well.

    The others may not read or write what it writes, or write what it reads.
    """
    return all(
        op in followers or not ({*op.ins, *op.written} & {*moving.written} or {*op.written} & {*moving.ins})
        for op in passed
    )

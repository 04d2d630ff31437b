"""States that micro-steps change take effect only when the optimizer step is applied.

A step whose gradient norm is not finite changes nothing. Params and moments are written by the update alone, which
checks the norm. A state that a micro-step writes, such as a history of maxima, is therefore kept twice: micro-steps and
evaluations work on a pending copy, and the update commits it if the norm is finite. Where there is no such state,
nothing is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...errors import ProgramError
from ..builder import Builder
from ..op import Op, Program
from ..opdef import OpDef
from ..value import Value


def carried_states(
    micro: Sequence[Program], evaluate: Program, ops: Mapping[str, OpDef], sums: frozenset[Value]
) -> tuple[Value, ...]:
    """The states that these programs write and that carry something into a later step or evaluation, by name.

    `micro`: the programs of a step, in the order in which they run. Left out are `sums`, and states that a step and
    an evaluation write before they read them. An op with effects may write every state that it reads.
    """
    first, *others = micro
    written = {v for program in (*micro, evaluate) for op in program.ops for v in _writes(op, ops)} - sums
    if not written:
        return ()
    read = _read_first(first, ops) | _read_first(evaluate, ops)
    read |= {v for program in others for v in _used(program)} - _used(first)
    return tuple(sorted(written & read, key=lambda v: v.name))


def on_copies(program: Program, copies: Mapping[Value, Value], builder: Builder, *, begins: bool) -> Program:
    """`program` with `copies` (state: its pending copy) in place of the states; if it `begins`, it takes them first.

    Raises ProgramError for a recomputed op that reads such a state: it would read what was written since.
    """
    for op in program.ops:
        changed = [v.name for v in op.ins if v in copies]
        if op.phase == "recompute" and changed:
            raise ProgramError(
                f"{program.name}: {op.kind} (block {op.block}, {op.where}) is recomputed, and reads the state "
                f"{changed[0]}, which the step changes. Give its outputs a label that is not recomputed."
            )
    taken: list[Op] = []
    if begins:
        with builder.record("forward") as taken:
            for state, copy in copies.items():
                if state in _used(program):
                    builder.emit("copy", state, outs=[copy])
    renamed = [
        replace(op, ins=tuple(copies.get(v, v) for v in op.ins), outs=tuple(copies.get(v, v) for v in op.outs))
        for op in program.ops
    ]
    return replace(program, ops=(*taken, *renamed))


def _writes(op: Op, ops: Mapping[str, OpDef]) -> list[Value]:
    values = (*op.outs, *op.ins) if ops[op.kind].effects else op.outs
    return [v for v in values if v.role == "state"]


def _used(program: Program) -> set[Value]:
    return {v for op in program.ops for v in (*op.ins, *op.outs) if v.role == "state"}


def _read_first(program: Program, ops: Mapping[str, OpDef]) -> set[Value]:
    """States whose value from before the program is read, by an op or by adding to it."""
    read: set[Value] = set()
    replaced: set[Value] = set()
    for op in program.ops:
        added = {op.outs[i] for i in op.accumulate}
        read |= {v for v in (*op.ins, *added) if v.role == "state"} - replaced
        replaced |= set(_writes(op, ops)) - read
    return read

"""Pending states: changes that micro-steps make to states take effect only if the optimizer step is applied.

A step whose gradient norm is not finite changes nothing. Params and moments are written only by the update, which
checks the norm. If a micro-step writes a state, such as a history of maxima, micro-steps and evaluations work on a
pending copy of it, and the update commits the copy if the norm is finite. Without such states the pass changes nothing.
A state that the update itself writes needs no copy: the update leaves it as a skipped step must.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...errors import ProgramError
from ..builder import Builder
from ..op import Op, Program
from ..value import Value


def states_to_commit(
    micro: Sequence[Program], evaluate: Program, update: Program, readings: frozenset[Value]
) -> tuple[Value, ...]:
    """Return the states that these programs write and whose contents a later step or evaluation reads, sorted by name.

    `micro` are the programs of a step, in the order in which they run. Excluded are `readings`, states that the update
    writes, and states that a step and an evaluation write before they read them.
    """
    first, *others = micro
    written = _written((*micro, evaluate)) - readings - _written((update,))
    if not written:
        return ()
    read = _read_first(first) | _read_first(evaluate)
    read |= {v for program in others for v in _used(program)} - _used(first)
    return tuple(sorted(written & read, key=lambda v: v.name))


def on_copies(program: Program, copies: Mapping[Value, Value], builder: Builder, *, begins: bool) -> Program:
    """Return `program` with each state of `copies` replaced by its pending copy. If it `begins`, it makes the copies.

    Raises ProgramError if a recomputed op reads such a state, because its contents would have changed.
    """
    for op in program.ops:
        changed = [v.name for v in op.ins if v in copies]
        if op.phase == "recompute" and changed:
            raise ProgramError(
                f"{program.name}: {op.kind} (block {op.block}, {op.where}) is recomputed, and reads the state "
                f"{changed[0]}, which the step changes. Give its outputs labels that are not recomputed."
            )
    taken: list[Op] = []
    if begins:
        with builder.record("forward") as taken:
            for state, copy in copies.items():
                if state in _used(program):
                    builder.emit("copy", state, outs=[copy])
    return replace(program, ops=(*taken, *program.on(copies).ops))


def _written(programs: Sequence[Program]) -> set[Value]:
    return {v for program in programs for op in program.ops for v in op.written if v.role == "state"}


def _used(program: Program) -> set[Value]:
    return {v for op in program.ops for v in (*op.ins, *op.outs) if v.role == "state"}


def _read_first(program: Program) -> set[Value]:
    """Return the states whose contents from before the program are read, or added to."""
    read: set[Value] = set()
    replaced: set[Value] = set()
    for op in program.ops:
        added = {op.outs[i] for i in op.accumulate}
        read |= {v for v in (*op.ins, *added) if v.role == "state"} - replaced
        replaced |= {v for v in op.outs if v.role == "state"} - read
    return read

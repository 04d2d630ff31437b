"""Lets chosen results of a program outlive it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..op import Program
from ..value import Value


def write_to(program: Program, targets: Mapping[Value, Value]) -> Program:
    """Let the ops that write the keys write the given states instead, and their readers read those."""

    def moved(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(targets.get(v, v) for v in values)

    ops = tuple(
        replace(op, ins=moved(op.ins), outs=moved(op.outs)) if any(v in targets for v in (*op.ins, *op.outs)) else op
        for op in program.ops
    )
    return replace(program, ops=ops, outputs=moved(program.outputs))

"""In-place ops: marks the ops that may write an output to the place of an input. Runs last, just before planning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..op import Op, Program
from ..opdef import OpDef
from ..value import Value


def in_place(program: Program, ops: Mapping[str, OpDef]) -> Program:
    """Set `Op.in_place` where `OpDef.may_overwrite` allows it and the input is an activation that no later op reads.

    What an op of a side lane reads keeps its place, because that op may still be running.
    """
    last: dict[Value, int] = {v.root: index for index, op in enumerate(program.ops) for v in op.ins}
    aside = {v.root for op in program.ops if op.lane != "compute" for v in op.ins}
    last.update(dict.fromkeys((*program.outputs, *aside), len(program.ops)))

    def marked(index: int, op: Op) -> Op:
        rule = ops[op.kind].may_overwrite
        if rule is OpDef.may_overwrite:
            return op
        allowed = rule(op).items()
        pairs = {out: i for out, i in allowed if last[op.ins[i].root] == index and fits_in_place(op, out, i)}
        return op.changed(in_place=pairs) if pairs else op

    return replace(program, ops=tuple(marked(index, op) for index, op in enumerate(program.ops)))


def fits_in_place(op: Op, out: int, i: int) -> bool:
    """Whether output `out` can take the place of input `i`: same size and dtype, and the op reads the input once.

    Rows have the place of their whole value.
    """
    value, result = op.ins[i], op.outs[out]
    if value.root is not value or result.root is not result:
        return False
    is_alike = value.role == result.role == "act" and (value.size, value.dtype) == (result.size, result.dtype)
    return is_alike and op.lane == "compute" and op.ins.count(value) == 1 and out not in op.accumulate

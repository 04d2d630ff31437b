"""The evaluation program: the forward program without ops that only training needs, such as dropout."""

from __future__ import annotations

from collections.abc import Mapping

from ..op import Op, Program
from ..opdef import OpDef
from ..value import Value


def for_evaluation(program: Program, ops: Mapping[str, OpDef]) -> Program:
    """Remove the ops marked `OpDef.training_only`. Readers of such an op's output read its first input instead."""
    instead: dict[Value, Value] = {}
    kept: list[Op] = []
    for op in program.ops:
        op = op.on(instead)
        if ops[op.kind].training_only:
            (out,) = op.outs
            instead[out] = op.ins[0]
        else:
            kept.append(op)
    outputs = tuple(instead.get(v, v) for v in program.outputs)
    return Program("evaluate", tuple(kept), outputs, stage="evaluate")

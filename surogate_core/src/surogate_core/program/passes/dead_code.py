"""Dead code elimination: removes ops whose results are never read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..op import Op, Program
from ..opdef import OpDef
from ..value import Value


def dead_code(program: Program, ops: Mapping[str, OpDef]) -> Program:
    """Remove every op that has no effects, writes only activations, and whose results no kept op or output reads."""
    live: set[Value] = set(program.outputs)
    kept: list[Op] = []
    for op in reversed(program.ops):
        if ops[op.kind].effects or any(v.role != "act" or v in live for v in op.outs):
            kept.append(op)
            live.update(op.ins)
    return replace(program, ops=tuple(reversed(kept)))

"""Dead code elimination: removes ops whose results are never read, and the outputs that an op can do without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..op import Op, Program
from ..opdef import OpDef
from ..value import Value


def dead_code(program: Program, ops: Mapping[str, OpDef]) -> Program:
    """Remove every op that changes no state, writes only activations, and whose results no kept op or output reads.

    Where nothing reads some of the outputs of an op, it becomes the one that writes the others (`Rewrites.narrowed`).
    """
    live: set[Value] = set(program.outputs)
    kept: list[Op] = []
    for op in reversed(program.ops):
        used = [v.role != "act" or v in live for v in op.outs]
        if op.changes or any(used):
            kept.append(op if all(used) else ops[op.kind].rewrites.narrowed(op, used))
            live.update(op.ins)
    return replace(program, ops=tuple(reversed(kept)))

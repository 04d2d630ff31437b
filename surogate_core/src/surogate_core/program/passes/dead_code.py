"""Dead code elimination: removes ops whose results are never read, and the outputs that an op can do without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..op import Op, Program
from ..opdef import OpDef
from ..value import Value


def dead_code(program: Program, ops: Mapping[str, OpDef]) -> Program:
    """Remove every op that changes no state, writes only activations, and whose results no kept op or output reads.

    An op of whose outputs only the first is used becomes the kind that computes it alone (`OpDef.first_output`).
    """
    live: set[Value] = set(program.outputs)
    kept: list[Op] = []
    for op in reversed(program.ops):
        used = [v.role != "act" or v in live for v in op.outs]
        if op.changes or any(used):
            alone = ops[op.kind].first_output
            kept.append(replace(op, kind=alone, outs=op.outs[:1]) if alone and not any(used[1:]) else op)
            live.update(op.ins)
    return replace(program, ops=tuple(reversed(kept)))

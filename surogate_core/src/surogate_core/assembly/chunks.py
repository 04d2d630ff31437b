"""Chunks of ops that take much workspace (`OpDef.takes_chunks`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..program.op import Op, Program
from ..program.opdef import OpDef


def in_chunks(program: Program, ops: Mapping[str, OpDef], chunks: int) -> Program:
    """Return `program` with every op that takes chunks in `chunks` of them. Returns it unchanged if there is none."""

    def chunked(op: Op) -> Op:
        return replace(op, attrs={**op.attrs, "chunks": chunks}) if ops[op.kind].takes_chunks else op

    changed = tuple(map(chunked, program.ops))
    return program if changed == program.ops else replace(program, ops=changed)

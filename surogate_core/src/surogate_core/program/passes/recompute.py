"""Activation recomputation: drops selected values after the forward pass and recomputes them in the backward pass.

Values are selected, not ops, because the outputs of one op can differ:
`add_rmsnorm` writes a residual that is kept and a norm that is dropped. The pass runs after the recipe's lowering, so
recomputed values are bit-identical to those of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..builder import Builder
from ..op import Op, Program
from ..opdef import OpDef
from ..value import WEIGHT_LABEL, Value
from .fuse_recompute import fuse_recompute


def recompute(program: Program, drops: Callable[[Value], bool], builder: Builder) -> Program:
    """Emit ops that recompute the dropped values, just before the first backward op that reads them, or let a backward
    op compute them (`fuse_recompute`).

    A value is dropped if `drops` selects it, its label is WEIGHT_LABEL, or its op is `always_recomputed`, provided that
    a forward op inside a block writes it. `Rewrites.rematerialise` emits the recomputation. Without that rule the op is
    emitted again, unless it changes states.
    """
    producer = _producers(program, builder.ops)
    dropped = {v for v, op in producer.items() if drops(v) or _always_dropped(v, op, builder.ops)}
    back: dict[Value, Value] = {}
    ops: list[Op] = []

    def materialise(value: Value) -> None:
        if value in back:
            return
        op = producer[value]
        emitted, results = _rematerialise(op, frozenset(v for v in op.outs if v not in dropped), builder)
        for new in emitted:
            append(new)
        for old, fresh in zip(op.outs, results, strict=True):
            if fresh is not None and old in dropped:
                back.setdefault(old, fresh)

    def append(op: Op) -> None:
        for value in op.ins:
            if value in dropped:
                materialise(value)
        ops.append(op.on(back))

    for op in program.ops:
        if op.phase == "backward":
            append(op)
        else:
            ops.append(op)
    return fuse_recompute(replace(program, ops=tuple(ops)), builder.ops)


def drops_anyway(program: Program, ops: Mapping[str, OpDef]) -> bool:
    """Return whether `recompute` changes the program even if the user recomputes nothing."""
    return any(_always_dropped(value, op, ops) for value, op in _producers(program, ops).items())


def _always_dropped(value: Value, op: Op, ops: Mapping[str, OpDef]) -> bool:
    return value.label == WEIGHT_LABEL or ops[op.kind].always_recomputed


def _producers(program: Program, ops: Mapping[str, OpDef]) -> dict[Value, Op]:
    """Map each activation inside a block that can be recomputed to the op that writes it."""
    return {
        v: op
        for op in program.ops
        if op.phase == "forward" and op.block >= 0 and (ops[op.kind].rewrites.rematerialise or not op.changes)
        for v in op.outs
        if v.role == "act" and v not in program.outputs
    }


def _rematerialise(op: Op, kept: frozenset[Value], builder: Builder) -> tuple[list[Op], tuple[Value | None, ...]]:
    """Emit the recomputation of `op`. Return the new ops and, for each output, its replacement (None if kept)."""
    rule = builder.ops[op.kind].rewrites.rematerialise
    with builder.record("recompute", op.block) as emitted:
        if rule is not None:
            results = rule(builder, op, kept)
        else:
            results = builder.emit(op.kind, *op.ins, label=op.outs[0].label, **op.attrs)
    return emitted, results

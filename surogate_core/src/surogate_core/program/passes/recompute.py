"""Activation recomputation: drops selected values after the forward pass and recomputes them in the backward pass.

Values are selected, not ops, because the outputs of one op can differ:
`add_rmsnorm` writes a residual that is kept and a norm that is dropped. The pass runs after the recipe's lowering, so
recomputed values are bit-identical to those of the forward pass.

Fused recomputation: a backward op that reads what a recomputed op reads computes its output as well. `swiglu_bwd` reads
`gate_up`, of which `swiglu` is a function, so an op that computes both only has to write one value more. The backward
ops that read the value earlier follow that op.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ..builder import Builder
from ..labels import BLOCK_INPUT
from ..op import Op, Program
from ..opdef import OpDef
from ..value import WEIGHT_LABEL, Value


def recompute(
    program: Program, drops: Callable[[Value], bool], builder: Builder, moved: Collection[str] = ()
) -> Program:
    """Emit ops that recompute the dropped values, just before the first backward op that reads them, or let a backward
    op compute them (`fuse_recompute`).

    If the value that enters a block is dropped, all of the block before is computed for it, and again for the backward
    pass of that block: what it keeps in between would be as much as two blocks have.

    A value is dropped if `drops` selects it, its label is WEIGHT_LABEL, or its op is `always_recomputed`, provided that
    a forward op inside a block writes it. `Rewrites.rematerialize` emits the recomputation. Without that rule the op is
    emitted again, unless it changes states.

    moved  labels of values that an offload strategy moves to the host. What an op makes of such a value and has its
           label, as a quantized copy, is dropped: made again from what is moved.
    """
    producer = _producers(program, builder.ops)
    dropped = {v for v, op in producer.items() if drops(v) or _always_dropped(v, op, builder.ops, moved)}
    in_pairs = any(v.label == BLOCK_INPUT for v in dropped)
    back: dict[Value, Value] = {}
    ops: list[Op] = []

    def materialise(value: Value) -> None:
        if value in back:
            return
        op = producer[value]
        emitted, results = _rematerialize(op, frozenset(v for v in op.outs if v not in dropped), builder)
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

    reached: set[int] = set()
    for op in program.ops:
        if op.phase == "backward":
            if in_pairs and op.block not in reached:
                reached.add(op.block)
                for value in [v for v in back if v.block == op.block]:
                    del back[value]
            append(op)
        else:
            ops.append(op)
    return fuse_recompute(replace(program, ops=tuple(ops)), builder.ops)


def drops_anyway(program: Program, ops: Mapping[str, OpDef], moved: Collection[str] = ()) -> bool:
    """Return whether `recompute` changes the program even if the user recomputes nothing."""
    return any(_always_dropped(value, op, ops, moved) for value, op in _producers(program, ops).items())


def _always_dropped(value: Value, op: Op, ops: Mapping[str, OpDef], moved: Collection[str]) -> bool:
    is_copy = value.label in moved and any(v.label == value.label for v in op.ins)
    return value.label == WEIGHT_LABEL or ops[op.kind].always_recomputed or is_copy


def _producers(program: Program, ops: Mapping[str, OpDef]) -> dict[Value, Op]:
    """Map each activation inside a block that can be recomputed to the op that writes it."""
    return {
        v: op
        for op in program.ops
        if op.phase == "forward" and op.block >= 0 and (ops[op.kind].rewrites.rematerialize or not op.changes)
        for v in op.outs
        if v.role == "act" and v not in program.outputs
    }


def _rematerialize(op: Op, kept: frozenset[Value], builder: Builder) -> tuple[list[Op], tuple[Value | None, ...]]:
    """Emit the recomputation of `op`. Return the new ops and, for each output, its replacement (None if kept)."""
    rule = builder.ops[op.kind].rewrites.rematerialize
    with builder.record("recompute", op.block) as emitted:
        if rule is not None:
            results = rule(builder, op, kept)
        else:
            results = builder.emit(op.kind, *op.ins, label=op.outs[0].label, **op.attrs)
    return emitted, results


def fuse_recompute(program: Program, ops: Mapping[str, OpDef]) -> Program:
    """Remove recomputed ops whose first output a backward op can write (`Rewrites.recompute_kind`).

    Only backward ops may read that output, and nothing the others. If one of its readers cannot move, the op stays.
    """
    readers = program.readers()
    position = {op: index for index, op in enumerate(program.ops)}
    fused: dict[Op, Op] = {}
    followers: dict[Op, list[Op]] = {}
    gone: set[Op] = set()
    for op in (op for op in program.ops if op.phase == "recompute"):
        at, kind = _where(op, readers, ops)
        if at is None:
            continue
        early = [reader for reader in readers[op.outs[0]] if position[reader] < position[at]]
        passed = {reader: program.ops[position[reader] + 1 : position[at] + 1] for reader in early}
        is_free = gone.isdisjoint((at, *early)) and fused.keys().isdisjoint((at, *early))
        if is_free and all(_may_pass(reader, others, early) for reader, others in passed.items()):
            fused[at] = at.changed(kind=kind, outs=(*at.outs, op.outs[0]))
            followers[at] = early
            gone.update((op, *early))
    left = (op for op in program.ops if op not in gone)
    return replace(program, ops=tuple(new for op in left for new in (fused.get(op, op), *followers.get(op, ()))))


def _where(op: Op, readers: Mapping[Value, Sequence[Op]], ops: Mapping[str, OpDef]) -> tuple[Op | None, str]:
    """Return the backward op that can compute the only output of `op` that is read, and the kind that does so."""
    first, *others = op.outs
    reading = readers.get(first, ())
    if {reader.phase for reader in reading} != {"backward"} or any(value in readers for value in others):
        return None, ""
    for candidate in dict.fromkeys(reader for value in op.ins for reader in readers[value]):
        rule = ops[candidate.kind].rewrites.recompute_kind
        fits = (candidate.phase, candidate.block) == ("backward", op.block) and candidate not in reading
        if rule and fits and (kind := rule(candidate, op)):
            return candidate, kind
    return None, ""


def _may_pass(moving: Op, passed: Sequence[Op], followers: Sequence[Op]) -> bool:
    """Whether an op may run after others that it precedes now, of which `followers` move as well.

    The others may not read or write what it writes, or write what it reads.
    """
    return all(
        op in followers or not ({*op.ins, *op.written} & {*moving.written} or {*op.written} & {*moving.ins})
        for op in passed
    )

"""Weights of experts are decoded a few experts at a time, in front of products with these alone.

    w = decode(all); y = product(x, w)  ->  y_0 = unwritten; w_i = decode(some); y_i+1 = product of them in place of y_i

So the memory of a layer's decoded experts is that of some. Each op that reads them decodes them for itself, and no bit
of a result changes: a product computes the rows of an expert from the matrix of that expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

from ..builder import Builder
from ..op import Op, Program
from ..opdef import Apart, GroupWise, OpDef
from ..value import ALIGNMENT, UNFINISHED_LABEL, WEIGHT_LABEL, Value


@dataclass(frozen=True)
class _Decoded:
    """An op that decodes matrices, each a group's or several of one, and the groups that it decodes at a time."""

    op: Op
    groups: int
    at_a_time: int


def decode_some(program: Program, most: int, builder: Builder) -> Program:
    """Return the program with at most `most` bytes decoded at a time, or one matrix, where all readers allow it."""
    readers, ops = program.readers(), builder.ops
    with_outs = (op for op in program.ops if op.outs)
    found = {op.outs[0]: one for op in with_outs if (one := _decoded(op, readers, most, ops))}
    if not found:
        return program
    return replace(program, ops=tuple(_divided(program.ops, found, builder)))


def can_decode_some(program: Program, ops: Mapping[str, OpDef]) -> bool:
    """Return whether a weight of any size would be decoded in parts."""
    readers = program.readers()
    return any(_decoded(op, readers, 1, ops) for op in program.ops if op.outs)


def equal_parts(op: Op, apart: Apart, groups: int, most: int) -> int:
    """Return how many of `groups` equal shares of the matrices of an op take at most `most` bytes; at least 1.

    The largest of its values counts. 0: it has no such shares, or one has all. All parts but the last have as many, and
    begin at an address of which kernels may assume the alignment.
    """
    rows = op.attrs["rows"]
    values = [*((op.ins[i], 0) for i in apart.ins), *((op.outs[i], _axis(apart, i)) for i in apart.outs)]
    each = len(rows) // groups
    if not each or tuple(rows) != tuple(rows[:each]) * groups or any(v.shape[axis] % groups for v, axis in values):
        return 0
    nbytes = [v.nbytes // groups for v, _ in values]
    unit = lcm(*(ALIGNMENT // gcd(ALIGNMENT, size) for size in nbytes))
    count = max(most // max(nbytes) // unit, 1) * unit
    parts = -(-groups // count)
    return -(-groups // parts // unit) * unit if parts > 1 else 0


def _axis(apart: Apart, out: int) -> int:
    return 1 if out in apart.beside else 0


def part_of_op(
    op: Op, apart: Apart, groups: int, first: int, count: int, share: Callable[[Value, int, int, int], Value]
) -> Op:
    """Return an op on `count` of `groups` shares of its matrices, from `first` on.

    share: (value, axis, start, size) -> that part of a value along an axis; all of an output that holds no matrices.
    """

    def part(value: Value, axis: int) -> Value:
        size = value.shape[axis] // groups
        return share(value, axis, first * size, count * size)

    ins = (part(v, 0) if i in apart.ins else v for i, v in enumerate(op.ins))
    outs = (part(v, _axis(apart, i)) if i in apart.outs else share(v, 0, 0, v.shape[0]) for i, v in enumerate(op.outs))
    matrices = op.attrs["rows"]
    attrs = {**op.attrs, "rows": matrices[: len(matrices) // groups * count]}
    return op.changed(ins=tuple(ins), outs=tuple(outs), attrs=attrs)


def _decoded(op: Op, readers: Mapping[Value, Sequence[Op]], most: int, ops: Mapping[str, OpDef]) -> _Decoded | None:
    """Return how an op is divided; None: it is not, because it is small, or because a reader needs all matrices."""
    apart = ops[op.kind].apart(op)
    if apart is None or any(out.label != WEIGHT_LABEL for out in op.outs) or op.outs[0].nbytes <= most:
        return None
    of_weight = readers.get(op.outs[0], ())
    if any(reader not in of_weight for out in op.outs[1:] for reader in readers.get(out, ())):
        return None
    groups = {_groups_of(op.outs[0], reader, ops[reader.kind].group_wise(reader)) for reader in of_weight}
    if len(groups) != 1 or not (count := groups.pop()):
        return None
    at_a_time = equal_parts(op, apart, count, most)
    return _Decoded(op, count, at_a_time) if at_a_time else None


def _groups_of(weight: Value, reader: Op, use: GroupWise | None) -> int:
    """Return the groups of an op that reads a weight as that of its product alone, and writes all of an activation."""
    if use is None or reader.ins[use.weight] is not weight or reader.ins.count(weight) > 1:
        return 0
    (y,) = reader.outs
    return use.groups if (y.role, y.root, reader.lane) == ("act", y, "compute") else 0


def _divided(ops: Sequence[Op], decoded: Mapping[Value, _Decoded], builder: Builder) -> Iterable[Op]:
    """Yield the ops, each that reads a weight of `decoded` once for each part of it."""
    left_out = {one.op for one in decoded.values()}
    for op in ops:
        weight = next((v for v in op.ins if v in decoded), None)
        if weight is not None:
            yield from _in_parts(op, decoded[weight], builder)
        elif op not in left_out:
            yield op


def _in_parts(op: Op, decoded: _Decoded, builder: Builder) -> Iterable[Op]:
    use, apart, whole = builder.ops[op.kind].group_wise(op), builder.ops[decoded.op.kind].apart(decoded.op), decoded.op
    assert use is not None and apart is not None
    (y,) = op.outs

    def activation(label: str, shape: Sequence[int], dtype: str) -> Value:
        with builder.block(op.block):
            return builder.activation(label, shape, dtype)

    def share(value: Value, axis: int, start: int, size: int) -> Value:
        if value in whole.outs:
            shape = (*value.shape[:axis], size, *value.shape[axis + 1 :])
            return activation(WEIGHT_LABEL, shape, value.dtype)
        return builder.rows(value, start, size)

    base = activation(UNFINISHED_LABEL, y.shape, y.dtype)
    yield op.changed(kind="unwritten", ins=(), outs=(base,), attrs={"shape": y.shape, "dtype": y.dtype})
    for first in range(0, decoded.groups, decoded.at_a_time):
        count = min(decoded.at_a_time, decoded.groups - first)
        decode = part_of_op(whole, apart, decoded.groups, first, count, share)
        yield decode.changed(phase=op.phase, block=op.block, times=op.times)
        now = dict(zip(whole.outs, decode.outs, strict=True))
        out = y if first + count == decoded.groups else activation(UNFINISHED_LABEL, y.shape, y.dtype)
        ins = (base, *(now.get(v, v) for v in op.ins))
        attrs = {**op.attrs, "first": first}
        yield op.changed(kind=use.kind, ins=ins, outs=(out,), attrs=attrs, in_place={0: 0})
        base = out

"""Row tiles: ops that compute each row by itself run some rows at a time, so that what only they read stays small.

    forward    attention | o, norm, gate_up, swiglu, down, norm, qkv, rope: all for some rows, then for the next | ...

A stretch is what lies between two ops that need whole values, such as attention. Values that only one stretch reads
have the rows of a tile; those that others read, such as the residual stream, are whole, and each tile writes its rows.
Kernels do not change: a tile is the same op on fewer rows.

In the order of the functions:

1. `_later`: an op of the backward pass moves to its first reader, so that its result does not wait for attention.
2. `_stretches`: ops that need nothing of a stretch move in front of it, copies to the host of what it writes behind it.
3. `_again`: a stretch computes again what an earlier one has recomputed, instead of keeping it.
4. `_in_tiles`: each stretch that makes memory smaller becomes its tiles, one after another.

Rows of all outputs have the bits of the whole product where a kernel's arithmetic does not depend on how many rows it
gets. Sums over rows are those of the tiles, in order (`sum_in_blocks`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..builder import Builder
from ..op import Op, Program
from ..opdef import OpDef, RowWise
from ..value import Value

MOST = 256
"""Tiles of a program, of which each has all ops of a stretch."""

MULTIPLE = 128
"""Rows of a tile are a multiple of it, so that rows begin at an address of which kernels may assume the alignment."""


@dataclass(frozen=True)
class _Stretch:
    """Ops that are next to each other. `rows`: each computes its rows by itself."""

    ops: tuple[Op, ...]
    rows: bool


def tile(program: Program, tokens: int, rows: int, builder: Builder) -> Program:
    """Return the program with its ops on `tokens` rows in tiles of `rows`, wherever a value becomes smaller by it."""
    if tokens <= rows:
        return program
    given = _RowWise(builder.ops, tokens)
    stretches = _stretches(_later(program, given), given)
    stretches = _again(stretches, builder)
    return replace(program, ops=tuple(_in_tiles(stretches, program.outputs, given, rows, builder)))


class _RowWise:
    """`OpDef.row_wise` of ops of which each value with rows has one for each token, found once for alike ops."""

    def __init__(self, ops: Mapping[str, OpDef], tokens: int) -> None:
        self._ops = ops
        self.tokens = tokens
        self._known: dict[object, RowWise | None] = {}

    def __call__(self, op: Op) -> RowWise | None:
        if op.signature not in self._known:
            self._known[op.signature] = self._of(op)
        return self._known[op.signature]

    def _of(self, op: Op) -> RowWise | None:
        found = self._ops[op.kind].row_wise(op)
        if found is None or op.lane != "compute" or op.changes or op.accumulate:
            return None
        values = [*(op.ins[i] for i in found.ins), *(op.outs[i] for i in found.outs)]
        sums = [op.outs[i] for i in found.sums]
        whole = all(v.shape[:1] == (self.tokens,) and not v.room and v.place == "device" for v in values)
        is_right = whole and all(op.outs[i].role == "act" for i in found.outs)
        return found if is_right and all(v.role == "grad" and v.dtype != "bf16" for v in sums) else None


def _later(program: Program, row_wise: _RowWise) -> Program:
    """Move ops of the backward pass in front of their first readers, where more than they themselves lies between.

    An op stays if inputs of it, which would live as long, have more bytes than its outputs.
    """
    last_read = {v: i for i, op in enumerate(program.ops) for v in op.ins}
    last_read |= dict.fromkeys(program.outputs, len(program.ops))
    first_read: dict[Value, int] = {}
    in_front: dict[int, list[Op]] = {}
    moved: set[int] = set()
    for index in range(len(program.ops) - 1, -1, -1):
        op = program.ops[index]
        found = row_wise(op)
        target = min((first_read[v] for v in op.outs if v in first_read), default=index)
        if found and not found.sums and op.phase == "backward" and not set(program.outputs).intersection(op.outs):
            crosses = any(not row_wise(between) for between in program.ops[index + 1 : target])
            longer = sum(v.nbytes for v in op.ins if v.role == "act" and last_read[v] < target)
            if crosses and longer <= sum(v.nbytes for v in op.outs):
                in_front.setdefault(target, []).insert(0, op)
                moved.add(index)
                last_read |= {v: max(last_read[v], target) for v in op.ins}
                first_read |= dict.fromkeys(op.ins, target)
                continue
        first_read |= dict.fromkeys(op.ins, index)
    kept = (new for i, op in enumerate(program.ops) for new in (*in_front.get(i, ()), *(() if i in moved else (op,))))
    return replace(program, ops=tuple(kept))


def _stretches(program: Program, row_wise: _RowWise) -> list[_Stretch]:
    """Divide a program. In the backward pass a stretch ends with its block, or gradients of two would live together."""
    found: list[_Stretch] = []
    front: list[Op] = []
    run: list[Op] = []
    behind: list[Op] = []
    read: set[Value] = set()
    written: set[Value] = set()
    copied: set[Value] = set()

    def close() -> None:
        found.extend((_Stretch((*front,), False), _Stretch((*run,), True), _Stretch((*behind,), False)))
        for group in (front, run, behind):
            group.clear()
        for values in (read, written, copied):
            values.clear()

    for op in program.ops:
        if row_wise(op):
            ends = bool(run) and "forward" not in (op.phase, run[-1].phase) and op.block != run[-1].block
            if ends or not copied.isdisjoint(op.ins):
                close()
            run.append(op)
            read.update(op.ins)
            written.update(op.outs)
        elif (written | copied).isdisjoint((*op.ins, *op.written)) and read.isdisjoint(op.written):
            front.append(op)
        elif op.lane != "compute" and read.isdisjoint(op.written) and written.isdisjoint(op.written):
            behind.append(op)
            copied.update(op.written)
        else:
            close()
            found.append(_Stretch((op,), False))
    close()
    return [stretch for stretch in found if stretch.ops]


def _again(stretches: Sequence[_Stretch], builder: Builder) -> list[_Stretch]:
    """Compute in a stretch what an earlier one has recomputed, if that needs nothing that would live longer for it.

    So only what other ops read is kept between them. Ops of which then nothing is read are dropped.
    """
    last_read = {v: i for i, stretch in enumerate(stretches) for op in stretch.ops for v in op.ins}
    kept = {v for stretch in stretches if not stretch.rows for op in stretch.ops for v in op.ins}
    made: dict[Value, Op] = {}
    result: list[_Stretch] = []
    for index, stretch in enumerate(stretches):
        if stretch.rows:
            here = {v for v, last in last_read.items() if last >= index and (v in kept or v not in made)}
            result.append(_Stretch(tuple(_recomputing(stretch.ops, made, here, builder)), True))
            made |= {v: op for op in stretch.ops if op.phase == "recompute" for v in op.outs if v not in kept}
        else:
            result.append(stretch)
    return _without_unread(result)


def _recomputing(
    ops: Sequence[Op], made: Mapping[Value, Op], here: Collection[Value], builder: Builder
) -> Iterator[Op]:
    """Yield the ops, each after those of `made` that compute what it reads, as far as that needs only `here`."""
    fresh: dict[Value, Value] = {}
    there = set(here)
    for op in ops:
        for value in op.ins:
            for again in (_needed(value, made, there) if value in made else ()) or ():
                if again.outs[0] not in fresh:
                    with builder.block(again.block):
                        outs = [builder.activation(v.label, v.shape, v.dtype) for v in again.outs]
                    yield again.on(fresh).changed(outs=tuple(outs))
                    fresh |= dict(zip(again.outs, outs, strict=True))
                    there.update(again.outs)
        yield op.on(fresh)


def _needed(value: Value, made: Mapping[Value, Op], here: Collection[Value]) -> list[Op] | None:
    """Return the ops of `made` that compute a value of what is `here`, in order; None: there is more that they need."""
    if value.role != "act" or value in here:
        return []
    if value not in made:
        return None
    before = [_needed(v, made, here) for v in made[value].ins]
    return None if None in before else [*(op for ops in before for op in ops or ()), made[value]]


def _without_unread(stretches: Sequence[_Stretch]) -> list[_Stretch]:
    """Drop recomputed ops of stretches that no op reads."""
    read: set[Value] = set()
    result = []
    for stretch in reversed(stretches):
        kept = []
        for op in reversed(stretch.ops):
            if stretch.rows and op.phase == "recompute" and read.isdisjoint(op.outs):
                continue
            kept.append(op)
            read.update(op.ins)
        result.append(_Stretch(tuple(reversed(kept)), stretch.rows))
    return result[::-1]


def _in_tiles(
    stretches: Sequence[_Stretch], outputs: Sequence[Value], row_wise: _RowWise, rows: int, builder: Builder
) -> Iterable[Op]:
    """Yield the ops of all stretches, those of a stretch that has values of its own once for each tile."""
    readers: dict[Value, set[int]] = {v: {-1} for v in outputs}
    for index, stretch in enumerate(stretches):
        for op in stretch.ops:
            for value in op.ins:
                readers.setdefault(value, set()).add(index)
    for index, stretch in enumerate(stretches):
        acts = [v for op in stretch.ops for v in op.outs if v.role == "act"]
        own = {v for v in acts if readers.get(v, set()) <= {index}}
        if not stretch.rows or not any(len(v.shape) > 1 for v in own):
            yield from stretch.ops
            continue
        for first in range(0, row_wise.tokens, rows):
            count = min(rows, row_wise.tokens - first)
            yield from _tile(stretch.ops, first, count, own, row_wise, builder)


def _tile(
    ops: Sequence[Op], first: int, count: int, own: set[Value], row_wise: _RowWise, builder: Builder
) -> Iterable[Op]:
    """Yield the ops on `count` rows from row `first` on. Of values of its `own` the tile has one of so many rows."""
    places: dict[Value, Value] = {}

    def place(value: Value) -> Value:
        if value not in places and value in own:
            with builder.block(value.block):
                places[value] = builder.activation(value.label, (count, *value.shape[1:]), value.dtype)
        elif value not in places:
            places[value] = builder.rows(value, first, count)
        return places[value]

    for op in ops:
        found = row_wise(op)
        assert found is not None
        ins = tuple(place(v) if i in found.ins else v for i, v in enumerate(op.ins))
        outs = tuple(place(v) if i in found.outs else v for i, v in enumerate(op.outs))
        yield op.changed(ins=ins, outs=outs)

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

A sketch writes out three tiles: one stands for all between the first and the last (`Op.times`), which are alike. So it
has the seconds of the whole program, and its live bytes.

Every tile has an instance of its own of a value that makes sense for its rows alone (`RowWise.local`), such as the
order in which experts take them. Tiles of the same rows read it in later stretches too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..builder import Builder
from ..op import Op, Program
from ..opdef import OpDef
from ..value import ALIGNMENT, Value
from . import sum_in_blocks
from .row_wise import RowWiseOps

MOST = 256
"""Tiles of a program, of which each has all ops of a stretch."""

_MOST_OF_A_ROW = 16
"""Tiles of a long row. More make a program longer, but hardly smaller: values of a stretch are then a small part of the
whole ones."""

MULTIPLE = 128
"""Rows of a tile are a multiple of it, so that rows begin at an address of which kernels may assume the alignment."""


@dataclass(frozen=True)
class _Stretch:
    """Ops that are next to each other. `rows`: each computes its rows by itself."""

    ops: tuple[Op, ...]
    rows: bool


def tiles_of(tokens: int) -> int:
    """Return the rows of a tile, a multiple of the rows of a block of sums, of `tokens` rows."""
    return -(-tokens // (_MOST_OF_A_ROW * sum_in_blocks.BLOCK)) * sum_in_blocks.BLOCK


def computes_together(program: Program, tokens: int, ops: Mapping[str, OpDef]) -> bool:
    """Return whether tiles divide ops whose rows depend on which others are in their tile (`RowWise.together`)."""
    given = RowWiseOps(ops, tokens, together=True)
    given.refuse_whole(program)
    return any(found.together for op in program.ops if (found := given(op)))


def tile(
    program: Program, tokens: int, rows: int, builder: Builder, *, together: bool = False, sketch: bool = False
) -> Program:
    """Return the program with its ops on `tokens` rows in tiles of `rows`, wherever a value becomes smaller by it.

    together  ops are divided too whose rows depend on which others are in their tile, and tiles are those of every plan
              of these rows: sums over rows are always made in them
    sketch    return a program that cannot run, for its seconds and live bytes
    """
    if tokens <= rows:
        return program
    given = RowWiseOps(builder.ops, tokens, together)
    given.refuse_whole(program)
    stretches = _stretches(_later(program, given), given)
    stretches = _again(stretches, builder)
    spans = _spans(tokens, rows, sketch)
    return replace(program, ops=tuple(_in_tiles(stretches, program.outputs, given, spans, builder)))


@dataclass(frozen=True)
class _Span:
    """`count` rows from row `first` on; of as many alike tiles as it stands for, those of one."""

    first: int
    count: int
    times: int = 1


def _spans(tokens: int, rows: int, sketch: bool) -> list[_Span]:
    found = [_Span(first, min(rows, tokens - first)) for first in range(0, tokens, rows)]
    between = found[1:-1]
    return [found[0], replace(between[0], times=len(between)), found[-1]] if sketch and between else found


def _later(program: Program, row_wise: RowWiseOps) -> Program:
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
                first_read |= {v: min(first_read.get(v, target), target) for v in op.ins}
                continue
        first_read |= dict.fromkeys(op.ins, index)
    kept = (new for i, op in enumerate(program.ops) for new in (*in_front.get(i, ()), *(() if i in moved else (op,))))
    return replace(program, ops=tuple(kept))


def _stretches(program: Program, row_wise: RowWiseOps) -> list[_Stretch]:
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
    """Compute in a stretch what an earlier one has recomputed, if what would live longer for it is smaller.

    So only what other ops read is kept between them. Ops of which then nothing is read are dropped.
    """
    last_read = {v: i for i, stretch in enumerate(stretches) for op in stretch.ops for v in op.ins}
    kept = {v for stretch in stretches if not stretch.rows for op in stretch.ops for v in op.ins}
    made: dict[Value, Op] = {}
    result: list[_Stretch] = []
    for index, stretch in enumerate(stretches):
        if stretch.rows:
            here = _Here(index, last_read, kept, made)
            here.more |= _worth_keeping({v for op in stretch.ops for v in op.ins if v in made}, made, here)
            result.append(_Stretch(tuple(_recomputing(stretch.ops, made, here, builder)), True))
            made |= {v: op for op in stretch.ops if op.phase == "recompute" for v in op.outs if v not in kept}
        else:
            result.append(stretch)
    return _without_unread(result)


@dataclass
class _Here:
    """The values that are there for a stretch: what it or a later one reads, but for what earlier ones have recomputed
    for stretches alone; and `more`."""

    index: int
    last_read: Mapping[Value, int]
    kept: Collection[Value]
    made: Mapping[Value, Op]
    more: set[Value] = field(default_factory=set)

    def __contains__(self, value: Value) -> bool:
        is_read = self.last_read.get(value, -1) >= self.index
        return (is_read and (value in self.kept or value not in self.made)) or value in self.more


def _recomputing(ops: Sequence[Op], made: Mapping[Value, Op], here: _Here, builder: Builder) -> Iterator[Op]:
    """Yield the ops, each after those of `made` that compute what it reads, as far as that needs only `here`."""
    fresh: dict[Value, Value] = {}
    for op in ops:
        for value in op.ins:
            is_made = value in made and not _missing(value, made, here)
            for again in _needed(value, made, here) if is_made else ():
                if again.outs[0] not in fresh:
                    with builder.block(again.block):
                        outs = [builder.activation(v.label, v.shape, v.dtype) for v in again.outs]
                    yield again.on(fresh).changed(outs=tuple(outs))
                    fresh |= dict(zip(again.outs, outs, strict=True))
                    here.more.update(again.outs)
        yield op.on(fresh)


def _worth_keeping(values: Collection[Value], made: Mapping[Value, Op], here: _Here) -> set[Value]:
    """Return what must live longer so that those of `values` of which it is not `here` can be computed again; nothing
    if that is no smaller than they are."""
    missing = {value: found for value in values if (found := _missing(value, made, here))}
    longer = set().union(*missing.values())
    return longer if sum(v.nbytes for v in longer) < sum(v.nbytes for v in missing) else set()


def _missing(value: Value, made: Mapping[Value, Op], here: _Here) -> set[Value]:
    """Return what is not `here` of all that the ops of `made` need to compute a value."""
    if value.role != "act" or value in here:
        return set()
    return set().union(*(_missing(v, made, here) for v in made[value].ins)) if value in made else {value}


def _needed(value: Value, made: Mapping[Value, Op], here: _Here) -> list[Op]:
    """Return the ops of `made` that compute a value of what is `here`, in order."""
    if value.role != "act" or value in here:
        return []
    return [*(op for v in made[value].ins for op in _needed(v, made, here)), made[value]]


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
    stretches: Sequence[_Stretch],
    outputs: Sequence[Value],
    row_wise: RowWiseOps,
    spans: Sequence[_Span],
    builder: Builder,
) -> Iterable[Op]:
    """Yield the ops of all stretches, those of a stretch that has values of its own once for each tile.

    Where tiles are those of every plan, so are sums over rows: whether a stretch has values of its own depends on what
    is recomputed.
    """
    readers: dict[Value, set[int]] = {v: {-1} for v in outputs}
    for index, stretch in enumerate(stretches):
        for op in stretch.ops:
            for value in op.ins:
                readers.setdefault(value, set()).add(index)
    kept: dict[tuple[Value, int], Value] = {}
    local: set[Value] = set()
    for index, stretch in enumerate(stretches):
        acts = [v for op in stretch.ops for v in op.outs if v.role == "act"]
        own = {v for v in acts if readers.get(v, set()) <= {index}}
        local |= {op.outs[i] for op in stretch.ops if (found := row_wise(op)) for i in found.local}
        reads = not local.isdisjoint(v for op in stretch.ops for v in (*op.ins, *op.outs))
        sums = row_wise.together and any(found.sums for op in stretch.ops if (found := row_wise(op)))
        if not stretch.rows or not (reads or sums or any(len(v.shape) > 1 for v in own)):
            yield from stretch.ops
            continue
        for span in spans:
            yield from _Tile(span, own, kept, row_wise, builder).ops(stretch.ops)


@dataclass(frozen=True)
class _Tile:
    """The rows of a span. Of each value in `own` the tile has one with the rows of the span.

    kept  (a value, the first row of a tile) -> that of the tile, of what makes sense for its rows alone
    """

    span: _Span
    own: set[Value]
    kept: dict[tuple[Value, int], Value]
    row_wise: RowWiseOps
    builder: Builder
    places: dict[Value, Value] = field(default_factory=dict)

    def ops(self, ops: Sequence[Op]) -> Iterator[Op]:
        for op in ops:
            found = self.row_wise(op)
            assert found is not None
            whole = ((v, i in found.ins) for i, v in enumerate(op.ins))
            ins = tuple(self._rows(v) if has_rows else self.kept.get((v, self.span.first), v) for v, has_rows in whole)
            attrs = self._attrs(op, found.first)
            alone = [i for i in found.local if i not in found.outs]
            specs = self.builder.ops[op.kind].infer(ins, attrs) if alone else ()
            outs = [self._rows(v) if i in found.outs else v for i, v in enumerate(op.outs)]
            for i in alone:
                value = op.outs[i]
                outs[i] = self._new(value, specs[i].shape, 1 if value in self.own else self.span.times)
                self.kept[value, self.span.first] = outs[i]
            yield op.changed(ins=ins, outs=tuple(outs), attrs=attrs, times=self.span.times)

    def _attrs(self, op: Op, first: str) -> Mapping[str, Any]:
        rows = op.ins[0].shape[0] // self.row_wise.tokens * self.span.first
        return {**op.attrs, first: rows} if first else op.attrs

    def _rows(self, value: Value) -> Value:
        if value not in self.places:
            each = value.shape[0] // self.row_wise.tokens
            if value in self.own:
                self.places[value] = self._new(value, (each * self.span.count, *value.shape[1:]))
            else:
                self.places[value] = self.builder.rows(value, each * self.span.first, each * self.span.count)
        return self.places[value]

    def _new(self, value: Value, shape: tuple[int, ...], times: int = 1) -> Value:
        """Return a value of the tile; with `times`, with the memory of the values of that many tiles."""
        nbytes = replace(value, shape=shape).nbytes
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT * times if times > 1 else 0
        with self.builder.block(value.block):
            return self.builder.activation(value.label, shape, value.dtype, room=room)

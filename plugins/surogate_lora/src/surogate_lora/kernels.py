"""Compiled kernels of the ops that move matrices, and of `lora_dropout`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from struct import pack

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target, Value

from .ops import dropped_draws, kept_scale

_FLOATS = ("fp32", "bf16")
_OCTET = 8
"""Columns that a thread of the kernel moves at a time."""


@dataclass(frozen=True)
class _Move:
    """An entry of the kernel's table, `Move` in pack.cu. source 0: zeros. Strides in elements; dtypes as codes."""

    source: int
    target: int
    source_stride: int
    target_stride: int
    rows: int
    columns: int
    dtypes: tuple[str, str]
    scale: float
    accumulates: bool = False

    def turned(self) -> _Move:
        """Return the move from the target to the source."""
        strides = self.target_stride, self.source_stride
        return _Move(self.target, self.source, *strides, self.rows, self.columns, self.dtypes[::-1], self.scale)

    @property
    def words(self) -> tuple[int, ...]:
        """The scale is the bits of a double."""
        source, target = (DTYPES[dtype].code for dtype in self.dtypes)
        kinds = source | target << 8 | self.accumulates << 16
        scale = int.from_bytes(pack("<d", self.scale), "little")
        strides = self.source_stride, self.target_stride
        return self.source, self.target, *strides, self.rows, self.columns, kinds, scale

    @property
    def octets(self) -> int:
        return self.rows * -(-self.columns // _OCTET)


Rectangle = tuple[int, int, int, int]
"""Row, column, number of rows and of columns."""


def _bind_pack(op: Op, ctx: BindContext) -> Call:
    """A move for each part, and one without a source for each gap between them."""
    moves = []
    taken: list[list[Rectangle]] = [[] for _ in op.outs]
    for part, at in zip(op.ins, op.attrs["places"], strict=True):
        whole, (rows, columns) = op.outs[at.whole], part.shape
        target = _address(ctx, whole, at.row, at.column)
        dtypes = part.dtype, whole.dtype
        moves.append(_Move(ctx.pointer(part), target, columns, whole.shape[1], rows, columns, dtypes, at.scale))
        taken[at.whole].append((at.row, at.column, rows, columns))
    for whole, rectangles in zip(op.outs, taken, strict=True):
        for row, column, rows, columns in gaps(whole.shape, rectangles):
            target, dtypes = _address(ctx, whole, row, column), (whole.dtype, whole.dtype)
            moves.append(_Move(0, target, columns, whole.shape[1], rows, columns, dtypes, 0.0))
    return _move(ctx, moves)


def _bind_unpack(op: Op, ctx: BindContext) -> Call:
    moves = []
    for i, (part, at) in enumerate(zip(op.outs, op.attrs["places"], strict=True)):
        whole, (rows, columns) = op.ins[at.whole], part.shape
        source = _address(ctx, whole, at.row, at.column)
        strides, dtypes = (whole.shape[1], columns), (whole.dtype, part.dtype)
        moves.append(_Move(source, ctx.pointer(part), *strides, rows, columns, dtypes, at.scale, i in op.accumulate))
    return _move(ctx, moves)


def _bind_join(op: Op, ctx: BindContext) -> Call:
    return _move(ctx, [_columns(ctx, part, whole=op.outs[0], column=at) for part, at in _in_order(op.ins)])


def _bind_split(op: Op, ctx: BindContext) -> Call:
    return _move(ctx, [_columns(ctx, part, whole=op.ins[0], column=at).turned() for part, at in _in_order(op.outs)])


def _in_order(parts: Sequence[Value]) -> Iterator[tuple[Value, int]]:
    """Yield each part with its first column in the whole."""
    column = 0
    for part in parts:
        yield part, column
        column += part.shape[1]


def _columns(ctx: BindContext, part: Value, whole: Value, column: int) -> _Move:
    rows, columns = part.shape
    source, target = ctx.pointer(part), _address(ctx, whole, 0, column)
    return _Move(source, target, columns, whole.shape[1], rows, columns, (part.dtype, whole.dtype), 1.0)


def _bind_scale(op: Op, ctx: BindContext) -> Call:
    return _move(ctx, [replace(_columns(ctx, op.ins[0], whole=op.outs[0], column=0), scale=op.attrs["scale"])])


def _address(ctx: BindContext, value: Value, row: int, column: int) -> int:
    return ctx.pointer(value) + DTYPES[value.dtype].nbytes(row * value.shape[1] + column)


def _move(ctx: BindContext, moves: Sequence[_Move]) -> Call:
    from . import _C

    table = ctx.table([word for move in moves for word in move.words])
    return ctx.call(_C.lora_move, table, len(moves), max(move.octets for move in moves))


def gaps(shape: Sequence[int], taken: Sequence[Rectangle]) -> Iterator[Rectangle]:
    """Return what rectangles that do not overlap leave of a matrix, as rectangles: for each band of rows between the
    edges of any of them, the stretches of columns that none of them has."""
    edges = sorted({0, shape[0], *(row for row, *_ in taken), *(row + rows for row, _, rows, _ in taken)})
    for top, bottom in pairwise(edges):
        column = 0
        inside = sorted((c, c + n) for row, c, rows, n in taken if row <= top and bottom <= row + rows)
        for start, end in (*inside, (shape[1], shape[1])):
            if start > column:
                yield top, column, bottom - top, start - column
            column = end


def _bind_dropout(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (x, micro_step, seed), (y,) = op.ins, op.outs
    rate = op.attrs["rate"]
    return ctx.call(
        _C.lora_dropout,
        *(x, micro_step, seed, y, x.size, _first(op), op.attrs["stream"]),
        *(dropped_draws(rate), kept_scale(rate), DTYPES[x.dtype].code),
    )


def _first(op: Op) -> int:
    """Return the index of the first element in the matrix that the input has rows of."""
    columns = op.ins[0].shape[1:]
    return int(op.attrs.get("row", 0)) * prod(columns)


def _drops(op: Op, target: Target) -> Support:
    if _first(op) % _OCTET:
        return Support(False, f"begins at element {_first(op)} of its matrix, which is no multiple of {_OCTET}")
    return _writes(op, target)


def _writes(op: Op, target: Target) -> Support:
    if op.accumulate:
        return Support(False, "cannot accumulate into its output")
    return Support(True)


def _pack_supports(op: Op, target: Target) -> Support:
    other = next((v for v in (*op.ins, *op.outs) if v.dtype not in _FLOATS), None)
    if other is not None:
        return Support(False, f"matrices must be fp32 or bf16, got {other!r}")
    return _writes(op, target)


def _unpack_supports(op: Op, target: Target) -> Support:
    narrow = next((op.outs[i] for i in sorted(op.accumulate) if op.outs[i].dtype != "fp32"), None)
    if narrow is not None:
        return Support(False, f"accumulates only into fp32 outputs, got {narrow!r}")
    return _pack_supports(replace(op, accumulate=frozenset()), target)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(op="lora_pack", dtypes=("*", "..."), supports=_pack_supports, bind=_bind_pack),
    KernelDef(op="lora_unpack", dtypes=("*", "..."), supports=_unpack_supports, bind=_bind_unpack),
    KernelDef(op="lora_join", dtypes=("*", "..."), supports=_pack_supports, bind=_bind_join),
    KernelDef(op="lora_split", dtypes=("*", "..."), supports=_pack_supports, bind=_bind_split),
    KernelDef(op="lora_scale", dtypes=("*", "..."), supports=_pack_supports, bind=_bind_scale),
    *(
        KernelDef(
            op="lora_dropout",
            dtypes=(dtype, "int32", "int64", dtype),
            attrs=("row",),
            supports=_drops,
            bind=_bind_dropout,
        )
        for dtype in _FLOATS
    ),
)

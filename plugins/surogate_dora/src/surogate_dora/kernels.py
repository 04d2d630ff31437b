"""Compiled kernels of DoRA's ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Launch, Op, Support, Target, Value

from .ops import Places

_FLOATS = ("fp32", "bf16")
_NONE = DTYPES["fp32"].code
"""The dtype that a launcher is given for a null pointer."""

MOST_RANKS = 1024
"""Ranks of all projections of an op, whose coefficients fit into the shared memory of a block."""

SLAB_ROWS, MOST_SLABS = 64, 128
"""The backward pass sums gradients over slabs of rows first: enough of them for all SMs, and few partial sums."""


def _bind_magnitude(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    from . import _C

    (weight,) = op.ins
    columns = weight.shape[1]
    return tuple(
        Launch(
            ctx.call(
                _C.dora_row_norms,
                *(_address(ctx, weight, first * columns), 0, 0, norm, rows, columns, 0),
                *(DTYPES[weight.dtype].code, _NONE, DTYPES[norm.dtype].code),
            )
        )
        for (first, rows), norm in zip(op.attrs["places"], op.outs, strict=True)
    )


def _bind_norm(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (weight, down, up), (norm,) = op.ins, op.outs
    codes = (DTYPES[value.dtype].code for value in (weight, down, norm))
    return ctx.call(_C.dora_row_norms, weight, down, up, norm, *weight.shape, down.shape[0], *codes)


def _bind_pack(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """A move for each A and each B, with the zeros next to it, and for each band of rows between them."""
    from . import _C

    down, up = op.outs
    width, ranks, places = down.shape[1], up.shape[1], op.attrs["places"]
    calls = []
    column = 0
    for (first, rows), a, b in zip(places, op.ins[::2], op.ins[1::2], strict=True):
        rank, kinds = a.shape[0], (DTYPES[a.dtype].code, DTYPES[down.dtype].code, 0)
        target = _address(ctx, down, column * width)
        calls.append(ctx.call(_C.dora_move, a, target, width, width, rank, width, 0, width, 1.0, *kinds))
        kinds = DTYPES[b.dtype].code, DTYPES[up.dtype].code, 0
        band = _address(ctx, up, first * ranks)
        calls.append(ctx.call(_C.dora_move, b, band, rank, ranks, rows, ranks, column, rank, op.attrs["scale"], *kinds))
        column += rank
    for first, rows in between(places, up.shape[0]):
        kinds = _NONE, DTYPES[up.dtype].code, 0
        band = _address(ctx, up, first * ranks)
        calls.append(ctx.call(_C.dora_move, 0, band, ranks, ranks, rows, ranks, 0, 0, 1.0, *kinds))
    return tuple(map(Launch, calls))


def _bind_unpack(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    from . import _C

    down, up = op.ins
    width, ranks = down.shape[1], up.shape[1]
    calls = []
    column = 0
    for i, (rank, (first, rows)) in enumerate(zip(op.attrs["ranks"], op.attrs["places"], strict=True)):
        a, b = op.outs[2 * i : 2 * i + 2]
        kinds = DTYPES[down.dtype].code, DTYPES[a.dtype].code, int(2 * i in op.accumulate)
        source = _address(ctx, down, column * width)
        calls.append(ctx.call(_C.dora_move, source, a, width, width, rank, width, 0, width, 1.0, *kinds))
        kinds = DTYPES[up.dtype].code, DTYPES[b.dtype].code, int(2 * i + 1 in op.accumulate)
        source = _address(ctx, up, first * ranks + column)
        calls.append(ctx.call(_C.dora_move, source, b, ranks, rank, rows, rank, 0, rank, op.attrs["scale"], *kinds))
        column += rank
    return tuple(map(Launch, calls))


def _bind_scale(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """A launch for the columns of each projection, and for those between them."""
    from . import _C

    (h, norm, *others), (y,), places = op.ins, op.outs, op.attrs["places"]
    magnitudes, bias = others[: len(places)], others[len(places) :]
    rows, stride = h.shape
    calls = []
    for (first, columns), m in _bands(places, magnitudes, stride):
        added = _address(ctx, bias[0], first) if bias else 0
        kinds = DTYPES[h.dtype].code, _code(m), DTYPES[bias[0].dtype].code if bias else _NONE
        factors = _address(ctx, norm, first), m or 0, added
        source, target = _address(ctx, h, first), _address(ctx, y, first)
        calls.append(ctx.call(_C.dora_scale, source, *factors, target, rows, columns, stride, *kinds))
    return tuple(map(Launch, calls))


def _bind_scale_bwd(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    from . import _C

    (dy, h, norm, *magnitudes), (d_h, *d_magnitudes) = op.ins, op.outs
    rows, stride = h.shape
    gradients = {m: (i, d_m) for i, (m, d_m) in enumerate(zip(magnitudes, d_magnitudes, strict=True), 1)}
    calls = []
    for (first, columns), m in _bands(op.attrs["places"], magnitudes, stride):
        i, d_m = gradients[m] if m else (0, None)
        kinds = DTYPES[dy.dtype].code, _code(m), _code(d_m), int(i in op.accumulate)
        calls.append(
            ctx.call(
                _C.dora_scale_bwd,
                *(_address(ctx, value, first) for value in (dy, h, norm)),
                *(m or 0, _address(ctx, d_h, first), d_m or 0, ctx.workspace if m else 0),
                *(rows, columns, stride, slabs(rows), *kinds),
            )
        )
    return tuple(map(Launch, calls))


def _address(ctx: BindContext, value: Value, element: int) -> int:
    return ctx.pointer(value) + DTYPES[value.dtype].nbytes(element)


def _code(value: Value | None) -> int:
    return _NONE if value is None else DTYPES[value.dtype].code


def _bands(places: Places, magnitudes: Sequence[Value], end: int) -> Iterator[tuple[tuple[int, int], Value | None]]:
    """Yield (first, count) of all columns, with the magnitudes of a projection; None: of none."""
    yield from zip(places, magnitudes, strict=True)
    yield from ((place, None) for place in between(places, end))


def between(places: Places, end: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of what places leave of 0 to `end`."""
    at = 0
    for first, count in (*places, (end, 0)):
        if first > at:
            yield at, first - at
        at = first + count


def slabs(rows: int) -> int:
    """Return the slabs of rows of the backward pass, each of them with at least one row."""
    each = -(-rows // min(-(-rows // SLAB_ROWS), MOST_SLABS))
    return -(-rows // each)


def _workspace(op: Op, target: Target) -> int:
    """Partial sums, in fp32: the projections of an op use them one after another."""
    return 4 * slabs(op.ins[0].shape[0]) * max(count for _, count in op.attrs["places"])


def _supports(op: Op, target: Target) -> Support:
    """Support fp32 and bf16. Only gradients of params accumulate, in fp32."""
    other = next((v for v in (*op.ins, *op.outs) if v.dtype not in _FLOATS), None)
    if other is not None:
        return Support(False, f"operands must be fp32 or bf16, got {other!r}")
    narrow = next((op.outs[i] for i in sorted(op.accumulate) if op.outs[i].dtype != "fp32"), None)
    if narrow is not None:
        return Support(False, f"accumulates only into fp32 outputs, got {narrow!r}")
    return Support(True)


def _writes(op: Op, target: Target) -> Support:
    return Support(False, "cannot accumulate into its output") if op.accumulate else _supports(op, target)


def _norm_supports(op: Op, target: Target) -> Support:
    _, down, up = op.ins
    if down.dtype != up.dtype:
        return Support(False, f"A and B must be alike, got {down!r} and {up!r}")
    if down.shape[0] > MOST_RANKS:
        return Support(False, f"at most {MOST_RANKS} ranks in all, got {down.shape[0]}")
    return _writes(op, target)


def _scale_supports(op: Op, target: Target) -> Support:
    (h, norm, *_), (y,) = op.ins, op.outs
    if (h.dtype, norm.dtype) != (y.dtype, "fp32"):
        return Support(False, f"h and y must be alike and norms fp32, got {h!r}, {y!r}, {norm!r}")
    return _writes(op, target)


def _scale_bwd_supports(op: Op, target: Target) -> Support:
    (dy, h, norm, *_), (d_h, *_) = op.ins, op.outs
    if not dy.dtype == h.dtype == d_h.dtype or norm.dtype != "fp32":
        return Support(False, f"dy, h and d_h must be alike and norms fp32, got {dy!r}, {h!r}, {d_h!r}, {norm!r}")
    return Support(False, "cannot accumulate into d_h") if 0 in op.accumulate else _supports(op, target)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(op="dora_magnitude", dtypes=("*", "..."), supports=_writes, bind=_bind_magnitude),
    KernelDef(op="dora_pack", dtypes=("*", "..."), supports=_writes, bind=_bind_pack),
    KernelDef(op="dora_unpack", dtypes=("*", "..."), supports=_supports, bind=_bind_unpack),
    KernelDef(op="dora_norm", dtypes=("*", "..."), supports=_norm_supports, bind=_bind_norm),
    KernelDef(op="dora_scale", dtypes=("*", "..."), supports=_scale_supports, bind=_bind_scale),
    KernelDef(
        op="dora_scale_bwd",
        dtypes=("*", "..."),
        supports=_scale_bwd_supports,
        bind=_bind_scale_bwd,
        workspace=_workspace,
    ),
)

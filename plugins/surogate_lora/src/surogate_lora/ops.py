"""Ops of LoRA in addition to products: matrices packed from others, so that branches share products, and dropout.

    lora_pack      (parts...; shapes, places, dtype)      -> wholes: each part, scaled, at its place; zeros elsewhere
    lora_unpack    (wholes...; shapes, places, dtypes)    -> parts: scale * what a whole has at each place
    lora_wgrad     (dy, x, dy, x, ...; the same)          -> parts of the products dy^T x: whole i is that of pair i

    lora_join      (parts [T, c]...)                      -> whole [T, sum of c]: the columns of the parts, in order
    lora_split     (whole [T, C]; columns)                -> parts [T, c]...: so many columns each, in order
    lora_scale     (x [R, c]; scale)                      -> scale * x, whose rows are of experts

    lora_principal (W [N, K]; row, rows, rank, scale, dtype) -> A, B and their copies: the principal part of rows of W

And what a branch sees of its input, in training alone:

    lora_dropout   (x [T, K], micro_step, seed; rate, stream, row = 0)
                   -> x / (1 - rate), or 0 where an element is dropped. x has the rows of a matrix from `row` on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, ProgramError, Rewrites, RowWise, Value


class Place(NamedTuple):
    """Place of a part: `row` and `column` of its first element in the matrix of index `whole`, which holds `scale`
    times the part."""

    whole: int
    row: int
    column: int
    scale: float


def _lora_pack(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    """`shapes` of the wholes, `places` of the parts, and the `dtype` of all wholes."""
    _check_places([v.shape for v in ins], attrs["places"], attrs["shapes"])
    return [OutSpec("lora", tuple(shape), attrs["dtype"]) for shape in attrs["shapes"]]


def _lora_unpack(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    """`shapes`, `places` and `dtypes` of the parts."""
    _check_places(attrs["shapes"], attrs["places"], [v.shape for v in ins])
    return [OutSpec("lora", tuple(s), d) for s, d in zip(attrs["shapes"], attrs["dtypes"], strict=True)]


def _check_places(parts: Sequence[Sequence[int]], places: Sequence[Place], wholes: Sequence[Sequence[int]]) -> None:
    if len(parts) != len(places):
        raise ProgramError(f"{len(parts)} parts for {len(places)} places")
    taken = []
    for (rows, columns), at in zip(parts, places, strict=True):
        below, right = at.row + rows, at.column + columns
        if not (0 <= at.row < below <= wholes[at.whole][0] and 0 <= at.column < right <= wholes[at.whole][1]):
            raise ProgramError(f"a part [{rows}, {columns}] leaves {list(wholes[at.whole])} at {at}")
        taken.append((at, below, right))
    for (a, below, right), (other, other_below, other_right) in combinations(taken, 2):
        apart = below <= other.row or other_below <= a.row or right <= other.column or other_right <= a.column
        if a.whole == other.whole and not apart:
            raise ProgramError(f"parts at {a} and {other} overlap")


def _lora_pack_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """The gradient of a param has the dtype of the product that computed it, so that an fp32 sum is not narrowed."""
    given = {i: grad for i, grad in enumerate(grads) if grad is not None}
    index = {i: n for n, i in enumerate(given)}
    parts = [(v, at) for v, at in zip(op.ins, op.attrs["places"], strict=True) if at.whole in given]
    outs = b.emit(
        "lora_unpack",
        *given.values(),
        label=[f"d_{v.label}" for v, _ in parts],
        shapes=tuple(v.shape for v, _ in parts),
        places=tuple(at._replace(whole=index[at.whole]) for _, at in parts),
        dtypes=tuple(given[at.whole].dtype if v.role == "param" else v.dtype for v, at in parts),
    )
    found = dict(zip((v for v, _ in parts), outs, strict=True))
    return tuple(found.get(v) for v in op.ins)


def _lora_wgrad(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    """`shapes`, `places` and `dtypes` of the parts."""
    pairs = list(zip(ins[::2], ins[1::2], strict=True))
    other = next(((dy, x) for dy, x in pairs if dy.shape[0] != x.shape[0]), None)
    if other is not None:
        raise ProgramError(f"dy and x must have the same number of rows, got {other[0]!r} and {other[1]!r}")
    _check_places(attrs["shapes"], attrs["places"], [(dy.shape[1], x.shape[1]) for dy, x in pairs])
    return [OutSpec("lora", tuple(s), d) for s, d in zip(attrs["shapes"], attrs["dtypes"], strict=True)]


def _lora_join(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    first = ins[0]
    other = next((v for v in ins if len(v.shape) != 2 or (v.shape[0], v.dtype) != (first.shape[0], first.dtype)), None)
    if other is not None:
        raise ProgramError(f"parts must be matrices of one dtype and as many rows, got {first!r} and {other!r}")
    return [OutSpec(first.label, (first.shape[0], sum(v.shape[1] for v in ins)), first.dtype)]


def _lora_split(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    (whole,), columns = ins, attrs["columns"]
    if min(columns, default=0) < 1 or sum(columns) != whole.shape[1]:
        raise ProgramError(f"columns {list(columns)} are not those of {whole!r}")
    return [OutSpec(whole.label, (whole.shape[0], count), whole.dtype) for count in columns]


def _lora_join_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    columns = tuple(v.shape[1] for v in op.ins)
    return b.emit("lora_split", dy, label=[f"d_{v.label}" for v in op.ins], columns=columns)


def _lora_scale_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    return (b.apply("lora_scale", dy, label=f"d_{op.ins[0].label}", **op.attrs),)


def _unpack_read(op: Op, read: Sequence[bool]) -> Op:
    """Take apart only what is read: not the gradients of frozen parts."""
    kept = [i for i, wanted in enumerate(read) if wanted]
    attrs = {name: tuple(op.attrs[name][i] for i in kept) for name in ("shapes", "places", "dtypes")}
    return op if all(read) else op.changed(outs=tuple(op.outs[i] for i in kept), attrs=attrs)


def _lora_principal(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    (weight,) = ins
    n, k = weight.shape
    row, rows, rank = attrs["row"], attrs["rows"], attrs["rank"]
    if not (0 <= row < row + rows <= n and 0 < rank <= min(rows, k)):
        raise ProgramError(f"{rank} singular values of rows {row} to {row + rows} of {weight!r}")
    return [OutSpec("lora", shape, attrs["dtype"]) for shape in ((rank, k), (rows, rank)) * 2]


def _svd_flops(op: Op) -> int:
    """The usual count of a thin SVD with both sides (Golub and Van Loan)."""
    m, n = sorted((op.attrs["rows"], op.ins[0].shape[1]), reverse=True)
    return 14 * m * n * n + 8 * n * n * n


def _wgrad_flops(op: Op) -> int:
    return 2 * op.ins[0].shape[0] * sum(v.size for v in op.outs)


def _moved(op: Op) -> int:
    return sum(v.size for v in op.outs)


DRAWS = 1 << 16
"""Each element is dropped by 16 random bits, so a rate is a multiple of 1 / DRAWS."""


def dropped_draws(rate: float) -> int:
    """Return how many of DRAWS equally likely draws drop an element: nearest to `rate`, neither none nor all."""
    return min(max(round(rate * DRAWS), 1), DRAWS - 1)


def kept_scale(rate: float) -> float:
    """Return the factor of elements that are kept, which leaves the mean exactly as it was."""
    return DRAWS / (DRAWS - dropped_draws(rate))


def _lora_dropout(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    x, micro_step, seed = ins
    if not 0 < attrs["rate"] < 1:
        raise ProgramError(f"drops a share between 0 and 1, not {attrs['rate']}")
    if (micro_step.shape, micro_step.dtype, seed.shape, seed.dtype) != ((), "int32", (), "int64"):
        raise ProgramError(f"micro_step is an int32 and seed an int64 scalar, not {micro_step!r} and {seed!r}")
    return [OutSpec(x.label, x.shape, x.dtype)]


def _lora_dropout_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """The same elements: the random bits are a function of micro_step, seed, stream and place."""
    (dy,) = grads
    assert dy is not None
    return b.apply("lora_dropout", dy, *op.ins[1:], label=f"d_{op.ins[0].label}", **op.attrs), None, None


_PARTS = {"shapes": tuple, "places": tuple, "dtypes": tuple}

OPS: tuple[OpDef, ...] = (
    OpDef(
        kind="lora_pack",
        infer=_lora_pack,
        attrs={"shapes": tuple, "places": tuple, "dtype": str},
        vjp=_lora_pack_vjp,
        reference="surogate_lora.reference:lora_pack",
        flops=_moved,
    ),
    OpDef(
        kind="lora_unpack",
        infer=_lora_unpack,
        attrs=_PARTS,
        reference="surogate_lora.reference:lora_unpack",
        rewrites=Rewrites(narrowed=_unpack_read),
        flops=_moved,
    ),
    OpDef(
        kind="lora_join",
        infer=_lora_join,
        vjp=_lora_join_vjp,
        reference="surogate_lora.reference:lora_join",
        flops=_moved,
        row_wise=lambda op: RowWise(ins=tuple(range(len(op.ins))), outs=(0,)),
    ),
    OpDef(
        kind="lora_split",
        infer=_lora_split,
        attrs={"columns": tuple},
        reference="surogate_lora.reference:lora_split",
        flops=_moved,
        row_wise=lambda op: RowWise(ins=(0,), outs=tuple(range(len(op.outs)))),
    ),
    OpDef(
        kind="lora_scale",
        infer=lambda ins, attrs: [OutSpec(ins[0].label, ins[0].shape, ins[0].dtype)],
        attrs={"scale": float},
        vjp=_lora_scale_vjp,
        reference="surogate_lora.reference:lora_scale",
        flops=_moved,
        row_wise=lambda op: RowWise(ins=(0,), outs=(0,), local=(0,), takes=(0,)),
    ),
    OpDef(
        kind="lora_principal",
        infer=_lora_principal,
        attrs={"row": int, "rows": int, "rank": int, "scale": float, "dtype": str},
        reference="surogate_lora.reference:lora_principal",
        flops=_svd_flops,
    ),
    OpDef(
        kind="lora_wgrad",
        infer=_lora_wgrad,
        attrs=_PARTS,
        reference="surogate_lora.reference:lora_wgrad",
        flops=_wgrad_flops,
        row_wise=lambda op: RowWise(ins=tuple(range(len(op.ins))), sums=tuple(range(len(op.outs)))),
    ),
    OpDef(
        kind="lora_dropout",
        infer=_lora_dropout,
        attrs={"rate": float, "stream": int, "row": (int, 0)},
        vjp=_lora_dropout_vjp,
        reference="surogate_lora.reference:lora_dropout",
        flops=lambda op: op.outs[0].size,
        training_only=True,
        always_recomputed=True,
        row_wise=lambda op: RowWise(ins=(0,), outs=(0,), first="row"),
    ),
)

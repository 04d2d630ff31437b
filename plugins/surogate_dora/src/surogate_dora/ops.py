"""Ops of DoRA in addition to products. `places` are (first row, rows) of projections in a matrix that holds several.

dora_magnitude  (W [N, K]; places, dtype)         -> m [n] of each projection: the norms of its rows
dora_pack       (A [r, K], B [n, r], ...; rows, places, scale, dtype)
                -> all A, one below the other, [R, K]; and [rows, R]: scale * B in the rows of its projection and
                the columns of its A, zeros elsewhere
dora_unpack     (gradients of both; ranks, places, scale, dtypes)    -> those of A, B of each projection
dora_norm       (W, A [R, K], B [N, R])           -> [N] fp32: |W + B A| by rows, a constant for the backward pass
dora_scale      (h [T, N], norm [N], m [n] ...; places)
                -> [T, N]: m / norm * h in the columns of each projection, h elsewhere; and plus a bias [N], if there
                is one more input
dora_scale_bwd  (dy, h, norm, m ...; places)      -> d_h, and d_m of each projection
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, ProgramError, Value

Places = tuple[tuple[int, int], ...]


def _check_places(places: Places, rows: int) -> None:
    end = 0
    for first, count in places:
        if not end <= first < first + count <= rows:
            raise ProgramError(f"places {places} are no rows of {rows}, in their order")
        end = first + count


def _magnitude(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    (weight,) = ins
    _check_places(attrs["places"], weight.shape[0])
    return [OutSpec("magnitude", (rows,), attrs["dtype"]) for _, rows in attrs["places"]]


def _pack(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    places, down, up = attrs["places"], ins[::2], ins[1::2]
    _check_places(places, attrs["rows"])
    if not len(down) == len(up) == len(places):
        raise ProgramError(f"{len(ins)} matrices for {len(places)} places")
    width = down[0].shape[1]
    for (_, rows), a, b in zip(places, down, up, strict=True):
        if (a.shape[1:], b.shape) != ((width,), (rows, a.shape[0])):
            raise ProgramError(f"{a!r} and {b!r} are no A [r, {width}] and B [{rows}, r]")
    rank = sum(a.shape[0] for a in down)
    return [
        OutSpec("dora", (rank, width), attrs["dtype"]),
        OutSpec("dora", (attrs["rows"], rank), attrs["dtype"]),
    ]


def _pack_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """The gradient of a param has the dtype of the product that computed it, so that an fp32 sum is not narrowed."""
    down, up = grads
    assert down is not None and up is not None
    made = [down, up] * len(op.attrs["places"])
    return b.emit(
        "dora_unpack",
        down,
        up,
        label=[f"d_{matrix.label}" for matrix in op.ins],
        ranks=tuple(a.shape[0] for a in op.ins[::2]),
        places=op.attrs["places"],
        scale=op.attrs["scale"],
        dtypes=tuple(
            grad.dtype if matrix.role == "param" else matrix.dtype for matrix, grad in zip(op.ins, made, strict=True)
        ),
    )


def _unpack(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    down, up = ins
    places, ranks = attrs["places"], attrs["ranks"]
    _check_places(places, up.shape[0])
    if not (len(ranks) == len(places) and sum(ranks) == down.shape[0] == up.shape[1]):
        raise ProgramError(f"{down!r} and {up!r} are not of ranks {ranks} at {places}")
    shapes = [
        shape for rank, (_, rows) in zip(ranks, places, strict=True) for shape in ((rank, down.shape[1]), (rows, rank))
    ]
    return [OutSpec("dora", shape, dtype) for shape, dtype in zip(shapes, attrs["dtypes"], strict=True)]


def _moved(op: Op) -> int:
    return sum(v.size for v in op.outs)


def _norm(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    weight, down, up = ins
    if (down.shape[1:], up.shape) != (weight.shape[1:], (weight.shape[0], down.shape[0])):
        raise ProgramError(f"{down!r} and {up!r} are no A [R, K] and B [N, R] of {weight!r}")
    return [OutSpec("dora_norm", weight.shape[:1], "fp64" if weight.dtype == "fp64" else "fp32")]


def _norm_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return None, None, None


def _norm_flops(op: Op) -> int:
    weight, down, _ = op.ins
    return (2 * down.shape[0] + 3) * weight.size


def _check_magnitudes(h: Value, norm: Value, magnitudes: Sequence[Value], places: Places) -> None:
    _check_places(places, h.shape[1])
    if norm.shape != h.shape[1:] or [m.shape for m in magnitudes] != [(count,) for _, count in places]:
        raise ProgramError(f"{norm!r} and {list(magnitudes)!r} are not of {h!r} at {places}")


def _scale(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    (h, norm, *others), places = ins, attrs["places"]
    magnitudes, bias = others[: len(places)], others[len(places) :]
    _check_magnitudes(h, norm, magnitudes, places)
    if len(bias) > 1 or any(value.shape != norm.shape for value in bias):
        raise ProgramError(f"{bias!r} is no bias of {h!r}")
    return [OutSpec(h.label, h.shape, h.dtype)]


def _scale_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    without = 2 + len(op.attrs["places"])
    d_h, *d_magnitudes = b.emit("dora_scale_bwd", dy, *op.ins[:without], **op.attrs)
    return d_h, None, *d_magnitudes, *(b.apply("linear_bgrad", dy) for _ in op.ins[without:])


def _scale_bwd(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    dy, h, norm, *magnitudes = ins
    if dy.shape != h.shape:
        raise ProgramError(f"{dy!r} is no gradient of {h!r}")
    _check_magnitudes(h, norm, magnitudes, attrs["places"])
    return [
        OutSpec(f"d_{h.label}", h.shape, dy.dtype),
        *(OutSpec(f"d_{m.label}", m.shape, norm.dtype) for m in magnitudes),
    ]


OPS: tuple[OpDef, ...] = (
    OpDef(
        kind="dora_magnitude",
        infer=_magnitude,
        attrs={"places": tuple, "dtype": str},
        reference="surogate_dora.reference:dora_magnitude",
        flops=lambda op: 2 * op.ins[0].size,
    ),
    OpDef(
        kind="dora_pack",
        infer=_pack,
        attrs={"rows": int, "places": tuple, "scale": float, "dtype": str},
        vjp=_pack_vjp,
        reference="surogate_dora.reference:dora_pack",
        flops=_moved,
    ),
    OpDef(
        kind="dora_unpack",
        infer=_unpack,
        attrs={"ranks": tuple, "places": tuple, "scale": float, "dtypes": tuple},
        reference="surogate_dora.reference:dora_unpack",
        flops=_moved,
    ),
    OpDef(
        kind="dora_norm",
        infer=_norm,
        vjp=_norm_vjp,
        reference="surogate_dora.reference:dora_norm",
        flops=_norm_flops,
    ),
    OpDef(
        kind="dora_scale",
        infer=_scale,
        attrs={"places": tuple},
        vjp=_scale_vjp,
        reference="surogate_dora.reference:dora_scale",
        flops=lambda op: 2 * op.outs[0].size,
        always_recomputed=True,  # of h and y, which have the same size, only h is kept
    ),
    OpDef(
        kind="dora_scale_bwd",
        infer=_scale_bwd,
        attrs={"places": tuple},
        reference="surogate_dora.reference:dora_scale_bwd",
        flops=lambda op: 4 * op.ins[0].size,
    ),
)

"""Ops of DoRA in addition to products. `places` are (first row, rows) of projections in a matrix that holds several.

    dora_magnitude  (W [N, K]; places, dtype)                      -> m [n] of each projection: the norms of its rows
    dora_norm       (W, A [r, K], B [n, r], ...; places, scales)   -> [n] fp32 of each: |W + scale * B A| by rows
    dora_scale      (base [T, N], branch [T, n], norm [n], m [n], ...; places, scales)
                    -> [T, N]: m / norm * (base + scale * branch) in the columns of each projection, base elsewhere, and
                    the bias [N], if there is one more input
    dora_scale_bwd  (dy, the inputs of dora_scale without bias; the same) -> d_base, and d_branch, d_m of each

`dora_norm` has no gradient: DoRA takes the norms as constants.
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


def _norm_dtype(weight: Value) -> str:
    return "fp64" if weight.dtype == "fp64" else "fp32"


def _magnitude(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    (weight,) = ins
    _check_places(attrs["places"], weight.shape[0])
    return [OutSpec("magnitude", (rows,), attrs["dtype"]) for _, rows in attrs["places"]]


def _norm(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    weight, *matrices = ins
    places = attrs["places"]
    _check_places(places, weight.shape[0])
    if not len(matrices) == 2 * len(places) == 2 * len(attrs["scales"]):
        raise ProgramError(f"{len(matrices)} matrices and {len(attrs['scales'])} scales for {len(places)} places")
    for (_, rows), down, up in zip(places, matrices[::2], matrices[1::2], strict=True):
        if (down.shape[1:], up.shape) != (weight.shape[1:], (rows, down.shape[0])):
            raise ProgramError(f"{down!r} and {up!r} are no A [r, K] and B [{rows}, r] of {weight!r}")
    return [OutSpec("dora_norm", (rows,), _norm_dtype(weight)) for _, rows in places]


def _norm_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return (None,) * len(op.ins)


def _norm_flops(op: Op) -> int:
    weight, *matrices = op.ins
    return sum(2 * up.size * weight.shape[1] for up in matrices[1::2]) + 3 * weight.size


def _check_parts(base: Value, parts: Sequence[Value], attrs: Mapping[str, Any]) -> None:
    places = attrs["places"]
    _check_places(places, base.shape[1])
    if not len(parts) == 3 * len(places) == 3 * len(attrs["scales"]):
        raise ProgramError(f"{len(parts)} parts and {len(attrs['scales'])} scales for {len(places)} places")
    for (_, rows), branch, norm, magnitude in zip(places, parts[::3], parts[1::3], parts[2::3], strict=True):
        if (branch.shape, norm.shape, magnitude.shape) != ((base.shape[0], rows), (rows,), (rows,)):
            raise ProgramError(f"{branch!r}, {norm!r}, {magnitude!r} are not of {rows} columns of {base!r}")


def _scale(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    base, *others = ins
    parts, bias = others[: 3 * len(attrs["places"])], others[3 * len(attrs["places"]) :]
    _check_parts(base, parts, attrs)
    if len(bias) > 1 or any(value.shape != base.shape[1:] for value in bias):
        raise ProgramError(f"{bias!r} is no bias of {base!r}")
    return [OutSpec(base.label, base.shape, base.dtype)]


def _scale_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    base, *others = op.ins
    parts = others[: 3 * len(op.attrs["places"])]
    d_base, *found = b.emit("dora_scale_bwd", dy, base, *parts, **op.attrs)
    given: list[Value | None] = [d_base]
    for d_branch, d_magnitude in zip(found[::2], found[1::2], strict=True):
        given += [d_branch, None, d_magnitude]
    if len(others) > len(parts):
        given.append(b.apply("linear_bgrad", dy))
    return tuple(given)


def _scale_bwd(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    dy, base, *parts = ins
    if dy.shape != base.shape:
        raise ProgramError(f"{dy!r} is no gradient of {base!r}")
    _check_parts(base, parts, attrs)
    specs = [OutSpec(f"d_{base.label}", base.shape, dy.dtype)]
    for branch, norm, magnitude in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        specs.append(OutSpec(f"d_{branch.label}", branch.shape, dy.dtype))
        specs.append(OutSpec(f"d_{magnitude.label}", magnitude.shape, norm.dtype))
    return specs


_PLACED = {"places": tuple, "scales": tuple}

OPS: tuple[OpDef, ...] = (
    OpDef(
        kind="dora_magnitude",
        infer=_magnitude,
        attrs={"places": tuple, "dtype": str},
        reference="surogate_dora.reference:dora_magnitude",
        flops=lambda op: 2 * op.ins[0].size,
    ),
    OpDef(
        kind="dora_norm",
        infer=_norm,
        attrs=_PLACED,
        vjp=_norm_vjp,
        reference="surogate_dora.reference:dora_norm",
        flops=_norm_flops,
    ),
    OpDef(
        kind="dora_scale",
        infer=_scale,
        attrs=_PLACED,
        vjp=_scale_vjp,
        reference="surogate_dora.reference:dora_scale",
        flops=lambda op: 3 * op.outs[0].size,
    ),
    OpDef(
        kind="dora_scale_bwd",
        infer=_scale_bwd,
        attrs=_PLACED,
        reference="surogate_dora.reference:dora_scale_bwd",
        flops=lambda op: 6 * op.ins[0].size,
    ),
)

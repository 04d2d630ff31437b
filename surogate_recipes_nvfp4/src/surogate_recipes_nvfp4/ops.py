"""The ops of NVFP4 products: quantize a matrix, multiply two.

A form of a matrix [R, C] is three values: codes e2m1 [R, C], in blocks of 16 elements along C; scales ue4m3
`scale_shape(R, C)`, whose bytes are in the layout of `scale_offset`, with zeros beyond the matrix; amax fp32 [2], the
largest magnitude and E (`scale_range`). An element is code * scale * amax / (6 E). If the matrix is not finite, amax is
NaN, so that products do not look finite, and codes and scales are unspecified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, Value
from surogate_core.errors import ProgramError

from .formats import BLOCK, scale_shape

Ins = Sequence[Value]
Attrs = Mapping[str, Any]

FORM = 3
"""Values of a form."""


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramError(message)


# ------------------------------------------------------------------------------------------------------------ quantize


def _form(label: str, rows: int, columns: int) -> list[OutSpec]:
    return [
        OutSpec(label, (rows, columns), "e2m1"),
        OutSpec(label, scale_shape(rows, columns), "ue4m3"),
        OutSpec(label, (2,), "fp32"),
    ]


def _quantize(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, *random = ins
    _need(x.dtype == "bf16" and len(x.shape) == 2, f"a bf16 matrix is quantized, not {x!r}")
    rows, columns = x.shape
    _need(rows % BLOCK == 0 == columns % BLOCK, f"rows and columns must be multiples of {BLOCK}, got {x!r}")
    _need(attrs["rows"] or attrs["columns"], "neither the form of the rows nor that of the columns is asked for")
    square, stochastic = attrs.get("square", False), attrs.get("stochastic", False)
    _need(not (square and attrs.get("hadamard", False)), "square blocks are not transformed: square with hadamard")
    _need(not (square and stochastic), "square blocks are rounded to nearest: square with stochastic")
    states = [(v.dtype, v.shape) for v in random]
    expected = [("int32", ()), ("int64", ())] if stochastic else []
    _need(states == expected, f"inputs after x must be {expected} (micro_step and seed), got {random!r}")
    return [
        *(_form(x.label, rows, columns) if attrs["rows"] else ()),
        *(_form(x.label, columns, rows) if attrs["columns"] else ()),
    ]


def _rematerialise(b: Emitter, op: Op, kept: frozenset[Value]) -> Gradients:
    """Emit the op with the forms of which something was dropped."""
    names = [name for name in ("rows", "columns") if op.attrs[name]]
    forms = {name: op.outs[FORM * i : FORM * (i + 1)] for i, name in enumerate(names)}
    dropped = {name: not kept.issuperset(outs) for name, outs in forms.items()}
    labels = [v.label for name, outs in forms.items() if dropped[name] for v in outs]
    wanted = {name: dropped.get(name, False) for name in ("rows", "columns")}
    fresh = iter(b.emit(op.kind, *op.ins, label=labels, **{**op.attrs, **wanted}) if labels else ())
    again = (next(fresh) if dropped[name] else None for name, outs in forms.items() for _ in outs)
    return tuple(None if v in kept else new for v, new in zip(op.outs, again, strict=True))


def _measuring(op: Op) -> int:
    """Return the bytes of the pass that finds the largest magnitudes, before the one that quantizes."""
    return op.ins[0].nbytes


# ------------------------------------------------------------------------------------------------------------ products


def _operand(name: str, form: Ins, transposed: bool) -> tuple[int, int]:
    """Return (rows of the result, summed elements) of a factor."""
    codes, scales, amax = form
    _need(codes.dtype == "e2m1" and len(codes.shape) == 2, f"{name} has codes e2m1 [R, C], got {codes!r}")
    rows, columns = codes.shape
    _need(rows % BLOCK == 0 == columns % BLOCK, f"{name} has rows and columns in multiples of {BLOCK}, got {codes!r}")
    shape = scale_shape(rows, columns)
    _need((scales.dtype, scales.shape) == ("ue4m3", shape), f"{name} has scales ue4m3 {list(shape)}, got {scales!r}")
    _need((amax.dtype, amax.shape) == ("fp32", (2,)), f"{name} has an amax fp32 [2], got {amax!r}")
    return (columns, rows) if transposed else (rows, columns)


def _product(ins: Ins, attrs: Attrs) -> OutSpec:
    backend, transposed = attrs["backend"], bool(attrs.get("trans_b"))
    _need(backend in ("emulate", "cublaslt"), f"backend is emulate or cublaslt, not {backend!r}")
    _need(not transposed or backend == "emulate", "a product in FP4 reads b along the summed dimension: trans_b")
    _need(len(ins) >= 2 * FORM, f"a product has two factors of three values, got {ins!r}")
    (m, k), (n, b_k) = _operand("a", ins[:FORM], False), _operand("b", ins[FORM : 2 * FORM], transposed)
    _need(k == b_k, f"a sums over {k} elements, b over {b_k}")
    return OutSpec("linear", (m, n), attrs["dtype"])


def _linear(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    out, rest = _product(ins, attrs), ins[2 * FORM :]
    _need(
        [(v.dtype, v.shape) for v in rest] in ([], [("bf16", out.shape[1:])]),
        f"a bias is bf16 {list(out.shape[1:])}, got {rest!r}",
    )
    return [out]


def _linear_add(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    out, base = _product(ins, attrs), ins[2 * FORM :]
    _need([v.shape for v in base] == [out.shape], f"the product is {list(out.shape)}, the base {base!r}")
    return [OutSpec(out.label, out.shape, base[0].dtype)]


def _product_flops(op: Op) -> int:
    return 2 * op.outs[0].size * op.ins[0].shape[1]


def _math(op: Op) -> str:
    return "fp4" if op.attrs["backend"] == "cublaslt" else "bf16"


def _traffic(op: Op) -> int:
    """Return the bytes that the product itself moves."""
    factors = sum(v.nbytes for v in (*op.ins[:2], *op.ins[FORM : FORM + 2]))
    added = sum(v.nbytes for v in (*op.ins[2 * FORM :], *op.outs, *(op.outs[i] for i in op.accumulate)))
    return added + (emulated_bytes(op) if op.attrs["backend"] == "emulate" else factors)


def _passes(op: Op) -> int:
    """Return the bytes of the passes that write the factors in bf16."""
    if op.attrs["backend"] != "emulate":
        return 0
    return emulated_bytes(op) + sum(v.nbytes for v in (*op.ins[:2], *op.ins[FORM : FORM + 2]))


def emulated_bytes(op: Op) -> int:
    """Return the bytes of both factors in bf16."""
    return 2 * (op.ins[0].size + op.ins[FORM].size)


_PRODUCT: dict[str, Any] = {
    "attrs": {"dtype": str, "backend": str, "trans_b": (bool, False)},
    "flops": _product_flops,
    "math": _math,
    "traffic": _traffic,
    "passes": _passes,
}

OPS: tuple[OpDef, ...] = (
    OpDef(
        kind="nvfp4_quantize",
        infer=_quantize,
        reference="surogate_recipes_nvfp4.reference:nvfp4_quantize",
        attrs={
            "rows": bool,
            "columns": bool,
            "square": (bool, False),
            "hadamard": (bool, False),
            "four_over_six": (bool, False),
            "stochastic": (bool, False),
            "stream": (int, 0),
        },
        rematerialise=_rematerialise,
        flops=lambda op: 2 * op.ins[0].size,
        passes=_measuring,
    ),
    OpDef(kind="nvfp4_linear", infer=_linear, reference="surogate_recipes_nvfp4.reference:nvfp4_linear", **_PRODUCT),
    OpDef(
        kind="nvfp4_linear_add",
        infer=_linear_add,
        reference="surogate_recipes_nvfp4.reference:nvfp4_linear_add",
        may_overwrite=lambda op: {0: 2 * FORM},
        **_PRODUCT,
    ),
)

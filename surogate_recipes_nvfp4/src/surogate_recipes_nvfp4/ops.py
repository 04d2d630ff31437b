"""The ops of NVFP4 products: one quantizes a matrix, two multiply. `formats.py` describes a form, three values.

nvfp4_quantize    x [M, K] bf16, with `measured` also its magnitudes fp32 [4], with `stochastic` also micro_step
                  int32 [] and seed int64 [] -> forms of x
    rows, columns   the forms to write: of x, then of its transpose [K, M]
    square          blocks of 16 x 16 elements share a scale, so that both forms hold the same numbers
    hadamard        the form of the transpose is that of its random Hadamard transform along M, rounded to bf16
    four_over_six   a block is scaled to the largest value 4 instead of 6 where that has the smaller squared error
    stochastic      round stochastically: element e of block i of a form uses byte e of Philox(seed, i + row * K / 16,
                    stream, micro_step), with `stream` for the rows and `stream` + 1 for the columns
    measured        magnitudes are inputs: the largest finite one and 1 if an element is not finite, of x and of the
                    transform of its transpose. The op does not measure x then.
    row             rows of the whole tensor before those of x, of which x is a tile: random bits go on where these end
nvfp4_swiglu      the output of `swiglu`, and its magnitudes
nvfp4_swiglu_bwd  the output of `swiglu_bwd`, and its magnitudes
nvfp4_linear      a form [M, K], b form [N, K], bias [N] or none -> a b^T + bias, in `dtype`
nvfp4_linear_add  a form, b form, base [M, N] -> base + a b^T
    backend         "emulate": bf16 products of the operands, which hold them exactly but for amax. "cublaslt": FP4
                    products
    trans_b         b is a form [K, N], whose blocks lie along N: for emulated products
    stored          b is a weight of matrices of these rows, as it is stored (`formats.STORED_LAYOUT`)
nvfp4_measure     x [M, K], a form of x -> fp32 [M, 5], of each row (`formats.OF_A_ROW`)
nvfp4_report      n times such sums -> fp32 [n, 3], the figures of a numerics report (`formats.COLUMNS`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from surogate_core.api import Op, OpDef, OutSpec, Rewrites, RowWise, Value, need

from .formats import BLOCK, COLUMNS, OF_A_ROW, scales_shape

Ins = Sequence[Value]
Attrs = Mapping[str, Any]

FORM = 3
"""Inputs of a product that are one form: codes, scales, magnitudes."""


def _form(label: str, rows: int, columns: int) -> list[OutSpec]:
    return [
        OutSpec(label, (rows, columns), "e2m1"),
        OutSpec(label, scales_shape(rows, columns), "ue4m3"),
        OutSpec(label, (2,), "fp32"),
    ]


# ---------------------------------------------------------------------------------------------------------- quantizing


def _quantize(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, *random = ins
    if attrs.get("measured"):
        magnitudes, *random = random
        need((magnitudes.shape, magnitudes.dtype) == ((4,), "fp32"), f"magnitudes are fp32 [4], got {magnitudes!r}")
    need(len(x.shape) == 2 and x.dtype == "bf16", f"a bf16 matrix is quantized, not {x!r}")
    rows, columns = x.shape
    need(not rows % BLOCK and not columns % BLOCK, f"rows and columns are multiples of {BLOCK}, got {x!r}")
    need(not attrs.get("row", 0) % BLOCK, f"row is a multiple of {BLOCK}, got {attrs.get('row')}")
    need(attrs["rows"] or attrs["columns"], "at least one form is written: rows or columns")
    transformed = attrs.get("hadamard", False)
    need(not transformed or (attrs["columns"] and not attrs.get("square")), "hadamard needs columns, without square")
    if attrs.get("stochastic"):
        given = [(v.shape, v.dtype) for v in random]
        need(
            given == [((), "int32"), ((), "int64")],
            f"stochastic rounding needs micro_step int32 [] and seed int64 [], got {random!r}",
        )
    else:
        need(not random, f"rounding to nearest has no further inputs, got {random!r}")
    written = [(rows, columns)] * bool(attrs["rows"]) + [(columns, rows)] * bool(attrs["columns"])
    return [spec for shape in written for spec in _form(x.label, *shape)]


def _narrowed(op: Op, read: Sequence[bool]) -> Op:
    """Return the op without a form of which nothing is read."""
    names = _written(op)
    kept = [name for at, name in enumerate(names) if any(read[3 * at : 3 * at + 3])]
    if len(kept) == len(names) or not kept:
        return op
    outs = [out for at, name in enumerate(names) if name in kept for out in op.outs[3 * at : 3 * at + 3]]
    attrs = {**op.attrs, "rows": "rows" in kept, "columns": "columns" in kept}
    if "columns" not in kept:
        attrs["hadamard"] = False
    return replace(op, outs=tuple(outs), attrs=attrs)


def _written(op: Op) -> list[str]:
    return [name for name in ("rows", "columns") if op.attrs[name]]


def _quantized_rows(op: Op) -> RowWise:
    """Blocks lie inside of 16 rows, but the magnitude is that of the rows that are quantized together.

    Rows of codes have rows of scales beside them where tiles are of whole atoms.
    """
    return RowWise(
        ins=(0,),
        outs=(0, 1) if op.attrs["rows"] else (),
        local=tuple(range(len(op.outs))),
        takes=(1,) if op.attrs.get("measured") else (),
        first="row" if op.attrs.get("stochastic") else "",
        together=True,
    )


# ------------------------------------------------------------------------------------------------- ops that measure too

_MAGNITUDES = OutSpec("amax", (4,), "fp32")


def _swiglu(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (gate_up,) = ins
    rows, width = gate_up.shape
    need(gate_up.dtype == "bf16" and not width % 4, f"gate_up is bf16 of a multiple of 4 columns, got {gate_up!r}")
    need(not rows % BLOCK, f"rows are a multiple of {BLOCK}, got {gate_up!r}")
    return [OutSpec("swiglu", (rows, width // 2), "bf16"), _MAGNITUDES]


def _swiglu_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, gate_up = ins
    out, magnitudes = _swiglu([gate_up], attrs)
    need((dy.shape, dy.dtype) == (out.shape, "bf16"), f"dy is bf16 {list(out.shape)}, got {dy!r}")
    return [OutSpec("d_gate_up", gate_up.shape, "bf16"), magnitudes]


def _measured_rows(op: Op) -> RowWise:
    return RowWise(ins=tuple(range(len(op.ins))), outs=(0,), local=(1,), together=True)


# ------------------------------------------------------------------------------------------------------------ products


def _operand(form: Ins) -> tuple[int, int]:
    codes, scales, amax = form
    need(len(codes.shape) == 2 and codes.dtype == "e2m1", f"codes are an e2m1 matrix, got {codes!r}")
    rows, columns = codes.shape
    need(
        (scales.shape, scales.dtype) == (scales_shape(rows, columns), "ue4m3"),
        f"scales of {codes!r} are ue4m3 {list(scales_shape(rows, columns))}, got {scales!r}",
    )
    need((amax.shape, amax.dtype) == ((2,), "fp32"), f"amax is fp32 [2], got {amax!r}")
    return rows, columns


def _stored(weight: Ins, rows: Sequence[int]) -> tuple[int, int]:
    n, k = weight[0].shape[0], 2 * weight[0].shape[-1]
    expected = [((n, k // 2), "uint8"), ((n, k // BLOCK), "e4m3"), ((len(rows),), "fp32")]
    found = [(v.shape, v.dtype) for v in weight]
    need(found == expected and n == sum(rows), f"a weight of {list(rows)} rows is stored as {expected}, got {weight!r}")
    return n, k


def _linear(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    stored = attrs.get("stored")
    (m, k), b = _operand(ins[:3]), _stored(ins[3:6], stored) if stored else _operand(ins[3:6])
    n, bk = b[::-1] if attrs.get("trans_b") else b
    need(k == bk, f"a sums over {k} elements, b over {bk}")
    backend = attrs["backend"]
    need(backend in ("emulate", "cublaslt"), f"backend is emulate or cublaslt, not {backend!r}")
    straight = backend == "emulate" and not stored
    need(
        straight or not attrs.get("trans_b"), f"{'stored' if stored else backend} b is read along the summed dimension"
    )
    need(len(ins) == 6 or ins[6].shape == (n,), f"bias must have shape [{n}]")
    return [OutSpec("linear", (m, n), attrs["dtype"])]


def _linear_add(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (out,), base = _linear(ins[:6], attrs), ins[6]
    need(base.shape == out.shape, f"the product is {list(out.shape)}, the base {list(base.shape)}")
    return [OutSpec(out.label, out.shape, base.dtype)]


def _product_flops(op: Op) -> int:
    return 2 * op.outs[0].size * op.ins[0].shape[1]


def _product_rows(op: Op) -> RowWise:
    """Rows are those of a. Both operands of a gradient of a weight are forms of columns, of which it sums the rows."""
    if op.outs[0].role == "grad":
        return RowWise(ins=(), sums=(0,), takes=tuple(range(2 * FORM)))
    base = (2 * FORM,) if op.kind == "nvfp4_linear_add" else ()
    return RowWise(ins=(0, 1, *base), outs=(0,), takes=tuple(range(FORM)))


def _math(op: Op) -> str:
    return "fp4" if op.attrs["backend"] == "cublaslt" else "bf16"


def _widened(op: Op) -> int:
    """Bytes of the operands in bf16, which emulated products make."""
    (m, k), n = op.ins[0].shape, op.outs[0].shape[1]
    return 2 * (m + n) * k if op.attrs["backend"] == "emulate" else 0


def _traffic(op: Op) -> int:
    written = sum(v.nbytes for v in (*op.ins[6:], *op.outs, *(op.outs[i] for i in op.accumulate)))
    return written + (_widened(op) or _read(op))


def _passes(op: Op) -> int:
    """Bytes that are moved before a product: codes and scales are read, bf16 is written; or scales are ordered."""
    if op.attrs["backend"] == "emulate":
        return _widened(op) + _read(op)
    return 2 * op.ins[4].nbytes if op.attrs.get("stored") else 0


def _read(op: Op) -> int:
    return sum(v.nbytes for v in op.ins[:6])


# ------------------------------------------------------------------------------------------------------------- numerics


def _measure(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, shape = ins[0], _operand(ins[1:4])
    need(x.shape == shape and x.dtype == "bf16", f"a form {list(shape)} is of a bf16 matrix of that shape, got {x!r}")
    return [OutSpec("numerics", (shape[0], OF_A_ROW), "fp32")]


def _report(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    wrong = next((v for v in ins if (v.shape[1:], v.dtype) != ((OF_A_ROW,), "fp32") or v.shape != ins[0].shape), None)
    need(wrong is None, f"sums are fp32 [rows, {OF_A_ROW}], of as many rows for each tensor, got {wrong!r}")
    return [OutSpec("numerics", (len(ins), len(COLUMNS)), "fp32")]


def _define(kind: str, infer: Any, **fields: Any) -> OpDef:
    return OpDef(kind=kind, infer=infer, reference=f"surogate_recipes_nvfp4.reference:{kind}", **fields)


_PRODUCT: dict[str, Any] = {
    "attrs": {"dtype": str, "backend": str, "trans_b": (bool, False), "stored": (tuple, ())},
    "flops": _product_flops,
    "math": _math,
    "traffic": _traffic,
    "passes": _passes,
    "row_wise": _product_rows,
}

OPS: tuple[OpDef, ...] = (
    _define(
        "nvfp4_quantize",
        _quantize,
        attrs={
            "rows": bool,
            "columns": bool,
            "square": (bool, False),
            "hadamard": (bool, False),
            "four_over_six": (bool, False),
            "stochastic": (bool, False),
            "stream": (int, 0),
            "measured": (bool, False),
            "row": (int, 0),
        },
        row_wise=_quantized_rows,
        rewrites=Rewrites(narrowed=_narrowed),
        flops=lambda op: 16 * op.ins[0].size * len(_written(op)),
        math=lambda op: "fp32",
        # The magnitudes are measured before anything is quantized.
        passes=lambda op: 0 if op.attrs.get("measured") else op.ins[0].nbytes,
    ),
    _define("nvfp4_linear", _linear, **_PRODUCT),
    _define("nvfp4_linear_add", _linear_add, may_overwrite=lambda op: {0: 6}, **_PRODUCT),
    _define(
        "nvfp4_measure",
        _measure,
        flops=lambda op: 8 * op.ins[0].size,
        math=lambda op: "fp32",
        row_wise=lambda op: RowWise(ins=(0, 1, 2), outs=(0,), takes=(1, 2, 3)),
    ),
    _define("nvfp4_report", _report),
    _define(
        "nvfp4_swiglu",
        _swiglu,
        flops=lambda op: 3 * op.outs[0].size,
        math=lambda op: "fp32",
        row_wise=_measured_rows,
    ),
    _define(
        "nvfp4_swiglu_bwd",
        _swiglu_bwd,
        may_overwrite=lambda op: {0: 1},
        flops=lambda op: 6 * op.ins[0].size,
        math=lambda op: "fp32",
        row_wise=_measured_rows,
    ),
)

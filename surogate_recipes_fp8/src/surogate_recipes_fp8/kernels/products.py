"""FP8 matrix products by cuBLASLt: fprop, dgrad and wgrad of linear layers.

`fp8_linear` is D = A B^T, times the scales of A and B, plus a bias. `fp8_linear_add` reads what it adds to in its
epilogue, and may overwrite it. Sums are fp32, or less precise with `fast`, and D is rounded once. Algorithms are
selected and cached as those of bf16 products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target, Value
from surogate_core.api.cublaslt import explaining, is_timed, library_bytes, selecting

PAIRS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))
"""Dtypes of A and B. cuBLASLt does not multiply e5m2 by e5m2."""

ANY_LAYOUT = range(100, 120)
"""Compute capabilities (SM100, SM103) that multiply transposed operands too."""

NO_BIAS = -1
"""Dtype code that the binding takes if there is no bias."""


@dataclass(frozen=True)
class Product:
    """D[m,n] = op(A)[m,k] op(B)[k,n], row-major, as `Gemm` takes it: transposed, A is stored as [k,m], B as [n,k]."""

    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool


def product(op: Op) -> Product:
    """Return the product of an op. Its attribute `trans_b` has the opposite sense, because B is [n,k] without it."""
    (a_rows, a_columns), (b_rows, b_columns) = op.ins[0].shape, op.ins[1].shape
    trans_a, trans_b = bool(op.attrs.get("trans_a")), bool(op.attrs.get("trans_b"))
    m, k = (a_columns, a_rows) if trans_a else (a_rows, a_columns)
    return Product(m, b_columns if trans_b else b_rows, k, trans_a, not trans_b)


def _base(op: Op) -> Value | None:
    """Return the input that the product adds to, if there is one."""
    return op.ins[4] if op.kind == "fp8_linear_add" else None


def _bias(op: Op) -> Value | None:
    return op.ins[4] if op.kind == "fp8_linear" and len(op.ins) == 5 else None


def _supports(op: Op, target: Target) -> Support:
    shape = product(op)
    if (shape.trans_a or not shape.trans_b) and target.device.sm not in ANY_LAYOUT:
        return Support(False, f"{target.device.title} needs FP8 operands with the summed dimension contiguous")
    if op.accumulate and (len(op.ins) > 4 or op.outs[0].dtype != "fp32"):
        return Support(False, f"accumulates only into fp32 outputs without another addend, got {op.outs[0]!r}")
    return _supports_sizes(shape, op.outs[0])


def _supports_sizes(shape: Product, out: Value) -> Support:
    """Require rows of 16 bytes, or a multiple, in all matrices, and a summed dimension that is a multiple of 16."""
    columns = 8 * 16 // DTYPES[out.dtype].bits
    multiples = {"summed dimension": (shape.k, 16), "columns of the result": (shape.n, columns)}
    if shape.trans_a:
        multiples["rows of the result"] = shape.m, 16
    if not shape.trans_b:
        multiples["columns of the result"] = shape.n, 16
    for name, (size, multiple) in multiples.items():
        if size % multiple:
            return Support(False, f"FP8 products need a multiple of {multiple} as {name}, got {size}")
    return Support(True)


def _workspace(op: Op, target: Target) -> int:
    return library_bytes(target)


def _bind(op: Op, ctx: BindContext) -> Call:
    """Time the algorithms on the op's buffers, which overwrites them, scales included."""
    from .. import _C

    a, b, scale_a, scale_b = op.ins[:4]
    base, bias, out = _base(op), _bias(op), op.outs[0]
    timed = is_timed(ctx.target)
    with selecting(ctx, _C), explaining(ctx, op, a, b):
        gemm = _C.Gemm(
            *(ctx.pointer(value) if value and timed else 0 for value in (a, b, base, out)),
            ctx.pointer(bias) if bias else 0,
            ctx.pointer(scale_a),
            ctx.pointer(scale_b),
            ctx.workspace,
            **asdict(product(op)),
            dtype_a=DTYPES[a.dtype].code,
            dtype_b=DTYPES[b.dtype].code,
            dtype_d=DTYPES[out.dtype].code,
            dtype_bias=DTYPES[bias.dtype].code if bias else NO_BIAS,
            accumulate=0 in op.accumulate or base is not None,
            fast=bool(op.attrs.get("fast")),
            library_bytes=library_bytes(ctx.target),
            stream=ctx.stream,
        )
    return ctx.call(gemm.run, a, b, base or 0, out, bias or 0, scale_a, scale_b, ctx.workspace)


def signatures(kind: str) -> Iterator[tuple[str, ...]]:
    for a, b in PAIRS:
        if kind == "fp8_linear_add":
            yield a, b, "fp32", "fp32", "bf16", "bf16"
            continue
        for out in ("bf16", "fp32"):
            yield a, b, "fp32", "fp32", out
            yield a, b, "fp32", "fp32", "bf16", out


KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(
        op=kind,
        dtypes=dtypes,
        attrs=("fast", "trans_a", "trans_b"),
        supports=_supports,
        bind=_bind,
        workspace=_workspace,
    )
    for kind in ("fp8_linear", "fp8_linear_add")
    for dtypes in signatures(kind)
)

"""Matrix products of linear layers by cuBLASLt: forward, dgrad and wgrad.

Operands and results are bf16 or fp32, sums fp32; `linear_add` and `linear_dgrad_add` read what they add to in their
epilogue, and may overwrite it. When an op is bound, its algorithm is selected by timing (<surogate/timing.h>). All ops
of the same shape share it, and it is cached for later runs, which are then bit-identical. With `deterministic: true`
nothing is timed and the first algorithm of cuBLASLt's heuristic is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from surogate_core.api import DTYPES, BindContext, KernelDef, Launch, Op, Support, Target, Value
from surogate_core.api.compiled import aligned
from surogate_core.api.cublaslt import is_timed, library_bytes, selecting

from .dtypes import FLOATS, supports_accumulate

NO_BIAS = -1
"""Dtype code that the binding takes if there is no bias."""


@dataclass(frozen=True)
class Product:
    """D[m,n] = op(A)[m,k] op(B)[k,n], row-major. A transposed operand is stored as [k,m] or [n,k]."""

    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool


def product(op: Op) -> Product:
    """Return the product of an op. In all kinds, `ins[0]` is A and `ins[1]` is B."""
    (rows, a_columns), (b_rows, b_columns) = op.ins[0].shape, op.ins[1].shape
    if op.kind in ("linear", "linear_add"):  # x [T, K] w [N, K]^T
        return Product(rows, b_rows, a_columns, False, True)
    if op.kind in ("linear_dgrad", "linear_dgrad_add"):  # dy [T, N] w [N, K]
        return Product(rows, b_columns, a_columns, False, False)
    return Product(a_columns, b_columns, rows, True, False)  # dy [T, N]^T x [T, K]


def _base(op: Op) -> Value | None:
    """Return the input that the product adds to, if there is one."""
    return op.ins[2] if op.kind in ("linear_add", "linear_dgrad_add") else None


def _bias(op: Op) -> Value | None:
    return op.ins[2] if op.kind == "linear" and len(op.ins) == 3 else None


def _product_dtype(a: str, out: str) -> str:
    """Return the dtype that cuBLASLt writes. With fp32 operands it is fp32; a bf16 result is then cast."""
    return "fp32" if a == "fp32" else out


def workspace(op: Op, target: Target) -> int:
    """Bytes of cuBLASLt's workspace, of an fp32 product that is cast to bf16, and of a bias converted to fp32."""
    return library_bytes(target) + _staged_bytes(op) + _widened_bytes(op)


def _staged_bytes(op: Op) -> int:
    out = op.outs[0]
    return aligned(4 * out.size) if _product_dtype(op.ins[0].dtype, out.dtype) != out.dtype else 0


def _widened_bytes(op: Op) -> int:
    bias = _bias(op)
    return aligned(4 * bias.size) if bias and bias.dtype != _product_dtype(op.ins[0].dtype, op.outs[0].dtype) else 0


def bind(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """Time the algorithms on the op's buffers, which overwrites them."""
    a, b, out, bias = op.ins[0], op.ins[1], op.outs[0], _bias(op)
    dtype = _product_dtype(a.dtype, out.dtype)
    staged, widened = _staged_bytes(op), _widened_bytes(op)
    at = ctx.workspace + library_bytes(ctx.target)
    d: Value | int = at if staged else out
    read_bias: Value | int = at + staged if widened else bias or 0
    gemm = _select(op, ctx, d, read_bias)
    launches = []
    if bias and widened:
        launches.append(_cast(ctx, bias, read_bias, bias.size, bias.dtype, dtype))
    launches.append(Launch(ctx.call(gemm.run, a, b, _base(op) or 0, d, read_bias, 0, 0, ctx.workspace)))
    if staged:
        launches.append(_cast(ctx, d, out, out.size, dtype, out.dtype))
    return tuple(launches)


def _select(op: Op, ctx: BindContext, d: Value | int, bias: Value | int) -> Any:
    """Return the `_C.Gemm` of an op, which writes to `d`."""
    from .. import _C

    def address(value: Value | int) -> int:
        return value if isinstance(value, int) else ctx.pointer(value)

    a, base, shape, dtype = op.ins[0], _base(op), product(op), _product_dtype(op.ins[0].dtype, op.outs[0].dtype)
    buffers = (address(value) if is_timed(ctx.target) else 0 for value in (a, op.ins[1], base or 0, d))
    with selecting(ctx, _C):
        return _C.Gemm(
            *buffers,
            address(bias),
            0,
            0,
            ctx.workspace,
            **asdict(shape),
            dtype_a=DTYPES[a.dtype].code,
            dtype_b=DTYPES[a.dtype].code,
            dtype_d=DTYPES[dtype].code,
            dtype_bias=DTYPES[dtype].code if bias else NO_BIAS,
            accumulate=0 in op.accumulate or base is not None,
            library_bytes=library_bytes(ctx.target),
            stream=ctx.stream,
        )


def _cast(ctx: BindContext, x: Value | int, y: Value | int, size: int, dtype_x: str, dtype_y: str) -> Launch:
    from .. import _C

    return Launch(ctx.call(_C.cast, x, y, size, False, DTYPES[dtype_x].code, DTYPES[dtype_y].code))


def _supports(op: Op, target: Target) -> Support:
    if op.accumulate and _base(op) is not None:
        return Support(False, "adds to its last input, not to its output too")
    return supports_accumulate(op, target)


def signatures(kind: str) -> Iterator[tuple[str, ...]]:
    for a in FLOATS:
        for out in FLOATS:
            base = (out,) if kind.endswith("_add") else ()
            if base and _product_dtype(a, out) != out:
                continue  # cuBLASLt reads no bf16 for fp32 operands; the recipe casts
            yield a, a, *base, out
            if kind == "linear":
                for bias in sorted({"bf16", _product_dtype(a, out)}):
                    yield a, a, bias, out


KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=dtypes, supports=_supports, bind=bind, workspace=workspace)
    for kind in ("linear", "linear_add", "linear_dgrad", "linear_dgrad_add", "linear_wgrad")
    for dtypes in signatures(kind)
)

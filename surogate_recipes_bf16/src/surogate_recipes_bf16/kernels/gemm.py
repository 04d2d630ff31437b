"""Matrix products of linear layers by cuBLASLt: forward, dgrad and wgrad.

Operands and results are bf16 or fp32, sums fp32; `linear_add` and `linear_dgrad_add` read what they add to in their
epilogue, and may overwrite it. When an op is bound, its algorithm is selected by timing (`csrc/timing.h`). All ops of
the same shape share it, and it is cached for later runs, which are then bit-identical. With `deterministic: true`
nothing is timed and the first algorithm of cuBLASLt's heuristic is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target, Value
from surogate_core.dtypes import DTYPES

from .dtypes import FLOATS, supports_accumulate
from .workspace import aligned

NO_BIAS = -1
"""Dtype code that the binding takes if there is no bias."""


def library_bytes(target: Target) -> int:
    """Return the workspace of cuBLASLt in bytes: what its fastest algorithms need on this generation of GPUs."""
    return (64 if (target.device.sm or 0) >= 90 else 32) << 20


def is_timed(target: Target) -> bool:
    """Return whether algorithms are selected by timing. Two runs may then select different ones."""
    return target.deterministic != "true"


def autotune_cache(ctx: BindContext) -> None:
    """Cache the algorithms that were selected by timing, for later runs."""
    from .. import _C

    if is_timed(ctx.target):
        ctx.autotune_cache(
            "products", lambda entries: _C.gemm_import(list(entries.items())), lambda: dict(_C.gemm_export())
        )


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
    """What the product adds to, if that is an input."""
    return op.ins[2] if op.kind in ("linear_add", "linear_dgrad_add") else None


def _bias(op: Op) -> Value | None:
    return op.ins[2] if op.kind == "linear" and len(op.ins) == 3 else None


def _product_dtype(a: str, out: str) -> str:
    """Return the dtype that cuBLASLt writes. With fp32 operands it is fp32; a bf16 result is then cast."""
    return "fp32" if a == "fp32" else out


def workspace(op: Op, target: Target) -> int:
    """Bytes of cuBLASLt's workspace, of an fp32 product that is cast to bf16, and of a bias converted to fp32."""
    a, out, bias = op.ins[0], op.outs[0], _bias(op)
    dtype = _product_dtype(a.dtype, out.dtype)
    staged = aligned(4 * out.size) if dtype != out.dtype else 0
    widened = aligned(4 * bias.size) if bias is not None and bias.dtype != dtype else 0
    return library_bytes(target) + staged + widened


def bind(op: Op, ctx: BindContext) -> Call:
    """Time the algorithms on the op's buffers, which overwrites them. Null pointers disable the timing."""
    from .. import _C

    autotune_cache(ctx)
    a, b, base, bias = op.ins[0], op.ins[1], _base(op), _bias(op)
    shape = product(op)
    timed = is_timed(ctx.target)
    gemm = _C.Gemm(
        *((ctx.pointer(value) if timed and value else 0) for value in (a, b, base, op.outs[0])),
        0 if bias is None else ctx.pointer(bias),
        ctx.workspace,
        shape.m,
        shape.n,
        shape.k,
        shape.trans_a,
        shape.trans_b,
        DTYPES[a.dtype].code,
        DTYPES[op.outs[0].dtype].code,
        NO_BIAS if bias is None else DTYPES[bias.dtype].code,
        0 in op.accumulate or base is not None,
        library_bytes(ctx.target),
        ctx.stream,
    )
    return ctx.call(gemm.run, a, b, base or 0, op.outs[0], bias or 0, ctx.workspace)


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

"""Compiled products of a linear layer: forward, dgrad and wgrad, by cuBLASLt.

Operands and results are bf16 or fp32, sums fp32. The algorithm is chosen by timing when an op is bound, shared by all
ops of the same shape, and kept for later runs, which then compute the same bits. Under `deterministic: true` the clock
has no say: the library's first choice is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from surogate_core.api import BindContext, Call, KernelDef, Op, Target, Value

from .dtypes import DTYPE_CODES, FLOATS, adding

NO_BIAS = -1
"""What the binding takes for the dtype of a bias that is not there."""


def library_bytes(target: Target) -> int:
    """Scratch for cuBLASLt: what its fastest algorithms ask for on the generation of the device."""
    return (64 if (target.device.sm or 0) >= 90 else 32) << 20


def is_timed(target: Target) -> bool:
    """Whether the clock chooses algorithms: of two runs it may choose differently, and bits with it."""
    return target.deterministic != "true"


def keep_choices(ctx: BindContext) -> None:
    """Have the clock's choices kept from run to run."""
    from .. import _C

    if is_timed(ctx.target):
        ctx.keep_choices("cublaslt", lambda known: _C.gemm_import(list(known.items())), lambda: dict(_C.gemm_export()))


def aligned(nbytes: int) -> int:
    """Up to a multiple of 256: the parts of a workspace begin there."""
    return -(-nbytes // 256) * 256


@dataclass(frozen=True)
class Product:
    """D[m,n] = op(A)[m,k] op(B)[k,n], row-major; a transposed operand is stored [k,m] or [n,k]."""

    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool


def product(op: Op) -> Product:
    """The product that an op is: `ins[0]` is A and `ins[1]` is B in all three."""
    (rows, a_columns), (b_rows, b_columns) = op.ins[0].shape, op.ins[1].shape
    if op.kind == "linear":  # x [T, K] w [N, K]^T
        return Product(rows, b_rows, a_columns, False, True)
    if op.kind == "linear_dgrad":  # dy [T, N] w [N, K]
        return Product(rows, b_columns, a_columns, False, False)
    return Product(a_columns, b_columns, rows, True, False)  # dy [T, N]^T x [T, K]


def _bias(op: Op) -> Value | None:
    return op.ins[2] if len(op.ins) == 3 else None


def _product_dtype(a: str, out: str) -> str:
    """What cuBLASLt writes: fp32 operands give fp32, which is rounded afterwards where bf16 is wanted."""
    return "fp32" if a == "fp32" else out


def _workspace(op: Op, target: Target) -> int:
    """The library's scratch; an fp32 product that is rounded to bf16 afterwards; a bias widened to fp32."""
    a, out, bias = op.ins[0], op.outs[0], _bias(op)
    dtype = _product_dtype(a.dtype, out.dtype)
    staged = aligned(4 * out.size) if dtype != out.dtype else 0
    widened = aligned(4 * bias.size) if bias is not None and bias.dtype != dtype else 0
    return library_bytes(target) + staged + widened


def _bind(op: Op, ctx: BindContext) -> Call:
    """Times the algorithms on the op's own buffers: the output, not the inputs, is overwritten. Null: not timed."""
    from .. import _C

    keep_choices(ctx)
    a, b, bias = op.ins[0], op.ins[1], _bias(op)
    shape = product(op)
    timed = is_timed(ctx.target)
    gemm = _C.Gemm(
        *((ctx.pointer(value) if timed else 0) for value in (a, b, op.outs[0])),
        0 if bias is None else ctx.pointer(bias),
        ctx.workspace,
        shape.m,
        shape.n,
        shape.k,
        shape.trans_a,
        shape.trans_b,
        DTYPE_CODES[a.dtype],
        DTYPE_CODES[op.outs[0].dtype],
        NO_BIAS if bias is None else DTYPE_CODES[bias.dtype],
        0 in op.accumulate,
        library_bytes(ctx.target),
        ctx.stream,
    )
    return ctx.call(gemm.run, a, b, op.outs[0], 0 if bias is None else bias, ctx.workspace)


def _signatures(kind: str) -> Iterator[tuple[str, ...]]:
    for a in FLOATS:
        for out in FLOATS:
            yield a, a, out
            if kind == "linear":
                for bias in sorted({"bf16", _product_dtype(a, out)}):
                    yield a, a, bias, out


KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=dtypes, supports=adding, bind=_bind, workspace=_workspace)
    for kind in ("linear", "linear_dgrad", "linear_wgrad")
    for dtypes in _signatures(kind)
)

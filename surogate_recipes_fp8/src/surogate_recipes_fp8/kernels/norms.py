"""Compiled RMS norms, forward and backward, that quantize their result."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target

from .quantization import Quantization, extent, measured_bytes, supports, supports_dtypes, supports_format

MAX_COLUMNS, MAX_COLUMNS_BWD = 32768, 16384
"""Longest rows that the threads of a block can keep in registers (rmsnorm.cu, rmsnorm_bwd.cu)."""


def partial_rows_bytes(rows: int, columns: int) -> int:
    """Bytes of one fp32 row of partial sums per thread block of at least 16 rows (rmsnorm_bwd.cu)."""
    return 4 * min(-(-rows // 16), 512) * columns


def _adds(op: Op) -> bool:
    return op.kind == "fp8_add_rmsnorm"


def _bind_rmsnorm(op: Op, ctx: BindContext) -> Call:
    """Bind `fp8_rmsnorm` or `fp8_add_rmsnorm`."""
    from .. import _C

    parts = Quantization.of(op, 3 if _adds(op) else 2)
    x, *residual, w = parts.ins
    transposed, wide = bool(op.attrs.get("transposed")), bool(op.attrs.get("wide"))
    outs = parts.optional(True, transposed, wide, True, _adds(op))
    return ctx.call(
        _C.fp8_rmsnorm,
        x,
        residual[0] if residual else 0,
        w,
        *outs,
        *extent(x),
        float(op.attrs["eps"]),
        parts.format,
        *parts.scale(ctx.workspace),
    )


def _rmsnorm_supports(op: Op, target: Target) -> Support:
    n_ins = 3 if _adds(op) else 2
    checks = (
        supports_dtypes(op, n_ins, ("bf16",) * n_ins),
        supports_format(op, "e4m3"),
        supports(op, op.ins[0], n_ins),
    )
    return _supports_columns(op, MAX_COLUMNS, next((check for check in checks if not check.ok), checks[-1]))


def _supports_columns(op: Op, limit: int, support: Support) -> Support:
    if support.ok and op.ins[0].shape[-1] > limit:
        return Support(False, f"supports rows of at most {limit} columns, got {op.ins[0]!r}")
    return support


def _n_ins(op: Op) -> int:
    """Number of inputs of a backward norm before scale and amax: with a residual gradient, five."""
    return 5 if op.attrs.get("residual") else 4


def _has_dw(op: Op) -> bool:
    return op.kind == "fp8_rmsnorm_bwd"


def _dw(op: Op) -> int:
    """Index of dw: after the copies and dx."""
    return 3 if op.attrs.get("transposed") else 2


def _bind_rmsnorm_bwd(op: Op, ctx: BindContext) -> Call:
    """Bind `fp8_rmsnorm_bwd` or `fp8_rmsnorm_dgrad`."""
    from .. import _C

    parts = Quantization.of(op, _n_ins(op))
    dy, x, w, rstd, *dresidual = parts.ins
    q, q_t, dx, dw = parts.optional(True, bool(op.attrs.get("transposed")), True, _has_dw(op))
    return ctx.call(
        _C.fp8_rmsnorm_bwd,
        dy,
        x,
        w,
        rstd,
        dresidual[0] if dresidual else 0,
        dx,
        dw,
        q,
        q_t,
        ctx.workspace + measured_bytes(op) if _has_dw(op) else 0,
        partial_rows_bytes(*extent(x)) if _has_dw(op) else 0,
        *extent(x),
        bool(op.accumulate),
        DTYPES[op.outs[_dw(op)].dtype if _has_dw(op) else "fp32"].code,
        parts.format,
        *parts.scale(ctx.workspace),
    )


def _rmsnorm_bwd_supports(op: Op, target: Target) -> Support:
    n_ins = _n_ins(op)
    dtypes = supports_dtypes(op, n_ins, ("bf16", "bf16", "bf16", "fp32", "bf16")[:n_ins])
    for check in (dtypes, supports_format(op, "e5m2")):
        if not check.ok:
            return check
    adds_to_dw = _has_dw(op) and op.outs[_dw(op)].dtype == "fp32"
    support = supports(op, op.ins[0], n_ins, accumulates=_dw(op) if adds_to_dw else -1)
    return _supports_columns(op, MAX_COLUMNS_BWD, support)


def _rmsnorm_bwd_workspace(op: Op, target: Target) -> int:
    return measured_bytes(op) + (partial_rows_bytes(*extent(op.ins[0])) if _has_dw(op) else 0)


KERNELS: tuple[KernelDef, ...] = (
    *(
        KernelDef(
            op=kind,
            dtypes=("*", "..."),
            attrs=("transposed", "wide"),
            supports=_rmsnorm_supports,
            bind=_bind_rmsnorm,
            workspace=lambda op, target: measured_bytes(op),
        )
        for kind in ("fp8_rmsnorm", "fp8_add_rmsnorm")
    ),
    *(
        KernelDef(
            op=kind,
            dtypes=("*", "..."),
            attrs=("transposed", "residual"),
            supports=_rmsnorm_bwd_supports,
            bind=_bind_rmsnorm_bwd,
            workspace=_rmsnorm_bwd_workspace,
            memory_efficiency=share,
        )
        for kind, share in (("fp8_rmsnorm_bwd", 0.6), ("fp8_rmsnorm_dgrad", None))
    ),
)

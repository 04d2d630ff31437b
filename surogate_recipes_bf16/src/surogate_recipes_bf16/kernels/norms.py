"""Compiled RMS norms and bias gradients, in fp32 and bf16."""

from __future__ import annotations

from itertools import product

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target

from .dtypes import FLOATS, supports_accumulate, supports_write


def _bind_rmsnorm(op: Op, ctx: BindContext) -> Call:
    """Bind `rmsnorm` or `add_rmsnorm`. Both launchers take the pointers in the order of ins and outs."""
    from .. import _C

    x = op.ins[0]
    launch = getattr(_C, op.kind)
    attrs = float(op.attrs["eps"]), _offset(op)
    return ctx.call(launch, *op.ins, *op.outs, *x.shape, *attrs, DTYPES[x.dtype].code)


def _offset(op: Op) -> float:
    return float(op.attrs.get("offset", 0.0))


def _bind_rmsnorm_bwd(op: Op, ctx: BindContext) -> Call:
    """Bind `rmsnorm_bwd` or `rmsnorm_bwd_recompute`."""
    from .. import _C

    dy, x, w, rstd = op.ins[:4]
    dx, dw, *norm = op.outs
    return ctx.call(
        _C.rmsnorm_bwd,
        dy,
        x,
        w,
        rstd,
        op.ins[4] if len(op.ins) == 5 else 0,
        dx,
        dw,
        norm[0] if norm else 0,
        ctx.workspace,
        rmsnorm_bwd_workspace(*x.shape),
        *x.shape,
        _offset(op),
        1 in op.accumulate,
        DTYPES[x.dtype].code,
        DTYPES[dw.dtype].code,
    )


def _bind_rmsnorm_dgrad(op: Op, ctx: BindContext) -> Call:
    """Bind `rmsnorm_dgrad` or `rmsnorm_dgrad_recompute`."""
    from .. import _C

    dx, *norm = op.outs
    dresidual = op.ins[4] if len(op.ins) == 5 else 0
    tensors = (*op.ins[:4], dresidual, dx, norm[0] if norm else 0)
    return ctx.call(_C.rmsnorm_dgrad, *tensors, *dx.shape, _offset(op), DTYPES[dx.dtype].code)


def _rmsnorm_bwd_supports(op: Op, target: Target) -> Support:
    if 0 in op.accumulate:
        return Support(False, "cannot accumulate into dx")
    return supports_accumulate(op, target)


def rmsnorm_bwd_workspace(rows: int, columns: int) -> int:
    """Bytes of one fp32 row of partial sums per thread block (rmsnorm_bwd.cu)."""
    return 4 * min(rows, 512) * columns


def _bind_linear_bgrad(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (dy,), (dbias,) = op.ins, op.outs
    return ctx.call(
        _C.linear_bgrad,
        dy,
        dbias,
        ctx.workspace,
        linear_bgrad_workspace(*dy.shape),
        *dy.shape,
        0 in op.accumulate,
        DTYPES[dy.dtype].code,
        DTYPES[dbias.dtype].code,
    )


def linear_bgrad_workspace(rows: int, columns: int) -> int:
    """Bytes of one fp32 row of partial sums per slab of at least 64 rows (column_sum.cu)."""
    return 4 * min(128, -(-rows // 64)) * columns


KERNELS: tuple[KernelDef, ...] = (
    *(
        KernelDef(
            op=kind,
            dtypes=dtypes,
            attrs=("offset",),
            supports=supports_write,
            bind=_bind_rmsnorm,
            memory_efficiency=share,
        )
        for dtype in FLOATS
        for kind, dtypes, share in (
            ("rmsnorm", (dtype, dtype, dtype, "fp32"), None),
            ("add_rmsnorm", (*[dtype] * 4, "fp32", dtype), 0.93),
        )
    ),
    *(
        KernelDef(
            op=kind,
            dtypes=(dtype, dtype, dtype, "fp32", *dresidual, dtype, dw, *norm),
            attrs=("offset",),
            supports=_rmsnorm_bwd_supports,
            bind=_bind_rmsnorm_bwd,
            workspace=lambda op, target: rmsnorm_bwd_workspace(*op.ins[1].shape),
            memory_efficiency=0.6,
        )
        for dtype, dw in product(FLOATS, FLOATS)
        for dresidual in ((), (dtype,))
        for kind, norm in (("rmsnorm_bwd", ()), ("rmsnorm_bwd_recompute", (dtype,)))
    ),
    *(
        KernelDef(
            op=kind,
            dtypes=(dtype, dtype, dtype, "fp32", *dresidual, dtype, *norm),
            attrs=("offset",),
            supports=supports_write,
            bind=_bind_rmsnorm_dgrad,
            memory_efficiency=share,
        )
        for dtype in FLOATS
        for dresidual in ((), (dtype,))
        for kind, norm, share in (("rmsnorm_dgrad", (), 0.86), ("rmsnorm_dgrad_recompute", (dtype,), 0.9))
    ),
    *(
        KernelDef(
            op="linear_bgrad",
            dtypes=(dtype, dbias),
            supports=supports_accumulate,
            bind=_bind_linear_bgrad,
            workspace=lambda op, target: linear_bgrad_workspace(*op.ins[0].shape),
        )
        for dtype, dbias in product(FLOATS, FLOATS)
    ),
)

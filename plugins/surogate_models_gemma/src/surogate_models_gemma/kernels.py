"""Compiled kernels of `scale`, `geglu` and `norm_add_rmsnorm`, in fp32 and bf16."""

from __future__ import annotations

from itertools import product

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target, Value


def _bind_scale(op: Op, ctx: BindContext) -> Call:
    import torch

    from surogate_core.reference.rounding import TORCH_DTYPES

    from . import _C

    (x,), (out,) = op.ins, op.outs
    factor = float(torch.tensor(op.attrs["factor"], dtype=torch.float64).to(TORCH_DTYPES[x.dtype]))
    return ctx.call(_C.scale, x, out, x.size, factor, DTYPES[x.dtype].code)


def _bind_geglu(op: Op, ctx: BindContext) -> Call:
    """Bind `geglu` or `geglu_bwd`. Both launchers take the pointers in the order of ins and outs."""
    from . import _C

    half = op.outs[0] if op.kind == "geglu" else op.ins[0]
    return ctx.call(getattr(_C, op.kind), *op.ins, *op.outs, *half.shape, DTYPES[half.dtype].code)


def _supports(op: Op, target: Target) -> Support:
    if op.accumulate:
        return Support(False, f"cannot accumulate into {op.outs[0]!r}")
    return Support(True)


def _bind_norms(op: Op, ctx: BindContext) -> Call:
    from . import _C

    y = op.ins[0]
    return ctx.call(_C.norm_add_rmsnorm, *op.ins, *op.outs, *y.shape, *_attrs(op), DTYPES[y.dtype].code)


def _bind_norms_bwd(op: Op, ctx: BindContext) -> Call:
    """Bind `norm_add_rmsnorm_bwd` or `norm_add_rmsnorm_bwd_recompute`."""
    from . import _C

    dx, dy, dw, dpost_w, *norm = op.outs
    return ctx.call(
        _C.norm_add_rmsnorm_bwd,
        *_gradients_of(op),
        *(dx, dy, dw, dpost_w),
        norm[0] if norm else 0,
        *(ctx.workspace, norms_bwd_workspace(*dx.shape)),
        *dx.shape,
        *_attrs(op),
        *(i in op.accumulate for i in (2, 3)),
        *(DTYPES[value.dtype].code for value in (dx, dw, dpost_w)),
    )


def _bind_norms_dgrad(op: Op, ctx: BindContext) -> Call:
    """Bind `norm_add_rmsnorm_dgrad` or `norm_add_rmsnorm_dgrad_recompute`."""
    from . import _C

    dx, dy, *norm = op.outs
    tensors = (*_gradients_of(op), dx, dy, norm[0] if norm else 0)
    return ctx.call(_C.norm_add_rmsnorm_dgrad, *tensors, *dx.shape, *_attrs(op), DTYPES[dx.dtype].code)


def _gradients_of(op: Op) -> tuple[Value | int, ...]:
    """Return the seven inputs; 0: no gradient of the sum."""
    return op.ins if len(op.ins) == 7 else (*op.ins, 0)


def _attrs(op: Op) -> tuple[float, float]:
    return float(op.attrs["eps"]), float(op.attrs.get("offset", 0.0))


def norms_bwd_workspace(rows: int, columns: int) -> int:
    """Bytes of two fp32 rows of partial sums per thread block (norm_add_rmsnorm_bwd.cu)."""
    return 8 * min(rows, 256) * columns


def _supports_norms_bwd(op: Op, target: Target) -> Support:
    for i in op.accumulate:
        if i not in (2, 3) or op.outs[i].dtype != "fp32":
            return Support(False, f"accumulates only into fp32 gradients of weights, got {op.outs[i]!r}")
    return _supports(op.changed(accumulate=()), target)


FLOATS = ("fp32", "bf16")

KERNELS: tuple[KernelDef, ...] = (
    *(
        KernelDef(op=kind, dtypes=(dtype,) * values, supports=_supports, bind=bind)
        for kind, values, bind in (("scale", 2, _bind_scale), ("geglu", 2, _bind_geglu), ("geglu_bwd", 3, _bind_geglu))
        for dtype in FLOATS
    ),
    *(
        KernelDef(
            op="norm_add_rmsnorm",
            dtypes=(*[dtype] * 5, "fp32", dtype),
            attrs=("offset",),
            supports=_supports,
            bind=_bind_norms,
            memory_efficiency=0.9,
        )
        for dtype in FLOATS
    ),
    *(
        KernelDef(
            op=kind,
            dtypes=(*[dtype] * 3, "fp32", *[dtype] * 2, *dtotal, dtype, dtype, *weights, *norm),
            attrs=("offset",),
            supports=_supports_norms_bwd,
            bind=_bind_norms_bwd,
            workspace=lambda op, target: norms_bwd_workspace(*op.ins[0].shape),
            memory_efficiency=0.6,
        )
        for dtype in FLOATS
        for weights in product(FLOATS, FLOATS)
        for dtotal in ((), (dtype,))
        for kind, norm in (("norm_add_rmsnorm_bwd", ()), ("norm_add_rmsnorm_bwd_recompute", (dtype,)))
    ),
    *(
        KernelDef(
            op=kind,
            dtypes=(*[dtype] * 3, "fp32", *[dtype] * 2, *dtotal, dtype, dtype, *norm),
            attrs=("offset",),
            supports=_supports,
            bind=_bind_norms_dgrad,
            memory_efficiency=0.86,
        )
        for dtype in FLOATS
        for dtotal in ((), (dtype,))
        for kind, norm in (("norm_add_rmsnorm_dgrad", ()), ("norm_add_rmsnorm_dgrad_recompute", (dtype,)))
    ),
)

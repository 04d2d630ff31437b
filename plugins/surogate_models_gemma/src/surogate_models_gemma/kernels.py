"""Compiled kernels of `scale` and `geglu`, in fp32 and bf16."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target


def _bind_scale(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (x,), (out,) = op.ins, op.outs
    return ctx.call(_C.scale, x, out, x.size, op.attrs["factor"], DTYPES[x.dtype].code)


def _bind_geglu(op: Op, ctx: BindContext) -> Call:
    """Bind `geglu` or `geglu_bwd`. Both launchers take the pointers in the order of ins and outs."""
    from . import _C

    half = op.outs[0] if op.kind == "geglu" else op.ins[0]
    return ctx.call(getattr(_C, op.kind), *op.ins, *op.outs, *half.shape, DTYPES[half.dtype].code)


def _supports(op: Op, target: Target) -> Support:
    if op.accumulate:
        return Support(False, f"cannot accumulate into {op.outs[0]!r}")
    return Support(True)


KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=(dtype,) * values, supports=_supports, bind=bind)
    for kind, values, bind in (("scale", 2, _bind_scale), ("geglu", 2, _bind_geglu), ("geglu_bwd", 3, _bind_geglu))
    for dtype in ("bf16", "fp32")
)

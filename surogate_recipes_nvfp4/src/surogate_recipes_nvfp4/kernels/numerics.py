"""The compiled figures of numerics reports."""

from __future__ import annotations

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target


def _bind_measure(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(_C.nvfp4_measure, *op.ins, *op.outs, *op.ins[0].shape)


def _bind_report(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(
        _C.nvfp4_report, ctx.table([ctx.pointer(v) for v in op.ins]), *op.outs, len(op.ins), op.ins[0].shape[0]
    )


def _supports(op: Op, target: Target) -> Support:
    return Support(not op.accumulate, "cannot accumulate into its outputs" if op.accumulate else "")


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="nvfp4_measure",
        dtypes=("bf16", "e2m1", "ue4m3", "fp32", "fp32"),
        supports=_supports,
        bind=_bind_measure,
    ),
    KernelDef(op="nvfp4_report", dtypes=("fp32", "..."), supports=_supports, bind=_bind_report),
)

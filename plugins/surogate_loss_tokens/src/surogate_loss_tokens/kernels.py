"""Compiled kernels of the sums over labels, in fp32. Those of the LM head are in the bf16 recipe."""

from __future__ import annotations

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target


def _bind(op: Op, ctx: BindContext) -> Call:
    from . import _C

    backward = op.kind == "token_loss_bwd"
    needed = 5 if backward else 4
    weights = op.ins[needed] if len(op.ins) > needed else 0
    sizes = op.ins[0].size, float(op.attrs.get("smoothing", 0.0)), float(op.attrs.get("z", 0.0))
    if backward:
        return ctx.call(_C.token_loss_bwd, *op.ins[:needed], weights, *op.outs, *sizes)
    return ctx.call(_C.token_loss, *op.ins[:needed], weights, *op.outs, *sizes, sum(1 << i for i in op.accumulate))


def _supports(op: Op, target: Target) -> Support:
    if op.accumulate and op.kind == "token_loss_bwd":
        return Support(False, "cannot accumulate into gradients of tokens")
    return Support(True)


KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=("fp32",) * values, attrs=("smoothing", "z"), supports=_supports, bind=_bind)
    for kind, least in (("token_loss", 7), ("token_loss_bwd", 8))
    for values in (least, least + 1)
)

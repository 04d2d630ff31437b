"""Biases of experts (`csrc/expert_bias.cu`)."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target

from .support import supports

MOST_EXPERTS = 16
"""Experts of a token."""


def _width(op: Op) -> int:
    return op.ins[0].shape[1]


def _supports(op: Op, target: Target) -> Support:
    experts = next((value.shape[1] for value in op.ins if value.dtype == "int32" and len(value.shape) == 2), 1)
    if experts > MOST_EXPERTS:
        return Support(False, f"at most {MOST_EXPERTS} experts a token, got {experts}")
    adds = op.kind in ("expert_bias_grad", "grouped_linear_bgrad") and op.outs[0].dtype == "fp32"
    return supports(op, target, _width(op), accumulate=adds)


def _bind_add(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    tokens, k = op.ins[2].shape
    return ctx.call(_C.add_expert_bias, *op.ins, *op.outs, tokens, k, _width(op))


def _bind_dgrad(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(_C.expert_bias_dgrad, *op.ins, *op.outs, *op.ins[1].shape, _width(op))


def _bind_grad(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    sizes = (*op.ins[2].shape, _width(op), op.attrs["n_experts"])
    return ctx.call(_C.expert_bias_grad, *op.ins, *op.outs, *sizes, 0 in op.accumulate, DTYPES[op.outs[0].dtype].code)


def _bind_bgrad(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    sizes = (*op.ins[0].shape, op.ins[1].size)
    code = DTYPES[op.outs[0].dtype].code
    return ctx.call(_C.grouped_linear_bgrad, *op.ins, *op.outs, *sizes, 0 in op.accumulate, code)


KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=dtypes, supports=_supports, bind=bind)
    for kind, dtypes, bind in (
        ("add_expert_bias", ("bf16", "fp32", "int32", "bf16", "bf16"), _bind_add),
        ("expert_bias_dgrad", ("bf16", "int32", "bf16", "fp32"), _bind_dgrad),
        *(("expert_bias_grad", ("bf16", "fp32", "int32", gradient), _bind_grad) for gradient in ("fp32", "bf16")),
        *(("grouped_linear_bgrad", ("bf16", "int32", gradient), _bind_bgrad) for gradient in ("fp32", "bf16")),
    )
)

"""The compiled ops of attention sinks, in bf16: `KernelDef`s for csrc/. Sums over tokens are in a fixed order."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target

DIMS = (64, 128, 256)
"""Sizes of a head."""
_RUN = 256
"""Tokens of which a thread block sums the gradient of a sink."""


def _sizes(op: Op) -> tuple[int, int, int]:
    """Return tokens, heads and elements of a head."""
    out, sinks = (op.outs[0], op.ins[4]) if op.kind == "add_sinks" else (op.ins[1], op.ins[3])
    return out.shape[0], sinks.size, out.shape[1] // sinks.size


def _supports(op: Op, target: Target) -> Support:
    if op.accumulate and (op.kind == "add_sinks" or op.outs[0].dtype != "fp32"):
        return Support(False, "cannot accumulate into its outputs")
    dim = _sizes(op)[2]
    return Support(True) if dim in DIMS else Support(False, f"heads must have 64, 128 or 256 elements, got {dim}")


def _bind_add(op: Op, ctx: BindContext) -> Call:
    """The queries, keys and values, and the ends of documents, are for the backward rule."""
    from . import _C

    return ctx.call(_C.add_sinks, *op.ins[2:], *op.outs, *_sizes(op))


def _bind_gradient(op: Op, ctx: BindContext) -> Call:
    from . import _C

    code = DTYPES[op.outs[0].dtype].code
    return ctx.call(_C.sinks_gradient, *op.ins, *op.outs, ctx.workspace, *_sizes(op), 0 in op.accumulate, code)


def _workspace(op: Op, target: Target) -> int:
    """fp32 shares of the gradient: `sinks_gradient_workspace` in csrc/sinks.h."""
    tokens, heads, _ = _sizes(op)
    return -(-tokens // _RUN) * heads * 4


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="add_sinks",
        dtypes=("bf16", "int32", "bf16", "fp32", "bf16", "bf16", "fp32"),
        attrs=("window",),
        supports=_supports,
        bind=_bind_add,
    ),
    *(
        KernelDef(
            op="sinks_gradient",
            dtypes=("bf16", "bf16", "fp32", "bf16", gradient),
            supports=_supports,
            bind=_bind_gradient,
            workspace=_workspace,
        )
        for gradient in ("fp32", "bf16")
    ),
)

"""Compiled causal attention over packed documents: cuDNN for bf16, a plain kernel for fp32 and where cuDNN cannot.

SUROGATE_ATTENTION=plain takes the plain kernel everywhere: slow, deterministic, fp32 inside.

How cuDNN's backward runs, and whether it gives the same bits from run to run, is decided in attention_route.py. What a
plan of cuDNN needs is known only to cuDNN, so the workspace there is an upper bound that a bind checks.
"""

from __future__ import annotations

import os

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target
from surogate_core.errors import ConfigError, ProgramError

from .attention_route import (
    MAY_DIFFER,
    Way,
    backward_bytes,
    backward_way,
    cost_of_repeating,
    dotted,
    forward_bytes,
    packs_dkv,
    planned_notice,
    score_figures,
    shape_of,
)
from .dtypes import DTYPE_CODES, FLOATS, writing

# -------------------------------------------------------------------------------------------------------------- plain


def _plain_supports(op: Op, target: Target) -> Support:
    size = op.attrs["head_dim"]
    if size % 8 or size > 128:
        return Support(False, f"head_dim is a multiple of 8 up to 128, not {size}")
    return writing(op, target)


def _bind_plain(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    qkv, cu_seqlens = op.ins
    out, lse = op.outs
    return ctx.call(_C.attention_plain, qkv, cu_seqlens, out, lse, *shape_of(op).launch, DTYPE_CODES[qkv.dtype])


def _bind_plain_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    dtype = DTYPE_CODES[op.ins[1].dtype]
    return ctx.call(_C.attention_plain_bwd, *op.ins, op.outs[0], ctx.workspace, *shape_of(op).launch, dtype)


def _plain_bwd_workspace(op: Op, target: Target) -> int:
    """rowsum(dout * out), fp32 [H, T]."""
    shape = shape_of(op)
    return 4 * shape.heads * shape.tokens


# -------------------------------------------------------------------------------------------------------------- cuDNN


def _cudnn_supports(op: Op, target: Target) -> Support:
    shape = shape_of(op)
    if os.environ.get("SUROGATE_ATTENTION") == "plain":
        return Support(False, "SUROGATE_ATTENTION=plain asks for the plain kernel")
    if shape.head_dim % 16 or shape.head_dim > 128:
        return Support(False, f"head_dim is a multiple of 16 up to 128, not {shape.head_dim}")
    if shape.seq_len < 2:
        return Support(False, "seq_len is at least 2")
    device = target.device
    if op.kind == "attention_bwd" and device.sm is not None and device.sm // 10 in (8, 12):
        return Support(False, f"cuDNN has no backward over packed documents on {device.title} (SM{device.sm})")
    return writing(op, target)


def _bind_cudnn(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    shape = shape_of(op)
    plan = _C.CudnnAttention(*shape.plan)
    _check_workspace(op, plan.workspace_bytes(), forward_bytes(shape))
    return ctx.call(plan.run, *op.ins, *op.outs, ctx.workspace)


def _bind_cudnn_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    shape = shape_of(op)
    version = _C.cudnn_version()
    way = backward_way(shape, ctx.target, version)
    tell_or_refuse(op, way, version, ctx)
    plan = _C.CudnnAttentionBackward(*shape.plan, way.route, way.groups, packs_dkv(shape))
    _check_workspace(op, plan.workspace_bytes(), backward_bytes(shape, ctx.target))
    return ctx.call(plan.run, *op.ins, *op.outs, ctx.workspace)


def tell_or_refuse(op: Op, way: Way, cudnn_version: int, ctx: BindContext) -> None:
    """Where bits may differ from run to run and should not: the user is told, or the run refused."""
    if way.deterministic or ctx.target.deterministic == "false":
        return
    cudnn = f"cuDNN {dotted(cudnn_version)}"
    if ctx.target.deterministic == "true":
        raise ConfigError(
            f"deterministic: true cannot be kept by {op.kind}. {cost_of_repeating(cudnn)} Or deterministic: auto. "
            f"({score_figures(shape_of(op))})"
        )
    ctx.notice(f"deterministic: auto: with {cudnn} {MAY_DIFFER}")


def _check_workspace(op: Op, needed: int, planned: int) -> None:
    if needed > planned:
        raise ProgramError(
            f"{op.kind}: cuDNN asks for {needed} bytes of workspace, planned were {planned}. "
            "SUROGATE_ATTENTION=plain takes the plain kernel instead; please report the numbers."
        )


# -------------------------------------------------------------------------------------------------------------- table


def _ins(kind: str, dtype: str) -> tuple[str, ...]:
    return (dtype, "int32") if kind == "attention" else (dtype, dtype, dtype, "fp32", "int32")


def _outs(kind: str, dtype: str) -> tuple[str, ...]:
    return (dtype, "fp32") if kind == "attention" else (dtype,)


CUDNN: tuple[KernelDef, ...] = (
    KernelDef(
        op="attention",
        dtypes=(*_ins("attention", "bf16"), *_outs("attention", "bf16")),
        supports=_cudnn_supports,
        bind=_bind_cudnn,
        workspace=lambda op, target: forward_bytes(shape_of(op)),
    ),
    KernelDef(
        op="attention_bwd",
        dtypes=(*_ins("attention_bwd", "bf16"), *_outs("attention_bwd", "bf16")),
        supports=_cudnn_supports,
        bind=_bind_cudnn_bwd,
        workspace=lambda op, target: backward_bytes(shape_of(op), target),
        notice=lambda op, target: planned_notice(shape_of(op), target),
    ),
)
"""bf16 by cuDNN."""

PLAIN: tuple[KernelDef, ...] = tuple(
    kernel
    for dtype in FLOATS
    for kernel in (
        KernelDef(
            op="attention",
            dtypes=(*_ins("attention", dtype), *_outs("attention", dtype)),
            supports=_plain_supports,
            bind=_bind_plain,
        ),
        KernelDef(
            op="attention_bwd",
            dtypes=(*_ins("attention_bwd", dtype), *_outs("attention_bwd", dtype)),
            supports=_plain_supports,
            bind=_bind_plain_bwd,
            workspace=_plain_bwd_workspace,
        ),
    )
)
"""fp32 and bf16 by our own kernels."""

KERNELS: tuple[KernelDef, ...] = (*CUDNN, *PLAIN)
"""The first that fits serves."""

"""Compiled causal attention over packed documents: cuDNN for bf16, plain kernels for fp32 and where cuDNN has none:
a cap of scores, and heads of more than 128 but on the SM90.

SUROGATE_ATTENTION=plain selects the plain kernels everywhere. They are slow and deterministic, with fp32 arithmetic.

Where documents are as long as rows, as in the variant of a program for full rows, cuDNN takes its dense graphs, which
are faster. The sizes of an op tell (`Shape.dense`).

attention_route.py selects the algorithm of cuDNN's backward, which determines whether it is deterministic. Only cuDNN
knows the workspace of a plan, so the planned workspace is an upper bound that binding checks.

The attr `chunks` of a backward (`attn_bwd_chunks`) divides the rows of the micro-batch: chunks run one after another in
the workspace of one.
"""

from __future__ import annotations

import os

from surogate_core.api import DTYPES, BindContext, Call, ConfigError, KernelDef, Op, ProgramError, Support, Target

from .attention_route import (
    MAY_DIFFER,
    BackwardAlgorithm,
    backward_bytes,
    chunked_algorithm,
    chunks_of,
    dotted,
    forward_bytes,
    nondeterminism_note,
    packs_dkv,
    planned_notice,
    score_sizes,
    shape_of,
)
from .dtypes import FLOATS, supports_write

# -------------------------------------------------------------------------------------------------------------- plain


def _plain_supports(op: Op, target: Target) -> Support:
    size = op.attrs["head_dim"]
    if size % 8 or size > 256:
        return Support(False, f"head_dim must be a multiple of 8 up to 256, got {size}")
    if op.kind == "attention_bwd" and size > 128 and target.device.sm in _LITTLE_SHARED_MEMORY:
        return Support(False, f"head_dim must be at most 128 on {target.device.title}, got {size}")
    return supports_write(op, target)


_LITTLE_SHARED_MEMORY = (86, 89, 120, 121)
"""SMs whose blocks have at most 99 KiB. The backward kernels take 102.5 for heads of more than 128."""


def _plain_notice(op: Op, target: Target) -> str:
    """Return a line about an op in bf16 that cuDNN does not serve for its shape or its scores."""
    size, capped = op.attrs["head_dim"], op.attrs.get("softcap", 0.0) > 0
    if op.ins[0].dtype != "bf16" or (size <= 128 and not capped):
        return ""
    what = f"heads of {size}" if size > 128 else "a cap of scores"
    return f"attention with {what} is computed by plain kernels in fp32 arithmetic, many times slower than cuDNN's."


def _bind_plain(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    if text := _plain_notice(op, ctx.target):
        ctx.notice(text)
    qkv, cu_seqlens = op.ins
    out, lse = op.outs
    return ctx.call(_C.attention_plain, qkv, cu_seqlens, out, lse, *shape_of(op).launch, DTYPES[qkv.dtype].code)


def _bind_plain_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    if text := _plain_notice(op, ctx.target):
        ctx.notice(text)
    dtype = DTYPES[op.ins[1].dtype].code
    arguments = (*op.ins, op.outs[0], ctx.workspace, *shape_of(op).launch, _plain_chunks(op), dtype)
    return ctx.call(_C.attention_plain_bwd, *arguments)


def _plain_bwd_workspace(op: Op, target: Target) -> int:
    """Bytes of rowsum(dout * out) and of the corrected lse, fp32 [H, T / chunks] each."""
    shape = shape_of(op)
    return 2 * 4 * shape.heads * shape.tokens // _plain_chunks(op)


_TILE = 64
"""Rows of a tile of the plain kernels."""


def _plain_chunks(op: Op) -> int:
    """Return the chunks of a plain backward: 1 if chunks would not begin at a tile, which would change its sums."""
    chunks = chunks_of(op)
    return 1 if shape_of(op).tokens // chunks % _TILE else chunks


# -------------------------------------------------------------------------------------------------------------- cuDNN


_NO_RAGGED_BACKWARD = (8, 12)
"""Major versions of the SMs on which cuDNN has no backward for ragged documents.

Its plans for dense documents can be built there, but have never run. They take 4 bytes per element of dk and dv of a
query head, twice the bound of `algorithm_bytes`.
"""


def _cudnn_supports(op: Op, target: Target) -> Support:
    shape = shape_of(op)
    if os.environ.get("SUROGATE_ATTENTION") == "plain":
        return Support(False, "SUROGATE_ATTENTION=plain selects the plain kernel")
    device = target.device
    most = 256 if device.sm == 90 else 128
    if shape.head_dim % 16 or shape.head_dim > most:
        return Support(False, f"head_dim must be a multiple of 16 up to {most}, got {shape.head_dim}")
    if shape.seq_len < 2:
        return Support(False, f"seq_len must be at least 2, got {shape.seq_len}")
    if op.kind == "attention_bwd" and device.sm is not None and device.sm // 10 in _NO_RAGGED_BACKWARD:
        missing = "is not tested" if shape.dense else "does not exist for packed documents"
        return Support(False, f"cuDNN's backward {missing} on {device.title} (SM{device.sm})")
    return supports_write(op, target)


def _bind_cudnn(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    shape = shape_of(op)
    plan = _C.CudnnAttention(*shape.plan)
    _check_workspace(op, plan.workspace_bytes(), forward_bytes(shape))
    return ctx.call(plan.run, *op.ins, *op.outs, ctx.workspace)


def _bind_cudnn_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    shape, chunks = shape_of(op), chunks_of(op)
    version = _C.cudnn_version()
    algorithm = chunked_algorithm(shape, chunks, ctx.target, version)
    check_determinism(op, algorithm, version, ctx)
    plan = _C.CudnnAttentionBackward(*shape.plan, algorithm.route, algorithm.groups, packs_dkv(shape), chunks)
    _check_workspace(op, plan.workspace_bytes(), backward_bytes(shape, ctx.target, chunks))
    return ctx.call(plan.run, *op.ins, *op.outs, ctx.workspace)


def check_determinism(op: Op, algorithm: BackwardAlgorithm, cudnn_version: int, ctx: BindContext) -> None:
    """Handle a nondeterministic algorithm: ConfigError for `deterministic: true`, a notice for `auto`."""
    if algorithm.deterministic or ctx.target.deterministic == "false":
        return
    cudnn = f"cuDNN {dotted(cudnn_version)}"
    if ctx.target.deterministic == "true":
        raise ConfigError(
            f"deterministic: true cannot be kept by {op.kind}. {nondeterminism_note(cudnn)} "
            f"Or use deterministic: auto. ({score_sizes(shape_of(op))})"
        )
    ctx.notice(f"deterministic: auto: with {cudnn} {MAY_DIFFER}")


def _check_workspace(op: Op, needed: int, planned: int) -> None:
    if needed > planned:
        raise ProgramError(
            f"{op.kind}: cuDNN needs {needed} bytes of workspace, but the plan has {planned}. "
            "Set SUROGATE_ATTENTION=plain to use the plain kernel instead, and please report these numbers."
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
        attrs=("window", "scale"),
        supports=_cudnn_supports,
        bind=_bind_cudnn,
        workspace=lambda op, target: forward_bytes(shape_of(op)),
    ),
    KernelDef(
        op="attention_bwd",
        dtypes=(*_ins("attention_bwd", "bf16"), *_outs("attention_bwd", "bf16")),
        attrs=("window", "scale", "chunks"),
        supports=_cudnn_supports,
        bind=_bind_cudnn_bwd,
        workspace=lambda op, target: backward_bytes(shape_of(op), target, chunks_of(op)),
        notice=lambda op, target: planned_notice(shape_of(op), target, chunks_of(op)),
    ),
)
"""cuDNN kernels, for bf16."""

PLAIN: tuple[KernelDef, ...] = tuple(
    kernel
    for dtype in FLOATS
    for kernel in (
        KernelDef(
            op="attention",
            dtypes=(*_ins("attention", dtype), *_outs("attention", dtype)),
            attrs=("window", "scale", "softcap"),
            arithmetic=("fp32", 0.4),
            supports=_plain_supports,
            bind=_bind_plain,
            notice=_plain_notice,
        ),
        KernelDef(
            op="attention_bwd",
            dtypes=(*_ins("attention_bwd", dtype), *_outs("attention_bwd", dtype)),
            attrs=("window", "scale", "softcap", "chunks"),
            arithmetic=("fp32", 0.2),
            supports=_plain_supports,
            bind=_bind_plain_bwd,
            workspace=_plain_bwd_workspace,
            notice=_plain_notice,
        ),
    )
)
"""Plain kernels, for fp32 and bf16.

On an H100 (2026-11-25), rows of 2,048: 16.2, 24.0 and 15.7 TFLOP/s forward with heads of 64, 128 and 256, and 7.0, 11.9
and 10.4 backward. Products in fp32 reach 49.5.
"""

KERNELS: tuple[KernelDef, ...] = (*CUDNN, *PLAIN)
"""In order of preference: the first supported kernel is used."""

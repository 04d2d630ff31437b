"""Compiled causal attention over packed documents: cuDNN for bf16, and kernels of this project for fp32 and where cuDNN
has none: a cap of scores, the backward on SM8x and SM12x, and heads of more than 128 but on the SM90.

SUROGATE_ATTENTION=plain selects the kernels of this project everywhere. They are deterministic. Those for bf16 compute
by tensor cores (`mma.sync`), those for fp32 in fp32.

Where documents are as long as rows, as in the variant of a program for full rows, cuDNN takes its dense graphs, which
are faster. The sizes of an op tell (`Shape.dense`).

attention_route.py selects the algorithm of cuDNN's backward, which determines whether it is deterministic. Only cuDNN
knows the workspace of a plan, so the planned workspace is an upper bound that binding checks.

All backwards compute by the lse and out that they are given. Kernels of this project also correct their rounding by
sums over the keys, and do not where the attr `own` says that they are not those of attention. They take a gradient of
lse, `dlse`, too. cuDNN corrects nothing and takes none.

The attr `chunks` of a backward (`attn_bwd_chunks`) divides the rows of the micro-batch: chunks run one after another in
the workspace of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from surogate_core.api import BindContext, Call, ConfigError, KernelDef, Op, ProgramError, Support, Target

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
    packs_dq,
    planned_notice,
    score_sizes,
    shape_of,
)
from .dtypes import supports_write

# ---------------------------------------------------------------------------------------------------------------- own


def _own_supports(op: Op, target: Target) -> Support:
    size = op.attrs["head_dim"]
    if size % 8 or size > 256:
        return Support(False, f"head_dim must be a multiple of 8 up to 256, got {size}")
    return supports_write(op, target)


def _plain_supports(op: Op, target: Target) -> Support:
    size = op.attrs["head_dim"]
    if op.kind == "attention_bwd" and size > 128 and target.device.sm in _LITTLE_SHARED_MEMORY:
        return Support(False, f"head_dim must be at most 128 in fp32 on {target.device.title}, got {size}")
    return _own_supports(op, target)


_LITTLE_SHARED_MEMORY = (86, 89, 120, 121)
"""SMs whose blocks have at most 99 KiB. The backward kernels in fp32 take 102.5 for heads of more than 128."""


def _bind_own(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    launcher = _C.attention_plain if op.ins[0].dtype == "fp32" else _C.attention_mma
    return ctx.call(launcher, *op.ins, *op.outs, *shape_of(op).launch)


def _bind_own_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    shape = shape_of(op)
    launcher = _C.attention_plain_bwd if op.ins[0].dtype == "fp32" else _C.attention_mma_bwd
    ins = op.ins if len(op.ins) == 6 else (*op.ins, 0)  # without the gradient of lse
    return ctx.call(launcher, *ins, op.outs[0], ctx.workspace, *shape.launch, shape.own, _own_chunks(op))


def _own_bwd_workspace(op: Op, target: Target) -> int:
    """Bytes of rowsum(dout * out) and of lse, both corrected, fp32 [H, T / chunks] each."""
    shape = shape_of(op)
    return 2 * 4 * shape.heads * shape.tokens // _own_chunks(op)


_TILE = 64
"""Rows of a tile of the backward kernels."""


def _own_chunks(op: Op) -> int:
    """Return the chunks of a backward: 1 if chunks would not begin at a tile, which would change its sums."""
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
        return Support(False, "SUROGATE_ATTENTION=plain selects the kernel of this project")
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
    packed = packs_dkv(shape), packs_dq(shape, algorithm)
    plan = _C.CudnnAttentionBackward(*shape.plan, algorithm.route, algorithm.groups, *packed, chunks)
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
            "Set SUROGATE_ATTENTION=plain to use the kernel of this project instead, and please report these numbers."
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
        attrs=("window", "scale", "own", "chunks"),
        supports=_cudnn_supports,
        bind=_bind_cudnn_bwd,
        workspace=lambda op, target: backward_bytes(shape_of(op), target, chunks_of(op)),
        notice=lambda op, target: planned_notice(shape_of(op), target, chunks_of(op)),
    ),
)
"""cuDNN kernels, for bf16."""


def _own(
    dtype: str, rate: str, forward: float, backward: float, supports: Callable[[Op, Target], Support]
) -> tuple[KernelDef, ...]:
    """Return the kernels of this project for a dtype, which compute at these shares of a rate."""
    return (
        KernelDef(
            op="attention",
            dtypes=(*_ins("attention", dtype), *_outs("attention", dtype)),
            attrs=("window", "scale", "softcap"),
            arithmetic=(rate, forward),
            supports=supports,
            bind=_bind_own,
        ),
        *(
            KernelDef(
                op="attention_bwd",
                dtypes=(*_ins("attention_bwd", dtype), *dlse, *_outs("attention_bwd", dtype)),
                attrs=("window", "scale", "softcap", "own", "chunks"),
                takes=("dlse",) if dlse else (),
                arithmetic=(rate, backward),
                supports=supports,
                bind=_bind_own_bwd,
                workspace=_own_bwd_workspace,
            )
            for dlse in ((), ("fp32",))
        ),
    )


MMA: tuple[KernelDef, ...] = _own("bf16", "mma.sync", 0.3, 0.18, _own_supports)
"""Kernels for bf16 by tensor cores.

On an H200 (2026-11-26), rows of 2,048: 106, 152 and 109 TFLOP/s forward with heads of 64, 128 and 256, and 52, 115 and
74 backward; with a cap 95 and 80 forward with heads of 128 and 256, and 96 and 65 backward. `mma.sync` allows 414
there. The backward computes 8 products, 10 with heads of more than 128, where an op counts 5. On other cards they have
not run: the share of a slower tensor core is not smaller.
"""

PLAIN: tuple[KernelDef, ...] = _own("fp32", "fp32", 0.4, 0.2, _plain_supports)
"""Plain kernels for fp32.

On an H100 (2026-11-25), rows of 2,048, from and to bf16, which they also served then: 16.2, 24.0 and 15.7 TFLOP/s
forward with heads of 64, 128 and 256, and 7.0, 11.9 and 10.4 backward. Products in fp32 reach 49.5.
"""

KERNELS: tuple[KernelDef, ...] = (*CUDNN, *MMA, *PLAIN)
"""In order of preference: the first supported kernel is used."""

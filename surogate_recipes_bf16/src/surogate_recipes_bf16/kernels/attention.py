"""Compiled causal attention over packed documents: cuDNN for bf16, a plain kernel for fp32 and where cuDNN cannot.

SUROGATE_ATTENTION=plain takes the plain kernel everywhere: slow, deterministic, fp32 inside.

Backward by cuDNN gives the same bits from run to run where that is affordable (`backward_way`). What a plan of cuDNN
needs is known only to cuDNN, so the workspace here is an upper bound that a bind checks.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

from surogate_core.api import BindContext, Call, DeviceInfo, KernelDef, Op, Support
from surogate_core.errors import ProgramError

from .dtypes import DTYPE_CODES, FLOATS, writing
from .gemm import aligned

SCORE_BYTES_LIMIT = 512 << 20
"""Most workspace for the score gradients that the deterministic backward of SM90 keeps; beyond, it goes another way."""

ORDERED_CUDNN = 92500
"""The first cuDNN that is deterministic on SM90 without keeping score gradients."""

_SLACK_BYTES = 1 << 16
_SLACK_DOCUMENT_BYTES = 512
"""Above cuDNN's own descriptors, of which it keeps a few for every document (448 bytes seen in 9.19 and 9.28)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention op. documents: entries of cu_seqlens less one, most of them empty in a usual batch."""

    tokens: int
    documents: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def launch(self) -> tuple[int, int, int, int, int]:
        """What the plain launchers take."""
        return self.tokens, self.documents, self.heads, self.kv_heads, self.head_dim

    @property
    def plan(self) -> tuple[int, int, int, int, int, int]:
        """What cuDNN's plans take."""
        return self.tokens, self.documents, self.seq_len, self.heads, self.kv_heads, self.head_dim


def shape_of(op: Op) -> Shape:
    """Sizes of `attention` or `attention_bwd`."""
    qkv, cu_seqlens = (op.ins[0], op.ins[1]) if op.kind == "attention" else (op.ins[1], op.ins[4])
    a = op.attrs
    return Shape(qkv.shape[0], cu_seqlens.shape[0] - 1, a["seq_len"], a["n_heads"], a["n_kv_heads"], a["head_dim"])


# -------------------------------------------------------------------------------------------------------------- plain


def _plain_supports(op: Op, device: DeviceInfo) -> Support:
    size = op.attrs["head_dim"]
    if size % 8 or size > 128:
        return Support(False, f"head_dim is a multiple of 8 up to 128, not {size}")
    return writing(op, device)


def _bind_plain(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    qkv, cu_seqlens = op.ins
    out, lse = op.outs
    return ctx.call(_C.attention_plain, qkv, cu_seqlens, out, lse, *shape_of(op).launch, DTYPE_CODES[qkv.dtype])


def _bind_plain_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    dtype = DTYPE_CODES[op.ins[1].dtype]
    return ctx.call(_C.attention_plain_bwd, *op.ins, op.outs[0], ctx.workspace, *shape_of(op).launch, dtype)


def _plain_bwd_workspace(op: Op, device: DeviceInfo) -> int:
    """rowsum(dout * out), fp32 [H, T]."""
    shape = shape_of(op)
    return 4 * shape.heads * shape.tokens


# -------------------------------------------------------------------------------------------------------------- cuDNN


@dataclass(frozen=True)
class Way:
    """How the backward runs. notice: a sentence for the user where bits may differ from run to run."""

    deterministic: bool
    notice: str = ""


def backward_way(shape: Shape, device: DeviceInfo, cudnn_version: int) -> Way:
    """Deterministic where the workspace allows: with score gradients in memory up to SCORE_BYTES_LIMIT, or without."""
    if device.sm is None or device.sm >= 100 or cudnn_version >= ORDERED_CUDNN or _keeps_scores(shape, device):
        return Way(True)
    return Way(
        False,
        f"attention backward: gradients differ in their last bits from run to run. cuDNN {dotted(cudnn_version)} would "
        f"take {score_bytes(shape) / 2**30:.1f} GiB of workspace to avoid that, for {shape.documents} documents of up "
        f"to {shape.seq_len} tokens and {shape.heads} heads. {dotted(ORDERED_CUDNN)} and later take none: "
        "pip install --upgrade nvidia-cudnn-cu13",
    )


def dotted(version: int) -> str:
    """91901 -> 9.19.1"""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def score_bytes(shape: Shape) -> int:
    """Workspace for the gradients of all scores in bf16, of every document as if it were the longest."""
    rows, columns = -(-shape.seq_len // 64) * 64, -(-shape.seq_len // 128) * 128
    return 2 * shape.documents * shape.heads * rows * columns


def _keeps_scores(shape: Shape, device: DeviceInfo) -> bool:
    return device.sm == 90 and score_bytes(shape) <= SCORE_BYTES_LIMIT


def packs_dkv(shape: Shape) -> bool:
    """Whether dk and dv go through packed scratch (attention.h): where query heads share key heads."""
    return shape.heads != shape.kv_heads


def forward_bytes(shape: Shape) -> int:
    """Upper bound of the forward plan's workspace: lengths, three arrays of offsets, cuDNN's own."""
    return _ragged_bytes(shape, 3) + _own_bytes(shape)


def backward_bytes(shape: Shape, device: DeviceInfo) -> int:
    """Upper bound of the backward plan's workspace.

    Packed dk and dv in bf16; for cuDNN rowsum(dout * out), dk and dv of every query head with room for fp32, and either
    the score gradients or dq in fp32 with the row width of qkv.
    """
    tokens, heads, groups, size = shape.tokens, shape.heads, shape.kv_heads, shape.head_dim
    packed = packs_dkv(shape)
    total = _ragged_bytes(shape, 4 if packed else 3) + _own_bytes(shape) + 4 * tokens * heads
    if packed:
        total += 2 * aligned(2 * tokens * groups * size) + 2 * 4 * tokens * heads * size
    dq = 4 * tokens * (heads + 2 * groups) * size
    return aligned(total + (score_bytes(shape) if _keeps_scores(shape, device) else dq))


def _ragged_bytes(shape: Shape, tensors: int) -> int:
    return aligned(4 * shape.documents) + aligned(8 * tensors * (shape.documents + 1))


def _own_bytes(shape: Shape) -> int:
    return _SLACK_BYTES + aligned(_SLACK_DOCUMENT_BYTES * shape.documents)


def _cudnn_supports(op: Op, device: DeviceInfo) -> Support:
    shape = shape_of(op)
    if os.environ.get("SUROGATE_ATTENTION") == "plain":
        return Support(False, "SUROGATE_ATTENTION=plain asks for the plain kernel")
    if shape.head_dim % 16 or shape.head_dim > 128:
        return Support(False, f"head_dim is a multiple of 16 up to 128, not {shape.head_dim}")
    if shape.seq_len < 2:
        return Support(False, "seq_len is at least 2")
    if op.kind == "attention_bwd" and device.sm is not None and device.sm // 10 in (8, 12):
        return Support(False, f"cuDNN has no backward over packed documents on {device.title} (SM{device.sm})")
    return writing(op, device)


def _bind_cudnn(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    shape = shape_of(op)
    plan = _C.CudnnAttention(*shape.plan)
    _check_workspace(op, plan.workspace_bytes(), forward_bytes(shape))
    return ctx.call(plan.run, *op.ins, *op.outs, ctx.workspace)


def _bind_cudnn_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    shape = shape_of(op)
    way = backward_way(shape, ctx.device, _C.cudnn_version())
    if way.notice:
        warnings.warn(way.notice, RuntimeWarning, stacklevel=2)
    plan = _C.CudnnAttentionBackward(*shape.plan, way.deterministic, packs_dkv(shape), SCORE_BYTES_LIMIT)
    _check_workspace(op, plan.workspace_bytes(), backward_bytes(shape, ctx.device))
    return ctx.call(plan.run, *op.ins, *op.outs, ctx.workspace)


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
        workspace=lambda op, device: forward_bytes(shape_of(op)),
    ),
    KernelDef(
        op="attention_bwd",
        dtypes=(*_ins("attention_bwd", "bf16"), *_outs("attention_bwd", "bf16")),
        supports=_cudnn_supports,
        bind=_bind_cudnn_bwd,
        workspace=lambda op, device: backward_bytes(shape_of(op), device),
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

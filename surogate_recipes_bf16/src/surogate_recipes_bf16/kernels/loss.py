"""The compiled LM head with cross-entropy: the logits of one chunk of tokens at a time, in the workspace.

The gradient of the logits takes their place. A bf16 weight gradient is summed over the chunks in fp32, in the
workspace, unless one bf16 product makes it whole.
"""

from __future__ import annotations

from surogate_core.api import BindContext, Call, DeviceInfo, KernelDef, Op, Support
from surogate_core.program.value import DTYPE_BYTES

from .dtypes import DTYPE_CODES, FLOATS, adding
from .gemm import aligned, library_bytes

NO_GRADIENTS = -1
"""What the binding takes for the dtype of a weight gradient that is not there."""

_ROW_MULTIPLE = 64
"""Rows of logits are padded to this many elements, so that every row can be read 16 bytes at a time."""


def _sizes(op: Op) -> tuple[int, int, int, int]:
    """Tokens, model width, vocabulary, chunks."""
    (tokens, d_model), (vocab_size, _) = op.ins[0].shape, op.ins[1].shape
    return tokens, d_model, vocab_size, int(op.attrs["chunks"])


def _workspace(op: Op, device: DeviceInfo) -> int:
    """The library's scratch, the logits of a chunk, the loss of every row, and dw in fp32 where it is rounded last."""
    tokens, d_model, vocab_size, chunks = _sizes(op)
    dtype = op.ins[0].dtype
    row = -(-vocab_size // _ROW_MULTIPLE) * _ROW_MULTIPLE
    logits = aligned(tokens // chunks * row * DTYPE_BYTES[dtype])
    staged = len(op.outs) == 3 and op.outs[2].dtype == "bf16" and (chunks > 1 or dtype == "fp32")
    dw = aligned(4 * vocab_size * d_model) if staged else 0
    return library_bytes(device) + logits + aligned(4 * tokens) + dw


def _bind(op: Op, ctx: BindContext) -> Call:
    """Times the algorithms of the products on the op's own buffers: dx, dw and the workspace are overwritten."""
    from .. import _C

    has_grads = op.kind == "lm_head_ce_grads"
    gradients = [ctx.pointer(value) for value in op.outs[1:]] if has_grads else [0, 0]
    buffers = [*(ctx.pointer(value) for value in (*op.ins, op.outs[0])), *gradients, ctx.workspace]
    head = _C.LmHead(
        *buffers,
        *_sizes(op),
        DTYPE_CODES[op.ins[0].dtype],
        DTYPE_CODES[op.outs[2].dtype] if has_grads else NO_GRADIENTS,
        0 in op.accumulate,
        2 in op.accumulate,
        library_bytes(ctx.device),
        ctx.stream,
    )
    return ctx.call(head.run, *buffers)


def _supports(op: Op, device: DeviceInfo) -> Support:
    if 1 in op.accumulate:
        return Support(False, "writes the gradient of x, does not add to it")
    return adding(op, device)


def _kernel(kind: str, dtypes: tuple[str, ...]) -> KernelDef:
    return KernelDef(op=kind, dtypes=dtypes, supports=_supports, bind=_bind, workspace=_workspace)


KERNELS: tuple[KernelDef, ...] = tuple(
    kernel
    for x in FLOATS
    for kernel in (
        _kernel("lm_head_ce", (x, x, "int32", "fp32", "fp32")),
        *(_kernel("lm_head_ce_grads", (x, x, "int32", "fp32", "fp32", x, dw)) for dw in FLOATS),
    )
)

"""The compiled LM head with cross-entropy, over labelled rows only: the logits of a chunk of them at a time.

The gradient of the logits takes their place. Chunks for which a micro-batch has no labels are left out. A bf16 weight
gradient is summed over the chunks in fp32, in the workspace, unless one bf16 product makes it whole; without one, where
the weight is frozen, that product is not run.
"""

from __future__ import annotations

from surogate_core.api import BindContext, KernelDef, Op, Part, Support, Target
from surogate_core.program.value import DTYPE_BYTES

from .dtypes import DTYPE_CODES, FLOATS, adding
from .gemm import aligned, is_timed, keep_choices, library_bytes

NO_DW = -1
"""What the binding takes for the dtype of a weight gradient that is not there."""

_ROW_MULTIPLE = 64
"""Rows of logits are padded to this many elements, so that every row can be read 16 bytes at a time."""


def _sizes(op: Op) -> tuple[int, int, int, int]:
    """Tokens, model width, vocabulary, chunks."""
    (tokens, d_model), (vocab_size, _) = op.ins[0].shape, op.ins[1].shape
    return tokens, d_model, vocab_size, int(op.attrs["chunks"])


def _workspace(op: Op, target: Target) -> int:
    """What lm_head.cpp lays out: library scratch, logits, losses and rows, x and dx of a chunk, dw rounded last."""
    tokens, d_model, vocab_size, chunks = _sizes(op)
    dtype = op.ins[0].dtype
    rows = tokens // chunks
    logits = aligned(rows * -(-vocab_size // _ROW_MULTIPLE) * _ROW_MULTIPLE * DTYPE_BYTES[dtype])
    x = aligned(rows * d_model * DTYPE_BYTES[dtype])
    staged = len(op.outs) == 3 and op.outs[2].dtype == "bf16" and (chunks > 1 or dtype == "fp32")
    dw = aligned(4 * vocab_size * d_model) if staged else 0
    return library_bytes(target) + logits + 3 * aligned(4 * tokens) + x * min(len(op.outs), 2) + dw


def _bind(op: Op, ctx: BindContext) -> tuple[Part, ...]:
    """Times the algorithms of the products on the op's own buffers: dx, dw and the workspace are overwritten."""
    from .. import _C

    keep_choices(ctx)
    has_dx, has_dw = len(op.outs) > 1, len(op.outs) > 2
    gradients = [*(ctx.pointer(value) for value in op.outs[1:]), 0, 0][:2]
    head = _C.LmHead(
        *(ctx.pointer(value) for value in (*op.ins, op.outs[0])),
        *gradients,
        ctx.workspace,
        *_sizes(op),
        DTYPE_CODES[op.ins[0].dtype],
        has_dx,
        DTYPE_CODES[op.outs[2].dtype] if has_dw else NO_DW,
        0 in op.accumulate,
        2 in op.accumulate,
        library_bytes(ctx.target),
        is_timed(ctx.target),
        ctx.stream,
    )
    tokens, _, _, chunks = _sizes(op)
    above = [-1, *(i * tokens // chunks for i in range(1, chunks))]
    return (
        Part(ctx.call(head.begin)),
        *(Part(ctx.call(head.chunk, i), above[i]) for i in range(chunks)),
        Part(ctx.call(head.end)),
    )


def _supports(op: Op, target: Target) -> Support:
    if op.kind == "lm_head_ce_grads" and op.attrs["wrt"][0] != 0:
        return Support(False, "computes the gradient of the weight beside that of x, not alone")
    if 1 in op.accumulate:
        return Support(False, "writes the gradient of x, does not add to it")
    return adding(op, target)


def _kernel(kind: str, dtypes: tuple[str, ...]) -> KernelDef:
    return KernelDef(op=kind, dtypes=dtypes, supports=_supports, bind=_bind, workspace=_workspace)


KERNELS: tuple[KernelDef, ...] = tuple(
    kernel
    for x in FLOATS
    for kernel in (
        _kernel("lm_head_ce", (x, x, "int32", "fp32", "fp32")),
        _kernel("lm_head_ce_grads", (x, x, "int32", "fp32", "fp32", x)),
        *(_kernel("lm_head_ce_grads", (x, x, "int32", "fp32", "fp32", x, dw)) for dw in FLOATS),
    )
)

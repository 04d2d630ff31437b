"""The compiled LM head with cross-entropy, over labelled rows only, one chunk of logits at a time.

The gradient of the logits overwrites them. Chunks without labels are skipped. A bf16 weight gradient is summed over the
chunks in fp32 in the workspace, unless a single bf16 product computes it. The product is omitted if the weight is
frozen.
"""

from __future__ import annotations

from typing import Any

from surogate_core.api import DTYPES, BindContext, KernelDef, Launch, Op, Support, Target
from surogate_core.api.compiled import aligned
from surogate_core.api.cublaslt import is_timed, library_bytes, selecting

from .dtypes import FLOATS, supports_accumulate

NO_DW = -1
"""Dtype code that the binding takes if there is no weight gradient."""

_ROW_MULTIPLE = 64
"""The row stride of the logits is a multiple of this many elements, so that 16-byte accesses are aligned."""


def sizes(op: Op) -> tuple[int, int, int, int]:
    """Return (tokens, d_model, vocab_size, chunks)."""
    (tokens, d_model), (vocab_size, _) = op.ins[0].shape, op.ins[1].shape
    return tokens, d_model, vocab_size, int(op.attrs["chunks"])


def products_bytes(op: Op, target: Target, dx: bool, dtype_dw: str = "") -> int:
    """Bytes of the layout of head_products.cpp: cuBLASLt's workspace, logits, row lists, x and dx of a chunk, dw."""
    tokens, d_model, vocab_size, chunks = sizes(op)
    dtype = op.ins[0].dtype
    rows = tokens // chunks
    logits = aligned(DTYPES[dtype].nbytes(rows * -(-vocab_size // _ROW_MULTIPLE) * _ROW_MULTIPLE))
    x = aligned(DTYPES[dtype].nbytes(rows * d_model))
    staged = dtype_dw == "bf16" and (chunks > 1 or dtype == "fp32")
    dw = aligned(4 * vocab_size * d_model) if staged else 0
    return library_bytes(target) + logits + 2 * aligned(4 * tokens) + x * (1 + dx) + dw


def launches(op: Op, ctx: BindContext, head: Any) -> tuple[Launch, ...]:
    """Return the launches of a bound head. Chunks run that the labels of the batch reach."""
    tokens, _, _, chunks = sizes(op)
    counted = op.ins[2].name == "targets"  # the host knows the number of labels of the batch alone
    above = [-1, *(i * tokens // chunks if counted else -1 for i in range(1, chunks))]
    return (
        Launch(ctx.call(head.begin)),
        *(Launch(ctx.call(head.chunk, i), above[i]) for i in range(chunks)),
        Launch(ctx.call(head.end)),
    )


def _workspace(op: Op, target: Target) -> int:
    """Bytes of the layout in lm_head.cpp: products and row losses."""
    dtype_dw = op.outs[2].dtype if len(op.outs) > 2 else ""
    return products_bytes(op, target, len(op.outs) > 1, dtype_dw) + aligned(4 * op.ins[0].shape[0])


def _bind(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """Time the algorithms of the products on the op's buffers, which overwrites w, dw and the workspace."""
    from .. import _C

    has_dx, has_dw = len(op.outs) > 1, len(op.outs) > 2
    gradients = [*(ctx.pointer(value) for value in op.outs[1:]), 0, 0][:2]
    with selecting(ctx, _C):
        head = _C.LmHead(
            *(ctx.pointer(value) for value in (*op.ins, op.outs[0])),
            *gradients,
            ctx.workspace,
            *sizes(op),
            float(op.attrs.get("softcap", 0.0)),
            DTYPES[op.ins[0].dtype].code,
            has_dx,
            DTYPES[op.outs[2].dtype].code if has_dw else NO_DW,
            0 in op.accumulate,
            2 in op.accumulate,
            library_bytes(ctx.target),
            is_timed(ctx.target),
            ctx.stream,
        )
    return launches(op, ctx, head)


def _supports(op: Op, target: Target) -> Support:
    if op.kind == "lm_head_ce_grads" and op.attrs["wrt"][0] != 0:
        return Support(False, "cannot compute the gradient of the weight without that of x")
    if 1 in op.accumulate:
        return Support(False, "cannot accumulate into the gradient of x")
    return supports_accumulate(op, target)


def _kernel(kind: str, dtypes: tuple[str, ...]) -> KernelDef:
    return KernelDef(op=kind, dtypes=dtypes, attrs=("softcap",), supports=_supports, bind=_bind, workspace=_workspace)


KERNELS: tuple[KernelDef, ...] = tuple(
    kernel
    for x in FLOATS
    for kernel in (
        _kernel("lm_head_ce", (x, x, "int32", "fp32", "fp32")),
        _kernel("lm_head_ce_grads", (x, x, "int32", "fp32", "fp32", x)),
        *(_kernel("lm_head_ce_grads", (x, x, "int32", "fp32", "fp32", x, dw)) for dw in FLOATS),
    )
)

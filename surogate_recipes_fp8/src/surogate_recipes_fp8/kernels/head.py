"""The compiled LM head with cross-entropy by FP8 products, over labelled rows only, one chunk of logits at a time.

The gradient of the logits takes their place in E5M2. For dw it is transposed, with x. Chunks without labels are
skipped. A bf16 dw is summed over the chunks in fp32 in the workspace.
"""

from __future__ import annotations

from typing import Any

from surogate_core.api import DTYPES, BindContext, KernelDef, Launch, Op, Support, Target
from surogate_core.api.compiled import aligned
from surogate_core.api.cublaslt import explaining, is_timed, library_bytes, selecting

from ..formats import MULTIPLE, transposes
from ..head_ops import computes_dw

NO_DW = -1
"""Dtype code that the binding takes if there is no weight gradient."""

_ROW_MULTIPLE = 64
"""The row stride of the logits is a multiple of this many elements."""


def sizes(op: Op) -> tuple[int, int, int, int]:
    """Return (tokens, d_model, vocab_size, chunks)."""
    (tokens, d_model), (vocab_size, _) = op.ins[0].shape, op.ins[1].shape
    return tokens, d_model, vocab_size, int(op.attrs["chunks"])


def _workspace(op: Op, target: Target) -> int:
    """Bytes of the layout of lm_head.h: cuBLASLt's workspace, logits, rows, x and dx of a chunk, dw, codes, losses."""
    tokens, d_model, vocab_size, chunks = sizes(op)
    rows, ld = tokens // chunks, -(-vocab_size // _ROW_MULTIPLE) * _ROW_MULTIPLE
    has_dx, has_dw = len(op.outs) > 1, computes_dw(op)
    staged = has_dw and op.outs[2].dtype == "bf16" and chunks > 1
    return (
        library_bytes(target)
        + aligned(2 * rows * ld)
        + 3 * aligned(4 * tokens)
        + aligned(2 * rows * d_model) * (1 + has_dx)
        + (aligned(4 * vocab_size * d_model) if staged else 0)
        + aligned(rows * d_model) * (1 + has_dw)
        + aligned(1)
        + (aligned(rows * vocab_size) if has_dw else 0)
    )


def _bind(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """Time the algorithms of the products on the op's buffers, which overwrites w, its scale, dw and the workspace."""
    from .. import _C

    has_dx, has_dw = len(op.outs) > 1, computes_dw(op)
    ins = [*(ctx.pointer(value) for value in op.ins), 0][:6]
    gradients = [*(ctx.pointer(value) for value in op.outs[1:]), 0, 0][:2]
    tokens, _, _, chunks = sizes(op)
    with selecting(ctx, _C), explaining(ctx, op, *op.ins[:2]):
        head: Any = _C.Fp8LmHead(
            *ins,
            ctx.pointer(op.outs[0]),
            *gradients,
            ctx.workspace,
            *sizes(op),
            float(op.attrs.get("softcap", 0.0)),
            has_dx,
            DTYPES[op.outs[2].dtype].code if has_dw else NO_DW,
            0 in op.accumulate,
            2 in op.accumulate,
            bool(op.attrs.get("fast")),
            bool(op.attrs.get("fast_dx")),
            library_bytes(ctx.target),
            is_timed(ctx.target),
            ctx.stream,
        )
    counted = op.ins[2].name == "targets"  # the host knows the number of labels of the batch alone
    above = [-1, *(i * tokens // chunks if counted else -1 for i in range(1, chunks))]
    return (
        Launch(ctx.call(head.begin)),
        *(Launch(ctx.call(head.chunk, i), above[i]) for i in range(chunks)),
        Launch(ctx.call(head.end)),
    )


def _supports(op: Op, target: Target) -> Support:
    tokens, d_model, vocab_size, chunks = sizes(op)
    for name, size in (("columns", d_model), ("vocabulary", vocab_size), ("rows of a chunk", tokens // chunks)):
        if size % MULTIPLE:
            return Support(False, f"FP8 products need a multiple of {MULTIPLE} as {name}, got {size}")
    has_dx = 0 in op.attrs.get("wrt", ())
    if computes_dw(op) and not has_dx:
        return Support(False, "cannot compute the gradient of the weight without that of x")
    if has_dx and transposes(target.device.sm) and len(op.ins) == 5:
        return Support(False, f"{target.device.title} needs FP8 operands with the summed dimension contiguous")
    if op.accumulate - ({0, 2} if computes_dw(op) and op.outs[2].dtype == "fp32" else {0}):
        return Support(False, f"accumulates only into the loss and a weight gradient in fp32, not into {op.outs[1:]!r}")
    return Support(True)


def _kernel(kind: str, dtypes: tuple[str, ...]) -> KernelDef:
    return KernelDef(
        op=kind,
        dtypes=dtypes,
        attrs=("softcap", "fast", "fast_dx") if kind.endswith("_grads") else ("softcap", "fast"),
        supports=_supports,
        bind=_bind,
        workspace=_workspace,
    )


_INS = ("bf16", "e4m3", "int32", "fp32", "fp32")

KERNELS: tuple[KernelDef, ...] = (
    _kernel("fp8_lm_head_ce", (*_INS, "fp32")),
    *(
        _kernel("fp8_lm_head_ce_grads", (*_INS, *transposed, "fp32", "bf16", *dw))
        for transposed in ((), ("e4m3",))
        for dw in ((), ("fp32",), ("bf16",))
    ),
)

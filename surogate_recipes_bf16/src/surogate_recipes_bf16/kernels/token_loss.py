"""The compiled LM head for losses of tokens: the ops `lm_head_tokens*` of surogate-loss-tokens.

As the LM head with cross-entropy (`loss.py`): labelled rows only, one chunk of logits at a time. The backward pass
computes the logits again, and their gradient overwrites them.
"""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, KernelDef, Launch, Op, Support, Target
from surogate_core.api.cublaslt import is_timed, library_bytes, selecting

from .dtypes import FLOATS, supports_accumulate
from .loss import NO_DW, ROW_MULTIPLE, sizes
from .workspace import aligned


def _gradients(op: Op) -> int:
    """Return how many gradients the op writes: none, dx, or dx and dw."""
    return 0 if op.kind == "lm_head_tokens" else len(op.outs)


def _workspace(op: Op, target: Target) -> int:
    """Bytes of the layout in lm_head_tokens.cpp: cuBLASLt's workspace, logits, row lists, x and dx of a chunk, dw."""
    tokens, d_model, vocab_size, chunks = sizes(op)
    dtype, gradients = op.ins[0].dtype, _gradients(op)
    rows = tokens // chunks
    logits = aligned(DTYPES[dtype].nbytes(rows * -(-vocab_size // ROW_MULTIPLE) * ROW_MULTIPLE))
    x = aligned(DTYPES[dtype].nbytes(rows * d_model))
    staged = gradients == 2 and op.outs[1].dtype == "bf16" and (chunks > 1 or dtype == "fp32")
    dw = aligned(4 * vocab_size * d_model) if staged else 0
    return library_bytes(target) + logits + 2 * aligned(4 * tokens) + x * min(gradients + 1, 2) + dw


def _bind(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """Time the algorithms of the products on the op's buffers, which overwrites w, dw and the workspace."""
    from .. import _C

    gradients = _gradients(op)
    if gradients:
        logsumexp, d_log_probs, d_logsumexp, d_mean = op.ins[3:]
        rows = [*(ctx.pointer(value) for value in (d_log_probs, logsumexp, d_mean, d_logsumexp))]
        outs = [*(ctx.pointer(value) for value in op.outs), 0][:2]
    else:
        rows, outs = [*(ctx.pointer(value) for value in op.outs), 0], [0, 0]
    with selecting(ctx, _C):
        head = _C.LmHeadTokens(
            *(ctx.pointer(value) for value in op.ins[:3]),
            *rows,
            *outs,
            ctx.workspace,
            *sizes(op),
            DTYPES[op.ins[0].dtype].code,
            gradients > 0,
            DTYPES[op.outs[1].dtype].code if gradients == 2 else NO_DW,
            gradients == 2 and 1 in op.accumulate,
            library_bytes(ctx.target),
            is_timed(ctx.target),
            ctx.stream,
        )
    tokens, _, _, chunks = sizes(op)
    counted = op.ins[2].name == "targets"  # the host knows the number of labels of the batch alone
    above = [-1, *(i * tokens // chunks if counted else -1 for i in range(1, chunks))]
    return (
        Launch(ctx.call(head.begin)),
        *(Launch(ctx.call(head.chunk, i), above[i]) for i in range(chunks)),
        Launch(ctx.call(head.end)),
    )


def _supports(op: Op, target: Target) -> Support:
    if op.accumulate - {1} or (op.accumulate and _gradients(op) < 2):
        return Support(False, "accumulates into the gradient of the weight alone")
    return supports_accumulate(op, target)


def _kernel(kind: str, dtypes: tuple[str, ...]) -> KernelDef:
    return KernelDef(op=kind, dtypes=dtypes, supports=_supports, bind=_bind, workspace=_workspace)


_ROWS = ("fp32",) * 4

KERNELS: tuple[KernelDef, ...] = tuple(
    kernel
    for x in FLOATS
    for kernel in (
        _kernel("lm_head_tokens", (x, x, "int32", "fp32", "fp32", "fp32")),
        _kernel("lm_head_tokens_dgrad", (x, x, "int32", *_ROWS, x)),
        *(_kernel("lm_head_tokens_bwd", (x, x, "int32", *_ROWS, x, dw)) for dw in FLOATS),
    )
)

"""The compiled LM head for losses of tokens: the ops `lm_head_tokens*` of surogate-loss-tokens.

As the LM head with cross-entropy (`loss.py`): labelled rows only, one chunk of logits at a time. The backward pass
computes the logits again, and their gradient overwrites them.
"""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, KernelDef, Launch, Op, Support, Target
from surogate_core.api.cublaslt import is_timed, library_bytes, selecting

from .dtypes import FLOATS, supports_accumulate
from .loss import NO_DW, launches, products_bytes, sizes


def _gradients(op: Op) -> int:
    """Return how many gradients the op writes: none, dx, or dx and dw."""
    return 0 if op.kind == "lm_head_tokens" else len(op.outs)


def _workspace(op: Op, target: Target) -> int:
    gradients = _gradients(op)
    return products_bytes(op, target, gradients > 0, op.outs[1].dtype if gradients == 2 else "")


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
            float(op.attrs.get("softcap", 0.0)),
            DTYPES[op.ins[0].dtype].code,
            gradients > 0,
            DTYPES[op.outs[1].dtype].code if gradients == 2 else NO_DW,
            gradients == 2 and 1 in op.accumulate,
            library_bytes(ctx.target),
            is_timed(ctx.target),
            ctx.stream,
        )
    return launches(op, ctx, head)


def _supports(op: Op, target: Target) -> Support:
    if op.accumulate - {1} or (op.accumulate and _gradients(op) < 2):
        return Support(False, "accumulates into the gradient of the weight alone")
    return supports_accumulate(op, target)


def _kernel(kind: str, dtypes: tuple[str, ...]) -> KernelDef:
    return KernelDef(op=kind, dtypes=dtypes, attrs=("softcap",), supports=_supports, bind=_bind, workspace=_workspace)


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

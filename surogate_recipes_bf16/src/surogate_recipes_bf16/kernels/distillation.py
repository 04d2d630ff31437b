"""The compiled LM head for distillation: the ops `lm_head_distill*` of surogate-loss-distillation.

As the LM head with cross-entropy (`loss.py`): labelled rows only, one chunk of logits at a time, whose gradient
overwrites them.
"""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, KernelDef, Launch, Op, Support, Target
from surogate_core.api.compiled import aligned
from surogate_core.api.cublaslt import is_timed, library_bytes, selecting

from .dtypes import FLOATS, supports_accumulate
from .loss import NO_DW, launches, products_bytes, sizes

MOST_TOKENS = 8192
"""Most tokens of a teacher, as in loss.h: their logits are in shared memory."""

_FIGURES = 3
_DW = 4
"""Index of the gradient of the weight among the outputs."""


def _workspace(op: Op, target: Target) -> int:
    """Bytes of the layout in lm_head_distill.cpp: products and the figures of rows."""
    dtype_dw = op.outs[_DW].dtype if len(op.outs) > _DW else ""
    figures = _FIGURES * aligned(4 * op.ins[0].shape[0])
    return products_bytes(op, target, len(op.outs) > _FIGURES, dtype_dw) + figures


def _bind(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """Time the algorithms of the products on the op's buffers, which overwrites w, dw and the workspace."""
    from .. import _C

    has_dx, has_dw = len(op.outs) > _FIGURES, len(op.outs) > _DW
    gradients = [*(ctx.pointer(value) for value in op.outs[_FIGURES:]), 0, 0][:2]
    with selecting(ctx, _C):
        head = _C.LmHeadDistill(
            *(ctx.pointer(value) for value in (*op.ins, *op.outs[:_FIGURES])),
            *gradients,
            ctx.workspace,
            *sizes(op),
            op.ins[3].shape[1],
            *(float(op.attrs.get(name, 0.0)) for name in ("weight", "temperature", "softcap")),
            op.attrs["reverse"],
            DTYPES[op.ins[0].dtype].code,
            has_dx,
            DTYPES[op.outs[_DW].dtype].code if has_dw else NO_DW,
            0 in op.accumulate,
            _DW in op.accumulate,
            library_bytes(ctx.target),
            is_timed(ctx.target),
            ctx.stream,
        )
    return launches(op, ctx, head)


def _supports(op: Op, target: Target) -> Support:
    k = op.ins[3].shape[1]
    if k > MOST_TOKENS:
        return Support(False, f"at most {MOST_TOKENS:,} tokens of the teacher, got {k:,}")
    if op.kind == "lm_head_distill_grads" and op.attrs["wrt"][0] != 0:
        return Support(False, "cannot compute the gradient of the weight without that of x")
    if op.accumulate - {_DW} not in (set(), set(range(_FIGURES))):
        return Support(False, "accumulates into all figures or none, and into the gradient of the weight")
    return supports_accumulate(op, target)


def _kernel(kind: str, dtypes: tuple[str, ...]) -> KernelDef:
    return KernelDef(op=kind, dtypes=dtypes, attrs=("softcap",), supports=_supports, bind=_bind, workspace=_workspace)


_INS = ("int32", "int32", "fp32", "fp32")
_OUTS = ("fp32",) * _FIGURES

KERNELS: tuple[KernelDef, ...] = tuple(
    kernel
    for x in FLOATS
    for kernel in (
        _kernel("lm_head_distill", (x, x, *_INS, *_OUTS)),
        _kernel("lm_head_distill_grads", (x, x, *_INS, *_OUTS, x)),
        *(_kernel("lm_head_distill_grads", (x, x, *_INS, *_OUTS, x, dw)) for dw in FLOATS),
    )
)

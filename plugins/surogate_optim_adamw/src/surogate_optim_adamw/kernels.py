"""The compiled `adamw`: all tensors in one launch, listed by a table in device memory."""

from __future__ import annotations

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target
from surogate_core.api.param_update import supports_in_place, update_table

CHUNK_SIZE = 16384
"""Number of elements that one thread block updates: a power of two."""

WORKSPACE_BYTES = 256
"""For the factors that all elements share (`Factors` in element.cuh)."""

_DTYPES = ("fp32", "bf16")


def _bind_adamw(op: Op, ctx: BindContext) -> Call:
    from . import _C

    words, chunks = update_table(op, ctx.pointer, ctx.comm.rank, CHUNK_SIZE)
    attrs = op.attrs
    return ctx.call(
        _C.adamw,
        ctx.table(words),
        *op.ins[:4],
        ctx.workspace,
        WORKSPACE_BYTES,
        attrs["n"],
        chunks,
        CHUNK_SIZE,
        attrs["beta1"],
        attrs["beta2"],
        attrs["epsilon"],
    )


def _supports(op: Op, target: Target) -> Support:
    others = [v for v in (*op.ins[4:], *op.outs) if v.dtype not in _DTYPES]
    if others:
        return Support(False, f"gradients, masters, moments and copies must be fp32 or bf16, got {others[0]!r}")
    return supports_in_place(op)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="adamw",
        dtypes=("fp32", "fp32", "int32", "int64", "*", "..."),
        supports=_supports,
        bind=_bind_adamw,
        workspace=lambda op, target: WORKSPACE_BYTES,
        memory_efficiency=0.96,  # measured on an H200
    ),
)

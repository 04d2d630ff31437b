"""Compiled ops over gradients: their global norm, and sums that are rounded stochastically."""

from __future__ import annotations

from collections.abc import Callable

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target, Value
from surogate_core.program.value import DTYPE_CODES

CHUNK_SIZE = 65536
"""Elements of one tensor whose squares one block of threads adds; a multiple of 8."""


def _bind_global_norm(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    words, chunks = table(op, ctx.pointer)
    norm, clip_coef = op.outs
    return ctx.call(
        _C.global_norm,
        ctx.table(words),
        norm,
        clip_coef,
        ctx.workspace,
        len(op.ins),
        chunks,
        CHUNK_SIZE,
        float(op.attrs["max_norm"]),
    )


def table(op: Op, pointer: Callable[[Value], int]) -> tuple[list[int], int]:
    """(words, chunks): four words a tensor, `Entry` in global_norm.cu, and the number of chunks of all together."""
    words: list[int] = []
    chunks = 0
    for value in op.ins:
        words += [pointer(value), value.size, chunks, DTYPE_CODES[value.dtype]]
        chunks += _chunks(value)
    return words, chunks


def _chunks(value: Value) -> int:
    return -(-value.size // CHUNK_SIZE)


def _norm_workspace(op: Op, target: Target) -> int:
    """An fp64 sum of every chunk."""
    return 8 * sum(_chunks(value) for value in op.ins)


def _bind_accumulate_rounded(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    addend, total, tick, seed = op.ins
    return ctx.call(
        _C.accumulate_rounded,
        addend,
        total,
        op.outs[0],
        tick,
        seed,
        op.attrs["stream"],
        total.size,
        DTYPE_CODES[addend.dtype],
    )


def _supports(op: Op, target: Target) -> Support:
    if (target.device.sm or 0) < 80:
        return Support(False, f"needs a GPU of SM80 or newer, not {target.device.title}")
    if op.accumulate:
        return Support(False, "writes its outputs, does not add to them")
    return Support(True)


def _supports_norm(op: Op, target: Target) -> Support:
    for value in op.ins:
        if value.dtype not in ("fp32", "bf16"):
            return Support(False, f"gradients are fp32 or bf16, {value!r} is not")
    if [value.dtype for value in op.outs] != ["fp32", "fp32"]:
        return Support(False, "norm and clip coefficient are fp32")
    return _supports(op, target)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="global_norm",
        dtypes=("*", "..."),
        supports=_supports_norm,
        bind=_bind_global_norm,
        workspace=_norm_workspace,
    ),
    *(
        KernelDef(
            op="accumulate_rounded",
            dtypes=(addend, "bf16", "int32", "int64", "bf16"),
            supports=_supports,
            bind=_bind_accumulate_rounded,
        )
        for addend in ("fp32", "bf16")
    ),
)

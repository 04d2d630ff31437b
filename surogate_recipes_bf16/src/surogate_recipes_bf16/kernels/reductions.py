"""Compiled ops on gradients: the global norm, and accumulation with stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target, Value
from surogate_core.dtypes import DTYPES

from .dtypes import supports_write

CHUNK_SIZE = 65536
"""Number of elements that one thread block of `global_norm` sums; a multiple of 8."""


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
    """Return (words, chunks): four words per tensor (`Entry` in global_norm.cu), and the total number of chunks."""
    words: list[int] = []
    chunks = 0
    for value in op.ins:
        words += [pointer(value), value.size, chunks, DTYPES[value.dtype].code]
        chunks += _chunks(value)
    return words, chunks


def _chunks(value: Value) -> int:
    return -(-value.size // CHUNK_SIZE)


def _norm_workspace(op: Op, target: Target) -> int:
    """Bytes of one fp64 sum per chunk."""
    return 8 * sum(_chunks(value) for value in op.ins)


def _bind_accumulate_rounded(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    addend, total, micro_step, seed = op.ins
    return ctx.call(
        _C.accumulate_rounded,
        addend,
        total,
        op.outs[0],
        micro_step,
        seed,
        op.attrs["stream"],
        total.size,
        DTYPES[addend.dtype].code,
    )


def _supports_norm(op: Op, target: Target) -> Support:
    for value in op.ins:
        if value.dtype not in ("fp32", "bf16"):
            return Support(False, f"gradients must be fp32 or bf16, got {value!r}")
    if [value.dtype for value in op.outs] != ["fp32", "fp32"]:
        return Support(False, "norm and clip coefficient must be fp32")
    return supports_write(op, target)


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
            supports=supports_write,
            bind=_bind_accumulate_rounded,
        )
        for addend in ("fp32", "bf16")
    ),
)

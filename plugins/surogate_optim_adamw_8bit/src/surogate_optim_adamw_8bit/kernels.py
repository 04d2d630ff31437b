"""The compiled `adamw_8bit`: all tensors in one launch, listed by a table in device memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target, Value
from surogate_core.api.param_update import column_of, copies_of, supports_in_place, update_table

from .codes import bits_of, code_map, lookup

CHUNK_SIZE = 8192
"""Number of elements that a warp updates at a time: 32 blocks of codes, one lane for the scales of each."""

WORKSPACE_BYTES = 256
"""For the factors that all elements share (`Factors` in element.cuh)."""

_DTYPES = ("fp32", "bf16")


def _bind_adamw_8bit(op: Op, ctx: BindContext) -> Call:
    from . import _C

    words, chunks = update_table(op, ctx.pointer, ctx.comm.rank, CHUNK_SIZE, *scales_of(op))
    attrs = op.attrs
    return ctx.call(
        _C.adamw_8bit,
        ctx.table(words),
        ctx.table(code_words()),
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


def scales_of(op: Op) -> tuple[dict[int, Value], dict[int, Value]]:
    """Return {index of a param: its scales}, of m and of v."""
    quantized = op.attrs["quantized"]
    scales = op.ins[len(op.ins) - 2 * len(quantized) :]
    m, v = scales[: len(quantized)], scales[len(quantized) :]
    return dict(zip(quantized, m, strict=True)), dict(zip(quantized, v, strict=True))


def code_words() -> list[int]:
    """Return the 32-bit words of `CodeTables` in codes.cuh: both maps, then the entries of both lookups."""
    maps = chain.from_iterable((bits_of(x) for x in code_map(signed)) for signed in (True, False))
    return packed([*maps, *lookup(True), *lookup(False)])


def packed(words: Sequence[int]) -> list[int]:
    """Return 32-bit words in pairs, as int64 numbers of the same bytes."""
    data = struct.pack(f"<{len(words)}I", *words).ljust(-(-len(words) // 2) * 8, b"\0")
    return list(struct.unpack(f"<{len(data) // 8}q", data))


def _supports(op: Op, target: Target) -> Support:
    values = (*column_of(op, 0), *column_of(op, 1), *copies_of(op).values())
    others = [v for v in values if v.dtype not in _DTYPES]
    if others:
        return Support(False, f"gradients, masters and copies must be fp32 or bf16, got {others[0]!r}")
    return supports_in_place(op)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="adamw_8bit",
        dtypes=("fp32", "fp32", "int32", "int64", "*", "..."),
        supports=_supports,
        bind=_bind_adamw_8bit,
        workspace=lambda op, target: WORKSPACE_BYTES,
        memory_efficiency=0.95,  # measured on an H200
    ),
)

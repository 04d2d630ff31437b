"""Compiled ops of the numerics report."""

from __future__ import annotations

import struct
from collections.abc import Callable

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target, Value

from ..formats import CLIPPED_ABOVE, LARGEST, LOST_BELOW


def _bind_count(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    dtype = op.attrs["dtype"]
    return ctx.call(_C.fp8_count, *op.ins, *op.outs, op.ins[0].size, CLIPPED_ABOVE[dtype], LOST_BELOW[dtype])


def _supports_count(op: Op, target: Target) -> Support:
    x = op.ins[0]
    if x.size % 8:
        return Support(False, f"the number of elements must be a multiple of 8, got {x!r}")
    if op.attrs["dtype"] not in LARGEST:
        return Support(False, f"dtype must be of {(*LARGEST,)}, got {op.attrs['dtype']!r}")
    return Support(True)


def _bind_report(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    history: Value | int = op.ins[0] if op.attrs["history"] else 0
    length, quantizers = history.shape if isinstance(history, Value) else (0, 0)
    words = ctx.table(table(op, ctx.pointer))
    return ctx.call(_C.fp8_report, words, history, op.outs[0], len(op.attrs["sizes"]), length, quantizers)


def table(op: Op, pointer: Callable[[Value], int]) -> list[int]:
    """Return six words per tensor: `Entry` in numerics.cu."""
    attrs, values = op.attrs, op.ins[bool(op.attrs["history"]) :]
    n = len(attrs["sizes"])
    words: list[int] = []
    for i, (maximum, size, column) in enumerate(zip(attrs["maxima"], attrs["sizes"], attrs["columns"], strict=True)):
        (bits,) = struct.unpack("<q", struct.pack("<d", maximum))
        words += [*(pointer(values[k * n + i]) for k in range(3)), bits, size, column]
    return words


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(op="fp8_count", dtypes=("bf16", "fp32", "fp32", "int64"), supports=_supports_count, bind=_bind_count),
    KernelDef(op="fp8_report", dtypes=("*", "..."), bind=_bind_report),
)

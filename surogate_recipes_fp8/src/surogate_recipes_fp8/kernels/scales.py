"""Compiled ops on the scales and amax of all quantizers: one launch over a table in device memory.

`fp8_inexact` is for the scales of stored weights.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target, Value


def _bind_scales(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    maximum = float(op.attrs["maximum"])
    words = table(((amax, scale, maximum) for amax, scale in zip(op.ins, op.outs, strict=True)), ctx.pointer)
    return ctx.call(_C.fp8_scales, ctx.table(words), len(op.ins), maximum)


def _bind_update(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    clip_coef, history, *states = op.ins
    length, n = history.shape
    words = table(zip(states[:n], states[n:], op.attrs["maxima"], strict=True), ctx.pointer)
    return ctx.call(_C.fp8_update, ctx.table(words), clip_coef, history, length, n)


def _bind_guard(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    norm, clip_coef, *amaxes = op.ins
    words = table(((amax, None, 0.0) for amax in amaxes), ctx.pointer)
    return ctx.call(_C.fp8_guard, ctx.table(words), norm, clip_coef, op.outs[1], len(amaxes))


def table(rows: Iterable[tuple[Value, Value | None, float]], pointer: Callable[[Value], int]) -> list[int]:
    """Return three words per quantizer (`Entry` in scales.cu): addresses of amax and scale, and the largest value."""
    words: list[int] = []
    for amax, scale, maximum in rows:
        (bits,) = struct.unpack("<q", struct.pack("<d", maximum))
        words += [pointer(amax), pointer(scale) if scale is not None else 0, bits]
    return words


def _supports_scales(op: Op, target: Target) -> Support:
    for value, shapes in (*((amax, ((), (2,))) for amax in op.ins), *((scale, ((2,),)) for scale in op.outs)):
        if value.shape not in shapes:
            return Support(False, f"an amax is fp32 [2] or a scalar, a scale fp32 [2], got {value!r}")
    return _supports(op, target)


def _supports_update(op: Op, target: Target) -> Support:
    """Support states that are updated in place."""
    _, history, *states = op.ins
    if len(history.shape) != 2 or len(states) != 2 * history.shape[1]:
        return Support(False, f"the history must be [length, quantizers], got {history!r} for {len(states) // 2}")
    n = history.shape[1]
    if op.outs != (history, *states[n:], *states[:n]):
        return Support(False, "history, scales and amax must be updated in place, but the op writes other values")
    if len(op.attrs["maxima"]) != n:
        return Support(False, f"needs {n} maxima, got {len(op.attrs['maxima'])}")
    return _supports(op, target)


def _supports_guard(op: Op, target: Target) -> Support:
    if op.outs[0] is not op.ins[0]:
        return Support(False, f"the norm must be updated in place, but the op writes {op.outs[0]!r}")
    return _supports(op, target)


def _bind_inexact(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    _, scales, amax = op.ins
    return ctx.call(_C.fp8_inexact, *op.ins, *op.outs, scales.size, amax.shape[0])


def _supports(op: Op, target: Target) -> Support:
    if op.accumulate:
        return Support(False, "cannot accumulate into its outputs")
    return Support(True)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(op="fp8_scales", dtypes=("fp32", "..."), supports=_supports_scales, bind=_bind_scales),
    KernelDef(op="fp8_update", dtypes=("fp32", "..."), supports=_supports_update, bind=_bind_update),
    KernelDef(op="fp8_inexact", dtypes=("uint8", "uint8", "fp32", "int32"), supports=_supports, bind=_bind_inexact),
    KernelDef(op="fp8_guard", dtypes=("fp32", "..."), supports=_supports_guard, bind=_bind_guard),
)

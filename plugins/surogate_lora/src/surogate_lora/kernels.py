"""Compiled kernels of `lora_add`, `lora_slice` and `lora_dropout`."""

from __future__ import annotations

from itertools import product

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target
from surogate_core.program.value import DTYPE_CODES

from .ops import dropped_draws, kept_scale

_FLOATS = ("fp32", "bf16")


def _bind_add(op: Op, ctx: BindContext) -> Call:
    """The table has four words per branch (`Branch` in branches.cu)."""
    from . import _C

    (base, *branches), (y,) = op.ins, op.outs
    words = [
        word
        for branch, column in zip(branches, op.attrs["columns"], strict=True)
        for word in (ctx.pointer(branch), column, branch.shape[1], DTYPE_CODES[branch.dtype])
    ]
    return ctx.call(
        _C.lora_add,
        *(base, ctx.table(words), y, *base.shape, len(branches)),
        float(op.attrs["scale"]),
        DTYPE_CODES[base.dtype],
    )


def _bind_slice(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (x,), (out,) = op.ins, op.outs
    return ctx.call(
        _C.lora_slice,
        *(x, out, *x.shape, op.attrs["column"], op.attrs["width"]),
        float(op.attrs["scale"]),
        DTYPE_CODES[x.dtype],
        DTYPE_CODES[out.dtype],
    )


def _bind_dropout(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (x, micro_step, seed), (y,) = op.ins, op.outs
    rate = op.attrs["rate"]
    return ctx.call(
        _C.lora_dropout,
        *(x, micro_step, seed, y, x.size, op.attrs["stream"]),
        *(dropped_draws(rate), kept_scale(rate), DTYPE_CODES[x.dtype]),
    )


def _writes(op: Op, target: Target) -> Support:
    if (target.device.sm or 0) < 80:
        return Support(False, f"needs a GPU of SM80 or newer, not {target.device.title}")
    if op.accumulate:
        return Support(False, "cannot accumulate into its output")
    return Support(True)


def _add_supports(op: Op, target: Target) -> Support:
    base, *branches = op.ins
    others = [v for v in branches if v.dtype not in _FLOATS]
    if others:
        return Support(False, f"branches must be fp32 or bf16, got {others[0]!r}")
    if op.outs[0].dtype != base.dtype:
        return Support(False, f"the output must have the dtype of {base!r}, got {op.outs[0]!r}")
    return _writes(op, target)


def _slice_supports(op: Op, target: Target) -> Support:
    """Support only outputs in `dtype`. For a wider output, the kernel would have to round to `dtype` first."""
    if op.attrs["dtype"] != op.outs[0].dtype:
        return Support(False, f"the output must be {op.attrs['dtype']}, got {op.outs[0]!r}")
    return _writes(op, target)


KERNELS: tuple[KernelDef, ...] = (
    *(
        KernelDef(op="lora_add", dtypes=(dtype, "*", "..."), supports=_add_supports, bind=_bind_add)
        for dtype in _FLOATS
    ),
    *(
        KernelDef(op="lora_slice", dtypes=(x, out), supports=_slice_supports, bind=_bind_slice)
        for x, out in product(_FLOATS, _FLOATS)
    ),
    *(
        KernelDef(op="lora_dropout", dtypes=(dtype, "int32", "int64", dtype), supports=_writes, bind=_bind_dropout)
        for dtype in _FLOATS
    ),
)

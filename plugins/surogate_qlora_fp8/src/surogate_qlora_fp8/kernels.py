"""The compiled ops of blockwise FP8 storage: `KernelDef`s for csrc/."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target
from surogate_core.api.matrix_storage import supports
from surogate_core.dtypes import DTYPES


def _bind_quantize(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (w,) = op.ins
    shape = (op.attrs["rows"], w.shape[1], op.attrs["tile"])
    return ctx.call(_C.fp8_tile_quantize, w, *op.outs, *shape, DTYPES[w.dtype].code)


def _bind_dequantize(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(_C.fp8_tile_dequantize, *op.ins, *op.outs, *_weight(op))


def _bind_amax(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(_C.fp8_tile_amax, *op.ins, *op.outs, *_weight(op))


def _bind_to_e4m3(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(_C.fp8_tile_to_e4m3, *op.ins, *op.outs, op.attrs["transposed"], *_weight(op))


def _weight(op: Op) -> tuple[Sequence[int], int, int, int]:
    """Return shape and dtype of the dequantized weight."""
    return op.attrs["rows"], op.ins[0].shape[1], op.attrs["tile"], DTYPES[op.attrs["dtype"]].code


def _supports(op: Op, target: Target) -> Support:
    found = supports(op, target)
    if found.ok and op.ins[0].shape[1] % 8:
        return Support(False, f"columns must be a multiple of 8, got {op.ins[0]!r}")
    return found


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(op="fp8_tile_quantize", dtypes=("*", "e4m3", "fp32"), supports=_supports, bind=_bind_quantize),
    KernelDef(op="fp8_tile_dequantize", dtypes=("e4m3", "fp32", "*"), supports=_supports, bind=_bind_dequantize),
    KernelDef(op="fp8_tile_amax", dtypes=("e4m3", "fp32", "fp32"), supports=_supports, bind=_bind_amax),
    KernelDef(
        op="fp8_tile_to_e4m3",
        dtypes=("e4m3", "fp32", "fp32", "e4m3", "fp32"),
        supports=_supports,
        bind=_bind_to_e4m3,
    ),
)

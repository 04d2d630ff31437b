"""The compiled ops of NVFP4 storage: `KernelDef`s for csrc/."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.api import BindContext, Call, KernelDef, Op
from surogate_core.api.matrix_storage import supports
from surogate_core.dtypes import DTYPES


def _bind_quantize(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (w,), rows = op.ins, op.attrs["rows"]
    how = (op.attrs["four_over_six"], DTYPES[w.dtype].code)
    return ctx.call(_C.fp4_block_quantize, w, *op.outs, ctx.workspace, rows, w.shape[1], *how)


def _bind_dequantize(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(_C.fp4_block_dequantize, *op.ins, *op.outs, *_weight(op))


def _bind_amax(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(_C.fp4_block_amax, *op.ins, *op.outs, *_weight(op))


def _bind_to_e4m3(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(_C.fp4_block_to_e4m3, *op.ins, *op.outs, op.attrs["transposed"], *_weight(op))


def _weight(op: Op) -> tuple[Sequence[int], int, int]:
    """Return shape and dtype of the dequantized weight."""
    return op.attrs["rows"], 2 * op.ins[0].shape[1], DTYPES[op.attrs["dtype"]].code


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="fp4_block_quantize",
        dtypes=("*", "uint8", "e4m3", "fp32"),
        supports=supports,
        bind=_bind_quantize,
        workspace=lambda op, target: 4 * len(op.attrs["rows"]),
    ),
    KernelDef(
        op="fp4_block_dequantize",
        dtypes=("uint8", "e4m3", "fp32", "*"),
        supports=supports,
        bind=_bind_dequantize,
    ),
    KernelDef(op="fp4_block_amax", dtypes=("uint8", "e4m3", "fp32", "fp32"), supports=supports, bind=_bind_amax),
    KernelDef(
        op="fp4_block_to_e4m3",
        dtypes=("uint8", "e4m3", "fp32", "fp32", "e4m3", "fp32"),
        supports=supports,
        bind=_bind_to_e4m3,
    ),
)

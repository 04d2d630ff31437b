"""The compiled ops of blockwise FP8 storage: `KernelDef`s for csrc/."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target
from surogate_core.api.matrix_kernels import reading_kernels
from surogate_core.api.matrix_storage import supports

from .ops import STORAGE


def _bind_quantize(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (w,) = op.ins
    shape = (op.attrs["rows"], w.shape[1], op.attrs["tile"])
    return ctx.call(_C.fp8_tile_quantize, w, *op.outs, *shape, DTYPES[w.dtype].code)


def _supports(op: Op, target: Target) -> Support:
    found = supports(op, target)
    if found.ok and op.ins[0].shape[1] % 8:
        return Support(False, f"columns must be a multiple of 8, got {op.ins[0]!r}")
    return found


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(op="fp8_tile_quantize", dtypes=("*", "e4m3", "fp32"), supports=_supports, bind=_bind_quantize),
    *reading_kernels(
        STORAGE,
        "surogate_qlora_fp8._C",
        lambda op: (op.attrs["rows"], op.ins[0].shape[1], op.attrs["tile"]),
        supports=_supports,
    ),
)

"""The compiled ops of NVFP4 storage: `KernelDef`s for csrc/."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op
from surogate_core.api.matrix_kernels import reading_kernels
from surogate_core.api.matrix_storage import supports

from .ops import STORAGE


def _bind_quantize(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (w,), rows = op.ins, op.attrs["rows"]
    how = (op.attrs["four_over_six"], DTYPES[w.dtype].code)
    return ctx.call(_C.fp4_block_quantize, w, *op.outs, ctx.workspace, rows, w.shape[1], *how)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="fp4_block_quantize",
        dtypes=("*", "uint8", "e4m3", "fp32"),
        supports=supports,
        bind=_bind_quantize,
        workspace=lambda op, target: 4 * len(op.attrs["rows"]),
    ),
    *reading_kernels(STORAGE, "surogate_qlora_fp4._C", lambda op: (op.attrs["rows"], 2 * op.ins[0].shape[1])),
)

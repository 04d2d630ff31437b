"""The compiled ops of MXFP4 storage: `KernelDef`s for csrc/."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op
from surogate_core.api.matrix_kernels import reading_kernels
from surogate_core.api.matrix_storage import supports

from .ops import STORAGE


def _bind_quantize(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (w,) = op.ins
    return ctx.call(_C.mxfp4_quantize, w, *op.outs, *w.shape, DTYPES[w.dtype].code)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(op="mxfp4_quantize", dtypes=("*", "uint8", "uint8"), supports=supports, bind=_bind_quantize),
    *reading_kernels(STORAGE, "surogate_qlora_mxfp4._C", lambda op: (op.attrs["rows"], 2 * op.ins[0].shape[1])),
)

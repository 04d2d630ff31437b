"""The compiled ops of NF4: `KernelDef`s for csrc/."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.api import DTYPES, BindContext, KernelDef, Launch, Op, Target, Value
from surogate_core.api.compiled import aligned
from surogate_core.api.matrix_kernels import reading_kernels
from surogate_core.api.matrix_storage import supports

from .ops import STORAGE, groups
from .tables import absmax_map, words_of


def _shape(op: Op, columns: int) -> tuple[Sequence[int], int, int]:
    return op.attrs["rows"], columns, op.attrs["block"]


def _sums_bytes(op: Op) -> int:
    """Bytes of the sums of the groups, the first part of the workspace. The absmax follow."""
    return aligned(8 * groups(*_shape(op, op.ins[0].shape[1])))


def _quantize_workspace(op: Op, target: Target) -> int:
    return _sums_bytes(op) + 4 * op.outs[1].size if op.attrs["double"] else 0


def _bind_quantize(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    from . import _C

    (w,), shape = op.ins, _shape(op, op.ins[0].shape[1])
    dtype = DTYPES[w.dtype].code
    if not op.attrs["double"]:
        return (Launch(ctx.call(_C.nf4_quantize, w, *op.outs, *shape, dtype)),)
    codes, absmax_codes, nested, offset = op.outs
    sums, absmax = ctx.workspace, ctx.workspace + _sums_bytes(op)
    numbers = ctx.table(words_of(absmax_map()))
    compressed = (absmax_codes, nested, offset, numbers)
    return (
        Launch(ctx.call(_C.nf4_quantize, w, codes, absmax, *shape, dtype)),
        Launch(ctx.call(_C.nf4_compress, absmax, sums, *compressed, *shape)),
    )


def _stored(values: Sequence[Value], ctx: BindContext) -> tuple[Value | int, ...]:
    """Return codes, absmax, nested absmax, offset and map of a stored weight; 0 for what it does not have."""
    if len(values) == 2:
        return (*values, 0, 0, 0)
    return (*values, ctx.table(words_of(absmax_map())))


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="nf4_quantize",
        dtypes=("*", "uint8", "*", "..."),
        supports=supports,
        bind=_bind_quantize,
        workspace=_quantize_workspace,
    ),
    *reading_kernels(STORAGE, "surogate_qlora_nf4._C", lambda op: _shape(op, op.attrs["shape"][1]), stored=_stored),
)

"""The compiled ops of NF4: `KernelDef`s for csrc/."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.api import BindContext, Call, KernelDef, Launch, Op, Support, Target, Value
from surogate_core.dtypes import DTYPES

from .ops import groups
from .tables import absmax_map, words_of

MAX_MATRICES = 64
"""Matrices that can be fused in a param: `max_matrices` of <surogate/fused_rows.cuh>."""


def _shape(op: Op, columns: int) -> tuple[Sequence[int], int, int]:
    return op.attrs["rows"], columns, op.attrs["block"]


def _sums_bytes(op: Op) -> int:
    """Bytes of the sums of the groups, the first part of the workspace. The absmax follow."""
    return -(-8 * groups(*_shape(op, op.ins[0].shape[1])) // 256) * 256


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


def _bind_dequantize(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(_C.nf4_dequantize, *_stored(op.ins, ctx), op.outs[0], *_weight(op))


def _bind_amax(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(_C.nf4_amax, *_stored(op.ins, ctx), op.outs[0], *_weight(op))


def _bind_to_e4m3(op: Op, ctx: BindContext) -> Call:
    from . import _C

    *stored, amax = op.ins
    return ctx.call(_C.nf4_to_e4m3, *_stored(stored, ctx), amax, *op.outs, op.attrs["transposed"], *_weight(op))


def _stored(values: Sequence[Value], ctx: BindContext) -> tuple[Value | int, ...]:
    """Return codes, absmax, nested absmax, offset and map of a stored weight; 0 for what it does not have."""
    if len(values) == 2:
        return (*values, 0, 0, 0)
    return (*values, ctx.table(words_of(absmax_map())))


def _weight(op: Op) -> tuple[Sequence[int], int, int, int]:
    """Return shape and dtype of the dequantized weight."""
    return (*_shape(op, op.attrs["shape"][1]), DTYPES[op.attrs["dtype"]].code)


def _supports(op: Op, target: Target) -> Support:
    if (target.device.sm or 0) < 80:
        return Support(False, f"needs a GPU of SM80 or newer, not {target.device.title}")
    if len(op.attrs["rows"]) > MAX_MATRICES:
        return Support(False, f"{len(op.attrs['rows'])} matrices are fused, at most {MAX_MATRICES} can be")
    if op.accumulate:
        return Support(False, "cannot accumulate into its outputs")
    return Support(True)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="nf4_quantize",
        dtypes=("*", "uint8", "*", "..."),
        supports=_supports,
        bind=_bind_quantize,
        workspace=_quantize_workspace,
    ),
    KernelDef(op="nf4_dequantize", dtypes=("uint8", "*", "..."), supports=_supports, bind=_bind_dequantize),
    KernelDef(op="nf4_amax", dtypes=("uint8", "*", "..."), supports=_supports, bind=_bind_amax),
    KernelDef(op="nf4_to_e4m3", dtypes=("uint8", "*", "..."), supports=_supports, bind=_bind_to_e4m3),
)

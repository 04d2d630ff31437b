"""Products of experts: by CUTLASS on an SM90 (`csrc/grouped_gemm.h`), by mma.sync elsewhere (`csrc/grouped_mma.cu`).

Those that add to a base have few terms and a kernel of their own (`csrc/grouped_thin.cu`). All read the ends of the
groups on the device, so that a launch does not depend on the routes.
"""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target
from surogate_core.api.compiled import groups_bytes

from ..ops import MOST_THIN
from .support import supports

_KINDS = {"grouped_linear": 0, "grouped_linear_dgrad": 1, "grouped_linear_wgrad": 2}
"""Kinds of ops, and their codes in `csrc/grouped_gemm.h`."""


def _sizes(op: Op) -> tuple[int, int, int, int]:
    """Return rows, n, k and the number of experts: a weight is [n, k]."""
    a, b, ends = op.ins
    rows, columns = a.shape
    if op.kind == "grouped_linear_wgrad":
        return rows, columns, b.shape[1], ends.size
    return rows, b.shape[0] // ends.size, b.shape[1], ends.size


def _result(op: Op) -> tuple[int, int, bool]:
    """Return the codes of the kind of op and of the dtype that it writes, and whether it adds."""
    return _KINDS[op.kind], DTYPES[op.outs[0].dtype].code, 0 in op.accumulate


def _portable_supports(op: Op, target: Target) -> Support:
    _, n, k, _ = _sizes(op)
    return supports(op, target, n, k, accumulate=op.outs[0].dtype == "fp32")


def _cutlass_supports(op: Op, target: Target) -> Support:
    if target.device.sm != 90:
        return Support(False, f"is for SM90 alone, not {target.device.title}")
    return _portable_supports(op, target)


def _bind_cutlass(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    pointers = (ctx.pointer(value) for value in (*op.ins, *op.outs))
    product = _C.GroupedGemm(*pointers, ctx.workspace, *_sizes(op), *_result(op))
    return ctx.call(product.run)


def _bind_portable(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(_C.grouped_mma, *op.ins, *op.outs, *_sizes(op), *_result(op))


_DTYPES = tuple(
    (kind, ("bf16", "bf16", "int32", out))
    for kind in _KINDS
    for out in (("fp32", "bf16") if kind == "grouped_linear_wgrad" else ("bf16",))
)

_SHARES = {"grouped_linear": 0.85, "grouped_linear_dgrad": 0.85, "grouped_linear_wgrad": 0.75}
"""Of the rate of dense products, with 1,024 rows an expert; with fewer, reading the weights takes longer.

On an H100, 2026-11-25, `benchmarks/grouped.py`: 476 to 631 TFLOP/s forward, 585 and 588 for dgrad, 457 to 585 for
wgrad; by mma.sync 215 to 313.
"""

CUTLASS: tuple[KernelDef, ...] = tuple(
    KernelDef(
        op=kind,
        dtypes=dtypes,
        arithmetic=("bf16", _SHARES[kind]),
        supports=_cutlass_supports,
        bind=_bind_cutlass,
        workspace=lambda op, target: groups_bytes(op.ins[2].size),
    )
    for kind, dtypes in _DTYPES
)

PORTABLE: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=dtypes, arithmetic=("bf16", 0.4), supports=_portable_supports, bind=_bind_portable)
    for kind, dtypes in _DTYPES
)


def _thin_sizes(op: Op) -> tuple[int, int, int, int]:
    """Return rows, columns of the result, terms and the number of experts."""
    (rows, terms), ends = op.ins[0].shape, op.ins[2]
    return rows, op.outs[0].shape[1], terms, ends.size


def _thin_supports(op: Op, target: Target) -> Support:
    _, width, terms, _ = _thin_sizes(op)
    if terms > MOST_THIN:
        return Support(False, f"at most {MOST_THIN} terms, got {terms}")
    return supports(op, target, width, terms)


def _bind_thin(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(_C.grouped_thin, *op.ins, *op.outs, *_thin_sizes(op), op.kind == "grouped_linear_dgrad_add")


THIN: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=("bf16", "bf16", "int32", "bf16", "bf16"), supports=_thin_supports, bind=_bind_thin)
    for kind in ("grouped_linear_add", "grouped_linear_dgrad_add")
)

KERNELS: tuple[KernelDef, ...] = (*CUTLASS, *PORTABLE, *THIN)
"""In order of preference."""

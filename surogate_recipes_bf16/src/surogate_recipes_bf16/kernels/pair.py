"""Sums of two products: one kernel on an SM90 (`csrc/pair_gemm.h`), two products by cuBLASLt elsewhere."""

from __future__ import annotations

from dataclasses import replace

from surogate_core.api import BindContext, Call, KernelDef, Launch, Op, Support, Target

from . import gemm
from .dtypes import supports_write

_SINGLE = {"linear_pair": "linear", "linear_dgrad_pair": "linear_dgrad"}
"""Kinds of pairs, and of each of their products."""


def _one_kernel_supports(op: Op, target: Target) -> Support:
    if target.device.sm != 90:
        return Support(False, f"is for SM90 alone, not {target.device.title}")
    sizes = {"columns": op.outs[0].shape[1], "terms": op.ins[0].shape[1], "other terms": op.ins[2].shape[1]}
    for name, size in sizes.items():
        if size % 8:
            return Support(False, f"the number of {name} must be a multiple of 8, got {size}")
    return supports_write(op, target)


def _bind_one_kernel(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    a, b, a2, b2 = op.ins
    (rows, k), (_, k2), columns = a.shape, a2.shape, op.outs[0].shape[1]
    pointers = (ctx.pointer(value) for value in (a, b, a2, b2, op.outs[0]))
    return ctx.call(_C.PairGemm(*pointers, rows, columns, k, k2, op.kind == "linear_pair").run)


def _two_products(op: Op) -> tuple[Op, Op]:
    """The second product, and the first one, which adds to it in its place."""
    kind = _SINGLE[op.kind]
    return (
        replace(op, kind=kind, ins=op.ins[2:]),
        replace(op, kind=f"{kind}_add", ins=(*op.ins[:2], op.outs[0])),
    )


def _bind_two_products(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    return tuple(launch for product in _two_products(op) for launch in gemm.bind(product, ctx))


def _two_workspaces(op: Op, target: Target) -> int:
    return max(gemm.workspace(product, target) for product in _two_products(op))


ONE_KERNEL: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=("bf16",) * 5, supports=_one_kernel_supports, bind=_bind_one_kernel) for kind in _SINGLE
)

TWO_PRODUCTS: tuple[KernelDef, ...] = tuple(
    KernelDef(
        op=kind,
        dtypes=(a, a, a, a, out),
        supports=supports_write,
        bind=_bind_two_products,
        workspace=_two_workspaces,
    )
    for kind, single in _SINGLE.items()
    for a, _, _, out in gemm.signatures(f"{single}_add")
)

KERNELS: tuple[KernelDef, ...] = (*ONE_KERNEL, *TWO_PRODUCTS)
"""In order of preference."""

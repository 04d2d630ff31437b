"""FP8 products of groups of rows by CUTLASS (`csrc/grouped_fp8.h`), on SM90 alone."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target
from surogate_core.api.compiled import aligned, groups_bytes

from ..group_ops import group_bias, operands, second_pair, some_groups


def _sizes(op: Op) -> tuple[int, int, int, int]:
    """Return rows, columns of the result, terms and the groups whose matrices b holds."""
    rows, terms = operands(op)[0].shape
    return rows, op.outs[0].shape[1], terms, some_groups(op)[1]


def _second_terms(op: Op) -> int:
    """Return the terms of the product that is added, or 0."""
    second = second_pair(op)
    return second[0].shape[1] if second else 0


def _supports(op: Op, target: Target) -> Support:
    if target.device.sm != 90:
        return Support(False, f"FP8 products of groups are for SM90 alone, not {target.device.title}")
    if op.accumulate:
        return Support(False, "cannot accumulate into its output")
    if len(operands(op)) < len(op.ins) and op.in_place != {0: 0}:
        return Support(False, "writes some rows, in the place of a base alone")
    _, width, terms, _ = _sizes(op)
    sizes = ("summed dimension", terms, 16), ("columns of the result", width, 8), ("ranks", _second_terms(op), 8)
    for name, size, multiple in sizes:
        if size % multiple:
            return Support(False, f"FP8 products need a multiple of {multiple} as {name}, got {size}")
    if second_pair(op) and bool(op.attrs.get("beside")) != (operands(op)[0].dtype == "e5m2"):
        return Support(False, "branches are added to y of e4m3, and to dx of e5m2")
    return Support(True)


def _workspace(op: Op, target: Target) -> int:
    """Return the bytes of the factor of the sums and of the groups."""
    return aligned(4) + groups_bytes(some_groups(op)[1])


def _bind(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    first, second = ([ctx.pointer(value) for value in values] for values in (operands(op)[:5], second_pair(op)))
    bias, (begin, _) = group_bias(op), some_groups(op)
    added = (*(second or (0, 0)), 0 if bias is None else ctx.pointer(bias))
    pointers = (*first, *added, ctx.pointer(op.outs[0]), ctx.workspace)
    dtypes = [DTYPES[value.dtype].code for value in operands(op)[:2]]
    modes = (bool(op.attrs.get("beside")), bool(op.attrs.get("fast")))
    product = _C.GroupedFp8(*pointers, *_sizes(op), *dtypes, *modes, _second_terms(op), begin)
    return ctx.call(product.run)


KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(
        op=kind,
        dtypes=(*base, dtype, weight, "fp32", "fp32", "int32", *added, "bf16"),
        attrs=("fast", "beside"),
        arithmetic=("fp8", share),
        supports=_supports,
        bind=_bind,
        workspace=_workspace,
    )
    for kind, base in (("fp8_grouped_linear", ()), ("fp8_grouped_linear_part", ("bf16",)))
    for dtype, share in (("e4m3", 0.75), ("e5m2", 0.6))
    for weight in ("e4m3", "e5m2")
    for added in ((), ("bf16",), ("bf16", "bf16"))
    if dtype == "e4m3" or len(added) != 1  # a bias is of the forward pass
)
"""Shares of the rate of dense products on an H200, 16,384 tokens and 128 experts (benchmarks/h200.md): 0.60 and 0.89 by
tiles of 128 x 256 with fast sums, 0.58 and 0.61 by tiles of 128 x 128 with exact ones."""

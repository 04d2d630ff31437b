"""The kernel of `all_reduce`, which calls the communicator of the rank."""

from __future__ import annotations

from collections.abc import Sequence

from ..api import BindContext, Call, KernelDef, Op, Support, Target, Value
from ..dtypes import DTYPES
from ..memory.alignment import align

REDUCIBLE = frozenset({"fp32", "bf16", "fp64", "int32", "int64"})
"""Dtypes that communicators can reduce."""


def _supports(op: Op, target: Target) -> Support:
    if target.device.sm is None:
        return Support(False, f"needs GPUs, got {target.device.title}")
    wrong = [v for v in op.ins if v.dtype not in REDUCIBLE]
    if wrong or op.ins != op.outs or op.accumulate:
        return Support(
            False, f"reduces only {', '.join(sorted(REDUCIBLE))}, in place; got {', '.join(map(repr, wrong or op.ins))}"
        )
    return Support(True)


def _bind(op: Op, ctx: BindContext) -> Call:
    return ctx.comm.all_reduce, (ranges([(ctx.pointer(v), v) for v in op.ins]), op.attrs["how"], ctx.stream)


def ranges(values: Sequence[tuple[int, Value]]) -> tuple[tuple[int, int, str], ...]:
    """Return the fewest ranges (address, elements, dtype) that cover values at these addresses.

    Adjacent values of the same dtype are one range. The padding between them is not used and contains zeros.
    """
    found: list[tuple[int, int, str]] = []
    for address, value in values:
        if found and found[-1][2] == value.dtype and align(found[-1][0] + _nbytes(found[-1])) == address:
            start = found.pop()[0]
        else:
            start = address
        found.append((start, (address - start) * 8 // DTYPES[value.dtype].bits + value.size, value.dtype))
    return tuple(found)


def _nbytes(span: tuple[int, int, str]) -> int:
    return DTYPES[span[2]].nbytes(span[1])


KERNELS = (KernelDef(op="all_reduce", dtypes=("*", "..."), attrs=("how",), supports=_supports, bind=_bind),)

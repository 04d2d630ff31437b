"""The kernel of `all_reduce`, which calls the communicator of the rank, on a GPU and on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..api import Call, Comm, KernelDef, Op, Span, Support, Target, Value
from ..api.world import How
from ..dtypes import DTYPES
from ..errors import ProgramError
from ..memory.alignment import align

_MOST_NAMES = 3

REDUCIBLE = frozenset({"fp32", "bf16", "fp64", "int32", "int64"})
"""Dtypes that communicators can reduce."""


def _supports(op: Op, target: Target) -> Support:
    if target.device.sm is None:
        return Support(False, f"needs GPUs, got {target.device.title}")
    refused = _refused(op)
    return Support(not refused, refused)


def _refused(op: Op) -> str:
    wrong = [v for v in op.ins if v.dtype not in REDUCIBLE]
    if wrong or op.ins != op.outs or op.accumulate:
        return f"reduces only {', '.join(sorted(REDUCIBLE))}, in place; got {', '.join(map(repr, wrong or op.ins))}"
    return ""


def call(op: Op, comm: Comm, pointer: Callable[[Value], int], stream: int) -> Call:
    """Return the call of `comm` that does what the op means. Raises ProgramError if it cannot."""
    refused, size = _refused(op), op.attrs["world_size"]
    if size != comm.world_size:
        refused = f"recorded for {size} ranks, but the communicator connects {comm.world_size}"
    if refused:
        raise ProgramError(f"{op.kind} (block {op.block}, emitted at {op.where}): {refused}")
    return _all_reduce, (comm, named(op), ranges([(pointer(v), v) for v in op.ins]), op.attrs["how"], stream)


def named(op: Op) -> str:
    """Return the name of a collective for messages: "the sum of gradients of block 17"."""
    what = "gradients" if all(v.role == "grad" for v in op.ins) else ", ".join(v.name for v in op.ins[:_MOST_NAMES])
    how = "maximum" if op.attrs["how"] == "max" else op.attrs["how"]
    return f"the {how} of {what}" + (f" of block {op.block}" if op.block >= 0 else "")


def _all_reduce(comm: Comm, name: str, spans: Sequence[Span], how: How, stream: int) -> None:
    with comm.position.collective(name, stream):
        comm.all_reduce(spans, how, stream)


def ranges(values: Sequence[tuple[int, Value]]) -> tuple[tuple[int, int, str], ...]:
    """Return the fewest ranges (address, elements, dtype) that cover values at these addresses.

    Adjacent values of the same dtype are one range. The padding between them is not used and contains zeros. Where the
    memory of a rank begins has no effect, so all ranks have the same ranges.
    """
    found: list[tuple[int, int, str]] = []
    for address, value in values:
        if found and found[-1][2] == value.dtype and found[-1][0] + align(_nbytes(found[-1])) == address:
            start = found.pop()[0]
        else:
            start = address
        found.append((start, (address - start) * 8 // DTYPES[value.dtype].bits + value.size, value.dtype))
    return tuple(found)


def _nbytes(span: tuple[int, int, str]) -> int:
    return DTYPES[span[2]].nbytes(span[1])


KERNELS = (
    KernelDef(
        op="all_reduce",
        dtypes=("*", "..."),
        attrs=("how",),
        supports=_supports,
        bind=lambda op, ctx: call(op, ctx.comm, ctx.pointer, ctx.stream),
    ),
)

KINDS = frozenset(kernel.op for kernel in KERNELS)
"""Kinds of ops that call the communicator."""

"""The compiled `adamw`: all tensors in one launch, listed by a table in device memory."""

from __future__ import annotations

import struct
from collections.abc import Callable

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target, Value

from .adamw import in_place

CHUNK_SIZE = 16384
"""Number of elements that one thread block updates: a power of two."""

WORKSPACE_BYTES = 256
"""For the factors that all elements share (`Factors` in element.cuh)."""

_DTYPES = ("fp32", "bf16")


def _bind_adamw(op: Op, ctx: BindContext) -> Call:
    from . import _C

    words, chunks = table(op, ctx.pointer)
    attrs = op.attrs
    return ctx.call(
        _C.adamw,
        ctx.table(words),
        *op.ins[:4],
        ctx.workspace,
        WORKSPACE_BYTES,
        attrs["n"],
        chunks,
        CHUNK_SIZE,
        attrs["beta1"],
        attrs["beta2"],
        attrs["epsilon"],
    )


def table(op: Op, pointer: Callable[[Value], int]) -> tuple[list[int], int]:
    """Return (words, chunks): ten words per tensor (`Entry` in adamw.cu), and the total number of chunks."""
    n = op.attrs["n"]
    grads, masters, ms, vs = (op.ins[4 + i * n : 4 + (i + 1) * n] for i in range(4))
    copied, measured = op.attrs["copied"], op.attrs["measured"]
    extra = op.outs[3 * n :]
    copies = dict(zip(copied, extra[: len(copied)], strict=True))
    amaxes = dict(zip(measured, extra[len(copied) :], strict=True))
    words: list[int] = []
    chunks = 0
    for i in range(n):
        values = (grads[i], masters[i], ms[i], vs[i], copies.get(i))
        flags = sum(1 << bit for bit, value in enumerate(values) if value is not None and value.dtype == "bf16")
        (weight_decay,) = struct.unpack("<q", struct.pack("<d", op.attrs["weight_decay"][i]))
        words += [
            *(0 if value is None else pointer(value) for value in (*values, amaxes.get(i))),
            masters[i].size,
            chunks,
            weight_decay,
            flags << 32 | op.attrs["streams"][i] & 0xFFFFFFFF,
        ]
        chunks += -(-masters[i].size // CHUNK_SIZE)
    return words, chunks


def _supports(op: Op, target: Target) -> Support:
    if (target.device.sm or 0) < 80:
        return Support(False, f"needs a GPU of SM80 or newer, not {target.device.title}")
    others = [v for v in (*op.ins[4:], *op.outs) if v.dtype not in _DTYPES]
    if others:
        return Support(False, f"gradients, masters, moments and copies must be fp32 or bf16, got {others[0]!r}")
    if any(op.outs[out] is not op.ins[i] and op.in_place.get(out) != i for out, i in in_place(op).items()):
        return Support(False, "masters and moments must be updated in place, but the op writes other values")
    return Support(True)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="adamw",
        dtypes=("fp32", "fp32", "int32", "int64", "*", "..."),
        supports=_supports,
        bind=_bind_adamw,
        workspace=lambda op, target: WORKSPACE_BYTES,
    ),
)

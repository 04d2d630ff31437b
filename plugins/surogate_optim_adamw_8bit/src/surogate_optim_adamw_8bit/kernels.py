"""The compiled `adamw_8bit`: all tensors in one launch, listed by a table in device memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import chain

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target, Value

from .codes import bits_of, code_map, lookup
from .optimizer import in_place

CHUNK_SIZE = 65536
"""Number of elements that one thread block updates at a time: a power of two."""

WORKSPACE_BYTES = 256
"""For the factors that all elements share (`Factors` in element.cuh)."""

_DTYPES = ("fp32", "bf16")


def _bind_adamw_8bit(op: Op, ctx: BindContext) -> Call:
    from . import _C

    words, chunks = table(op, ctx.pointer)
    attrs = op.attrs
    return ctx.call(
        _C.adamw_8bit,
        ctx.table(words),
        ctx.table(code_words()),
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
    """Return (words, chunks): twelve words per tensor (`Entry` in adamw_8bit.cu), and the total number of chunks."""
    n, quantized = op.attrs["n"], op.attrs["quantized"]
    grads, masters, ms, vs = (op.ins[4 + i * n : 4 + (i + 1) * n] for i in range(4))
    scales = op.ins[4 + 4 * n :]
    m_scales = dict(zip(quantized, scales[: len(quantized)], strict=True))
    v_scales = dict(zip(quantized, scales[len(quantized) :], strict=True))
    copied, measured = op.attrs["copied"], op.attrs["measured"]
    extra = op.outs[3 * n + len(scales) :]
    copies = dict(zip(copied, extra[: len(copied)], strict=True))
    amaxes = dict(zip(measured, extra[len(copied) :], strict=True))
    words: list[int] = []
    chunks = 0
    for i in range(n):
        halves = (grads[i], masters[i], copies.get(i))
        flags = sum(1 << bit for bit, value in enumerate(halves) if value is not None and value.dtype == "bf16")
        values = (grads[i], masters[i], ms[i], vs[i], m_scales.get(i), v_scales.get(i), copies.get(i), amaxes.get(i))
        (weight_decay,) = struct.unpack("<q", struct.pack("<d", op.attrs["weight_decay"][i]))
        words += [
            *(0 if value is None else pointer(value) for value in values),
            masters[i].size,
            chunks,
            weight_decay,
            flags << 32 | op.attrs["streams"][i] & 0xFFFFFFFF,
        ]
        chunks += -(-masters[i].size // CHUNK_SIZE)
    return words, chunks


def code_words() -> list[int]:
    """Return the 32-bit words of `CodeTables` in codes.cuh: both maps, then the entries of both lookups."""
    maps = chain.from_iterable((bits_of(x) for x in code_map(signed)) for signed in (True, False))
    return packed([*maps, *lookup(True), *lookup(False)])


def packed(words: Sequence[int]) -> list[int]:
    """Return 32-bit words in pairs, as int64 numbers of the same bytes."""
    data = struct.pack(f"<{len(words)}I", *words).ljust(-(-len(words) // 2) * 8, b"\0")
    return list(struct.unpack(f"<{len(data) // 8}q", data))


def _supports(op: Op, target: Target) -> Support:
    if (target.device.sm or 0) < 80:
        return Support(False, f"needs a GPU of SM80 or newer, not {target.device.title}")
    n = op.attrs["n"]
    copies = op.outs[len(op.ins) - 4 - n :][: len(op.attrs["copied"])]
    others = [v for v in (*op.ins[4 : 4 + 2 * n], *copies) if v.dtype not in _DTYPES]
    if others:
        return Support(False, f"gradients, masters and copies must be fp32 or bf16, got {others[0]!r}")
    if any(op.outs[out] is not op.ins[i] and op.in_place.get(out) != i for out, i in in_place(op).items()):
        return Support(False, "masters and moments must be updated in place, but the op writes other values")
    return Support(True)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="adamw_8bit",
        dtypes=("fp32", "fp32", "int32", "int64", "*", "..."),
        supports=_supports,
        bind=_bind_adamw_8bit,
        workspace=lambda op, target: WORKSPACE_BYTES,
    ),
)

"""Compiled ops on gradients: the global norm, also from sums of ranks, and accumulation with stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Launch, Op, Support, Target, Value

from .dtypes import FLOATS, supports_write

CHUNK_SIZE = 65536
"""Number of elements that one thread block of `global_norm` sums."""


def _bind_global_norm(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    from .. import _C

    words, chunks = table(op.ins, [CHUNK_SIZE] * len(op.ins), ctx.pointer)
    max_norm = float(op.attrs["max_norm"])
    return (
        Launch(ctx.call(_C.square_sums, ctx.table(words), ctx.workspace, len(op.ins), chunks)),
        Launch(ctx.call(_C.norm_of_sums, ctx.workspace, 0, *op.outs, chunks, max_norm)),
    )


def _bind_square_sums(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    words, chunks = table(op.ins, op.attrs["chunks"], ctx.pointer)
    return ctx.call(_C.square_sums, ctx.table(words), op.outs[0], len(op.ins), chunks)


def _bind_norm_of_sums(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    added = [first + i for first, count in op.attrs["ranges"] for i in range(count)]
    indices = 0 if added == list(range(len(added))) else ctx.table(added)
    return ctx.call(_C.norm_of_sums, op.ins[0], indices, *op.outs, len(added), float(op.attrs["max_norm"]))


def table(
    values: Sequence[Value], chunk_sizes: Sequence[int], pointer: Callable[[Value], int]
) -> tuple[list[int], int]:
    """Return (words, chunks): five words per value (`Entry` in gradient_norm.cu), and the total number of chunks."""
    words: list[int] = []
    chunks = 0
    for value, size in zip(values, chunk_sizes, strict=True):
        words += [pointer(value), value.size, chunks, DTYPES[value.dtype].code, size]
        chunks += -(-value.size // size)
    return words, chunks


def _norm_workspace(op: Op, target: Target) -> int:
    """Bytes of one fp64 sum per chunk."""
    return 8 * sum(-(-value.size // CHUNK_SIZE) for value in op.ins)


def _bind_accumulate_rounded(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    addend, total, micro_step, seed = op.ins
    return ctx.call(
        _C.accumulate_rounded,
        addend,
        total,
        op.outs[0],
        micro_step,
        seed,
        op.attrs["stream"],
        op.outs[0].first(ctx.comm.rank),
        total.size,
        DTYPES[addend.dtype].code,
    )


def _supports_norm(op: Op, target: Target) -> Support:
    if [value.dtype for value in op.outs] != ["fp32", "fp32"]:
        return Support(False, "norm and clip coefficient must be fp32")
    return _supports_sums(op, target)


def _supports_sums(op: Op, target: Target) -> Support:
    for value in op.ins:
        if value.dtype not in FLOATS:
            return Support(False, f"gradients must be fp32 or bf16, got {value!r}")
    odd = [size for size in op.attrs.get("chunks", ()) if size < 8 or size % 8]
    if odd:
        return Support(False, f"chunks must be multiples of 8 elements, got {odd[0]}")
    return supports_write(op, target)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="global_norm",
        dtypes=("*", "..."),
        supports=_supports_norm,
        bind=_bind_global_norm,
        workspace=_norm_workspace,
    ),
    KernelDef(op="square_sums", dtypes=("*", "..."), supports=_supports_sums, bind=_bind_square_sums),
    KernelDef(op="norm_of_sums", dtypes=("fp64", "fp32", "fp32"), supports=supports_write, bind=_bind_norm_of_sums),
    *(
        KernelDef(
            op="accumulate_rounded",
            dtypes=(addend, "bf16", "int32", "int64", "bf16"),
            supports=supports_write,
            bind=_bind_accumulate_rounded,
            memory_efficiency=1.0,
        )
        for addend in ("fp32", "bf16")
    ),
)

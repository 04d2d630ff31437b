"""Compiled kernel of `lora_wgrad`."""

from __future__ import annotations

from struct import pack

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target

from .gradients import OCTET, Part, Strip, refusal, strips

_TILE_COLUMNS = 256
_STEP_ROWS = 32
"""Columns and rows of a wide operand that a thread block of wgrad.cu multiplies at a time."""

_MOST_UNITS = 264
"""Thread blocks that share the work: two for each of the 132 multiprocessors of an H100 or H200. The number is the same
on every GPU, so the workspace and the order of sums depend on shapes only."""


def _tiles(strip: Strip) -> int:
    return -(-strip.columns // _TILE_COLUMNS)


def _sizes(op: Op) -> tuple[int, int, int]:
    """Return the number of tiles, the most octets of ranks of a strip, and the number of units."""
    found = strips(op)
    tiles = sum(_tiles(strip) for strip in found)
    steps = tiles * -(-op.ins[0].shape[0] // _STEP_ROWS)
    return tiles, max(strip.ranks for strip in found) // OCTET, min(_MOST_UNITS, steps)


def _workspace(op: Op, target: Target) -> int:
    """Return the bytes of the partial sums in fp32: one for each tile of each unit."""
    tiles, octets, units = _sizes(op)
    return (units + tiles - 1) * _TILE_COLUMNS * OCTET * octets * 4


def _bind(op: Op, ctx: BindContext) -> Call:
    from . import _C

    found = strips(op)
    words: list[int] = []
    octets: list[int] = []
    tile = 0
    for strip in found:
        element, rank = DTYPES["bf16"].nbytes(1), strip.parts[0].rank
        wide, thin = ctx.pointer(strip.wide) + element * strip.column, ctx.pointer(strip.thin) + element * rank
        strides = strip.wide.shape[1], strip.thin.shape[1]
        words += [wide, thin, *strides, strip.columns, strip.ranks // OCTET, tile, len(octets) // 5]
        for part in strip.parts:
            octets += _octets(op, ctx, part, strip.columns)
        tile += _tiles(strip)
    tiles, most, units = _sizes(op)
    rows = op.ins[0].shape[0]
    table = ctx.table([*words, *octets])
    space = ctx.workspace, _workspace(op, ctx.target)
    return ctx.call(_C.lora_wgrad, table, *space, len(found), tiles, most, rows, units)


def _octets(op: Op, ctx: BindContext, part: Part, columns: int) -> list[int]:
    """Return the words of entries `Octet` of wgrad.cu for the ranks of a part. The scale is the bits of a double."""
    out, scale = op.outs[part.out], op.attrs["places"][part.out].scale
    strides = (1, columns) if part.ranks_first else (part.ranks, 1)
    dtype = DTYPES[out.dtype]
    kinds = dtype.code | (part.out in op.accumulate) << 8
    bits = int.from_bytes(pack("<d", scale), "little")
    firsts = (dtype.nbytes(strides[1] * rank) for rank in range(0, part.ranks, OCTET))
    return [word for first in firsts for word in (ctx.pointer(out) + first, *strides, kinds, bits)]


def _supports(op: Op, target: Target) -> Support:
    narrow = next((op.outs[i] for i in sorted(op.accumulate) if op.outs[i].dtype != "fp32"), None)
    if narrow is not None:
        return Support(False, f"accumulates only into fp32 outputs, got {narrow!r}")
    reason = refusal(op)
    return Support(not reason, reason)


LORA_WGRAD_KERNEL = KernelDef(
    op="lora_wgrad", dtypes=("*", "..."), supports=_supports, workspace=_workspace, bind=_bind
)

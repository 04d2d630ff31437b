"""Sums over rows in blocks of rows: the bits of a sum do not depend on whether its rows come in tiles.

Each block adds to the sum, in order, and tiles of a multiple of a block make the same blocks. That reads and writes the
sum once for each block. So it is done only where the sum is small beside what is summed, as gradients of adapters are.
A gradient of a weight is as large as what is summed: it is summed in tiles, if there are any, and else at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..builder import Builder
from ..op import Op, Program
from ..opdef import OpDef

BLOCK = 16_384
"""Rows of a block. Sums of no more rows are made at once."""

MOST = 256
"""Blocks of an op, of 4 million rows. Sums of more rows, which fit no device, are made at once, so that the plan that
refuses them is short."""

SMALL = 64
"""A sum is small if it has less than one of so many bytes of the rows of a block."""


def sum_in_blocks(program: Program, ops: Mapping[str, OpDef], builder: Builder) -> Program:
    """Return the program with ops that write small sums over rows, and nothing else, once for each block of rows."""
    return replace(program, ops=tuple(part for op in program.ops for part in _blocks(op, ops, builder)))


def _blocks(op: Op, ops: Mapping[str, OpDef], builder: Builder) -> Iterable[Op]:
    if not op.outs or any(v.role != "grad" or v.dtype == "bf16" for v in op.outs):
        return [op]
    found = ops[op.kind].row_wise(op)
    if found is None or found.outs or found.takes or not found.sums:
        return [op]
    summed = [op.ins[i] for i in found.ins]
    rows = summed[0].shape[0]
    of_a_row = sum(v.nbytes // rows for v in summed)
    if (
        not BLOCK < rows <= MOST * BLOCK
        or SMALL * sum(v.nbytes for v in op.outs) > BLOCK * of_a_row
        or any(v.room for v in summed)
    ):
        return [op]

    def part(first: int) -> Op:
        count = min(BLOCK, rows - first)
        ins = (builder.rows(v, first, count) if i in found.ins else v for i, v in enumerate(op.ins))
        return op.changed(ins=tuple(ins))

    return [part(first) for first in range(0, rows, BLOCK)]

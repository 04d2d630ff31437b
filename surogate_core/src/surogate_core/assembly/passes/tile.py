"""Ops that compute each row by itself run in tiles of rows, and small sums over rows are made in blocks."""

from __future__ import annotations

from ...program.op import Program
from ...program.passes import sum_in_blocks
from ...program.passes.tile import computes_together, tile, tiles_of
from ..draft import Draft


def tile_rows(draft: Draft) -> Draft:
    """Divide micro-steps and the evaluation into tiles of the rows that the plan chooses.

    Where rows depend on which others are in their tile, the tiles of long rows are always the same, and ops on shorter
    ones that compute such rows are not divided.
    """
    inputs, b = draft.inputs, draft.builder
    fixed = tiles_of(inputs.tokens) if inputs.seq_len > sum_in_blocks.BLOCK else 0

    def tiled(program: Program) -> Program:
        together = fixed > 0 and computes_together(program, inputs.tokens, inputs.ops)
        rows = fixed if together else inputs.row_tiles or 0
        if not rows:
            return program
        tiled = tile(program, inputs.tokens, rows, b, together=together, sketch=inputs.tiles_stand_in)
        return draft.verified(program, tiled)

    return draft.having(tiled(draft.programs["evaluate"])).changing_micro_steps(tiled)


def sum_rows_in_blocks(draft: Draft) -> Draft:
    """Make small sums over rows in blocks, so that their bits do not depend on tiles."""

    def summed(program: Program) -> Program:
        after = sum_in_blocks.sum_in_blocks(program, draft.inputs.ops, draft.builder)
        return program if after.ops == program.ops else draft.verified(program, after)

    return draft.changing_micro_steps(summed)

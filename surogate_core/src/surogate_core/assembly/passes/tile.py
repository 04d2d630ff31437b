"""Ops that compute each row by itself run in tiles of rows, and small sums over rows are made in blocks."""

from __future__ import annotations

from ...program.op import Program
from ...program.passes.sum_in_blocks import sum_in_blocks
from ...program.passes.tile import tile
from ..draft import Draft


def tile_rows(draft: Draft) -> Draft:
    """Divide micro-steps and the evaluation into tiles of the rows that the plan chooses."""
    rows, tokens, b = draft.inputs.row_tiles or 0, draft.inputs.tokens, draft.builder

    def tiled(program: Program) -> Program:
        return draft.verified(program, tile(program, tokens, rows, b))

    return draft.having(tiled(draft.programs["evaluate"])).changing_micro_steps(tiled)


def sum_rows_in_blocks(draft: Draft) -> Draft:
    """Make small sums over rows in blocks, so that their bits do not depend on tiles."""

    def summed(program: Program) -> Program:
        after = sum_in_blocks(program, draft.inputs.ops, draft.builder)
        return program if after.ops == program.ops else draft.verified(program, after)

    return draft.changing_micro_steps(summed)

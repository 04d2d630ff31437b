"""Values are computed again instead of being kept for the backward pass."""

from __future__ import annotations

from functools import partial

from ...program.op import Program
from ...program.passes.recompute import drops_anyway, recompute
from ..draft import Draft


def recompute_values(draft: Draft) -> Draft:
    """Recompute in micro-steps what the plan chooses, and what is never kept (`drops_anyway`)."""
    chosen, labels, b = draft.inputs.recomputation, draft.inputs.labels, draft.builder

    def recomputed(program: Program) -> Program:
        if chosen or drops_anyway(program, b.ops):
            return draft.verified(program, recompute(program, partial(chosen.drops, labels=labels), b))
        return program

    return draft.changing_micro_steps(recomputed)

"""Values are computed again instead of being kept for the backward pass."""

from __future__ import annotations

from ...program.op import Program
from ...program.passes.recompute import drops_anyway, recompute
from ..draft import Draft


def recompute_values(draft: Draft) -> Draft:
    """Recompute in micro-steps what the plan chooses, and what is never kept (`drops_anyway`)."""
    inputs, b = draft.inputs, draft.builder
    chosen, moved = inputs.recomputation, inputs.kept_labels

    def recomputed(program: Program) -> Program:
        if chosen or drops_anyway(program, b.ops, moved):
            return draft.verified(program, recompute(program, inputs.dropped_by(chosen), b, moved))
        return program

    return draft.changing_micro_steps(recomputed)

"""The first micro-step of a step writes gradients, and the others add to them."""

from __future__ import annotations

from ...program.passes.accumulate import accumulate
from ..draft import Draft
from ..parts import gradient_parts


def accumulate_gradients(draft: Draft) -> Draft:
    """Make of each micro-step the first and, unless a step has only one, the following ones.

    All write the gradients that ranks divide, which `scatter_gradients` adds to their sums.
    """
    inputs = draft.inputs
    written = gradient_parts(draft.params) if inputs.sharding.gradients else ()
    for program in draft.micro_steps:
        both = accumulate(program, draft.builder, draft.scalars, written)[: inputs.grad_accum_steps]
        draft = draft.having_instead(program, [draft.verified(program, variant) for variant in both])
    return draft

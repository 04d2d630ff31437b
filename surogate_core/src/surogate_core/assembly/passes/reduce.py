"""The last micro-step of a step sums gradients over ranks."""

from __future__ import annotations

from itertools import groupby

from ...program.passes.reduce import MicroStep, micro_step_counts, reduce
from ..draft import Draft
from ..parts import gradient_parts


def reduce_gradients(draft: Draft) -> Draft:
    """Make the last micro-step of those before, with several ranks. Keep those that a step runs, in order.

    The sums that ranks divide are complete: `scatter_gradients` exchanges them. A step reports with its first
    micro-step.
    """
    inputs, parts = draft.inputs, gradient_parts(draft.params)
    divided = parts.keys() if inputs.sharding.gradients else ()
    summed = {param: gradient for param, gradient in draft.gradients.items() if gradient not in divided}
    for purpose, group in groupby(draft.micro_steps, lambda program: program.purpose):
        variants = list(group)
        first, before = variants[0], variants[-1]
        if inputs.world_size > 1:
            last = reduce(before, summed, {} if divided else parts, draft.builder, inputs.world_size)
            variants.append(draft.verified(before, last))
        by_kind = {MicroStep(p.first, p.last): p for p in variants}
        steps = [by_kind[kind] for kind in micro_step_counts(inputs.grad_accum_steps, inputs.world_size)]
        for program in variants[1:]:
            draft = draft.having_instead(program, ())
        draft = draft.having_instead(first, steps[:1] if purpose == "report" else steps)
    return draft

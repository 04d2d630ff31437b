"""Ranks divide the sums of gradients."""

from __future__ import annotations

from ...program.passes.scatter import Scatter
from ..draft import Draft
from ..parts import gradient_parts


def scatter_gradients(draft: Draft) -> Draft:
    """Let every micro-step exchange gradients, and forget the whole ones."""
    params, b = draft.params, draft.builder
    parts = gradient_parts(params)
    b.forget(parts)
    blocks = {p.grad: p.param.block for p in params.values() if p.grad in parts}
    scatter = Scatter(parts, blocks, b, draft.scalars, draft.inputs.world_size)
    return draft.having(*[draft.verified(program, scatter(program)) for program in draft.micro_steps])

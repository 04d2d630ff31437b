"""The model records its ops."""

from __future__ import annotations

from dataclasses import replace

from ..draft import Draft
from ..weight_maps import checked_weight_maps


def build_model(draft: Draft) -> Draft:
    """Record the model's forward program, whose outputs are the last hidden state and the model's own losses."""
    model, b = draft.inputs.model, draft.builder
    with b.record("forward"):
        head = model.build(b, draft.inputs.dims, draft.batch)
        forward = b.program("forward", (head.x, *head.losses))
        forward = draft.verified(None, forward, (model, "build"))
    weights = checked_weight_maps(draft.inputs, b.declared, b.stack_of)
    return replace(draft, head=head, model=forward, weights=weights).having(forward)

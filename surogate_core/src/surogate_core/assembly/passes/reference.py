"""The model without adapters, or on copies of its params, runs before, for losses that compare with it."""

from __future__ import annotations

from dataclasses import replace

from ...program.op import Op
from ...program.passes.dead_code import dead_code
from ...program.value import Value
from ..draft import Draft


def run_reference(draft: Draft) -> Draft:
    """Run the model on `copies` of its params, if there are some, before the forward program, whose loss reads it."""
    model, b, stand_in, forward = draft.model, draft.builder, draft.stand_in, draft.programs["forward"]
    assert model is not None and stand_in is not None
    places = dict(draft.copies)
    ops: list[Op] = []
    for op in dead_code(replace(model, outputs=model.outputs[:1]), draft.inputs.ops).ops:
        with b.record("reference", op.block):
            fresh = [b.activation(v.label, v.shape, v.dtype, room=v.room) for v in op.outs]
        places |= zip(op.outs, fresh, strict=True)
        ops.append(op.on(places).changed(phase="reference"))
    instead: dict[Value, Value] = {stand_in: places[model.outputs[0]]}
    after = replace(forward, ops=(*ops, *(op.on(instead) for op in forward.ops)))
    return draft.having(draft.verified(forward, after))

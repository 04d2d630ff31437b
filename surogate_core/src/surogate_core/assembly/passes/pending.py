"""States of a step that may be skipped change in a copy."""

from __future__ import annotations

from dataclasses import replace

from ...program.op import Program
from ...program.passes.pending import on_copies, states_to_commit
from ..draft import Draft


def keep_pending_states(draft: Draft) -> Draft:
    """Let micro-steps and evaluations change states in pending copies, which the update commits."""
    micro, evaluate, update, b = draft.micro_steps, draft.programs["evaluate"], draft.programs["update"], draft.builder
    readings = {state for metric in draft.reported for state in (metric.step, metric.evaluation)}
    readings |= {*draft.cached, *([draft.numerics.values] if draft.numerics else ())}
    states = states_to_commit(micro, evaluate, update, frozenset(readings))
    assert draft.clip_coef is not None
    copies = {v: b.state(f"pending.{v.name}", v.shape, v.dtype, None) for v in states}
    if not copies:
        return draft

    def on(program: Program, *, begins: bool) -> Program:
        return draft.verified(program, on_copies(program, copies, b, begins=begins))

    after = draft.having(*[on(program, begins=program.first) for program in micro], on(evaluate, begins=True))
    with b.record("update") as commits:
        for state, copy in copies.items():
            b.emit("commit", draft.clip_coef, copy, state, outs=[state])
    committing = draft.verified(update, replace(update, ops=(*update.ops, *commits)))
    return replace(after.having(committing), pending=tuple(copies.values()))

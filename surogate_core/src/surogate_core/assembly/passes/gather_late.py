"""The first micro-step gathers what the update has left in parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ...program.op import Op, Program
from ...program.value import Value
from ..draft import Draft


def gather_late(draft: Draft) -> Draft:
    """Move the gathers of the update to the first micro-steps, but not of weights that it reads or the host holds.

    An update ends with a gather of every weight that ranks have updated parts of, and of quantized copies of these, and
    nothing is left to compute then. So those that the update itself does not read are gathered while the next step runs
    its first blocks, if micro-steps read them. Meanwhile a rank has old weights in the parts of others: before an
    evaluation, a save and the end of training, the program `gather` brings all of them up to date.
    """
    update = draft.programs["update"]
    used = {*draft.on_host, *(v for op in update.ops for v in op.ins)}
    late = [op for op in update.ops if _gathers_weights(op) and used.isdisjoint(op.outs)]
    if not late:
        return draft
    moved = set(late)
    shorter = replace(update, ops=tuple(op for op in update.ops if op not in moved))
    used = {v for p in draft.micro_steps for op in p.ops for v in op.ins}
    early = [found for op in late if (found := _gather_of(op, used))]
    after = draft.having(draft.verified(update, shorter))
    for program in draft.micro_steps:
        if program.first:
            gathering = replace(program, ops=(*_in_order_of_use(early, program), *program.ops))
            after = after.having(draft.verified(program, gathering))
    return after.having(Program("gather", tuple(late), stage="update"))


def _gathers_weights(op: Op) -> bool:
    return op.kind in ("all_gather", "broadcast") and all(v.role == "param" or v.derived for v in op.outs)


def _gather_of(op: Op, values: Collection[Value]) -> Op | None:
    """Return the gather of those of its values that are among `values`; None if none is."""
    pairs = [(part, whole) for part, whole in zip(op.ins, op.outs, strict=True) if whole in values]
    if len(pairs) in (0, len(op.outs)):
        return op if pairs else None
    parts, wholes = zip(*pairs, strict=True)
    return op.changed(ins=parts, outs=wholes, attrs={**op.attrs, "shapes": tuple(v.shape for v in wholes)})


def _in_order_of_use(gathers: Sequence[Op], program: Program) -> list[Op]:
    first: dict[Value, int] = {}
    for index, op in enumerate(program.ops):
        for value in op.ins:
            first.setdefault(value, index)
    never = len(program.ops)
    ordered = sorted(gathers, key=lambda op: min(first.get(v, never) for v in op.outs))
    return [op.changed(phase="forward") for op in ordered]

"""Gathers of updated weights that the first micro-step of the next step hides.

An update ends with a gather of every weight that ranks have updated parts of, and of quantized copies of these, and
nothing is left to compute then. So those that the update itself does not read are gathered while the next step runs its
first blocks, if micro-steps read them. Meanwhile a rank has old weights in the parts of others: before an evaluation, a
save and the end of training, the program `gather` brings all of them up to date.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..program.op import Op, Program
from ..program.value import Value


def gather_late(
    update: Program, micro_steps: Sequence[Program], held: Collection[Value]
) -> tuple[Program, list[Program], list[Program]]:
    """Move the gathers of the update to the first micro-steps, but not of weights that it reads or the host holds.

    Return the update and the micro-steps, and the program `gather` if anything is gathered late.
    """
    read = {v for op in update.ops for v in op.ins}
    late = [op for op in update.ops if _gathers_weights(op) and read.isdisjoint(op.outs) and not {*held} & {*op.outs}]
    if not late:
        return update, [*micro_steps], []
    moved = set(late)
    used = {v for p in micro_steps for op in p.ops for v in op.ins}
    early = [found for op in late if (found := _of(op, used))]
    return (
        replace(update, ops=tuple(op for op in update.ops if op not in moved)),
        [replace(p, ops=(*_in_order_of_use(early, p), *p.ops)) if p.first else p for p in micro_steps],
        [Program("gather", tuple(late), stage="update")],
    )


def _gathers_weights(op: Op) -> bool:
    return op.kind in ("all_gather", "broadcast") and all(v.role == "param" or v.derived for v in op.outs)


def _of(op: Op, values: Collection[Value]) -> Op | None:
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

"""Ranks quantize the parts of weights that they have updated."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from ...program.op import Op
from ...program.shards import part_inside
from ..draft import Draft
from ..transfers import gather


def quantize_parts(draft: Draft) -> Draft:
    """Let ops of the update copy this rank's parts, and gather the copies unless ranks hold no more.

    A recipe quantizes the updated weights at the end of the update. Where an element of a copy is made of that element
    of the weight alone (`OpDef.elementwise`), no rank needs the whole weight: it quantizes its part, and ranks gather
    the copy, which has fewer bytes.
    A weight that the update gathers anyway, because another op reads it, stays whole.
    """
    update, sharding, b = draft.programs["update"], draft.inputs.sharding, draft.builder
    parts = {p.param: p.part for p in draft.params.values() if p.part is not None and p.part.owner is None}
    copying = {
        op
        for op in update.ops
        if op.ins and op.ins[0] in parts and b.ops[op.kind].elementwise(op) and op.outs[0].derived
    }
    whole = {v for op in update.ops if op not in copying for v in op.ins}
    copying = {op for op in copying if sharding.divides(op.ins[0]) or op.ins[0] not in whole}
    if not copying:
        return draft
    ops: list[Op] = []
    for block, found in groupby(update.ops, lambda op: op.outs[0].block if op in copying else None):
        if block is None:
            ops += found
            continue
        pairs = []
        for op in found:
            (copy,) = op.outs
            part = part_inside(copy, sharding.parts)
            ops.append(op.changed(ins=(parts[op.ins[0]], *op.ins[1:]), outs=(part,)))
            pairs.append((part, copy))
        with b.record("update", block) as gathers:
            gather(b, [(part, copy) for part, copy in pairs if not sharding.divides(copy)], sharding.parts)
        ops += gathers
    return draft.having(draft.verified(update, replace(update, ops=tuple(ops))))

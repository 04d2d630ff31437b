"""Quantized copies of weights of which each rank makes the part that it has updated (ZeRO).

A recipe quantizes the updated weights at the end of the update. Where an element of a copy is made of that element of
the weight alone (`OpDef.elementwise`), no rank needs the whole weight: it quantizes its part, and ranks gather the
copy, which has fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from ..api import ParamInfo
from ..program.builder import Builder
from ..program.op import Op, Program
from ..program.shards import Sharding, part_inside
from .transfers import gather


def quantize_parts(update: Program, params: Iterable[ParamInfo], sharding: Sharding, b: Builder) -> Program:
    """Return the update with ops on this rank's parts, and gathers of what they make unless ranks hold no more.

    Itself if no op copies a part. A weight that the update gathers anyway, because another op reads it, stays whole.
    """
    parts = {p.param: p.part for p in params if p.part is not None and p.part.owner is None}
    copying = {
        op
        for op in update.ops
        if op.ins and op.ins[0] in parts and b.ops[op.kind].elementwise(op) and op.outs[0].derived
    }
    if not sharding.weights:
        whole = {v for op in update.ops if op not in copying for v in op.ins}
        copying = {op for op in copying if op.ins[0] not in whole}
    if not copying:
        return update
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
        if not sharding.weights:
            with b.record("update", block) as gathers:
                gather(b, pairs, sharding.parts)
            ops += gathers
    return replace(update, ops=tuple(ops))

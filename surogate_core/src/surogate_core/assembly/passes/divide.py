"""Ranks divide weights, and gather the whole for the ops that read it (ZeRO 3).

Divided are the model's matrices that programs read, and what `derive` makes of matrices for them: a recipe's quantized
copies, and the states of a weight format. They come to the device block by block (`Streaming`). No rank ever holds the
whole model: a program for each block takes the parts of what the loader wrote to the arena.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from ...program.builder import Builder
from ...program.op import Program
from ...program.shards import SMALLEST_CHUNK, is_divisible, part_of
from ...program.value import Value
from ..draft import Draft
from ..parts import stays_whole
from ..staging import Staged, staged_place
from ..streaming import Streaming
from ..transfers import RankParts, take_part


def divide_weights(draft: Draft) -> Draft:
    """Declare parts in place of whole weights, and gather these where programs read them."""
    ranks, b, programs = draft.inputs.sharding.parts, draft.builder, list(draft.programs.values())
    parts = _parts(draft)
    within = {v: v.inside for p in programs for op in p.ops for v in (*op.ins, *op.outs) if v.inside}
    b.redeclare(parts)
    draft.verifier.replace_values(parts.values())
    inside = {v: parts[whole] for v, whole in within.items() if whole in parts}
    streaming = Streaming(RankParts(parts, ranks), b)
    gathering = [streaming(program.on(inside)) for program in programs]
    loading = _loading(parts, ranks, b)
    after = [draft.verified(before, program) for before, program in zip(programs, gathering, strict=True)]
    after += [draft.verified(None, one.program) for one in loading]
    return replace(draft.having(*after), parts=parts, staging=(*draft.staging, *loading))


def _parts(draft: Draft) -> dict[Value, Value]:
    """Return {whole weight: this rank's part}. Staged params have no memory to divide."""
    sharding, params = draft.inputs.sharding, draft.params.values()
    ranks = sharding.parts
    staged = {param for one in draft.staging for param in one.places}
    reading = (p for p in draft.programs.values() if p.stage in ("micro", "evaluate"))
    read = {v for p in reading for op in p.ops for v in op.ins}
    divisible = (p for p in params if p.of_model and is_divisible(p.param.shape, ranks))
    chosen = [p.param for p in divisible if not stays_whole(p, draft.inputs)]
    owners = {p.param: p.part.owner for p in params if p.part is not None}
    parts = {param: part_of(param, ranks, owners.get(param)) for param in chosen if param not in staged}
    for value in draft.builder.declared:
        if value.role == "state" and value.derived and value in read and value.size >= ranks * SMALLEST_CHUNK:
            parts[value] = part_of(value, ranks)
    return {whole: part for whole, part in parts.items() if sharding.divides(whole)}


def _loading(parts: Mapping[Value, Value], ranks: int, b: Builder) -> list[Staged]:
    """Return for each block the program that takes the rank's parts of params, which the loader writes whole."""
    blocks: dict[int, list[tuple[Value, Value]]] = defaultdict(list)
    for whole, part in parts.items():
        if whole.role == "param":
            blocks[whole.block].append((whole, part))
    found = []
    for block, pairs in blocks.items():
        places = {part: staged_place(whole) for whole, part in pairs}
        with b.record("derive", block) as ops:
            for part, staged in places.items():
                take_part(b, staged, part, ranks)
        name = f"load.{block}" if block >= 0 else "load.outside"
        found.append(Staged(Program(name, tuple(ops), stage="derive"), places))
    return found

"""Weights of which each rank holds a part, and gathers the whole for the ops that read it (ZeRO 3).

Divided are the model's matrices that programs read, and what `derive` makes of matrices for them: a recipe's quantized
copies, and the states of a weight format. They come to the device block by block (`Streaming`). No rank ever holds the
whole model: a program for each block takes the parts of what the loader wrote to the arena.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..api import ParamInfo
from ..program.builder import Builder
from ..program.op import Program
from ..program.shards import SMALLEST_CHUNK, is_divisible, part_of
from ..program.value import Value
from .staging import Staged, staged_place
from .streaming import Streaming
from .transfers import RankParts, take_part


@dataclass(frozen=True)
class DividedWeights:
    """The weights that ranks divide. parts: {whole value: the rank's part}. inside: {part in a whole: that part}."""

    ranks: int
    parts: Mapping[Value, Value]
    inside: Mapping[Value, Value]

    def programs(self, programs: Iterable[Program], b: Builder) -> list[Program]:
        """Return the programs with gathers of the values that they read."""
        streaming = Streaming(RankParts(self.parts, self.ranks), b)
        return [streaming(program.on(self.inside)) for program in programs]

    def loading(self, b: Builder) -> list[Staged]:
        """Return for each block the program that takes the rank's parts of params, which the loader writes whole."""
        blocks: dict[int, list[tuple[Value, Value]]] = defaultdict(list)
        for whole, part in self.parts.items():
            if whole.role == "param":
                blocks[whole.block].append((whole, part))
        found = []
        for block, pairs in blocks.items():
            places = {part: staged_place(whole) for whole, part in pairs}
            with b.record("derive", block) as ops:
                for part, staged in places.items():
                    take_part(b, staged, part, self.ranks)
            name = f"load.{block}" if block >= 0 else "load.outside"
            found.append(Staged(Program(name, tuple(ops), stage="derive"), places))
        return found


def divide_weights(
    programs: Sequence[Program], staged: Iterable[Value], params: Mapping[Value, ParamInfo], ranks: int, b: Builder
) -> DividedWeights:
    """Declare the parts in place of the whole weights. `staged` params have no memory to divide."""
    read = {v for p in programs if p.stage in ("micro", "evaluate") for op in p.ops for v in op.ins}
    within = {v: v.inside for p in programs for op in p.ops for v in (*op.ins, *op.outs) if v.inside}
    chosen = [p.param for p in params.values() if p.of_model and is_divisible(p.param.shape, ranks)]
    owners = {p.param: p.part.owner for p in params.values() if p.part is not None}
    parts = {param: part_of(param, ranks, owners.get(param)) for param in chosen if param not in staged}
    for value in b.declared:
        if value.role == "state" and value.derived and value in read and value.size >= ranks * SMALLEST_CHUNK:
            parts[value] = part_of(value, ranks)
    b.redeclare(parts)
    return DividedWeights(ranks, parts, {v: parts[whole] for v, whole in within.items() if whole in parts})

"""Gradients of which each rank keeps the sums of its part (ZeRO 2).

Every micro-step writes the gradients of a block to buffers, which every second block uses. Once they are complete, the
ranks exchange them, and each adds the sums over the ranks for its own part to those of earlier micro-steps. It does so
while the next block computes, so nothing waits for the exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from zlib import crc32

from ..builder import Builder
from ..inputs import Scalars
from ..op import Op, Program
from ..shards import part_inside
from ..value import Value
from .reduce import collective, completed

_SETS = 2
"""Blocks whose gradients are in buffers at a time: one computes, and ranks exchange those of the one before."""


@dataclass
class Scatter:
    """Divides the gradients of the micro-steps of a run.

    parts   {gradient: this rank's part of the sums}
    blocks  {gradient: the block of its param}
    """

    parts: Mapping[Value, Value]
    blocks: Mapping[Value, int]
    builder: Builder
    scalars: Scalars
    world_size: int
    _buffers: dict[tuple[object, ...], Value] = field(default_factory=dict)
    _insides: dict[str, Value] = field(default_factory=dict)

    def __call__(self, program: Program) -> Program:
        """Return a micro-step, which writes the gradients, with the exchange on "comm"."""
        complete = completed(program, self.blocks, self.parts)
        buffers: dict[Value, Value] = {}
        for number, (_, groups) in enumerate(sorted(complete.items())):
            for block, _, values in groups:
                buffers |= self._buffers_of(values, number % _SETS if block >= 0 else -1)
        ops: list[Op] = []
        waiting: list[Op] = []
        for index, op in enumerate(program.ops):
            ops.append(op.on(buffers))
            for block, _, values in complete.get(index, ()):
                exchange, additions = self._exchange(program, block, values, buffers)
                ops += [*exchange, *waiting]
                waiting = additions
        return replace(program, ops=(*ops, *waiting))

    def _exchange(
        self, program: Program, block: int, values: list[Value], buffers: Mapping[Value, Value]
    ) -> tuple[list[Op], list[Op]]:
        """Return what sums gradients over the ranks, and what adds the rank's parts of that to the sums."""
        b, parts = self.builder, [self.parts[value] for value in values]
        sources, sums = [buffers[value] for value in values], parts
        if not program.first:
            with b.block(block):
                sums = [self._addend(part, source) for part, source in zip(parts, sources, strict=True)]
        with b.record("backward", block) as exchange:
            b.emit(collective(parts[0]), *sources, outs=sums, lane="comm", world_size=self.world_size, how="sum")
        with b.record("backward", block) as additions:
            for value, part, addend in zip(values, parts, sums, strict=True):
                if not program.first:
                    self._add(value, addend, part)
        return exchange, additions

    def _addend(self, part: Value, source: Value) -> Value:
        """Return what holds the sum over the ranks until it is added: of an owner, the buffer."""
        if part.owner is None:
            return self.builder.activation("d_part", part.shape, part.dtype)
        inside = part_inside(source, self.world_size, part.owner)
        return self._insides.setdefault(inside.name, inside)

    def _add(self, gradient: Value, addend: Value, part: Value) -> None:
        b, scalars = self.builder, self.scalars
        if part.dtype != "bf16":
            b.emit("add", addend, part, outs=[part])
            return
        assert scalars.first_micro_step is not None  # all ranks would round a whole gradient alike
        stream = crc32(f"{gradient.name}/sum".encode())
        b.emit("accumulate_rounded", addend, part, scalars.first_micro_step, scalars.seed, outs=[part], stream=stream)

    def _buffers_of(self, values: list[Value], number: int) -> dict[Value, Value]:
        """Return buffers for the gradients of a block, the same for every block with this number."""
        found: dict[Value, Value] = {}
        for value in values:
            alike = sum((v.shape, v.dtype) == (value.shape, value.dtype) for v in found)
            key = (number, alike, value.shape, value.dtype) if number >= 0 else (value.name,)
            if key not in self._buffers:
                name = f"gradients.{len(self._buffers)}"
                self._buffers[key] = self.builder.buffer(name, value.shape, value.dtype)
            found[value] = self._buffers[key]
        return found

"""The micro-step that reports on numerics: it measures how the rounding of each operand changes it.

It computes the same as any other, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from surogate_core.api import Builder, Init, Numerics, Program, QuantizedTensor, Value

from .formats import COLUMNS


@dataclass
class Measured:
    """The tensors that a program measures. Emits the ops that do."""

    builder: Builder
    tensors: list[QuantizedTensor] = field(default_factory=list)
    figures: list[Value] = field(default_factory=list)

    def measure(self, name: str, block: int, tensor: Value, form: Sequence[Value]) -> None:
        """Emit the op that compares `tensor` with a form of it."""
        self.figures.append(self.builder.apply("nvfp4_measure", tensor, *form))
        self.tensors.append(QuantizedTensor(name, block))

    def report(self, micro: Program) -> Numerics:
        """Return the report of `micro`, in which the tensors were measured."""
        b = self.builder
        with b.record("backward") as emitted:
            values = b.state("nvfp4.numerics", (len(self.figures), len(COLUMNS)), "fp32", Init(kind="zeros"))
            b.emit("nvfp4_report", *self.figures, outs=[values])
        return Numerics(
            micro=replace(micro, ops=(*micro.ops, *emitted)),
            values=values,
            tensors=tuple(self.tensors),
            columns=COLUMNS,
        )

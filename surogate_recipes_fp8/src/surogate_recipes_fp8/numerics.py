"""The micro-step that reports on numerics: it counts what FP8 clips and what it rounds to 0, and how old scales are.

It computes the same as any other, to the bit. Ops that quantize also write the tensor itself, which `fp8_count` reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from surogate_core.api import Builder, Init, Numerics, Program, QuantizedTensor, Value

from .formats import COLUMNS, LARGEST, Format
from .quantizers import QuantizedWeight


@dataclass(frozen=True)
class _Counted:
    name: str
    block: int
    size: int
    dtype: Format
    amax: Value
    counts: Value
    scale: Value
    column: int


@dataclass
class Counts:
    """The tensors that a program counts. Emits the ops that do."""

    builder: Builder
    tensors: list[_Counted] = field(default_factory=list)

    def count(self, name: str, block: int, tensor: Value, scale: Value, dtype: Format, column: int = -1) -> None:
        """Emit the op that counts `tensor`. `column`: that of its quantizer in the history; -1: it has none."""
        amax = self.builder.activation("amax", (2,), "fp32")
        counts = self.builder.activation("counts", (3,), "int64")
        self.builder.emit("fp8_count", tensor, scale, outs=[amax, counts], dtype=dtype)
        self.tensors.append(_Counted(name, block, tensor.size, dtype, amax, counts, scale, column))


def report(micro: Program, counts: Counts, trained: list[QuantizedWeight], history: Value | None) -> Numerics:
    """Return the report of `micro`, whose tensors `counts` has counted, and of the weights that are trained.

    A frozen weight exists in FP8 only.
    """
    b = counts.builder
    with b.record("backward") as emitted:
        for weight in trained:
            counts.count(weight.weight.name, weight.weight.block, weight.weight, weight.scale, "e4m3")
        tensors = counts.tensors
        values = b.state("fp8.numerics", (len(tensors), len(COLUMNS)), "fp32", Init(kind="zeros"))
        b.emit(
            "fp8_report",
            *(() if history is None else (history,)),
            *(t.amax for t in tensors),
            *(t.counts for t in tensors),
            *(t.scale for t in tensors),
            outs=[values],
            sizes=tuple(t.size for t in tensors),
            maxima=tuple(LARGEST[t.dtype] for t in tensors),
            columns=tuple(t.column for t in tensors),
            history=history is not None,
        )
    return Numerics(
        micro=replace(micro, ops=(*micro.ops, *emitted)),
        values=values,
        tensors=tuple(QuantizedTensor(t.name, t.block) for t in tensors),
        columns=COLUMNS,
    )

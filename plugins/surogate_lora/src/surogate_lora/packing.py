"""Matrices packed from others by one `lora_pack`."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.api import Builder, Value

from .ops import Place


class Packing:
    """Collects matrices and their parts, then emits the op that packs all of them.

    packing = Packing()
    index = packing.add((5, 8), [(a, 0, 0, 1.0), (b, 3, 0, 0.5)])   # a [3, 8] above 0.5 * b [2, 8]
    whole = packing.emit(builder, ADAPTER_LABEL, "bf16")[index]
    """

    def __init__(self) -> None:
        self._parts: list[Value] = []
        self._places: list[Place] = []
        self._shapes: list[tuple[int, ...]] = []

    def add(self, shape: tuple[int, ...], parts: Sequence[tuple[Value, int, int, float]]) -> int:
        """Add a matrix of `shape` with (part, row, column, scale) in it; return its index in what `emit` returns."""
        index = len(self._shapes)
        self._shapes.append(shape)
        for part, row, column, scale in parts:
            self._parts.append(part)
            self._places.append(Place(index, row, column, scale))
        return index

    def emit(self, b: Builder, label: str, dtype: str) -> tuple[Value, ...]:
        """Emit the op and return the matrices."""
        labels = [label] * len(self._shapes)
        shapes, places = tuple(self._shapes), tuple(self._places)
        return b.emit("lora_pack", *self._parts, label=labels, shapes=shapes, places=places, dtype=dtype)


def firsts(sizes: Sequence[int]) -> list[int]:
    """Return the first index of each of these stretches if one follows the other."""
    return [sum(sizes[:i]) for i in range(len(sizes))]

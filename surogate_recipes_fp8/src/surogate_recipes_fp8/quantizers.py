"""The states of FP8 quantizers: delayed scales of activations and gradients, FP8 copies of weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from surogate_core.api import Builder, Init, Value
from surogate_core.api.products import Operand

from .formats import FORMATS, LARGEST, Format

ZEROS = Init(kind="zeros")


@dataclass(frozen=True)
class Quantizer:
    """Quantizes one tensor of every micro-step with a delayed scale. See `reference.py` for scale and amax."""

    dtype: Format
    scale: Value
    amax: Value

    @property
    def maximum(self) -> float:
        return LARGEST[self.dtype]


@dataclass(frozen=True)
class QuantizedWeight:
    """The FP8 copies of a weight [N, K]. transposed: [K, N]; None if micro-steps make it, or products need none.

    They are in E4M3, or in E5M2 with a power of two as scale, where that is exact.
    """

    weight: Value
    copy: Value
    scale: Value
    transposed: Value | None


class Quantizers:
    """Declares the states of a family, each once, however many programs use it.

    `delayed` quantizers belong to a recipe that records magnitudes; without it, every tensor is quantized by its own.
    `exact`: weights of which E5M2 holds every element.
    """

    def __init__(self, builder: Builder, exact: Collection[Value]) -> None:
        self._builder, self._exact = builder, exact
        self._delayed: dict[str, Quantizer] = {}
        self._weights: dict[Value, QuantizedWeight] = {}

    @property
    def delayed(self) -> tuple[Quantizer, ...]:
        return tuple(self._delayed.values())

    @property
    def weights(self) -> tuple[QuantizedWeight, ...]:
        return tuple(self._weights.values())

    def of(self, operand: Operand) -> Quantizer:
        """Return the quantizer of an operand."""
        name = f"fp8.{operand.name}"
        if name not in self._delayed:
            with self._builder.block(operand.weight.block):
                self._delayed[name] = Quantizer(
                    FORMATS[operand.which],
                    self._builder.state(f"{name}.scale", (2,), "fp32", ZEROS),
                    self._builder.state(f"{name}.amax", (2,), "fp32", ZEROS, collects="max"),
                )
        return self._delayed[name]

    def column(self, operand: Operand) -> int:
        """Return the column of the history that the quantizer of an operand has."""
        return [*self._delayed.values()].index(self.of(operand))

    def weight(self, weight: Value, *, transposed: bool) -> QuantizedWeight:
        """Return the FP8 copies of `weight`, with the transposed one if `transposed`."""
        if weight not in self._weights:
            name, (rows, columns) = f"fp8.{weight.name}", weight.shape
            dtype = "e5m2" if weight in self._exact else "e4m3"
            with self._builder.block(weight.block):
                self._weights[weight] = QuantizedWeight(
                    weight,
                    self._derived(name, (rows, columns), dtype),
                    self._derived(f"{name}.scale", (2,), "fp32"),
                    self._derived(f"{name}.transposed", (columns, rows), dtype) if transposed else None,
                )
        return self._weights[weight]

    def history(self, length: int) -> Value:
        """Declare the magnitudes of the last `length` steps of all delayed quantizers."""
        return self._builder.state("fp8.history", (length, len(self._delayed)), "fp32", ZEROS)

    def _derived(self, name: str, shape: Sequence[int], dtype: str) -> Value:
        return self._builder.state(name, shape, dtype, None, derived=True)

"""The quantizer of NVFP4 products.

    y  = x w^T     nvfp4_linear(x, w)         blocks along K
    dx = dy w      nvfp4_linear(dy, w)        blocks of dy along N
    dw = dy^T x    nvfp4_linear(dy^T, x^T)    blocks along T, after the Hadamard transform

`nvfp4_quantize` writes two forms of each x and each dy: of its rows, and of its columns for dw. They are quantized
separately, so neither is the transposed other. The form of the rows is read at once. That of the columns of x is kept
for the backward pass: 4.5 bits for each element.

A weight has blocks of 16 x 16 elements, so that y and dx see the same numbers. Products on tensor cores read operands
along the summed dimension alone, so dx needs the transposed form beside the other one. Emulated products read one form
either way.

SwiGLU and its gradient measure what they write, so the quantizer does not read it twice. It measures other tensors
itself (csrc/quantize.cu has the bytes).

A frozen weight that the run stores in blocks of 1 x 16 is not quantized again: y reads what is stored. Its blocks lie
along K, and its matrices have magnitudes of their own, so dx, which sums over N, stays a bf16 product.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from surogate_core.api import Builder, Op, Scalars, Value
from surogate_core.api.products import Operand, QuantizedWeights, Quantizer

from .numerics import Measured

Form = tuple[Value, ...]
"""Codes, scales and amax of a matrix (ops.py)."""

PARTS = ("codes", "scales", "amax")


@dataclass(frozen=True)
class StoredWeight:
    """Codes, scales and factors of a frozen weight (`formats.STORED_LAYOUT`), and the rows of its matrices."""

    form: Form
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """Options of the lowering.

    weights        weights whose products are quantized
    backend        "emulate" or "cublaslt"
    four_over_six  kinds of operands whose blocks choose between the largest values 4 and 6: of "x", "dy", "w"
    hadamard       operands of weight gradients are transformed
    stochastic     gradients are rounded stochastically
    square         weights have blocks of 16 x 16 elements instead of 1 x 16
    stored         frozen weights that forward products read as they are stored
    """

    weights: QuantizedWeights
    backend: str
    four_over_six: Collection[str]
    hadamard: bool
    stochastic: bool
    square: bool
    stored: Mapping[Value, StoredWeight]

    def transposes(self, weight: Value) -> bool:
        """Return whether backward products read a transposed form of `weight`."""
        return self.backend != "emulate" and weight in self.weights.by_dgrad


@dataclass(frozen=True)
class QuantizedWeight:
    """The forms of a weight [N, K], and of its transpose [K, N] where backward products read that."""

    weight: Value
    rows: Form
    columns: Form

    def quantize(self, b: Builder, settings: Settings) -> None:
        """Emit the op that writes the forms."""
        b.emit(
            "nvfp4_quantize",
            self.weight,
            outs=[*self.rows, *self.columns],
            rows=True,
            columns=bool(self.columns),
            square=settings.square,
            four_over_six="w" in settings.four_over_six,
        )


class Weights:
    """Declares the forms of weights, each once, however many programs read them."""

    def __init__(self, builder: Builder, settings: Settings) -> None:
        self._b = builder
        self._settings = settings
        self._known: dict[Value, QuantizedWeight] = {}

    @property
    def all(self) -> Sequence[QuantizedWeight]:
        return tuple(self._known.values())

    def __getitem__(self, weight: Value) -> QuantizedWeight:
        if weight not in self._known:
            attrs = {"rows": True, "columns": self._settings.transposes(weight), "square": self._settings.square}
            specs = self._b.ops["nvfp4_quantize"].infer([weight], attrs)
            names = [*PARTS, *(f"transposed.{part}" for part in PARTS)]
            with self._b.block(weight.block):
                states = [
                    self._b.state(f"nvfp4.{weight.name}.{name}", spec.shape, spec.dtype, None, derived=True)
                    for name, spec in zip(names, specs, strict=False)
                ]
            self._known[weight] = QuantizedWeight(weight, tuple(states[:3]), tuple(states[3:]))
        return self._known[weight]


class Fp4Quantizer(Quantizer):
    """Quantizes the operands of one program."""

    def __init__(
        self, builder: Builder, scalars: Scalars, settings: Settings, weights: Weights, measured: Measured | None
    ) -> None:
        self._measured = measured
        self._b = builder
        self._scalars = scalars
        self._settings = settings
        self._weights = weights
        self._forms: dict[Value, Mapping[str, Form]] = {}

    def quantize(self, operand: Operand) -> Collection[Op]:
        self._quantize(operand)
        return ()

    def quantize_result(self, op: Op, operand: Operand) -> bool:
        """Emit the form of an op that measures its output, where its kernel does: with the transform."""
        kind = f"nvfp4_{op.kind}"
        if kind not in self._b.ops or not (operand.by_wgrad and self._settings.hadamard):
            return False
        magnitudes = self._b.activation("amax", (4,), "fp32")
        self._b.emit(kind, *op.ins, outs=[*op.outs, magnitudes])
        self._quantize(operand, magnitudes)
        return True

    def _quantize(self, operand: Operand, *magnitudes: Value) -> None:
        attrs: dict[str, Any] = {
            "rows": operand.by_rows,
            "columns": operand.by_wgrad,
            "hadamard": operand.by_wgrad and self._settings.hadamard,
            "four_over_six": operand.which in self._settings.four_over_six,
        }
        if magnitudes:
            attrs["measured"] = True
        random: tuple[Value, ...] = ()
        if operand.which == "dy" and self._settings.stochastic:
            random = (self._scalars.micro_step, self._scalars.seed)
            attrs |= {"stochastic": True, "stream": crc32(operand.name.encode()) & ~1}
        outs = self._b.emit("nvfp4_quantize", operand.value, *magnitudes, *random, **attrs)
        forms = [outs[at : at + 3] for at in range(0, len(outs), 3)]
        written = dict(zip([name for name in ("rows", "columns") if attrs[name]], forms, strict=True))
        self._forms[operand.value] = written
        if self._measured is not None and operand.by_rows:
            self._measured.measure(operand.name, operand.weight.block, operand.value, written["rows"])

    def multiply(self, op: Op, left: Operand, weight: Value, *, base: Value | None, bias: Value | None) -> None:
        stored = self._settings.stored.get(weight)
        attrs: dict[str, Any] = {"dtype": op.outs[0].dtype, "backend": self._settings.backend}
        if stored is not None:
            right, attrs["stored"] = stored.form, stored.rows
        else:
            turned, forms = left.which == "dy", self._weights[weight]
            right = forms.columns if turned and forms.columns else forms.rows
            attrs["trans_b"] = turned and not forms.columns
        added = [value for value in (base, bias) if value is not None]
        self._b.emit(
            "nvfp4_linear" if base is None else "nvfp4_linear_add",
            *self._forms[left.value]["rows"],
            *right,
            *added,
            outs=op.outs,
            **attrs,
        )

    def wgrad(self, op: Op, dy: Operand, x: Operand) -> None:
        self._b.emit(
            "nvfp4_linear",
            *self._forms[dy.value]["columns"],
            *self._forms[x.value]["columns"],
            outs=op.outs,
            accumulate=op.accumulate,
            dtype="fp32",
            backend=self._settings.backend,
        )

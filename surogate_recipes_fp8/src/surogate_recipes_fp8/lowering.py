"""The quantizer of FP8 products.

    y  = x w^T     fp8_linear(x, w)        E4M3 x E4M3
    dx = dy w      fp8_linear(dy, w^T)     E5M2 x E4M3
    dw = dy^T x    fp8_linear(dy^T, x^T)   E5M2 x E4M3, fp32

`fp8_grouped_linear` computes y and dx of groups of rows (`OpDef.group_ends`). Their dw stays in bf16: transposed
operands would be cut where groups end, and FP8 products read 16 bytes at a time, from multiples of 16 on.

Each x and each dy is quantized by the op that computes it where that op has a form that quantizes, otherwise by
`fp8_quantize` right after it. The input of the product that follows SwiGLU or GeGLU is not stored for dw: the backward
pass of the activation, which reads the same tensors, writes the transposed copy again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from surogate_core.api import Builder, LowerContext, Op, Program, Value
from surogate_core.api.products import Operand, QuantizedWeights, Quantizer, lower_products

from .formats import FORMATS
from .numerics import Counts
from .ops import SCALE
from .quantizers import Quantizers

Scaling = Literal["delayed", "current", "fallback", "unrecorded"]
"""Scaling of tensors: "current" raises the amax of delayed quantizers, "unrecorded" has none (see reference.py)."""

_GATED = {"swiglu_bwd": "swiglu", "geglu_bwd": "geglu"}


@dataclass(frozen=True)
class Settings:
    """Options of the lowering of a program.

    weights     weights whose products are quantized
    transposes  products need operands with the summed dimension contiguous, hence transposed copies
    fast_fprop, fast_backward
                products that may keep partial sums in fewer bits
    """

    weights: QuantizedWeights
    transposes: bool
    fast_fprop: bool
    fast_backward: bool


@dataclass(frozen=True)
class _Copies:
    """The FP8 copies of a tensor and their scale."""

    rows: Value
    transposed: Value | None
    scale: Value


class Fp8Quantizer(Quantizer):
    """Quantizes the operands of one program."""

    def __init__(
        self,
        program: Program,
        operands: Mapping[Value, Operand],
        builder: Builder,
        quantizers: Quantizers,
        settings: Settings,
        scaling: Scaling,
        counts: Counts | None,
    ) -> None:
        self._b = builder
        self._counts = counts
        self._quantizers = quantizers
        self._settings = settings
        self._scaling = scaling
        self._readers = program.readers()
        self._copies: dict[Value, _Copies] = {}
        self._transposed_weights: dict[Value, Value] = {}
        self._hidden = self._find_hidden(program, operands)
        self._waiting: dict[
            Value, list[tuple[Op, Operand, Operand]]
        ] = {}  # dw, by the x without a transposed copy so far

    def _find_hidden(self, program: Program, operands: Mapping[Value, Operand]) -> dict[Value, Value]:
        """{d_gate_up: the output of SwiGLU or GeGLU that its backward pass quantizes again}, where both are."""
        found = {}
        for op in program.ops:
            if op.kind not in _GATED or op.outs[0] not in operands:
                continue
            forward = next((o for o in self._readers.get(op.ins[1], ()) if o.kind == _GATED[op.kind]), None)
            operand = operands.get(forward.outs[0]) if forward else None
            if operand is not None and self._is_transposed(operand):
                found[op.outs[0]] = operand.value
        return found

    def _is_transposed(self, operand: Operand) -> bool:
        return self._settings.transposes and operand.by_wgrad

    # -------------------------------------------------------------------------------------------------------- products

    def multiply(self, op: Op, left: Operand, weight: Value, *, base: Value | None, bias: Value | None) -> None:
        copies, forward = self._copies[left.value], left.which == "x"
        stored = self._quantizers.weight(weight, transposed=self._keeps_transposed(weight))
        operand, attrs = (stored.copy, {}) if forward else self._weight_for_dgrad(weight)
        fast = self._settings.fast_fprop if forward else self._settings.fast_backward
        ins = (copies.rows, operand, copies.scale, stored.scale)
        at = self._b.ops[op.kind].group_ends
        if at is not None:
            assert base is None, f"{op.kind} is declared to add to a product of groups"
            groups = (op.ins[at], *([] if bias is None else [bias]))
            self._b.emit("fp8_grouped_linear", *ins, *groups, outs=op.outs, fast=fast, beside=not forward)
            return
        kind = "fp8_linear" if base is None else "fp8_linear_add"
        added = [value for value in (base, bias) if value is not None]
        self._b.emit(kind, *ins, *added, outs=op.outs, **attrs, dtype=op.outs[0].dtype, fast=fast)

    def wgrad(self, op: Op, dy: Operand, x: Operand) -> None:
        left, right = self._copies[dy.value], self._copies[x.value]
        attrs: dict[str, Any] = {"dtype": "fp32", "fast": self._settings.fast_backward}
        if not self._settings.transposes:
            ins, attrs = (left.rows, right.rows), attrs | {"trans_a": True, "trans_b": True}
        elif right.transposed is None:
            self._waiting.setdefault(x.value, []).append((op, dy, x))
            return
        else:
            assert left.transposed is not None
            ins = (left.transposed, right.transposed)
        self._b.emit("fp8_linear", *ins, left.scale, right.scale, outs=op.outs, accumulate=op.accumulate, **attrs)

    def _keeps_transposed(self, weight: Value) -> bool:
        """A frozen weight is quantized once, so its transposed copy is kept. That of a trained one costs a pass over
        bytes in every micro-step, and would take as much memory as the copy itself."""
        weights = self._settings.weights
        return self._settings.transposes and weight in weights.by_dgrad and not weights.is_trained(weight)

    def _weight_for_dgrad(self, weight: Value) -> tuple[Value, dict[str, Any]]:
        stored = self._quantizers.weight(weight, transposed=self._keeps_transposed(weight))
        if not self._settings.transposes:
            return stored.copy, {"trans_b": True}
        if stored.transposed is not None:
            return stored.transposed, {}
        if weight not in self._transposed_weights:
            self._transposed_weights[weight] = self._b.apply("fp8_transpose", stored.copy, label="weight")
        return self._transposed_weights[weight], {}

    # ------------------------------------------------------------------------------------------------------ quantizing

    def quantize(self, operand: Operand) -> Collection[Op]:
        """Emit `fp8_quantize`, which also computes the gradient of a bias, the sums of the columns of dy."""
        attrs, value = self._attrs(operand), operand.value
        bias = next((op for op in self._readers.get(value, ()) if op.kind == "linear_bgrad"), None)
        ins, sums = (value, *self._given(operand)), 1 + attrs["transposed"]
        attrs["column_sums"] = bias is not None
        specs = self._b.ops["fp8_quantize"].infer(ins, attrs)
        outs = [self._b.activation(value.label if s.label != SCALE else s.label, s.shape, s.dtype) for s in specs]
        if bias is not None:
            outs[sums] = bias.outs[0]
        accumulate = frozenset({sums} if bias is not None and bias.accumulate else ())
        self._b.emit("fp8_quantize", *ins, outs=outs, accumulate=accumulate, **attrs)
        self._keep(operand, outs, attrs)
        return () if bias is None else (bias,)

    def quantize_result(self, op: Op, operand: Operand) -> bool:
        """Emit the form of an op that has copies in place of its first output, or beside it if something reads it."""
        if self._b.ops[op.kind].moves and not self._is_transposed(operand):
            self._quantize_moved(op, operand)
            return True
        kind = f"fp8_{op.kind}"
        if kind not in self._b.ops or not op.attrs.keys() <= self._b.ops[kind].attrs.keys():
            return False  # the offset of a norm, for example: its result is quantized by an op of its own
        attrs, ins = {**op.attrs, **self._attrs(operand)}, [*op.ins]
        wide = operand.is_wide or self._counts is not None
        if op.kind in ("rmsnorm_bwd", "rmsnorm_dgrad"):
            wide, attrs["residual"] = True, len(op.ins) == 5
        else:
            attrs["wide"] = wide
        hidden = self._hidden.get(operand.value)
        if hidden is not None:
            ins.append(self._copies[hidden].scale)
            attrs["hidden"] = FORMATS["x"]
        ins += self._given(operand)
        outs = [self._b.activation(s.label, s.shape, s.dtype) for s in self._b.ops[kind].infer(ins, attrs)]
        copies, own = 1 + attrs["transposed"], op.outs[0 if wide else 1 :]
        outs[copies : copies + len(own)] = own
        self._b.emit(kind, *ins, outs=outs, accumulate=frozenset(copies + i for i in op.accumulate), **attrs)
        self._keep(operand, outs, attrs)
        if hidden is not None:
            self._copies[hidden] = replace(self._copies[hidden], transposed=outs[copies + len(own)])
            for waiting in self._waiting.pop(hidden, ()):
                self.wgrad(*waiting)
        return True

    def _quantize_moved(self, op: Op, operand: Operand) -> None:
        """Quantize what an op moves, which may be less than what it writes, and move the copy."""
        if operand.is_wide or self._counts is not None:
            self._b.append(op)
        attrs, source = self._attrs(operand), op.ins[0]
        copy, *rest = self._b.emit("fp8_quantize", source, *self._given(operand), label=source.label, **attrs)
        moved = self._b.emit(op.kind, copy, *op.ins[1:], label=operand.value.label, **op.attrs)
        self._keep(operand, [*moved, *rest], attrs)

    def _given(self, operand: Operand) -> tuple[Value, ...]:
        """Return the last inputs of the op that quantizes: scale and amax, as the scaling asks for."""
        if self._scaling == "unrecorded":
            return ()
        state = self._quantizers.of(operand)
        return {"delayed": (state.scale, state.amax), "current": (state.amax,), "fallback": (state.scale,)}[
            self._scaling
        ]

    def _attrs(self, operand: Operand) -> dict[str, Any]:
        transposed = self._is_transposed(operand) and operand.value not in self._hidden.values()
        scaling = "current" if self._scaling == "unrecorded" else self._scaling
        return {"dtype": FORMATS[operand.which], "scaling": scaling, "transposed": transposed}

    def _keep(self, operand: Operand, outs: Sequence[Value], attrs: Mapping[str, Any]) -> None:
        """Remember the copies, which are the first of `outs`, and their scale: a state, or the last of them."""
        delayed = self._scaling == "delayed"
        scale = self._quantizers.of(operand).scale if delayed else outs[-1]
        self._copies[operand.value] = _Copies(outs[0], outs[1] if attrs["transposed"] else None, scale)
        if self._counts is not None:
            column = self._quantizers.column(operand) if delayed else -1
            block, dtype = operand.weight.block, FORMATS[operand.which]
            self._counts.count(operand.name, block, operand.value, scale, dtype, column)


def lower_program(
    program: Program,
    context: LowerContext,
    quantizers: Quantizers,
    settings: Settings,
    scaling: Scaling,
    counts: Counts | None = None,
) -> Program:
    """Return `program` with the products of `settings.weights` lowered to FP8. `counts` counts what is quantized."""
    b = context.builder
    return lower_products(
        program,
        b,
        settings.weights,
        lambda operands: Fp8Quantizer(program, operands, b, quantizers, settings, scaling, counts),
    )

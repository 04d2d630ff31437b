"""Lowers the products of a program's blocks to FP8.

Products with a weight of the model become products of quantized operands:

    y  = x w^T     fp8_linear(x, w)        E4M3 x E4M3
    dx = dy w      fp8_linear(dy, w^T)     E5M2 x E4M3
    dw = dy^T x    fp8_linear(dy^T, x^T)   E5M2 x E4M3, fp32

Everything else stays as it is: embedding, LM head, norms, attention, adapters. Each x and each dy is quantized once, by
the op that computes it where that op has a form that quantizes, otherwise by `fp8_quantize` right after it. The input
of the product that follows SwiGLU is not stored for dw: the backward pass of SwiGLU, which reads the same tensors,
writes the transposed copy again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from surogate_core.api import LowerContext, Op, Program, Value
from surogate_core.program.builder import Builder

from .formats import Format
from .numerics import Counts
from .ops import SCALE
from .quantizers import Quantizers

Scaling = Literal["delayed", "current", "fallback", "unrecorded"]
"""Scaling of tensors: "current" raises the amax of delayed quantizers, "unrecorded" has none (see reference.py)."""

FORWARD = ("linear", "linear_add", "linear_pair")
DGRAD = ("linear_dgrad", "linear_dgrad_add", "linear_dgrad_pair")
QUANTIZING = ("rmsnorm", "add_rmsnorm", "swiglu", "swiglu_bwd", "rmsnorm_bwd", "rmsnorm_dgrad")
"""Ops that have a form which quantizes its first output."""


@dataclass(frozen=True)
class Settings:
    """Options of the lowering of a program.

    weights     weights whose products are quantized
    grads       {gradient of one of them: the weight}
    by_dgrad    those that backward products read
    transposes  products need operands with the summed dimension contiguous, hence transposed copies
    fast_fprop, fast_backward
                products that may keep partial sums in fewer bits
    """

    weights: frozenset[Value]
    grads: Mapping[Value, Value]
    by_dgrad: frozenset[Value]
    transposes: bool
    fast_fprop: bool
    fast_backward: bool


@dataclass
class _Tensor:
    """A tensor that products read: x of a forward product, or dy.

    readers   ops that read its FP8 copies
    weight    of the first such product, which names the quantizer
    """

    value: Value
    weight: Value
    which: Literal["x", "dy"]
    dtype: Format
    readers: list[Op] = field(default_factory=list)
    transposed: bool = False


@dataclass(frozen=True)
class _Copies:
    """The FP8 copies of a tensor and their scale."""

    rows: Value
    transposed: Value | None
    scale: Value


def quantized_weight(op: Op, settings: Settings) -> Value | None:
    """Return the weight of a product that is quantized; None for any other op."""
    if op.kind in (*FORWARD, *DGRAD):
        return op.ins[1] if op.ins[1] in settings.weights else None
    return settings.grads.get(op.outs[0]) if op.kind == "linear_wgrad" else None


class Lowering:
    """Lowers one program. `run` returns the result."""

    def __init__(
        self,
        program: Program,
        builder: Builder,
        quantizers: Quantizers,
        settings: Settings,
        scaling: Scaling,
        counts: Counts | None,
    ) -> None:
        self._program = program
        self._b = builder
        self._counts = counts
        self._quantizers = quantizers
        self._settings = settings
        self._scaling = scaling
        self._readers = program.readers()
        self._producers = program.producers()
        self._tensors = self._find_tensors()
        self._copies: dict[Value, _Copies] = {}
        self._transposed_weights: dict[Value, Value] = {}
        self._waiting: dict[Value, list[Op]] = {}  # wgrads, by the x whose transposed copy does not exist yet
        self._hidden = self._find_hidden()
        self._merged: set[Op] = set()  # gradients of biases that the op which quantizes dy computes
        self._ops: list[Op] = []

    def run(self) -> Program:
        for op in self._program.ops:
            with self._b.record(op.phase, op.block) as emitted:
                self._lower(op)
            self._ops += emitted
        return replace(self._program, ops=tuple(self._ops))

    # ----------------------------------------------------------------------------------------------- what is quantized

    def _find_tensors(self) -> dict[Value, _Tensor]:
        found: dict[Value, _Tensor] = {}
        for op in self._program.ops:
            weight = quantized_weight(op, self._settings)
            if weight is None:
                continue
            if op.kind in FORWARD:
                tensor = found.setdefault(op.ins[0], _Tensor(op.ins[0], weight, "x", "e4m3"))
                tensor.readers.append(op)
            else:
                tensor = found.setdefault(op.ins[0], _Tensor(op.ins[0], weight, "dy", "e5m2"))
                tensor.readers.append(op)
                if op.kind == "linear_wgrad":
                    for value in op.ins:
                        found[value].transposed = self._settings.transposes
                    found[op.ins[1]].readers.append(op)
        return found

    def _find_hidden(self) -> dict[Value, Value]:
        """{d_gate_up: the output of SwiGLU that its backward pass quantizes again}, where both are quantized."""
        found = {}
        for op in self._program.ops:
            if op.kind != "swiglu_bwd" or op.outs[0] not in self._tensors:
                continue
            forward = next((o for o in self._readers.get(op.ins[1], ()) if o.kind == "swiglu"), None)
            tensor = self._tensors.get(forward.outs[0]) if forward else None
            if tensor is not None and tensor.transposed:
                found[op.outs[0]] = tensor.value
        return found

    def _is_wide(self, tensor: _Tensor) -> bool:
        """Whether anything but FP8 products reads the tensor."""
        others = (op for op in self._readers.get(tensor.value, ()) if op not in tensor.readers)
        return any(others) or tensor.value in self._program.outputs or tensor.value.role != "act"

    # ------------------------------------------------------------------------------------------------------ op by op

    def _lower(self, op: Op) -> None:
        weight = quantized_weight(op, self._settings)
        if weight is not None:
            self._product(op, weight)
            return
        if op in self._merged:
            return
        out = op.outs[0] if op.outs else None
        tensor = self._tensors.get(out) if out is not None else None
        if tensor is not None and op.kind in QUANTIZING:
            self._fused(op, tensor)
        else:
            self._b.append(op)
            for value in op.outs:
                if value in self._tensors:
                    self._quantize(self._tensors[value])

    def _product(self, op: Op, weight: Value) -> None:
        if op.kind == "linear_wgrad":
            if self._copies_of(op.ins[1]).transposed is None and self._settings.transposes:
                self._waiting.setdefault(op.ins[1], []).append(op)
            else:
                self._wgrad(op)
            return
        copies, forward = self._copies_of(op.ins[0]), op.kind in FORWARD
        stored = self._quantizers.weight(weight, transposed=self._keeps_transposed(weight))
        operand, attrs = (stored.copy, {}) if forward else self._weight_for_dgrad(weight)
        fast = self._settings.fast_fprop if forward else self._settings.fast_backward
        attrs |= {"dtype": op.outs[0].dtype, "fast": fast}
        ins = (copies.rows, operand, copies.scale, stored.scale)
        outs = list(op.outs)
        if op.kind.endswith("_pair"):
            kind = op.kind.removesuffix("_pair")
            base = self._b.apply(kind, *op.ins[2:], label=op.outs[0].label, dtype=op.outs[0].dtype)
            self._b.emit("fp8_linear_add", *ins, base, outs=outs, **attrs)
        elif op.kind.endswith("_add"):
            self._b.emit("fp8_linear_add", *ins, op.ins[2], outs=outs, **attrs)
        else:
            self._b.emit("fp8_linear", *ins, *op.ins[2:], outs=outs, **attrs)
        self._quantize_results(op)

    def _quantize_results(self, op: Op) -> None:
        for value in op.outs:
            if value in self._tensors:
                self._quantize(self._tensors[value])

    def _wgrad(self, op: Op) -> None:
        dy, x = (self._copies_of(value) for value in op.ins)
        attrs: dict[str, Any] = {"dtype": "fp32", "fast": self._settings.fast_backward}
        if self._settings.transposes:
            assert dy.transposed is not None and x.transposed is not None
            ins = (dy.transposed, x.transposed)
        else:
            ins, attrs = (dy.rows, x.rows), attrs | {"trans_a": True, "trans_b": True}
        self._b.emit("fp8_linear", *ins, dy.scale, x.scale, outs=list(op.outs), accumulate=op.accumulate, **attrs)

    def _keeps_transposed(self, weight: Value) -> bool:
        """A frozen weight is quantized once, so its transposed copy is kept. That of a trained one costs a pass over
        bytes in every micro-step, and would take as much memory as the copy itself."""
        settings = self._settings
        return settings.transposes and weight in settings.by_dgrad and weight not in settings.grads.values()

    def _weight_for_dgrad(self, weight: Value) -> tuple[Value, dict[str, Any]]:
        stored = self._quantizers.weight(weight, transposed=self._keeps_transposed(weight))
        if not self._settings.transposes:
            return stored.copy, {"trans_b": True}
        if stored.transposed is not None:
            return stored.transposed, {}
        if weight not in self._transposed_weights:
            self._transposed_weights[weight] = self._b.apply("fp8_transpose", stored.copy, label="weight")
        return self._transposed_weights[weight], {}

    # ----------------------------------------------------------------------------------------------------- quantizing

    def _copies_of(self, value: Value) -> _Copies:
        if value not in self._copies:  # a value that no op of the program writes
            self._quantize(self._tensors[value])
        return self._copies[value]

    def _given(self, tensor: _Tensor) -> tuple[Value, ...]:
        """Return the last inputs of the op that quantizes `tensor`: scale and amax, as its scaling asks for."""
        if self._scaling == "unrecorded":
            return ()
        state = self._quantizers.of(tensor.weight, tensor.which, tensor.dtype)
        return {"delayed": (state.scale, state.amax), "current": (state.amax,), "fallback": (state.scale,)}[
            self._scaling
        ]

    def _attrs(self, tensor: _Tensor) -> dict[str, Any]:
        transposed = tensor.transposed and tensor.value not in self._hidden.values()
        scaling = "current" if self._scaling == "unrecorded" else self._scaling
        return {"dtype": tensor.dtype, "scaling": scaling, "transposed": transposed}

    def _keep(self, tensor: _Tensor, copies: Iterable[Value], last: Value, attrs: Mapping[str, Any]) -> None:
        """Remember the copies of `tensor`, and its scale: a state, or the last output of the op that quantized it."""
        rows, *rest = copies
        scale = self._given(tensor)[0] if attrs["scaling"] == "delayed" else last
        self._copies[tensor.value] = _Copies(rows, rest[0] if attrs["transposed"] else None, scale)

    def _count(self, tensor: _Tensor) -> None:
        if self._counts is not None:
            name, column = f"{tensor.weight.name}.{tensor.which}", -1
            if self._scaling == "delayed":
                column = self._quantizers.column(tensor.weight, tensor.which, tensor.dtype)
            scale = self._copies[tensor.value].scale
            self._counts.count(name, tensor.weight.block, tensor.value, scale, tensor.dtype, column)

    def _quantize(self, tensor: _Tensor) -> None:
        attrs, value = self._attrs(tensor), tensor.value
        bias = next((op for op in self._readers.get(value, ()) if op.kind == "linear_bgrad"), None)
        attrs["column_sums"] = bias is not None and tensor.which == "dy"
        ins = (value, *self._given(tensor))
        specs = self._b.ops["fp8_quantize"].infer(ins, attrs)
        outs = [self._b.activation(value.label if s.label != SCALE else s.label, s.shape, s.dtype) for s in specs]
        if bias is not None:
            outs[1 + attrs["transposed"]] = bias.outs[0]
            self._merged.add(bias)
        accumulate = frozenset({1 + attrs["transposed"]} if bias is not None and bias.accumulate else ())
        self._b.emit("fp8_quantize", *ins, outs=outs, accumulate=accumulate, **attrs)
        self._keep(tensor, outs[:2], outs[-1], attrs)
        self._count(tensor)

    def _fused(self, op: Op, tensor: _Tensor) -> None:
        """Emit the form of `op` that quantizes its first output."""
        attrs, kind = self._attrs(tensor), f"fp8_{op.kind}"
        wide = self._is_wide(tensor) or self._counts is not None
        more: dict[str, Any] = {}
        ins = list(op.ins)
        backward_of_norm = op.kind in ("rmsnorm_bwd", "rmsnorm_dgrad")
        if backward_of_norm:
            more["residual"] = len(op.ins) == 5
        else:
            more["wide"] = wide
        hidden = self._hidden.get(op.outs[0])
        if hidden is not None:
            ins.append(self._copies[hidden].scale)
            more["hidden"] = self._tensors[hidden].dtype
        own = dict(op.attrs)
        specs = self._b.ops[kind].infer([*ins, *self._given(tensor)], own | attrs | more)
        fresh = [self._b.activation(spec.label, spec.shape, spec.dtype) for spec in specs]
        copies = 1 + attrs["transposed"]
        first = len(op.outs) if backward_of_norm else 0
        if backward_of_norm:
            fresh[:first] = op.outs
        else:
            kept = [op.outs[0]] if wide else []
            after = copies + len(kept)
            fresh[copies:after] = kept
            fresh[after : after + len(op.outs) - 1] = op.outs[1:]
        if hidden is not None:
            again = fresh[copies + wide]
        with_accumulate = frozenset(op.accumulate)
        self._b.emit(kind, *ins, *self._given(tensor), outs=fresh, accumulate=with_accumulate, **own, **attrs, **more)
        self._keep(tensor, fresh[first : first + 2], fresh[-1], attrs)
        self._count(tensor)
        if hidden is not None:
            self._copies[hidden] = replace(self._copies[hidden], transposed=again)
            for waiting in self._waiting.pop(hidden, ()):
                self._wgrad(waiting)


def lower_program(
    program: Program,
    context: LowerContext,
    quantizers: Quantizers,
    settings: Settings,
    scaling: Scaling,
    counts: Counts | None = None,
) -> Program:
    """Return `program` with the products of `settings.weights` lowered to FP8. `counts` counts what is quantized."""
    return Lowering(program, context.builder, quantizers, settings, scaling, counts).run()

"""Gates: the gated activation between the two products of an expert, and the gate of a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, need

from .shapes import Attrs, Ins, define, indices, matrix, route_weights, rows

_FORM: Mapping[str, Any] = {
    "alpha": (float, 1.0),
    "limit": (float, 0.0),
    "offset": (float, 0.0),
    "interleaved": (bool, False),
}


def _weighted_swiglu(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    """The label is that of `swiglu`, which `recompute_swiglu` and others drop."""
    gate_up, weights, order = ins
    rows, columns = matrix(gate_up, "gate_up")
    need(columns % 2 == 0, f"gate_up must have an even number of columns, got {columns}")
    indices(order, "order", rows)
    route_weights(weights, rows, gate_up.dtype)
    limit = attrs.get("limit", 0.0)
    need(limit >= 0, f"limit must be positive, or 0 for none, got {limit}")
    return [OutSpec("swiglu", (rows, columns // 2), gate_up.dtype)]


def _weighted_swiglu_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    d_gate_up, d_weights = b.emit("weighted_swiglu_bwd", dy, *op.ins, label=f"d_{op.ins[0].label}", **op.attrs)
    return d_gate_up, d_weights, None


def _weighted_swiglu_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, gate_up, weights, order = ins
    (spec,) = _weighted_swiglu((gate_up, weights, order), attrs)
    need(dy.shape == spec.shape, f"dy is {list(dy.shape)}, gate_up {list(gate_up.shape)}")
    return [OutSpec("d_gate_up", gate_up.shape, gate_up.dtype), OutSpec("d_weights", weights.shape, weights.dtype)]


def _gate_rows(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, gate = ins
    tokens, _ = matrix(x, "x")
    need(gate.shape == (tokens, 1), f"gate must have the shape [{tokens}, 1], not {gate!r}")
    return [OutSpec("mlp_out", x.shape, x.dtype)]


def _gate_rows_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    dx, d_gate = b.emit("gate_rows_bwd", dy, *op.ins, label=f"d_{op.ins[0].label}")
    return dx, d_gate


def _gate_rows_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, x, gate = ins
    (spec,) = _gate_rows((x, gate), attrs)
    need(dy.shape == spec.shape, f"dy is {list(dy.shape)}, x {list(x.shape)}")
    return [OutSpec("d_x", x.shape, x.dtype), OutSpec("d_gate", gate.shape, gate.dtype)]


GATE: tuple[OpDef, ...] = (
    define(
        "weighted_swiglu",
        _weighted_swiglu,
        attrs=_FORM,
        vjp=_weighted_swiglu_vjp,
        flops=lambda op: 4 * op.outs[0].size,
        row_wise=rows((0, 1, 2), local=(0,), takes=(0, 2)),
    ),
    define(
        "weighted_swiglu_bwd",
        _weighted_swiglu_bwd,
        attrs=_FORM,
        may_overwrite=lambda op: {0: 1},
        flops=lambda op: 9 * op.ins[0].size,
        row_wise=rows((0, 1, 2, 3), (0, 1), local=(0,), takes=(0, 1, 3)),
    ),
    define("gate_rows", _gate_rows, vjp=_gate_rows_vjp, flops=lambda op: op.ins[0].size, row_wise=rows((0, 1))),
    define("gate_rows_bwd", _gate_rows_bwd, flops=lambda op: 4 * op.ins[0].size, row_wise=rows((0, 1, 2), (0, 1))),
)

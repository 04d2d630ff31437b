"""Ops of a mixture of experts that drops no token.

Each of T tokens goes to k of E experts, so there are R = T k rows, whatever the routes are: all shapes are known before
the run, and the sizes of the groups stay on the device. A slot is t k + j, the j-th expert of token t. Rows are slots
in the order of their experts.

    route             (logits [T, E]; k, normalize) -> weights fp32 [T, k], experts int32 [T, k]
    expert_order      (experts int32 [T, k]; n_experts E) -> order int32 [R], place int32 [R], ends int32 [E]
    gather_rows       (x [T, D], order, place) -> [R, D]       the token of each row
    sum_rows          (y [R, D], order, place; k) -> [T, D]    the sum of the rows of each token
    grouped_linear    (x [R, K], w [E N, K], ends) -> [R, N]   of each row with the weight of its expert
    weighted_swiglu   (gate_up [R, 2F], weights fp32 [T, k], order) -> [R, F]
    router_load       (logits [T, E], experts, targets int32 [T], [before]; layer, layers L) -> fp32 [L, E + 1]

order[row] is the slot of a row, place[slot] the row of a slot, ends[e] the end of the rows of expert e. Weights of
experts are rows one above another, as q, k and v are those of one param: the first N rows are of expert 0. The rows of
gate_up are, for each expert, F of the gate and F of the value.

Adapters of experts multiply by stacks of thin matrices [E r, K] and [E N, r]. Products over at most MOST_THIN terms add
to a base, in place of an `add`: grouped_linear_add and grouped_linear_dgrad_add (the same inputs, base). If the base is
such a product too, one op computes both: grouped_linear_pair and grouped_linear_dgrad_pair (x, w, ends, x2, w2).

router_load collects what is reported of the tokens with a label (`targets` >= 0). Row `layer` has the routes of each
expert, and last the sum of the entropies in nats of the router's softmax over all experts; the others are those of
`before`, or 0. Numbers of routes are exact up to 2^24 a layer and expert.

The weights of the routes multiply what enters the down projection. That is their place because it is narrower than what
leaves it, which no backward op reads then. So the sum of the experts of a token is `sum_rows`, and its gradient
`gather_rows`, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import (
    IN_OUTPUTS,
    Emitter,
    Gradients,
    Op,
    OpDef,
    OutSpec,
    Product,
    ProgramError,
    Rewrites,
    Value,
    accumulator,
)

Ins = Sequence[Value]
Attrs = Mapping[str, Any]

_REFERENCE = "surogate_models_moe.reference"

MOST_THIN = 64
"""Most terms of a product whose time is that of what it writes, so that adding to a base is worth a kernel."""


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramError(message)


def _matrix(value: Value, name: str) -> tuple[int, int]:
    _need(len(value.shape) == 2, f"{name} must have two dimensions, not {value!r}")
    return value.shape[0], value.shape[1]


def _indices(value: Value, name: str, *shape: int) -> None:
    _need(value.dtype == "int32" and value.shape == shape, f"{name} must be int32 {list(shape)}, not {value!r}")


# ------------------------------------------------------------------------------------------------------------- routes


def _route(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (logits,) = ins
    tokens, experts = _matrix(logits, "logits")
    _need(1 <= attrs["k"] <= experts, f"k must be from 1 to {experts}, got {attrs['k']}")
    shape = (tokens, attrs["k"])
    return [OutSpec("route_weights", shape, accumulator(logits.dtype)), OutSpec("experts", shape, "int32")]


def _route_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    d_weights = grads[0]
    assert d_weights is not None
    return (b.apply("route_bwd", d_weights, op.ins[0], op.outs[1], normalize=op.attrs["normalize"]),)


def _route_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    d_weights, logits, experts = ins
    tokens, _ = _matrix(logits, "logits")
    _indices(experts, "experts", tokens, _matrix(experts, "experts")[1])
    _need(d_weights.shape == experts.shape, f"d_weights is {list(d_weights.shape)}, experts {list(experts.shape)}")
    return [OutSpec("d_logits", logits.shape, logits.dtype)]


def _expert_order(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (experts,) = ins
    _indices(experts, "experts", *_matrix(experts, "experts"))
    labels = {"order": experts.size, "place": experts.size, "ends": attrs["n_experts"]}
    return [OutSpec(label, (size,), "int32") for label, size in labels.items()]


def _router_load(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    logits, experts, targets, *before = ins
    tokens, n_experts = _matrix(logits, "logits")
    _indices(experts, "experts", tokens, _matrix(experts, "experts")[1])
    _indices(targets, "targets", tokens)
    _need(0 <= attrs["layer"] < attrs["layers"], f"layer must be from 0 to {attrs['layers'] - 1}, got {attrs['layer']}")
    spec = OutSpec("router_load", (attrs["layers"], n_experts + 1), accumulator(logits.dtype))
    fits = all((v.shape, v.dtype) == (spec.shape, spec.dtype) for v in before)
    _need(len(before) < 2 and fits, f"before must be {spec.dtype} {list(spec.shape)}, not {before!r}")
    return [spec]


# --------------------------------------------------------------------------------------------------------------- rows


def _gather_rows(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, order, place = ins
    tokens, width = _matrix(x, "x")
    _need(order.size % tokens == 0, f"{order.size} rows are no multiple of {tokens} tokens")
    for name, value in (("order", order), ("place", place)):
        _indices(value, name, order.size)
    return [OutSpec("rows", (order.size, width), x.dtype)]


def _gather_rows_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    x, order, place = op.ins
    (dy,) = grads
    assert dy is not None
    return b.apply("sum_rows", dy, order, place, k=order.size // x.shape[0], label=f"d_{x.label}"), None, None


def _sum_rows(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    y, order, place = ins
    rows, width = _matrix(y, "y")
    _need(attrs["k"] > 0 and rows % attrs["k"] == 0, f"{rows} rows are no multiple of k, {attrs['k']}")
    for name, value in (("order", order), ("place", place)):
        _indices(value, name, rows)
    return [OutSpec("mlp_out", (rows // attrs["k"], width), y.dtype)]


def _sum_rows_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    return b.apply("gather_rows", dy, *op.ins[1:], label=f"d_{op.ins[0].label}"), None, None


# ----------------------------------------------------------------------------------------------------------- products


def _weight(w: Value, ends: Value) -> tuple[int, int]:
    """Return the rows and columns of the weight of one expert."""
    rows, columns = _matrix(w, "w")
    _indices(ends, "ends", ends.size)
    _need(rows % ends.size == 0, f"the {rows} rows of w are no multiple of {ends.size} experts")
    return rows // ends.size, columns


def _grouped(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w, ends = ins
    (rows, k), (n, columns) = _matrix(x, "x"), _weight(w, ends)
    _need(k == columns, f"x has {k} columns, w has {columns}")
    return [OutSpec("linear", (rows, n), x.dtype)]


def _grouped_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    x, w, ends = op.ins
    (dy,) = grads
    assert dy is not None
    dw = b.apply("grouped_linear_wgrad", dy, x, ends)
    return b.apply("grouped_linear_dgrad", dy, w, ends, label=f"d_{x.label}"), dw, None


def _grouped_dgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, w, ends = ins
    (rows, n), (weight_rows, k) = _matrix(dy, "dy"), _weight(w, ends)
    _need(n == weight_rows, f"dy has {n} columns, the weight of an expert {weight_rows} rows")
    return [OutSpec("d_linear", (rows, k), dy.dtype)]


def _grouped_wgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, x, ends = ins
    (rows, n), (x_rows, k) = _matrix(dy, "dy"), _matrix(x, "x")
    _need(rows == x_rows, f"dy has {rows} rows, x has {x_rows}")
    _indices(ends, "ends", ends.size)
    return [OutSpec("d_weight", (ends.size * n, k), attrs.get("dtype", accumulator(dy.dtype)))]


def _added(product: Any) -> Any:
    """Return the rule of the shape of a product that adds to its last input."""

    def infer(ins: Ins, attrs: Attrs) -> list[OutSpec]:
        (spec,), base = product(ins[:3], attrs), ins[3]
        _need((base.shape, base.dtype) == (spec.shape, spec.dtype), f"base is {base!r}, the product {list(spec.shape)}")
        return [spec]

    return infer


def _adding(op: Op) -> str:
    terms = op.ins[0].shape[1]
    return f"{op.kind}_add" if terms <= MOST_THIN else ""


def _paired(product: Any) -> Any:
    """Return the rule of the shape of the sum of two products."""

    def infer(ins: Ins, attrs: Attrs) -> list[OutSpec]:
        x, w, ends, x2, w2 = ins
        (spec,), (other,) = product((x, w, ends), attrs), product((x2, w2, ends), attrs)
        _need(spec == other, f"the products are {spec.dtype} {list(spec.shape)} and {other.dtype} {list(other.shape)}")
        return [spec]

    return infer


def _grouped_add_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return *_grouped_vjp(b, op.changed(ins=op.ins[:3]), grads), grads[0]


def _grouped_flops(op: Op) -> int:
    """2RNK: each row meets the weight of one expert."""
    other = op.ins[1] if op.kind == "grouped_linear_wgrad" else op.outs[0]
    return 2 * op.ins[0].size * other.shape[1]


def _pair_flops(op: Op) -> int:
    return 2 * (op.ins[0].size + op.ins[3].size) * op.outs[0].shape[1]


# ------------------------------------------------------------------------------------------------------------- SwiGLU


def _weighted_swiglu(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    """The label is that of `swiglu`, which `recompute_swiglu` and others drop."""
    gate_up, weights, order = ins
    rows, columns = _matrix(gate_up, "gate_up")
    _need(columns % 2 == 0, f"gate_up must have an even number of columns, got {columns}")
    _indices(order, "order", rows)
    total = accumulator(gate_up.dtype)
    _need(weights.size == rows and weights.dtype == total, f"weights must be {total} with {rows} elements")
    return [OutSpec("swiglu", (rows, columns // 2), gate_up.dtype)]


def _weighted_swiglu_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    d_gate_up, d_weights = b.emit("weighted_swiglu_bwd", dy, *op.ins, label=f"d_{op.ins[0].label}")
    return d_gate_up, d_weights, None


def _weighted_swiglu_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, gate_up, weights, order = ins
    (spec,) = _weighted_swiglu((gate_up, weights, order), attrs)
    _need(dy.shape == spec.shape, f"dy is {list(dy.shape)}, gate_up {list(gate_up.shape)}")
    return [OutSpec("d_gate_up", gate_up.shape, gate_up.dtype), OutSpec("d_weights", weights.shape, weights.dtype)]


def _op(kind: str, infer: Any, **fields: Any) -> OpDef:
    return OpDef(kind=kind, infer=infer, reference=f"{_REFERENCE}:{kind}", **fields)


OPS: tuple[OpDef, ...] = (
    _op(
        "route",
        _route,
        attrs={"k": int, "normalize": bool},
        vjp=_route_vjp,
        flops=lambda op: 5 * op.ins[0].size,
    ),
    _op("route_bwd", _route_bwd, attrs={"normalize": bool}, flops=lambda op: 5 * op.ins[1].size),
    _op("expert_order", _expert_order, attrs={"n_experts": int}),
    _op(
        "router_load",
        _router_load,
        attrs={"layer": int, "layers": int},
        may_overwrite=lambda op: {0: 3} if len(op.ins) == 4 else {},
        flops=lambda op: 5 * op.ins[0].size,
    ),
    # The backward pass gathers again what it reads: k rows of a token are k times the memory of their source.
    _op("gather_rows", _gather_rows, vjp=_gather_rows_vjp, always_recomputed=True, moves=True),
    _op("sum_rows", _sum_rows, attrs={"k": int}, vjp=_sum_rows_vjp, flops=lambda op: op.ins[0].size),
    _op(
        "grouped_linear",
        _grouped,
        vjp=_grouped_vjp,
        flops=_grouped_flops,
        product=Product(of="forward"),
        group_ends=2,
        rewrites=Rewrites(add_kind=_adding),
    ),
    _op(
        "grouped_linear_add",
        _added(_grouped),
        vjp=_grouped_add_vjp,
        flops=_grouped_flops,
        may_overwrite=lambda op: {0: 3},
    ),
    _op(
        "grouped_linear_dgrad",
        _grouped_dgrad,
        flops=_grouped_flops,
        product=Product(of="dgrad"),
        group_ends=2,
        rewrites=Rewrites(add_kind=_adding),
    ),
    _op(
        "grouped_linear_dgrad_add",
        _added(_grouped_dgrad),
        flops=_grouped_flops,
        may_overwrite=lambda op: {0: 3},
    ),
    _op("grouped_linear_pair", _paired(_grouped), flops=_pair_flops),
    _op("grouped_linear_dgrad_pair", _paired(_grouped_dgrad), flops=_pair_flops),
    _op(
        "grouped_linear_wgrad",
        _grouped_wgrad,
        attrs={"dtype": (str | None, IN_OUTPUTS)},
        flops=_grouped_flops,
        product=Product(of="wgrad"),
        group_ends=2,
    ),
    _op("weighted_swiglu", _weighted_swiglu, vjp=_weighted_swiglu_vjp, flops=lambda op: 4 * op.outs[0].size),
    _op(
        "weighted_swiglu_bwd",
        _weighted_swiglu_bwd,
        may_overwrite=lambda op: {0: 1},
        flops=lambda op: 9 * op.ins[0].size,
    ),
)

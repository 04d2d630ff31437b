"""Tokens on their way to experts and back."""

from __future__ import annotations

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, accumulator, need

from .shapes import Attrs, Ins, define, expert_bias, indices, matrix, route_weights
from .shapes import rows as row_wise


def _gather_rows(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, order, place = ins
    tokens, width = matrix(x, "x")
    need(order.size % tokens == 0, f"{order.size} rows are no multiple of {tokens} tokens")
    for name, value in (("order", order), ("place", place)):
        indices(value, name, order.size)
    return [OutSpec("rows", (order.size, width), x.dtype)]


def _gather_rows_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    x, order, place = op.ins
    (dy,) = grads
    assert dy is not None
    return b.apply("sum_rows", dy, order, place, k=order.size // x.shape[0], label=f"d_{x.label}"), None, None


def _sum_rows(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    y, order, place = ins
    rows, width = matrix(y, "y")
    need(attrs["k"] > 0 and rows % attrs["k"] == 0, f"{rows} rows are no multiple of k, {attrs['k']}")
    for name, value in (("order", order), ("place", place)):
        indices(value, name, rows)
    return [OutSpec("mlp_out", (rows // attrs["k"], width), y.dtype)]


def _sum_rows_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    return b.apply("gather_rows", dy, *op.ins[1:], label=f"d_{op.ins[0].label}"), None, None


def _add_expert_bias(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    y, weights, experts, bias = ins
    tokens, width = matrix(y, "y")
    indices(experts, "experts", tokens, matrix(experts, "experts")[1])
    route_weights(weights, experts.size, y.dtype)
    expert_bias(bias, matrix(bias, "bias")[0], width)
    return [OutSpec("mlp_out", y.shape, y.dtype)]


def _add_expert_bias_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    _, weights, experts, bias = op.ins
    (dy,) = grads
    assert dy is not None
    d_weights = b.apply("expert_bias_dgrad", dy, experts, bias)
    return dy, d_weights, None, b.apply("expert_bias_grad", dy, weights, experts, n_experts=bias.shape[0])


def _expert_bias_dgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, experts, bias = ins
    tokens, width = matrix(dy, "dy")
    indices(experts, "experts", tokens, matrix(experts, "experts")[1])
    expert_bias(bias, matrix(bias, "bias")[0], width)
    return [OutSpec("d_weights", experts.shape, accumulator(dy.dtype))]


def _expert_bias_grad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, weights, experts = ins
    tokens, width = matrix(dy, "dy")
    indices(experts, "experts", tokens, matrix(experts, "experts")[1])
    route_weights(weights, experts.size, dy.dtype)
    return [OutSpec("d_bias", (attrs["n_experts"], width), accumulator(dy.dtype))]


ROWS: tuple[OpDef, ...] = (
    # The backward pass gathers again what it reads: k rows of a token are k times the memory of their source.
    define(
        "gather_rows",
        _gather_rows,
        vjp=_gather_rows_vjp,
        always_recomputed=True,
        moves=True,
        row_wise=row_wise((0, 1, 2), local=(0,), takes=(1, 2)),
    ),
    define(
        "sum_rows",
        _sum_rows,
        attrs={"k": int},
        vjp=_sum_rows_vjp,
        flops=lambda op: op.ins[0].size,
        row_wise=row_wise((0, 1, 2), takes=(0, 1, 2)),
    ),
    define(
        "add_expert_bias",
        _add_expert_bias,
        vjp=_add_expert_bias_vjp,
        may_overwrite=lambda op: {0: 0},
        param_kinds={3: "vector"},
        flops=lambda op: 2 * op.ins[2].size * op.outs[0].shape[1],
        row_wise=row_wise((0, 1, 2)),
    ),
    define(
        "expert_bias_dgrad",
        _expert_bias_dgrad,
        flops=lambda op: 2 * op.ins[1].size * op.ins[0].shape[1],
        row_wise=row_wise((0, 1)),
    ),
    define(
        "expert_bias_grad",
        _expert_bias_grad,
        attrs={"n_experts": int},
        flops=lambda op: 2 * op.ins[2].size * op.ins[0].shape[1],
        row_wise=row_wise((0, 1, 2), (), sums=(0,)),
    ),
)

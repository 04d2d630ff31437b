"""The choice of experts for each token, the order of rows that it makes, and what is reported of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, accumulator, need

from .shapes import Attrs, Ins, define, indices, matrix, rows

SOFTMAX, SIGMOID = "softmax", "sigmoid"
_WEIGHING: Mapping[str, Any] = {"scoring": (str, SOFTMAX), "scale": (float, 1.0), "epsilon": (float, 0.0)}
"""Attributes that decide the weights of chosen experts, besides `normalize`."""
_CHOOSING: Mapping[str, Any] = {"groups": (int, 1), "chosen_groups": (int, 1)}
"""Attributes that decide the choice, besides k."""


def _weighing(attrs: Attrs) -> None:
    scoring = attrs.get("scoring", SOFTMAX)
    need(scoring in (SOFTMAX, SIGMOID), f"scoring must be {SOFTMAX} or {SIGMOID}, got {scoring!r}")
    epsilon = attrs.get("epsilon", 0.0)
    need(epsilon >= 0, f"epsilon must be at least 0, got {epsilon}")
    need(not epsilon or attrs["normalize"], f"epsilon {epsilon} is part of a sum that is not taken: normalize is False")


def _route(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    logits, *bias = ins
    tokens, experts = matrix(logits, "logits")
    k, groups, chosen = attrs["k"], attrs.get("groups", 1), attrs.get("chosen_groups", 1)
    need(1 <= k <= experts, f"k must be from 1 to {experts}, got {k}")
    need(groups >= 1 and experts % groups == 0, f"groups must divide the {experts} experts, got {groups}")
    need(1 <= chosen <= groups, f"chosen_groups must be from 1 to groups, {groups}, got {chosen}")
    size = experts // groups
    need(groups == 1 or size > 1, f"a group is judged by its two best experts, and {groups} groups have one each")
    need(k <= chosen * size, f"k must be at most {chosen * size}, the experts of {chosen} groups, got {k}")
    _weighing(attrs)
    total = accumulator(logits.dtype)
    for value in bias:
        fits = value.shape == (experts,) and value.dtype == total
        need(len(bias) == 1 and fits, f"bias must be {total} [{experts}], not {value!r}")
    return [OutSpec("route_weights", (tokens, k), total), OutSpec("experts", (tokens, k), "int32")]


def _route_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    d_weights = grads[0]
    assert d_weights is not None
    attrs = {name: value for name, value in op.attrs.items() if name == "normalize" or name in _WEIGHING}
    d_logits = b.apply("route_bwd", d_weights, op.ins[0], op.outs[1], **attrs)
    return (d_logits, *(None for _ in op.ins[1:]))  # a bias decides between experts, which has no gradient


def _route_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    d_weights, logits, experts = ins
    tokens, _ = matrix(logits, "logits")
    indices(experts, "experts", tokens, matrix(experts, "experts")[1])
    need(d_weights.shape == experts.shape, f"d_weights is {list(d_weights.shape)}, experts {list(experts.shape)}")
    _weighing(attrs)
    return [OutSpec("d_logits", logits.shape, logits.dtype)]


def _expert_order(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (experts,) = ins
    indices(experts, "experts", *matrix(experts, "experts"))
    labels = {"order": experts.size, "place": experts.size, "ends": attrs["n_experts"]}
    return [OutSpec(label, (size,), "int32") for label, size in labels.items()]


def _router_load(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    logits, experts, targets, *before = ins
    tokens, n_experts = matrix(logits, "logits")
    indices(experts, "experts", tokens, matrix(experts, "experts")[1])
    indices(targets, "targets", tokens)
    need(0 <= attrs["layer"] < attrs["layers"], f"layer must be from 0 to {attrs['layers'] - 1}, got {attrs['layer']}")
    spec = OutSpec("router_load", (attrs["layers"], n_experts + 1), accumulator(logits.dtype))
    fits = all((v.shape, v.dtype) == (spec.shape, spec.dtype) for v in before)
    need(len(before) < 2 and fits, f"before must be {spec.dtype} {list(spec.shape)}, not {before!r}")
    return [spec]


ROUTES: tuple[OpDef, ...] = (
    define(
        "route",
        _route,
        attrs={"k": int, "normalize": bool, **_WEIGHING, **_CHOOSING},
        optional={"bias": 1},
        vjp=_route_vjp,
        flops=lambda op: 5 * op.ins[0].size,
        row_wise=rows((0,), (0, 1)),
    ),
    define(
        "route_bwd",
        _route_bwd,
        attrs={"normalize": bool, **_WEIGHING},
        flops=lambda op: 5 * op.ins[1].size,
        row_wise=rows((0, 1, 2)),
    ),
    define("expert_order", _expert_order, attrs={"n_experts": int}, row_wise=rows((0,), (0, 1), local=(0, 1, 2))),
    define(
        "router_load",
        _router_load,
        attrs={"layer": int, "layers": int},
        may_overwrite=lambda op: {0: 3} if len(op.ins) == 4 else {},
        flops=lambda op: 5 * op.ins[0].size,
    ),
)

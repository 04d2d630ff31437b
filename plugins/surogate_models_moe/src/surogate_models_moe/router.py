"""The router: the experts of each token, the weights of its routes, and the order of rows."""

from __future__ import annotations

from dataclasses import dataclass

from surogate_core.api import Builder, Init, Value, WeightMap, accumulator
from surogate_models.api import linear, weight_map

from .sizes import MixtureDims


@dataclass(frozen=True)
class Routes:
    """The routes of T tokens to k experts each, which are R = T k rows.

    logits   [T, n_experts]
    weights  fp32 [T, k]
    experts  int32 [T, k]
    order    int32 [R], the route of each row: rows are in the order of their experts
    place    int32 [R], the row of each route
    ends     int32 [n_experts], the end of the rows of each expert
    """

    logits: Value
    weights: Value
    experts: Value
    order: Value
    place: Value
    ends: Value


def choose(b: Builder, d: MixtureDims, name: str, x: Value) -> Routes:
    """Emit the router of x [T, d_model]. Its params begin with `name`."""
    m, attrs = d.mixture, {"dtype": accumulator(x.dtype)} if d.mixture.router.wide else {}
    logits = linear(b, d, x, f"{name}.router", m.n_experts, label="router_logits", bias=m.router.biased, **attrs)
    bias = []
    if m.router.corrected:
        bias.append(b.param(f"{name}.correction", (m.n_experts,), Init(kind="zeros"), dtype=accumulator(x.dtype)))
    weights, experts = b.emit("route", logits, *bias, k=m.k, **m.router.attrs)
    return ordered(b, d, logits, weights, experts)


def ordered(b: Builder, d: MixtureDims, logits: Value, weights: Value, experts: Value) -> Routes:
    """Emit the order of rows for the choice of a router of the family's own: weights fp32 [T, k], experts int32."""
    return Routes(logits, weights, experts, *b.emit("expert_order", experts, n_experts=d.mixture.n_experts))


def router_weights(d: MixtureDims, name: str, module: str, *, correction: str = "") -> list[WeightMap]:
    """Return the weight maps of `choose`.

    module      what has `weight`, and `bias` if the logits have one
    correction  the tensor of the correction bias, if the router is `corrected`
    """
    m = d.mixture
    maps = [weight_map(f"{name}.router", (f"{module}.weight", m.n_experts, d.d_model), kind="router")]
    if m.router.biased:
        maps.append(weight_map(f"{name}.router_bias", (f"{module}.bias", m.n_experts)))
    if m.router.corrected:
        maps.append(weight_map(f"{name}.correction", (correction, m.n_experts), trained=False))
    return maps

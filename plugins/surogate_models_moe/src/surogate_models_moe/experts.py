"""The experts: a gated MLP each, on the rows of the tokens that go to it."""

from __future__ import annotations

from surogate_core.api import Builder, HFTensor, Init, ProgramError, Value, WeightMap
from surogate_models.api import Stacked, Transposed, weight_map

from .router import Routes
from .sizes import MixtureDims

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of the projections of an expert in most checkpoints."""


def routed(b: Builder, d: MixtureDims, name: str, x: Value, routes: Routes) -> Value:
    """Emit the experts of x [T, d_model]: -> [T, d_model], for each token the weighted sum of its experts.

    The weights multiply what enters the down projection, so its bias is added behind the sum (see `ops`).
    """
    m, at = d.mixture, routes
    rows = b.apply("gather_rows", x, at.order, at.place)
    gate_up = _products(b, d, rows, f"{name}.gate_up", 2 * m.d_expert, at.ends, label="gate_up", bias=m.biased)
    middle = b.apply("weighted_swiglu", gate_up, at.weights, at.order, **m.gate.attrs)
    y = _products(b, d, middle, f"{name}.down", d.d_model, at.ends, label="expert_out")
    y = b.apply("sum_rows", y, at.order, at.place, k=m.k)
    if not m.biased:
        return y
    return b.apply("add_expert_bias", y, at.weights, at.experts, _bias(b, d, f"{name}.down", d.d_model))


def _products(
    b: Builder, d: MixtureDims, x: Value, name: str, rows: int, ends: Value, *, label: str, bias: bool = False
) -> Value:
    """Emit a linear layer of each expert. The weights are one param, [n_experts * rows, columns of x]."""
    init = Init(kind="normal", std=d.init_std, residual_projection=label == "expert_out")
    w = b.param(name, (d.mixture.n_experts * rows, x.shape[1]), init)
    more = [_bias(b, d, name, rows)] if bias else []
    return b.apply("grouped_linear", x, w, ends, *more, label=label)


def _bias(b: Builder, d: MixtureDims, name: str, rows: int) -> Value:
    return b.param(f"{name}_bias", (d.mixture.n_experts, rows), Init(kind="zeros"))


def expert_weights(
    d: MixtureDims, name: str, module: str, *, projections: tuple[str, str, str] = PROJECTIONS
) -> list[WeightMap]:
    """Return the weight maps of `routed` for a checkpoint with a matrix for each expert and projection.

    projections: the names of gate, up and down in the module of an expert, as in `module`.0.gate_proj.weight.
    """
    m, (*both, last) = d.mixture, projections
    if m.biased:
        raise ProgramError(
            f"{module}: biases of experts in a tensor for each are not supported: see stacked_expert_weights"
        )
    experts = [f"{module}.{e}" for e in range(m.n_experts)]
    gate_up = ((f"{expert}.{x}.weight", m.d_expert, d.d_model) for expert in experts for x in both)
    down = ((f"{expert}.{last}.weight", d.d_model, m.d_expert) for expert in experts)
    return [
        weight_map(f"{name}.gate_up", *gate_up, parameter=f"{module}.gate_up_proj"),
        weight_map(f"{name}.down", *down, parameter=f"{module}.down_proj"),
    ]


def stacked_expert_weights(d: MixtureDims, name: str, module: str, *, transposed: bool = False) -> list[WeightMap]:
    """Return the weight maps of `routed` for a checkpoint with the matrices of all experts in one tensor.

    They are `module`.gate_up_proj and `module`.down_proj, [n_experts, rows, columns], or with `transposed` [n_experts,
    columns, rows], and with biases `..._proj_bias`, [n_experts, rows].
    """
    m, maps = d.mixture, []
    for which, rows, columns in (("gate_up", 2 * m.d_expert, d.d_model), ("down", d.d_model, m.d_expert)):
        shape = (m.n_experts, columns, rows) if transposed else (m.n_experts, rows, columns)
        layout = Stacked(rows, Transposed() if transposed else None)
        stack = HFTensor(f"{module}.{which}_proj", shape, layout)
        maps.append(WeightMap(f"{name}.{which}", (stack,), matrices=m.n_experts, parameter=stack.name))
        if m.biased:
            bias = (f"{module}.{which}_proj_bias", m.n_experts, rows)
            maps.append(weight_map(f"{name}.{which}_bias", bias, kind="vector"))
    return maps

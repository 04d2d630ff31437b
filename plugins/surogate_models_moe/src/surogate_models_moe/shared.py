"""The shared expert: an MLP that every token goes to, beside those that the router chooses."""

from __future__ import annotations

from dataclasses import replace

from surogate_core.api import Builder, Value, WeightMap
from surogate_models.api import linear, mlp, mlp_weights, weight_map

from .sizes import MixtureDims


def shared(b: Builder, d: MixtureDims, name: str, x: Value) -> Value:
    """Emit the shared expert of x [T, d_model]: -> [T, d_model]. Its params begin with `name`.shared."""
    y = mlp(b, _sizes(d), f"{name}.shared", x)
    if not d.mixture.shared_gated:
        return y
    gate = linear(b, d, x, f"{name}.shared.gate", 1, label="shared_gate")
    return b.apply("gate_rows", y, gate)


def shared_weights(d: MixtureDims, name: str, module: str, *, gate: str = "") -> list[WeightMap]:
    """Return the weight maps of `shared`, whose projections are in `module`; none if there is no shared expert.

    gate: the module of its gate, if it has one.
    """
    if not d.mixture.d_shared:
        return []
    maps = mlp_weights(_sizes(d), f"{name}.shared", module)
    if d.mixture.shared_gated:
        maps.append(weight_map(f"{name}.shared.gate", (f"{gate}.weight", 1, d.d_model), precise=True))
    return maps


def _sizes(d: MixtureDims) -> MixtureDims:
    return replace(d, d_ff=d.mixture.d_shared)

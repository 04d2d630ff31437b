"""A mixture of experts in place of an MLP: sizes, block, weight maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surogate_core.api import BatchInputs, Builder, Init, Value, WeightMap
from surogate_models.api import (
    DecoderDims,
    ResidualStream,
    add_norm,
    invalid,
    is_given,
    linear,
    mlp,
    mlp_weights,
    read_bool,
    read_int,
    refuse_layer_types,
    weight_map,
)

_UNSERVED = {
    "shared_expert_intermediate_size": "shared experts",
    "num_shared_experts": "shared experts",
    "n_shared_experts": "shared experts",
    "shared_intermediate_size": "shared experts",
    "n_routed_experts": "routed experts beside shared ones",
    "scoring_func": "other routers than softmax",
    "topk_method": "other routers than softmax",
    "router_jitter_noise": "noisy routers",
    "first_k_dense_replace": "dense layers by another key than mlp_only_layers",
    "n_group": "groups of experts",
    "topk_group": "groups of experts",
    "routed_scaling_factor": "scaled routes",
    "swiglu_limit": "clamped activations",
}
"""Keys of other mixtures of experts, and what they ask for."""


@dataclass(frozen=True, kw_only=True)
class MixtureDims(DecoderDims):
    """Sizes of a model.

    n_experts  experts of a layer
    k          experts that a token goes to
    d_expert   width of an expert
    normalize  the weights of a token's routes add up to 1
    dense      layers that have an MLP of width d_ff instead
    """

    n_experts: int
    k: int
    d_expert: int
    normalize: bool
    dense: frozenset[int] = frozenset()


def read_mixture(config: Mapping[str, Any], *, n_experts: int, d_expert: int) -> dict[str, Any]:
    """Read the fields of `MixtureDims` that are not of `DecoderDims`. The defaults are those of the family.

    Raises ConfigError for what the program does not have.
    """
    refuse_layer_types(config)
    for key, what in _UNSERVED.items():
        if config.get(key):
            raise invalid(key, f"{what} are not supported yet", config[key])
    if read_bool(config, "output_router_logits"):
        reason = "the loss of the router that transformers then adds is not supported yet; must be false"
        raise invalid("output_router_logits", reason, True)
    counts = [key for key in ("num_experts", "num_local_experts") if is_given(config, key)]
    experts = read_int(config, counts[0] if counts else "num_experts", default=n_experts)
    if len(counts) == 2 and read_int(config, counts[1]) != experts:
        raise invalid("num_local_experts", f"must be num_experts, which is {experts}", config["num_local_experts"])
    k = read_int(config, "num_experts_per_tok", default=8)
    if k > experts:
        raise invalid("num_experts_per_tok", f"must be at most the number of experts {experts}", k)
    if "norm_topk_prob" in config and not is_given(config, "norm_topk_prob"):
        raise invalid("norm_topk_prob", "must be true or false; transformers loads no null", None)
    normalize = read_bool(config, "norm_topk_prob")
    return {"n_experts": experts, "k": k, "d_expert": d_expert, "normalize": normalize}


def mixture_or_mlp(b: Builder, d: MixtureDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the norm of a stream, then the mixture of layer i, or its MLP."""
    name = f"layers.{i}.mlp"
    norm, residual = add_norm(b, d, stream, f"{name}.norm", label="residual_mid")
    if i in d.dense:
        return ResidualStream(residual, mlp(b, d, name, norm), stream.collected)
    y, logits, experts = mixture(b, d, name, norm)
    before = () if stream.collected is None else (stream.collected,)
    layer, layers = i - sum(dense < i for dense in d.dense), d.n_layers - len(d.dense)
    load = b.apply("router_load", logits, experts, batch.targets, *before, layer=layer, layers=layers)
    return ResidualStream(residual, y, load)


def mixture(b: Builder, d: MixtureDims, name: str, x: Value) -> tuple[Value, Value, Value]:
    """Emit the mixture of x [T, d_model]: -> [T, d_model]. Also return the router's logits and the experts chosen."""
    logits = linear(b, d, x, f"{name}.router", d.n_experts, label="router_logits")
    weights, experts = b.emit("route", logits, k=d.k, normalize=d.normalize)
    order, place, ends = b.emit("expert_order", experts, n_experts=d.n_experts)
    rows = b.apply("gather_rows", x, order, place)
    gate_up = _experts(b, d, rows, f"{name}.gate_up", 2 * d.d_expert, ends, label="gate_up")
    middle = b.apply("weighted_swiglu", gate_up, weights, order)
    y = _experts(b, d, middle, f"{name}.down", d.d_model, ends, label="expert_out", residual_projection=True)
    return b.apply("sum_rows", y, order, place, k=d.k), logits, experts


def _experts(
    b: Builder,
    d: MixtureDims,
    x: Value,
    name: str,
    rows: int,
    ends: Value,
    *,
    label: str,
    residual_projection: bool = False,
) -> Value:
    """Emit a linear layer of each expert. The weights are one param, [n_experts * rows, columns of x]."""
    init = Init(kind="normal", std=d.init_std, residual_projection=residual_projection)
    w = b.param(name, (d.n_experts * rows, x.shape[1]), init)
    return b.apply("grouped_linear", x, w, ends, label=label)


def mixture_weights(d: MixtureDims, layer: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `mixture_or_mlp`. Checkpoints have a matrix for each expert and projection."""
    name = f"{layer}.mlp"
    norm = weight_map(f"{name}.norm", (f"{source}.post_attention_layernorm.weight", d.d_model))
    if int(layer.removeprefix("layers.")) in d.dense:
        return [*mlp_weights(d, name, f"{source}.mlp"), norm]
    experts = [f"{source}.mlp.experts.{e}" for e in range(d.n_experts)]
    gate_up = ((f"{expert}.{x}_proj.weight", d.d_expert, d.d_model) for expert in experts for x in ("gate", "up"))
    down = ((f"{expert}.down_proj.weight", d.d_model, d.d_expert) for expert in experts)
    return [
        weight_map(f"{name}.router", (f"{source}.mlp.gate.weight", d.n_experts, d.d_model), kind="router"),
        weight_map(f"{name}.gate_up", *gate_up, parameter=f"{source}.mlp.experts.gate_up_proj"),
        weight_map(f"{name}.down", *down, parameter=f"{source}.mlp.experts.down_proj"),
        norm,
    ]

"""A mixture of experts in place of an MLP.

A token passes like this: its router chooses k experts (`router.py`), its row is copied to each of them, their outputs
are weighted and summed (`experts.py`), and what an MLP for all tokens makes of it is added (`shared.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from surogate_core.api import BatchInputs, Builder, ProgramError, Value, WeightMap
from surogate_models.api import (
    ResidualStream,
    add_norm,
    attention,
    attention_weights,
    mlp,
    mlp_weights,
    qk_norm_weights,
    weight_map,
)

from .experts import expert_weights, routed
from .router import Routes, choose, router_weights
from .shared import shared, shared_weights
from .sizes import MixtureDims


def pre_norm_mixture(b: Builder, d: MixtureDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + attention(norm(x)), then x + mixture(norm(x)), or the MLP of a dense layer."""
    name = f"layers.{i}.attn"
    norm, residual = add_norm(b, d, stream, f"{name}.norm")
    attn_out = attention(b, d, batch, name, norm, rope=d.rope)
    return mixture_or_mlp(b, d, batch, i, replace(stream, residual=residual, pending=attn_out))


def mixture_or_mlp(b: Builder, d: MixtureDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the norm of a stream, then the mixture of layer i, or its MLP."""
    name = f"layers.{i}.mlp"
    norm, residual = add_norm(b, d, stream, f"{name}.norm", label="residual_mid")
    if i in d.dense:
        return replace(stream, residual=residual, pending=mlp(b, d, name, norm))
    y, routes = mixture(b, d, name, norm)
    return replace(stream, residual=residual, pending=y, collected=collect(b, d, batch, i, stream, routes))


def mixture(b: Builder, d: MixtureDims, name: str, x: Value) -> tuple[Value, Routes]:
    """Emit the mixture of x [T, d_model]: -> [T, d_model], and the routes."""
    routes = choose(b, d, name, x)
    y = routed(b, d, name, x, routes)
    if d.mixture.d_shared:
        y = b.apply("add", y, shared(b, d, name, x), label="mlp_out")
    return y, routes


def collect(b: Builder, d: MixtureDims, batch: BatchInputs, i: int, stream: ResidualStream, routes: Routes) -> Value:
    """Emit what `metrics` reports of the router of layer i, behind that of the layers before.

    Raises ProgramError if the stream does not have what these collected: a block passes it on.
    """
    layer, layers = i - sum(dense < i for dense in d.dense), d.n_layers - len(d.dense)
    if layer and stream.collected is None:
        raise ProgramError(
            f"layer {i}: the stream has lost what the routers of the layers before report. Make that of a block by "
            "replace(stream, residual=..., pending=...), not by ResidualStream(residual, pending)"
        )
    before = () if stream.collected is None else (stream.collected,)
    return b.apply("router_load", routes.logits, routes.experts, batch.targets, *before, layer=layer, layers=layers)


def pre_norm_mixture_weights(d: MixtureDims, name: str, source: str, **names: Any) -> list[WeightMap]:
    """Return the weight maps of `pre_norm_mixture`. names: those of `mixture_weights`."""
    attn, own = f"{name}.attn", f"{source}.self_attn"
    return [
        *attention_weights(d, attn, own),
        *mixture_weights(d, name, source, **names),
        weight_map(f"{attn}.norm", (f"{source}.input_layernorm.weight", d.d_model)),
        *qk_norm_weights(d, attn, own),
    ]


def mixture_weights(
    d: MixtureDims,
    layer: str,
    source: str,
    *,
    correction: str = "gate.e_score_correction_bias",
    shared_expert: str = "shared_experts",
    shared_gate: str = "shared_expert_gate",
    experts: Callable[[MixtureDims, str, str], list[WeightMap]] = expert_weights,
) -> list[WeightMap]:
    """Return the weight maps of `mixture_or_mlp`.

    experts: those of the experts, `expert_weights` for checkpoints with a matrix for each expert and projection, or
    `stacked_expert_weights`. The other arguments are names in the module of the mixture, `source`.mlp: the correction
    bias of the router, the shared expert, and its gate.
    """
    name, module = f"{layer}.mlp", f"{source}.mlp"
    norm = weight_map(f"{name}.norm", (f"{source}.post_attention_layernorm.weight", d.d_model))
    if int(layer.removeprefix("layers.")) in d.dense:
        return [*mlp_weights(d, name, module), norm]
    return [
        *router_weights(d, name, f"{module}.gate", correction=f"{module}.{correction}"),
        *experts(d, name, f"{module}.experts"),
        *shared_weights(d, name, f"{module}.{shared_expert}", gate=f"{module}.{shared_gate}"),
        norm,
    ]

"""Qwen3-MoE: the attention of Qwen3, and in each layer a mixture of experts, or an MLP where `config.json` says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.api import BatchInputs, Builder, WeightMap
from surogate_models.api import (
    ResidualStream,
    add_norm,
    attention,
    attention_weights,
    decoder,
    invalid,
    qk_norm_weights,
    read_bool,
    read_dims,
    read_head_dim,
    read_int,
    read_n_kv_heads,
    read_rope,
    weight_map,
)

from .metrics import metrics
from .mixture import MixtureDims, mixture_or_mlp, mixture_weights, read_mixture


def dims(config: Mapping[str, Any]) -> MixtureDims:
    """Read the sizes from a parsed `config.json` of transformers 4 or 5.

    Missing keys have the defaults of transformers. Raises ConfigError ("key: what is wrong (got value)") if a key is
    missing or invalid, or if the model needs an unsupported feature: sliding windows, attention dropout, an activation
    other than SiLU, shared experts or another router.
    """
    if read_bool(config, "use_sliding_window"):
        raise invalid("use_sliding_window", "sliding windows of all layers are not supported yet; must be false", True)
    bias = read_bool(config, "attention_bias")
    head_dim = read_head_dim(config)
    sizes = read_dims(
        config,
        n_kv_heads=read_n_kv_heads(config, default=4),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_theta=10_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=32768),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )
    d_expert = read_int(config, "moe_intermediate_size", default=768)
    mixture = read_mixture(config, n_experts=128, d_expert=d_expert)
    return MixtureDims(**vars(sizes), **mixture, dense=_dense_layers(config, sizes.n_layers))


def _dense_layers(config: Mapping[str, Any], n_layers: int) -> frozenset[int]:
    """Return the layers with an MLP: those of `mlp_only_layers`, and all but each `decoder_sparse_step`-th one."""
    named = config.get("mlp_only_layers") or ()
    if not isinstance(named, list | tuple) or any(type(i) is not int or not 0 <= i < n_layers for i in named):
        raise invalid("mlp_only_layers", f"must be a list of numbers of layers, from 0 to {n_layers - 1}", named)
    step = read_int(config, "decoder_sparse_step", default=1)
    dense = frozenset(i for i in range(n_layers) if i in named or (i + 1) % step)
    if len({*named}) == n_layers:
        raise invalid("mlp_only_layers", "leaves no layer with experts. Such a model is a Qwen3", named)
    if len(dense) == n_layers:
        raise invalid("decoder_sparse_step", "leaves no layer with experts. Such a model is a Qwen3", step)
    return dense


def block(b: Builder, d: MixtureDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + attention(norm(x)), then x + mixture(norm(x))."""
    norm, residual = add_norm(b, d, stream, f"layers.{i}.attn.norm")
    attn_out = attention(b, d, batch, f"layers.{i}.attn", norm, rope=d.rope)
    return mixture_or_mlp(b, d, batch, i, ResidualStream(residual, attn_out, stream.collected))


def block_weights(d: MixtureDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `block`."""
    return [
        *attention_weights(d, f"{name}.attn", f"{source}.self_attn"),
        *mixture_weights(d, name, source),
        weight_map(f"{name}.attn.norm", (f"{source}.input_layernorm.weight", d.d_model)),
        *qk_norm_weights(d, f"{name}.attn", f"{source}.self_attn"),
    ]


QWEN3_MOE = decoder(
    name="qwen3_moe",
    summary="Qwen3-MoE: Qwen3 with experts in place of the MLP",
    architecture="Qwen3MoeForCausalLM",
    dims=dims,
    block=block,
    block_weights=block_weights,
    metrics=metrics,
)

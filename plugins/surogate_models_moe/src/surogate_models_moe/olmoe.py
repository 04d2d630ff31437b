"""OLMoE: norms in front of attention and experts, and of all queries and all keys of a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surogate_core.api import BatchInputs, Builder, WeightMap
from surogate_models.api import (
    ResidualStream,
    add_norm,
    attend,
    decoder,
    invalid,
    linear_weights,
    normed_qkv,
    normed_qkv_weights,
    read_bool,
    read_dims,
    read_head_dim,
    read_int,
    read_n_kv_heads,
    read_rope,
    refuse_layer_types,
    weight_map,
)

from .config_json import read_mixture
from .metrics import metrics
from .mixture import mixture_or_mlp, mixture_weights
from .sizes import MixtureDims


def dims(config: Mapping[str, Any]) -> MixtureDims:
    """Read the sizes from a parsed `config.json` of transformers 4 or 5.

    Missing keys have the defaults of transformers. Raises ConfigError ("key: what is wrong (got value)") if a key is
    missing or invalid, or if the model needs an unsupported feature: clipped queries, keys and values, attention
    dropout, an activation other than SiLU, shared experts or another router.
    """
    refuse_layer_types(config)
    if config.get("clip_qkv") is not None:
        raise invalid(
            "clip_qkv", "clipped queries, keys and values are not supported yet; must be null", config["clip_qkv"]
        )
    for key, none in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if config.get(key) not in (None, none):
            raise invalid(key, "layers without experts are not supported by this model", config[key])
    head_dim = read_head_dim(config)
    if head_dim * read_int(config, "num_attention_heads") != read_int(config, "hidden_size"):
        raise invalid("head_dim", "must be hidden_size / num_attention_heads, as the norms are", head_dim)
    bias = read_bool(config, "attention_bias")
    sizes = read_dims(
        {"rms_norm_eps": 1e-5, **config},
        n_kv_heads=read_n_kv_heads(config, default=read_int(config, "num_attention_heads")),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_theta=10_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=4096),
        qkv_bias=bias,
        o_bias=bias,
    )
    return MixtureDims(**vars(sizes), mixture=read_mixture(config, n_experts=64, d_expert=sizes.d_ff))


def block(b: Builder, d: MixtureDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + attention(norm(x)), then x + mixture(norm(x))."""
    name = f"layers.{i}.attn"
    norm, residual = add_norm(b, d, stream, f"{name}.norm")
    attn_out = attend(b, d, batch, name, normed_qkv(b, d, name, norm), rope=d.rope)
    return mixture_or_mlp(b, d, batch, i, replace(stream, residual=residual, pending=attn_out))


def block_weights(d: MixtureDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `block`."""
    attn = f"{source}.self_attn"
    return [
        *normed_qkv_weights(d, f"{name}.attn", attn),
        *linear_weights(f"{name}.attn.o", d.q_rows, d.o_bias, (f"{attn}.o_proj", d.d_model)),
        *mixture_weights(d, name, source),
        weight_map(f"{name}.attn.norm", (f"{source}.input_layernorm.weight", d.d_model)),
    ]


OLMOE = decoder(
    name="olmoe",
    summary="OLMoE: a mixture of experts with norms of whole queries and keys",
    architecture="OlmoeForCausalLM",
    dims=dims,
    block=block,
    block_weights=block_weights,
    metrics=metrics,
)

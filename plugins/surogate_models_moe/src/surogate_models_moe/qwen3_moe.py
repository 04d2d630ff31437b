"""Qwen3-MoE: the attention of Qwen3, and in each layer a mixture of experts, or an MLP where `config.json` says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_models.api import (
    decoder,
    invalid,
    read_bool,
    read_dims,
    read_head_dim,
    read_int,
    read_n_kv_heads,
    read_rope,
    refuse_layer_types,
)

from .config_json import read_dense_layers, read_mixture
from .metrics import metrics
from .mixture import pre_norm_mixture, pre_norm_mixture_weights
from .sizes import MixtureDims


def dims(config: Mapping[str, Any]) -> MixtureDims:
    """Read the sizes from a parsed `config.json` of transformers 4 or 5.

    Missing keys have the defaults of transformers. Raises ConfigError ("key: what is wrong (got value)") if a key is
    missing or invalid, or if the model needs an unsupported feature: sliding windows, attention dropout, an activation
    other than SiLU, shared experts or another router.
    """
    refuse_layer_types(config)
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
    dense = read_dense_layers(config, sizes.n_layers, without="Qwen3")
    return MixtureDims(**vars(sizes), mixture=mixture, dense=dense)


QWEN3_MOE = decoder(
    name="qwen3_moe",
    summary="Qwen3-MoE: Qwen3 with experts in place of the MLP",
    architecture="Qwen3MoeForCausalLM",
    dims=dims,
    block=pre_norm_mixture,
    block_weights=pre_norm_mixture_weights,
    metrics=metrics,
)

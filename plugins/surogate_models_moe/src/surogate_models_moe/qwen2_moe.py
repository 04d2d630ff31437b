"""Qwen2-MoE: the attention of Qwen2.5, and experts beside a shared one that each token opens by a sigmoid."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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
    """Read the sizes from a parsed `config.json`. Missing keys have the defaults of transformers."""
    refuse_layer_types(config)
    if read_bool(config, "use_sliding_window"):
        raise invalid("use_sliding_window", "sliding windows are not supported by this model; must be false", True)
    head_dim = read_head_dim(config)
    sizes = read_dims(
        config,
        n_kv_heads=read_n_kv_heads(config, default=16),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_theta=10_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=32768),
        qkv_bias=read_bool(config, "qkv_bias", default=True),
    )
    shared = "shared_expert_intermediate_size"
    mixture = read_mixture(
        config,
        n_experts=60,
        k=4,
        d_expert=read_int(config, "moe_intermediate_size", default=1408),
        reads=(shared,),
        d_shared=read_int(config, shared, default=5632),
        shared_gated=True,
    )
    dense = read_dense_layers(config, sizes.n_layers, without="Qwen2")
    return MixtureDims(**vars(sizes), mixture=mixture, dense=dense)


QWEN2_MOE = decoder(
    name="qwen2_moe",
    summary="Qwen2-MoE: experts, and a shared one that each token opens by a sigmoid",
    architecture="Qwen2MoeForCausalLM",
    dims=dims,
    block=pre_norm_mixture,
    block_weights=partial(pre_norm_mixture_weights, shared_expert="shared_expert"),
    metrics=metrics,
)

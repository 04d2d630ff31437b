"""GLM-4-MoE: the router of DeepSeek-V3, shared experts, dense first layers, and attention with partial RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from surogate_models.api import (
    decoder,
    read_bool,
    read_dims,
    read_head_dim,
    read_int,
    read_n_kv_heads,
    read_partial_rope,
    refuse_layer_types,
)

from .config_json import CORRECTED_KEYS, read_corrected_router, read_first_dense_layers, read_mixture
from .metrics import metrics
from .mixture import pre_norm_mixture, pre_norm_mixture_weights
from .sizes import MixtureDims

_READ = (*CORRECTED_KEYS, "n_shared_experts", "first_k_dense_replace")
_PREDICTED = "num_nextn_predict_layers"


@dataclass(frozen=True, kw_only=True)
class Glm4MoeDims(MixtureDims):
    """Sizes of a model.

    predicting  layers behind the last one that predict further tokens. No run computes with them; outputs keep those
                that files have.
    """

    predicting: int


def dims(config: Mapping[str, Any]) -> Glm4MoeDims:
    """Read the sizes from a parsed `config.json`. Missing keys have the defaults of transformers."""
    refuse_layer_types(config)
    head_dim = read_head_dim(config)
    sizes = read_dims(
        {"rms_norm_eps": 1e-5, **config},
        n_kv_heads=read_n_kv_heads(config, default=8),
        head_dim=head_dim,
        rope=read_partial_rope({"partial_rotary_factor": 0.5, **config}, head_dim, default_theta=10_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=131072),
        qk_norm=read_bool(config, "use_qk_norm"),
        qkv_bias=read_bool(config, "attention_bias"),
    )
    d_expert = read_int(config, "moe_intermediate_size", default=1408)
    mixture = read_mixture(
        config,
        n_experts=128,
        d_expert=d_expert,
        count="n_routed_experts",
        router=read_corrected_router(config, groups=1, chosen_groups=1, scale=1.0),
        reads=_READ,
        d_shared=d_expert * read_int(config, "n_shared_experts", default=1),
    )
    dense = read_first_dense_layers(config, sizes.n_layers, default=1)
    predicting = read_int(config, _PREDICTED) if config.get(_PREDICTED) else 0
    return Glm4MoeDims(**vars(sizes), mixture=mixture, dense=dense, predicting=predicting)


def predicting_layers(d: Glm4MoeDims) -> list[str]:
    """Return the patterns of the tensors of layers that predict further tokens."""
    return [f"model.layers.{d.n_layers + i}.*" for i in range(d.predicting)]


GLM4_MOE = replace(
    decoder(
        name="glm4_moe",
        summary="GLM-4-MoE: experts chosen by corrected sigmoids, a shared expert, partial RoPE",
        architecture="Glm4MoeForCausalLM",
        dims=dims,
        block=pre_norm_mixture,
        block_weights=pre_norm_mixture_weights,
        metrics=metrics,
    ),
    kept_tensors=predicting_layers,
    may_lack=predicting_layers,  # transformers saves none, and their number all the same
)

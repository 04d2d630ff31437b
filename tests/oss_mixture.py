"""A plugin of one file: layers of mixtures as gpt-oss has them, without attention, written with the surface for
mixtures. Its experts have biases, and are stacks in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.api import WeightMap, provides
from surogate_models.api import TINY_CONFIG, decoder, read_dims, read_int, read_rope, weight_map
from surogate_models_moe.api import (
    Gate,
    MixtureDims,
    Router,
    metrics,
    mixture_or_mlp,
    read_mixture,
    router_weights,
    stacked_expert_weights,
)

SUROGATE_API = {"models": 1}
SUROGATE_EXAMPLES = {
    "model oss_mixture": [
        {
            **TINY_CONFIG,
            "architectures": ["OssMixtureForCausalLM"],
            "model_type": "oss_mixture",
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        }
    ]
}


def dims(config: Mapping[str, Any]) -> MixtureDims:
    sizes = read_dims(
        config, n_kv_heads=2, head_dim=16, rope=read_rope(config, 16, default_theta=1e4), max_positions=64
    )
    mixture = read_mixture(
        config,
        n_experts=128,
        k=4,
        d_expert=read_int(config, "intermediate_size"),
        router=Router(biased=True),
        gate=Gate(alpha=1.702, limit=0.6, offset=1.0, interleaved=True),
        biased=True,
    )
    return MixtureDims(**vars(sizes), mixture=mixture)


def block_weights(d: MixtureDims, name: str, source: str) -> list[WeightMap]:
    mlp, module = f"{name}.mlp", f"{source}.mlp"
    return [
        weight_map(f"{mlp}.norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
        *router_weights(d, mlp, f"{module}.router"),
        *stacked_expert_weights(d, mlp, f"{module}.experts", transposed=True),
    ]


MODEL = decoder(
    name="oss_mixture",
    summary="layers of mixtures as in gpt-oss, without attention",
    architecture="OssMixtureForCausalLM",
    dims=dims,
    block=mixture_or_mlp,
    block_weights=block_weights,
    metrics=metrics,
)
surogate_models = provides([MODEL])

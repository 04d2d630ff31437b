"""DeepSeek-V3 and GLM-4.7-Flash: latent attention, experts that corrected sigmoids choose, dense first layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from surogate_core.api import ModelDef
from surogate_models.api import decoder, invalid, read_int
from surogate_models_moe.api import (
    CORRECTED_KEYS,
    metrics,
    read_corrected_router,
    read_first_dense_layers,
    read_mixture,
)

from .latent import LatentDims, block, block_weights, predicting_layers, read_latent

_READ = (*CORRECTED_KEYS, "n_shared_experts", "first_k_dense_replace")
_FIRST, _KINDS = "first_k_dense_replace", "mlp_layer_types"


def deepseek_v3(config: Mapping[str, Any]) -> LatentDims:
    """Read the sizes of a DeepSeek-V3 from a parsed `config.json`. Missing keys have the defaults of transformers."""
    given = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **config,
    }
    return _dims(given, max_positions=4096, experts=256, d_expert=2048, groups=8, chosen_groups=4, scale=2.5, k=8)


def glm4_moe_lite(config: Mapping[str, Any]) -> LatentDims:
    """Read the sizes of a GLM-4.7-Flash, as `deepseek_v3` does. Its dense layers are those of `mlp_layer_types`."""
    given = {
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        **config,
        _FIRST: _dense_first(config),
    }
    return _dims(given, max_positions=202_752, experts=64, d_expert=1536, groups=1, chosen_groups=1, scale=1.8, k=4)


def _dims(
    config: Mapping[str, Any],
    *,
    max_positions: int,
    experts: int,
    d_expert: int,
    groups: int,
    chosen_groups: int,
    scale: float,
    k: int,
) -> LatentDims:
    latent = read_latent(config, max_positions=max_positions)
    width = read_int(config, "moe_intermediate_size", default=d_expert)
    mixture = read_mixture(
        config,
        n_experts=experts,
        d_expert=width,
        k=k,
        count="n_routed_experts",
        router=read_corrected_router(config, groups=groups, chosen_groups=chosen_groups, scale=scale),
        reads=_READ,
        d_shared=width * read_int(config, "n_shared_experts", default=1),
    )
    dense = read_first_dense_layers(config, latent["n_layers"], default=3)
    return LatentDims(**latent, mixture=mixture, dense=dense)


def _dense_first(config: Mapping[str, Any]) -> int:
    """Return how many of the first layers of a GLM-4.7-Flash are dense: one, if `mlp_layer_types` does not say."""
    kinds, given = config.get(_KINDS), config.get(_FIRST)
    if kinds is None:
        if given not in (None, 1):
            raise invalid(_FIRST, f"transformers ignores it in this model; must be 1, or give {_KINDS}", given)
        return 1
    count = read_int(config, "num_hidden_layers")
    if not isinstance(kinds, list | tuple) or len(kinds) != count or any(x not in ("dense", "sparse") for x in kinds):
        raise invalid(_KINDS, f"must be {count} times dense or sparse", kinds)
    first = next((i for i, kind in enumerate(kinds) if kind == "sparse"), count)
    if "dense" in kinds[first:]:
        raise invalid(_KINDS, "dense layers behind one with experts are not supported", kinds)
    return first


def _family(name: str, models: str, architecture: str, dims: Callable[[Mapping[str, Any]], LatentDims]) -> ModelDef:
    model = decoder(
        name=name,
        summary=f"{models}: latent attention, experts chosen by corrected sigmoids, a shared expert",
        architecture=architecture,
        dims=dims,
        block=block,
        block_weights=block_weights,
        metrics=metrics,
    )
    return replace(model, kept_tensors=predicting_layers, may_lack=predicting_layers)


DEEPSEEK_V3 = _family("deepseek_v3", "DeepSeek-V3", "DeepseekV3ForCausalLM", deepseek_v3)
GLM4_MOE_LITE = _family("glm4_moe_lite", "GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", glm4_moe_lite)

"""Ministral 3 (text): a Mistral with YaRN, whose queries have a factor that grows with the position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surogate_models.api import (
    decoder,
    pre_norm_weights,
    read_dims,
    read_int,
    read_query_scaling,
    read_rope,
)

from .mistral import MistralDims, block, one_window

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The defaults of transformers for missing keys, and for a missing mapping of RoPE."""


def dims(config: Mapping[str, Any]) -> MistralDims:
    """Return the sizes that a parsed `config.json` of transformers describes. Missing keys have its defaults.

    Raises ConfigError ("key: what is wrong (got value)") if a key is invalid, if the model needs an unsupported
    feature, or if RoPE has no `llama_4_scaling_beta`, without which transformers computes nothing.
    """
    config = {**_DEFAULTS, **config}
    if config.get("rope_parameters") is None:
        config["rope_parameters"] = _ROPE
    head_dim = read_int(config, "head_dim")  # transformers does not load null, here and in the number of key heads
    rope = replace(read_rope(config, head_dim, default_theta=10_000.0), query_scaling=read_query_scaling(config))
    sizes = read_dims(
        config,
        n_kv_heads=read_int(config, "num_key_value_heads"),
        head_dim=head_dim,
        rope=rope,
        max_positions=read_int(config, "max_position_embeddings"),
    )
    return MistralDims(**vars(sizes), windows=one_window(config, sizes.n_layers))


MINISTRAL3 = decoder(
    name="ministral3",
    summary="Ministral 3 (text): grouped-query attention, YaRN, queries scaled by position",
    architecture="Ministral3ForCausalLM",
    dims=dims,
    block=block,
    block_weights=pre_norm_weights,
)

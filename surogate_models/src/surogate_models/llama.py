"""Llama 1 to 3: no QK-norm. `attention_bias` and `mlp_bias` enable biases on all attention and all MLP projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_json import read_bool, read_int
from .decoder import decoder, pre_norm
from .dims import DecoderDims, read_dims, read_head_dim, read_n_kv_heads, refuse_layer_types
from .rope import read_rope
from .weight_maps import pre_norm_weights


def dims(config: Mapping[str, Any]) -> DecoderDims:
    """Read the sizes from a parsed `config.json` of transformers 4 or 5.

    Missing keys have the defaults of transformers. For Llama 1 these are one key/value head per query head and a
    `rope_theta` of 10,000. Raises ConfigError ("key: what is wrong (got value)") if a key is missing or invalid, or if
    the model needs an unsupported feature: sliding windows, attention dropout or an activation other than SiLU.
    """
    refuse_layer_types(config)
    attention_bias = read_bool(config, "attention_bias")
    head_dim = read_head_dim(config)
    return read_dims(
        config,
        n_kv_heads=read_n_kv_heads(config, default=read_int(config, "num_attention_heads")),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_theta=10_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=2048),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=read_bool(config, "mlp_bias"),
    )


LLAMA = decoder(
    name="llama",
    summary="Llama 1 to 3 dense: grouped-query attention, scaled RoPE, tied or untied embeddings",
    architecture="LlamaForCausalLM",
    dims=dims,
    block=pre_norm,
    block_weights=pre_norm_weights,
)

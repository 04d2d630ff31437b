"""Qwen3 dense: QK-norm, an explicit head_dim that need not be d_model / n_heads, biases if `attention_bias` is set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_json import read_bool, read_int
from .decoder import decoder, pre_norm
from .dims import DecoderDims, read_dims, read_n_kv_heads, refuse_sliding_windows
from .rope import read_rope
from .weight_maps import pre_norm_weights


def dims(config: Mapping[str, Any]) -> DecoderDims:
    """Read the sizes from a parsed `config.json` of transformers 4 or 5.

    An absent key has the default of transformers: 32 key/value heads, a `rope_theta` of 10,000. Null is accepted where
    transformers accepts it. Raises ConfigError ("key: what is wrong (got value)") if a key is missing or invalid, or if
    the model needs an unsupported feature: sliding windows, attention dropout or an activation other than SiLU.
    """
    refuse_sliding_windows(config)
    bias = read_bool(config, "attention_bias")
    head_dim = read_int(config, "head_dim", default=128)
    return read_dims(
        config,
        n_kv_heads=read_n_kv_heads(config, default=32),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_theta=10_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=32768),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )


QWEN3 = decoder(
    name="qwen3",
    summary="Qwen3 dense: QK-norm, grouped-query attention, tied or untied embeddings",
    architecture="Qwen3ForCausalLM",
    dims=dims,
    block=pre_norm,
    block_weights=pre_norm_weights,
)

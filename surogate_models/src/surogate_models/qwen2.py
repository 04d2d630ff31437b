"""Qwen2 and Qwen2.5 dense: the query, key and value projections always have a bias, the output projection never."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_json import read_int
from .decoder import decoder, pre_norm
from .dims import DecoderDims, read_dims, read_head_dim, read_n_kv_heads, refuse_sliding_windows
from .rope import read_rope
from .weight_maps import pre_norm_weights


def dims(config: Mapping[str, Any]) -> DecoderDims:
    """Read the sizes from a parsed `config.json` of transformers 4 or 5.

    An absent key has the default of transformers: 32 key/value heads, a `rope_theta` of 10,000. Null is accepted where
    transformers accepts it. Raises ConfigError ("key: what is wrong (got value)") if a key is missing or invalid, or if
    the model needs an unsupported feature: sliding windows, attention dropout or an activation other than SiLU.
    """
    refuse_sliding_windows(config)
    head_dim = read_head_dim(config)
    return read_dims(
        config,
        n_kv_heads=read_n_kv_heads(config, default=32),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_theta=10_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=32768),
        qkv_bias=True,
    )


QWEN2 = decoder(
    name="qwen2",
    summary="Qwen2 and Qwen2.5 dense: biases on queries, keys and values, tied or untied embeddings",
    architecture="Qwen2ForCausalLM",
    dims=dims,
    block=pre_norm,
    block_weights=pre_norm_weights,
)

"""Qwen2 and Qwen2.5 dense: queries, keys and values always have a bias, attention's output never has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.api import ModelDef

from .config_json import integer
from .decoder import (
    DecoderDims,
    build,
    head_dim_of,
    ignored_tensors,
    n_kv_heads_of,
    read_dims,
    refuse_sliding_windows,
    tied_copies,
    weights,
)
from .rope import read_rope


def dims(config: Mapping[str, Any]) -> DecoderDims:
    """Read the sizes from a parsed `config.json` of transformers 4 or 5; an absent key means what it means there, which
    is 32 key heads and a `rope_theta` of 10,000. A key of null is the same only where transformers allows null.

    Raises ConfigError, "key: what is wrong (got value)", when a key is missing or wrong, and when the model needs what
    is not built: sliding windows, attention dropout, another activation.
    """
    refuse_sliding_windows(config)
    head_dim = head_dim_of(config)
    return read_dims(
        config,
        n_kv_heads=n_kv_heads_of(config, absent=32),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_theta=10_000.0),
        max_positions=integer(config, "max_position_embeddings", default=32768),
        qkv_bias=True,
    )


QWEN2 = ModelDef(
    name="qwen2",
    summary="Qwen2 and Qwen2.5 dense: biases on queries, keys and values, tied or untied embeddings",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    dims=dims,
    build=build,
    weights=weights,
    ignored_tensors=ignored_tensors,
    tied_copies=tied_copies,
)

"""A config.json that `surogate plugins test` trains on a CPU in seconds, for the examples of families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TINY_CONFIG: Mapping[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 256,
}
"""The keys that most models read, small, without `architectures` and `model_type`.

An example of a model is a whole config.json: `SUROGATE_EXAMPLES = {"model acme": [{**TINY_CONFIG, "acme_width": 8}]}`.
"""

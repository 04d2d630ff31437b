"""Hooks of `surogate-models-gptoss`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .gpt_oss import GPT_OSS
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = {"models": 1, "ops": 1, "kernels": 1, "diagnose": 1}
_SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
_TOKENS = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "seq_len": 12}
SUROGATE_EXAMPLES = {"model gpt_oss": [_SMALL]}
surogate_ops = provides(OPS)
surogate_models = provides([GPT_OSS])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_models_gptoss", KERNELS)

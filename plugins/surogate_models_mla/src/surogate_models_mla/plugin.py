"""Hooks of `surogate-models-mla`."""

from __future__ import annotations

from typing import Any

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks
from surogate_models.api import TINY_CONFIG

from .families import DEEPSEEK_V3, GLM4_MOE_LITE
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = {"models": 1, "ops": 1, "kernels": 1, "diagnose": 1}
_TINY: dict[str, Any] = {key: value for key, value in TINY_CONFIG.items() if key != "head_dim"}
_TINY |= {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 0,
}
_DEEPSEEK = _TINY | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9}
_HEADS = {"n_heads": 2, "nope": 4, "interleaved": True}
SUROGATE_EXAMPLES = {
    "model glm4_moe_lite": [_TINY],
    "model deepseek_v3": [
        _DEEPSEEK,
        _DEEPSEEK
        | {"q_lora_rank": None, "v_head_dim": 16, "rope_interleave": False}
        | {"rope_parameters": _YARN | {"original_max_position_embeddings": 16}},
    ],
    "op latent_split": [{"ins": ["fp32[6,12]"], "attrs": {"rank": 8}}],
    "op latent_split_bwd": [{"ins": ["fp32[6,8]", "fp32[6,4]"]}],
    "op latent_qkv": [{"ins": ["fp32[6,16]", "fp32[6,14]", "fp32[6,4]"], "attrs": _HEADS}],
    "op latent_qkv_bwd": [{"ins": ["fp32[6,48]"], "attrs": {**_HEADS, "rotary": 4, "v_dim": 3}}],
    "op latent_values": [{"ins": ["fp32[6,16]"], "attrs": {"n_heads": 2, "v_dim": 6}}],
    "op latent_values_bwd": [{"ins": ["fp32[6,12]"], "attrs": {"n_heads": 2, "head_dim": 8}}],
}
surogate_models = provides([DEEPSEEK_V3, GLM4_MOE_LITE])
surogate_ops = provides(OPS)
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_models_mla", KERNELS)

"""Hooks of `surogate-models-hybrid`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks
from surogate_models.api import TINY_CONFIG

from .kernels import KERNELS
from .ops import OPS
from .qwen3_5 import QWEN3_5, QWEN3_5_OUTER
from .qwen3_5_moe import QWEN3_5_MOE, QWEN3_5_MOE_OUTER
from .qwen3_next import QWEN3_NEXT

SUROGATE_API = {"models": 1, "ops": 1, "kernels": 1, "diagnose": 1}
_TEXT = {
    **TINY_CONFIG,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 256,
    # Else comparisons in bf16 are of rounding errors: norms enlarge those of heads whose outputs are near 0, as at
    # first tokens, and gradients of decays that are all fast are near 0.
    "rms_norm_eps": 1e-3,
    "initializer_range": 0.15,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_MIXTURE = {**{key: value for key, value in _TEXT.items() if key != "intermediate_size"}, **_EXPERTS}
_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
SUROGATE_EXAMPLES = {
    "model qwen3_5_text": [_TEXT],
    "model qwen3_5": [{"text_config": _TEXT, "vision_config": _TOWER, "tie_word_embeddings": False}],
    "model qwen3_5_moe_text": [_MIXTURE],
    "model qwen3_5_moe": [{"text_config": _MIXTURE, "vision_config": _TOWER, "tie_word_embeddings": False}],
    "model qwen3_next": [_TEXT | _EXPERTS | {"mlp_only_layers": [1]}, _MIXTURE],
}
surogate_ops = provides(OPS)
surogate_models = provides([QWEN3_5, QWEN3_5_OUTER, QWEN3_5_MOE, QWEN3_5_MOE_OUTER, QWEN3_NEXT])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_models_hybrid", KERNELS)

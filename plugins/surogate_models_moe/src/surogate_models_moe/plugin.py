"""Hooks of `surogate-models-moe`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks
from surogate_models.api import TINY_CONFIG

from .glm4_moe import GLM4_MOE
from .kernels import KERNELS
from .olmoe import OLMOE
from .ops import OPS
from .qwen2_moe import QWEN2_MOE
from .qwen3_moe import QWEN3_MOE

SUROGATE_API = {"models": 1, "ops": 1, "kernels": 1, "diagnose": 1}
_FEW = {**TINY_CONFIG, "num_experts": 5, "num_experts_per_tok": 2}
_WIDTH = {"moe_intermediate_size": 32}
_GLM = {**TINY_CONFIG, **_WIDTH, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
_GLM |= {"num_nextn_predict_layers": 0}
_TOKENS, _WEIGHTS, _CHOSEN, _BIAS = "fp32[6,8]", "fp32[6,2]", "int32[6,2]<5", "fp32[5,8]"
SUROGATE_EXAMPLES = {
    "model qwen3_moe": [_FEW | _WIDTH],
    "model qwen2_moe": [_FEW | _WIDTH | {"shared_expert_intermediate_size": 48}],
    "model olmoe": [_FEW],
    "model glm4_moe": [
        _GLM | {"n_shared_experts": 2, "routed_scaling_factor": 2.5},
        _GLM | {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True},
    ],
    "op add_expert_bias": [{"ins": [_TOKENS, _WEIGHTS, _CHOSEN, _BIAS]}],
    "op expert_bias_dgrad": [{"ins": [_TOKENS, _CHOSEN, _BIAS]}],
    "op expert_bias_grad": [{"ins": [_TOKENS, _WEIGHTS, _CHOSEN], "attrs": {"n_experts": 5}}],
}
surogate_models = provides([QWEN3_MOE, QWEN2_MOE, OLMOE, GLM4_MOE])
surogate_ops = provides(OPS)
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_models_moe", KERNELS)

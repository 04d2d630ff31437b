"""`surogate verify` on the GPU of models with linear attention, with experts, and with both.

Sizes are the least that kernels serve: heads of 128 in the delta rule. Decays are slow, as those of trained models:
gradients of drawn ones are of the size of their rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import environment, make_workplace, write_model

from surogate_verify.verification import verify

pytestmark = pytest.mark.gpu

_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-3,  # with less, norms of heads near 0 enlarge rounding
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "vocab_size": 2048,
}
_LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": {"model_type": "qwen3_5_text", **_LINEAR},
    "Qwen3_5MoeForCausalLM": {"model_type": "qwen3_5_moe_text", **_LINEAR, **_EXPERTS},
    "Qwen3NextForCausalLM": {"model_type": "qwen3_next", **_LINEAR, **_EXPERTS, "mlp_only_layers": [1]},
    "Glm4MoeForCausalLM": {
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}
RUNS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "fp8-hybrid": ("recipe=fp8-hybrid",),
    "LoRA": ("lora=true",),
    "recomputed": ("recompute=true",),
}


def write_trained(folder: Path, architecture: str) -> Path:
    """Write transformers' model with random weights, decays of 0.05 to 0.5 a token and routers that choose."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model(folder, **_COMMON, architectures=[architecture], **MODELS[architecture])
    given = (folder / "config.json").read_text()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_((0.05 + 0.45 * torch.rand_like(parameter)).log())
            elif name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(json.loads(given)))
    return folder


@pytest.mark.parametrize("settings", RUNS.values(), ids=list(RUNS))
@pytest.mark.parametrize("architecture", MODELS)
def test_models_with_states_and_experts_pass(
    architecture: str, settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    model = write_trained(tmp_path / "model", architecture)
    changes = {"model": str(model), "from_scratch": False, "sequence_len": 256, "model_dtype": "bf16"}
    config = make_workplace(tmp_path / "run", datasets=None).write(**changes)
    result = verify(config, settings, notice=lambda line: None)
    wrong = [row for verdict in result.verdicts for row in verdict.rows if not row.ok]
    assert result.passed, [(row.name, row.error, row.allowed, row.transformers_error) for row in wrong]

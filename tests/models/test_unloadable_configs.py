"""What transformers cannot load is refused by its key, so that no run ends with a model that nothing else reads."""

from __future__ import annotations

from typing import Any

import pytest
from models.harness import MODELS, tiny_config

from surogate_core.api import ConfigError

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("gemma2", {"query_pre_attn_scalar": 256.0}, "query_pre_attn_scalar: must be a whole number"),
        ("gemma3_text", {"query_pre_attn_scalar": 16.5}, "query_pre_attn_scalar: must be a whole number"),
        ("gemma2", {"final_logit_softcapping": 30}, r"final_logit_softcapping: .* write 30\.0"),
        ("gemma2", {"attn_logit_softcapping": 50}, r"attn_logit_softcapping: .* write 50\.0"),
        ("qwen3_moe", {**MIXTURE, "norm_topk_prob": None}, "norm_topk_prob: must be true or false"),
        ("olmoe", {**MIXTURE, "head_dim": None, "norm_topk_prob": None}, "norm_topk_prob: must be true or false"),
        ("smollm3", {"no_rope_layers": [True, False]}, "no_rope_layers: must be a list of 1"),
        (
            "olmo3",
            {"layer_types": ["full_attention"] * 2, "sliding_window": None},
            "sliding_window: must be a number",
        ),
    ],
)
def test_a_value_that_transformers_does_not_load_is_refused_by_its_key(
    family: str, keys: dict[str, Any], message: str
) -> None:
    plain = {"sliding_window": 8, "layer_types": None, "rope_parameters": None}
    config = tiny_config(model_type=family, num_hidden_layers=2, **{**plain, **keys})
    with pytest.raises(ConfigError, match=f"^{message}"):
        MODELS[family].dims(config)


def test_a_mixture_whose_every_layer_is_dense_is_refused_by_the_key_that_says_so() -> None:
    config = tiny_config(model_type="qwen3_moe", num_hidden_layers=2, **MIXTURE)
    with pytest.raises(ConfigError, match=r"^mlp_only_layers: leaves no layer with experts"):
        MODELS["qwen3_moe"].dims({**config, "mlp_only_layers": [0, 1]})
    with pytest.raises(ConfigError, match=r"^decoder_sparse_step: leaves no layer with experts"):
        MODELS["qwen3_moe"].dims({**config, "decoder_sparse_step": 3})

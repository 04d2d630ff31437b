"""Sizes of models with latent attention. Parity with transformers and exports are tested for all families."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from surogate_core.api import ConfigError
from surogate_models_mla.families import DEEPSEEK_V3, GLM4_MOE_LITE

FAMILIES = {"deepseek_v3": DEEPSEEK_V3, "glm4_moe_lite": GLM4_MOE_LITE}
SIZES: dict[str, Any] = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_have_the_defaults_of_transformers(family: str) -> None:
    model, theirs = FAMILIES[family], AutoConfig.for_model(family, **SIZES).to_dict()
    assert model.dims({**SIZES, "num_nextn_predict_layers": theirs.get("num_nextn_predict_layers")}) == model.dims(
        theirs
    )


def test_dense_layers_of_a_glm_are_those_of_its_list() -> None:
    assert GLM4_MOE_LITE.dims(SIZES).dense == {0}
    assert GLM4_MOE_LITE.dims(SIZES | {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}).dense == {0, 1}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_key_value_heads", 2, "must be num_attention_heads, 4"),
        ("head_dim", 32, "must be qk_rope_head_dim, 64"),
        ("v_head_dim", 512, "values must not be wider than keys"),
        ("kv_lora_rank", 0, "must be a whole number"),
        ("scoring_func", "softmax", "must be sigmoid"),
        ("output_router_logits", True, "the loss of the router"),
        ("swiglu_limit", 7.0, "clamped activations are not supported"),
    ],
)
def test_what_the_program_has_not_is_refused_by_its_key(family: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: {message}"):
        FAMILIES[family].dims(SIZES | {key: value})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"first_k_dense_replace": 2}, "first_k_dense_replace: transformers ignores it"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: must be 4 times dense or sparse"),
        ({"mlp_layer_types": ["sparse", "dense"] * 2}, "mlp_layer_types: dense layers behind one with experts"),
    ],
)
def test_other_orders_of_layers_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        GLM4_MOE_LITE.dims(SIZES | keys)

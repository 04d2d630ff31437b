"""The run's key `rope_scaling` on a config.json of transformers 5: all else that the file says about RoPE stays."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from transformers import AutoConfig

from surogate.config.rope_scaling import with_rope_scaling
from surogate_core.errors import ConfigError

from .harness import MODELS, PlannedModel, hf_loss_sum, packed_documents, random_hf_model, tiny_config, valid_tokens

LINEAR = {"rope_type": "linear", "factor": 8.0}
BY_LAYER_TYPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 90.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
SCALED = {**BY_LAYER_TYPE, "full_attention": {"rope_type": "yarn", "rope_theta": 90.0, "factor": 2.0, "beta_fast": 4.0}}
KINDS = ["sliding_attention", "full_attention"] * 2
WINDOWS: dict[str, Any] = {"sliding_window": 6, "layer_types": KINDS}
GEMMA = WINDOWS | {"model_type": "gemma3_text", "tie_word_embeddings": True}
OLMO = WINDOWS | {"model_type": "olmo3"}
QUERIES = {"original_max_position_embeddings": 8, "rope_theta": 90.0, "llama_4_scaling_beta": 0.5}
PARTIAL = {"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.5}
RESCALED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (GEMMA | {"rope_parameters": BY_LAYER_TYPE}, LINEAR),
    "gemma3_scaled_before": (GEMMA | {"rope_parameters": SCALED}, LINEAR),
    "gemma3_with_both_forms": (GEMMA | {"rope_parameters": SCALED, "rope_scaling": {"rope_theta": 50.0}}, LINEAR),
    "gemma3_one_layer_type": (
        GEMMA | {"rope_parameters": {**BY_LAYER_TYPE, "full_attention": None}},
        LINEAR | {"rope_type": "dynamic"},
    ),
    "gemma3_of_transformers_4": (
        GEMMA | {"rope_parameters": None, "rope_theta": 90, "rope_local_base_freq": 30},
        LINEAR,
    ),
    "olmo3": (OLMO | {"rope_parameters": SCALED}, {"rope_type": "default"}),
    "olmo3_yarn": (OLMO | {"rope_parameters": BY_LAYER_TYPE}, {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0}),
    "phi3": ({"model_type": "phi3", "hidden_size": 64, "rope_parameters": PARTIAL}, {"rope_type": "default"}),
    "ministral3": (
        {"model_type": "ministral3", "rope_parameters": {"rope_type": "yarn", "factor": 16.0, **QUERIES}},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4, "beta_fast": 4.0},
    ),
    "llama": ({"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 90.0}}, LINEAR),
}
UNSCALED = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")


def as_a_user_of_transformers_sets_it(config: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE of transformers for a config.json with another scaling, of full attention if by layer type."""
    ropes = AutoConfig.for_model(**deepcopy(config)).rope_parameters
    nested = "full_attention" in ropes
    whole = ropes["full_attention"] if nested else ropes
    whole = {key: whole[key] for key in UNSCALED if key in whole} | scaling
    return {**ropes, "full_attention": whole} if nested else whole


@pytest.mark.parametrize("case", RESCALED)
def test_a_rescaled_model_has_the_rope_and_the_first_loss_of_transformers(case: str) -> None:
    given, scaling = RESCALED[case]
    config = tiny_config(**given)
    wanted = as_a_user_of_transformers_sets_it(config, scaling)
    made = with_rope_scaling(config, scaling, None)
    theirs = random_hf_model({key: made[key] for key in made if key != "rope_scaling"} | {"rope_parameters": wanted})
    assert AutoConfig.for_model(**deepcopy(made)).rope_parameters == theirs.config.rope_parameters
    ours = PlannedModel(made, batch_size=3, seq_len=24)
    ours.load(dict(theirs.named_parameters()))
    rows = packed_documents()
    documents = [document for row in rows for document in row]
    scale = 1 / valid_tokens(documents)
    expected = float(hf_loss_sum(theirs, documents).detach()) * scale
    assert ours.micro_step(rows, scale) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_a_scaling_that_transformers_ignores_is_refused(family: str) -> None:
    given = {"type": "linear", "factor": 8.0}
    config = tiny_config(**WINDOWS, model_type=family, rope_parameters=None, rope_scaling=given)
    theirs = AutoConfig.for_model(**deepcopy(config)).rope_parameters
    assert theirs["full_attention"]["rope_type"] == "default"
    with pytest.raises(ConfigError, match=r"rope_scaling.type: is ignored by transformers 5 .* name it rope_type"):
        MODELS[family].dims(config)


def test_original_positions_that_transformers_does_not_read_are_refused() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    mapping = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    config = tiny_config(model_type="phi3", hidden_size=64, rope_parameters=mapping)
    theirs = AutoConfig.for_model(**deepcopy(config)).rope_parameters
    assert theirs["original_max_position_embeddings"] == 4096
    with pytest.raises(ConfigError, match=r"original_max_position_embeddings: transformers takes 4096 unless"):
        MODELS["phi3"].dims(config)
    assert MODELS["phi3"].dims(config | {"original_max_position_embeddings": 64})


def test_a_null_activation_is_refused_as_transformers_refuses_it() -> None:
    with pytest.raises(ConfigError, match="hidden_activation: must be gelu_pytorch_tanh"):
        MODELS["gemma3_text"].dims(tiny_config(**GEMMA, rope_parameters=None, hidden_activation=None))

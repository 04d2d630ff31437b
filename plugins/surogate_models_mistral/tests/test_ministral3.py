"""Sizes and RoPE of Ministral 3. Parity with transformers and exports are tested for all families."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from models.harness import (
    MODELS,
    PlannedModel,
    hf_loss_sum,
    random_documents,
    random_hf_model,
    relative_error,
    tiny_config,
    valid_tokens,
)
from transformers import AutoConfig, AutoModelForCausalLM, Ministral3Config

from surogate_core.api import ConfigError
from surogate_models.api import QueryScaling
from surogate_models.rope import Yarn

ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.3,
}
dims = MODELS["ministral3"].dims


def scaled(**changes: Any) -> dict[str, Any]:
    return tiny_config(model_type="ministral3", rope_parameters=ROPE | changes)


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    assert dims({}) == dims(Ministral3Config().to_dict())
    assert dims({}).rope.query_scaling == QueryScaling(0.1, 16384)
    assert (dims({}).rope.attention_factor, dims({}).max_positions) == (1.0, 262144)


def test_a_window_is_that_of_all_layers_and_null_is_none() -> None:
    assert set(dims({"sliding_window": None}).windows) == {0}
    assert set(dims({"sliding_window": 4096}).windows) == {4096}


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads"])
def test_null_sizes_are_refused_because_transformers_does_not_load_them(key: str) -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match=key):
        Ministral3Config(**{key: None})
    with pytest.raises(ConfigError, match=rf"^{key}: must be a whole number .*\(got None\)"):
        dims({key: None})


SIZES = {
    # hidden_size, num_hidden_layers, intermediate_size, tied, billions of parameters without the vision tower
    "Ministral-3-3B-Base-2512": (3072, 26, 9216, True, 3.4),
    "Ministral-3-8B-Base-2512": (4096, 34, 14336, False, 8.5),
    "Ministral-3-14B-Base-2512": (5120, 40, 16384, False, 13.5),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_the_tensors_of_transformers(name: str) -> None:
    width, layers, hidden, tied, billions = SIZES[name]
    config = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": hidden}
    config |= {"tie_word_embeddings": tied}
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("ministral3", **config))
    shapes = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    tensors = [tensor for weight in MODELS["ministral3"].weights(dims(config)) for tensor in weight.tensors]
    assert {tensor.name: tuple(tensor.shape) for tensor in tensors} == shapes
    assert round(sum(map(prod, shapes.values())) / 1e9, 1) == billions


@pytest.mark.parametrize("seq_len", [8, 9])
def test_rows_that_are_not_longer_than_the_original_context_have_no_factor_of_queries(seq_len: int) -> None:
    """Kernels without the factor are those of other models, and the result is the same."""
    programs = PlannedModel(scaled(), batch_size=1, seq_len=seq_len).assembly.programs
    found = [op.attrs.get("query_scaling") for op in programs["micro_first"].ops if op.kind in ("rope", "rope_bwd")]
    assert found == [None if seq_len == 8 else QueryScaling(0.3, 8)] * 8


def test_a_row_may_reach_positions_far_beyond_the_original_context() -> None:
    """Of 200 positions, the last have the 25th factor. Positions start again in each document of a row."""
    config = scaled(original_max_position_embeddings=8, factor=25.0) | {"max_position_embeddings": 200}
    config["pad_token_id"] = None  # torch leaves out the gradient of the embedding of the padding token
    hf = random_hf_model(config)
    flat = random_documents([200, 120, 7, 73], config["vocab_size"])
    rows = [flat[:1], flat[1:]]
    expected = hf_loss_sum(hf, flat) / valid_tokens(flat)
    expected.backward()
    model = PlannedModel(config, batch_size=2, seq_len=200)
    model.load(hf.state_dict())
    assert model.micro_step(rows, 1 / valid_tokens(flat)) == pytest.approx(expected.item(), rel=1e-5)
    theirs = {name: parameter.grad for name, parameter in hf.named_parameters()}
    assert max(relative_error(grad, theirs[name]) for name, grad in model.gradients.items()) <= 1e-5


def test_the_factor_of_queries_changes_the_result_and_its_beta_may_be_zero() -> None:
    rows = [random_documents([24], 97)]
    losses = []
    for beta in (0.3, 0.0, 0):
        config = scaled(llama_4_scaling_beta=beta)
        model = PlannedModel(config, batch_size=1, seq_len=24)
        model.load(random_hf_model(config).state_dict())
        losses.append(model.micro_step(rows, 1.0))
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)
    assert losses[1] == losses[2]
    assert dims(scaled(llama_4_scaling_beta=0)).rope == replace(dims(scaled()).rope, query_scaling=None)


@pytest.mark.parametrize(
    ("mapping", "length"),
    [
        (ROPE, 8),
        ({key: value for key, value in ROPE.items() if not key.startswith("original")}, 128),
        ({"rope_type": "default", "original_max_position_embeddings": 6, "llama_4_scaling_beta": 0.3}, 6),
        ({"type": "linear", "factor": 2.0, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.3}, 7),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_the_length_is_that_which_transformers_reads(key: str, mapping: dict[str, Any], length: int) -> None:
    config = tiny_config(model_type="ministral3") | {"rope_parameters": None, "rope_theta": 1e4, key: mapping}
    theirs = AutoConfig.for_model(**deepcopy(config)).rope_parameters["original_max_position_embeddings"]
    scaling = dims(config).rope.query_scaling
    assert scaling is not None and scaling.length == theirs == length


def test_original_positions_of_the_config_are_those_of_yarn_and_of_the_factor() -> None:
    config = scaled() | {"original_max_position_embeddings": 10}
    theirs = AutoConfig.for_model(**deepcopy(config))
    theirs.standardize_rope_params()  # as its model does
    assert theirs.rope_parameters["original_max_position_embeddings"] == 10
    rope = dims(config).rope
    assert rope.query_scaling == QueryScaling(0.3, 10)
    assert isinstance(rope.scaling, Yarn) and rope.max_positions == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"llama_4_scaling_beta": None},
            r"rope_parameters\.llama_4_scaling_beta: must be a positive number \(got None",
        ),
        ({"llama_4_scaling_beta": -0.1}, r"rope_parameters\.llama_4_scaling_beta: must be a positive number"),
        ({"llama_4_scaling_beta": False}, r"rope_parameters\.llama_4_scaling_beta: must be a positive number"),
        ({"llama_4_scaling_beta": "0.1"}, r"rope_parameters\.llama_4_scaling_beta: must be a positive number"),
        (
            {"original_max_position_embeddings": 0},
            r"rope_parameters\.original_max_position_embeddings: must be a whole",
        ),
        ({"mscale": -1.0, "mscale_all_dim": 1.0}, r"rope_parameters\.mscale: must be a positive number"),
    ],
    ids=str,
)
def test_errors_name_the_invalid_key_of_rope(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        dims(scaled(**changes))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, r"rope_parameters\.llama_4_scaling_beta: is required"),
        (
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            r"rope_parameters\.original_max_position_embeddings: is required",
        ),
        ({"sliding_window": 0}, "sliding_window: must be a whole number"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: must be full_attention in all layers"),
        ({"attention_dropout": 0.1}, "attention_dropout: dropout is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: must be silu"),
        ({"vision_config": {}}, "vision_config: towers of images"),
    ],
    ids=str,
)
def test_errors_name_the_invalid_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        dims(scaled() | config)

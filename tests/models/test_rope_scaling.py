"""`rope_scaling` and `rope_parameters`: frequencies bit-identical to transformers, and rejection of invalid values."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from surogate_core.errors import ConfigError
from surogate_models.reference import inverse_frequencies
from surogate_models.rope import Linear, read_partial_rope, read_rope

from .harness import MODELS, tiny_config

LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
MINISTRAL3 = {
    "type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
SCALINGS: dict[str, tuple[float, int, dict[str, Any]]] = {
    # rope_theta, head_dim, rope_scaling
    "Llama-3.1": (500000.0, 128, LLAMA_31),
    "Llama-3.2-1B": (500000.0, 64, LLAMA_31 | {"factor": 32.0}),
    "Qwen2.5 with yarn": (1000000.0, 128, YARN),
    "Qwen2.5-0.5B with yarn": (1000000.0, 64, YARN),
    "yarn, sharp": (10000.0, 64, YARN | {"beta_fast": 8, "beta_slow": 8}),
    "yarn, not truncated": (150000.0, 64, YARN | {"factor": 32.0, "truncate": False}),
    "yarn, attention factor": (1000000.0, 128, YARN | {"attention_factor": 0.75}),
    "yarn, mscale": (10000.0, 64, YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.5}),
    "Ministral 3": (1000000.0, 128, MINISTRAL3),
    "Ministral 3, other mscale": (1000000.0, 128, MINISTRAL3 | {"mscale": 1.3, "mscale_all_dim": 0.4}),
    "yarn, mscale alone": (1000000.0, 128, MINISTRAL3 | {"mscale": 1.7, "mscale_all_dim": None}),
    "yarn, mscale of 0": (1000000.0, 128, MINISTRAL3 | {"mscale": 0.0, "mscale_all_dim": 0.9}),
    "yarn, mscale of a factor near 1": (10000.0, 64, YARN | {"factor": 1.01, "mscale": 0.7, "mscale_all_dim": 0.2}),
    "yarn, mscale and attention factor": (10000.0, 64, MINISTRAL3 | {"mscale": 0.7, "attention_factor": 1.125}),
    "yarn, betas of 0": (1000000.0, 64, YARN | {"beta_fast": 0, "beta_slow": 0}),
    "yarn, betas": (700000.0, 80, YARN | {"factor": 13.5, "beta_fast": 17.5, "beta_slow": 2.25}),
    "yarn, truncate null": (150000.0, 64, YARN | {"factor": 32.0, "truncate": None}),
    "yarn, no pair scaled": (10000.0, 64, YARN | {"original_max_position_embeddings": 4, "factor": 2.0}),
    "linear": (100000.0, 128, {"type": "linear", "factor": 4.0}),
    "linear, odd factor": (10000.0, 96, {"rope_type": "linear", "factor": 3.7}),
    "dynamic": (10000.0, 128, {"type": "dynamic", "factor": 2.0}),
}

UNCHANGED = ("dynamic", "yarn, no pair scaled")


@pytest.mark.parametrize("style", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize("case", SCALINGS)
def test_frequencies_are_bit_identical_to_transformers(case: str, style: str) -> None:
    theta, head_dim, scaling = SCALINGS[case]
    sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "max_position_embeddings": 131072}
    if style == "transformers 4":
        config = {**sizes, "rope_theta": theta, "rope_scaling": scaling}
    else:
        kind = scaling.get("rope_type", scaling.get("type"))
        config = {**sizes, "rope_parameters": {**scaling, "rope_type": kind, "rope_theta": theta}}
    rope = read_rope(config, head_dim)
    theirs = AutoConfig.for_model("llama", **deepcopy(config))
    expected, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs)
    assert torch.equal(inverse_frequencies(head_dim, rope.theta, rope.scaling), expected)
    assert rope.attention_factor == factor
    assert torch.equal(expected, inverse_frequencies(head_dim, theta)) is (case in UNCHANGED)


def test_a_null_factor_of_yarn_is_that_of_the_context_as_in_transformers() -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 131072}
    mapping = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 5000, "rope_theta": 1e4}
    rope = read_rope(sizes | {"rope_parameters": mapping}, 64)
    theirs = AutoConfig.for_model("llama", **sizes, rope_parameters=deepcopy(mapping))
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert torch.equal(inverse_frequencies(64, rope.theta, rope.scaling), expected)
    assert (rope.attention_factor, rope.max_positions) == (factor, 131072)


OWN_ROPE = ("phi3", "gemma3_text", "olmo3", "ministral3", "glm4_moe_lite", "deepseek_v3")
"""Families with longrope alone, with a RoPE for each type of layer, with a factor of queries, with heads of parts."""

LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(24)],
    "long_factor": [1.0 + 2.7 * i for i in range(24)],
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("given", [{}, {"factor": 16.0}, {"factor": 0.5}, {"attention_factor": 1.25}], ids=str)
@pytest.mark.parametrize("rows", [4096, 4097])
def test_rows_choose_the_frequencies_of_longrope_as_transformers_does(rows: int, given: dict[str, Any]) -> None:
    """In phi3, whose heads are rotated in part: 48 of 64 elements."""
    mapping = {**LONG, **given, "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    config = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 131072}
    rope = read_partial_rope(config | {"rope_parameters": mapping}, 64).of_rows(rows)
    theirs = AutoConfig.for_model("phi3", **config, rope_parameters=deepcopy(mapping))
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=rows)
    assert torch.equal(inverse_frequencies(rope.rotary_dim, rope.theta, rope.scaling), expected)
    assert (rope.rotary_dim, rope.attention_factor) == (48, factor)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: must rotate an even number of the 64 elements"),
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor: must rotate an even number"),  # 19.2
        ({"rope_parameters": {"partial_rotary_factor": 0.05}}, "rope_parameters.partial_rotary_factor: must rotate"),
        ({"rope_parameters": {**LONG, "long_factor": [1.0] * 23}}, "rope_parameters.long_factor: must be a list of 24"),
        ({"rope_parameters": {**LONG, "short_factor": [0] * 24}}, "rope_parameters.short_factor: must be a positive"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor: must be a list of 24 numbers"),
    ],
    ids=str,
)
def test_errors_name_the_invalid_key_of_partial_and_long_rope(config: dict[str, Any], message: str) -> None:
    sizes = {"rope_theta": 1e4, "max_position_embeddings": 131072, "partial_rotary_factor": 0.75}
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_partial_rope(sizes | config, 64)


@pytest.mark.parametrize("family", sorted(MODELS.keys() - {*OWN_ROPE, "olmoe"}))  # whose heads divide the width
def test_every_family_reads_every_scaling(family: str) -> None:
    for theta, _, scaling in SCALINGS.values():
        config = tiny_config(model_type=family, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
        config["partial_rotary_factor"] = 1.0  # whole heads, where a family rotates a part of them by default
        assert MODELS[family].dims(config).rope == read_rope(config, 16)


def test_rope_scaling_replaces_rope_parameters_as_in_transformers() -> None:
    config = {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert read_rope(config, 16).theta == 7.0
    both = read_rope(config | {"rope_scaling": {"type": "linear", "factor": 2}}, 16)
    assert (both.theta, both.scaling) == (5.0, Linear(2.0))
    assert read_rope(config | {"rope_scaling": {}}, 16).theta == 7.0


def test_original_positions_of_the_config_take_precedence_over_the_mapping() -> None:
    config = tiny_config(rope_parameters=YARN | {"rope_theta": 1e4}, max_position_embeddings=64)
    assert MODELS["qwen3"].dims(config).max_positions == 4 * 32768
    assert MODELS["qwen3"].dims(config | {"original_max_position_embeddings": 100}).max_positions == 400


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear"}, "rope_scaling.factor: is required"),
        ({"type": "linear", "factor": 0.5}, r"rope_scaling.factor: must be at least 1 \(got 0.5\)"),
        ({"type": "linear", "factor": "2"}, r"rope_scaling.factor: must be a positive number \(got '2'\)"),
        ({"type": "dynamic", "factor": None}, r"rope_scaling.factor: must be a positive number \(got None\)"),
        ({"type": "su", "factor": 2.0}, r"rope_scaling.rope_type: must be default, linear, .* \(got 'su'\)"),
        ({"type": ["yarn"]}, r"rope_scaling.rope_type: must be default"),
        ({**LLAMA_31, "high_freq_factor": 1.0}, "rope_scaling.high_freq_factor: must be greater than low_freq_factor"),
        ({**LLAMA_31, "low_freq_factor": 0}, "rope_scaling.low_freq_factor: must be a positive number"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor: is required"),
        ({**YARN, "original_max_position_embeddings": 1.5}, "rope_scaling.original_max_position_embeddings: must be"),
        ({**YARN, "beta_fast": 0.5}, "rope_scaling.beta_fast: must not be less than beta_slow"),
        ({**YARN, "truncate": "no"}, "rope_scaling.truncate: must be true or false"),
        ({**YARN, "attention_factor": -1.0}, "rope_scaling.attention_factor: must be a positive number"),
        (
            {**YARN, "partial_rotary_factor": 0.5},
            "rope_scaling.partial_rotary_factor: partial RoPE is not supported by this model",
        ),
    ],
    ids=str,
)
def test_errors_name_the_invalid_scaling_key(scaling: dict[str, Any], message: str) -> None:
    config = {"rope_theta": 1e4, "max_position_embeddings": 4096, "rope_scaling": scaling}
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_rope(config, 64)

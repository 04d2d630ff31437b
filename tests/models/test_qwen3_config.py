"""`dims` reads a Qwen3 config.json and rejects invalid or unsupported values."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from surogate_core.api import ModelDef
from surogate_core.errors import ConfigError
from surogate_models.llama import LLAMA
from surogate_models.qwen2 import QWEN2
from surogate_models.qwen3 import QWEN3, dims

from .harness import tiny_config

CONFIGS = {
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "llama": transformers.LlamaConfig,
}


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in tiny_config(**changes).items() if k not in keys}


def test_rope_theta_is_read_in_the_formats_of_transformers_4_and_5() -> None:
    assert dims(tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})).rope.theta == 5e5
    assert dims(without("rope_parameters", rope_theta=1000000, rope_scaling=None)).rope.theta == 1e6
    assert dims(without("rope_parameters", rope_theta=7.0, rope_scaling={"type": "default"})).rope.theta == 7.0


def test_missing_optional_keys_have_the_defaults_of_transformers() -> None:
    optional = ("head_dim", "rms_norm_eps", "initializer_range", "max_position_embeddings", "tie_word_embeddings")
    d = dims(without(*optional, num_key_value_heads=None))
    assert (d.head_dim, d.norm_eps, d.init_std, d.max_positions, d.tied_embeddings) == (128, 1e-6, 0.02, 32768, False)
    assert d.n_kv_heads == d.n_heads == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "48"},
        {"hidden_size": True},
        {"hidden_size": 0},
        {"hidden_size": 48.0},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 2**31},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"head_dim": None},
        {"hidden_act": "gelu"},
        {"attention_bias": "yes"},
        {"attention_dropout": 0.1},
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "max_window_layers": None},
        {"use_sliding_window": 1},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": 3},
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        {"rope_parameters": "default"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 4]}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 4]}},
        {"partial_rotary_factor": 0.5},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": 10**400},
        {"initializer_range": 0},
    ],
    ids=str,
)
def test_errors_name_the_invalid_key(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(changes))}.*\(got .*\)"):
        dims(tiny_config(**changes))


def test_sliding_window_keys_are_accepted_if_no_layer_has_a_window() -> None:
    assert dims(tiny_config(use_sliding_window=True, max_window_layers=4)) == dims(tiny_config())
    assert dims(tiny_config(use_sliding_window=True, layer_types=["full_attention"] * 4)) == dims(tiny_config())


@pytest.mark.parametrize(
    "key",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        "num_attention_heads",
    ],
)
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: is required"):
        dims(without(key))


@pytest.mark.parametrize("family", [QWEN2, QWEN3, LLAMA], ids=lambda family: str(family.name))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": None},
        {"num_key_value_heads": 16},
        {"rope_theta": 5e5},
        {"rope_theta": None},
        {"rope_parameters": None},
        {"rope_scaling": None, "rope_theta": 2e4},
        {"num_attention_heads": 64},
        {"head_dim": None},
        {"rms_norm_eps": None},
        {"max_position_embeddings": None},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_absent_and_null_keys_mean_what_transformers_takes_them_for(family: ModelDef, changes: dict[str, Any]) -> None:
    """Against transformers' own config classes; what it refuses, or takes with a value that computes nothing, we do."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2}
    given = {**sizes, "vocab_size": 99, "intermediate_size": 64, **changes}
    try:
        theirs: Any = CONFIGS[family.name](**given)
    except Exception:  # its validation raises classes of huggingface_hub
        theirs = None
    if theirs is None or theirs.rope_parameters["rope_theta"] is None:
        with pytest.raises(ConfigError, match=next(iter(changes))):
            family.dims(given)
        return
    ours: Any = family.dims(given)
    assert (ours.n_kv_heads, ours.rope.theta) == (theirs.num_key_value_heads, theirs.rope_parameters["rope_theta"])
    assert (ours.norm_eps, ours.max_positions) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert ours.tied_embeddings == theirs.tie_word_embeddings and ours.init_std == theirs.initializer_range
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim


def test_tied_models_ignore_the_copy_of_the_embedding_in_checkpoints() -> None:
    for tied in (True, False):
        d = dims(tiny_config(tie_word_embeddings=tied))
        names = {tensor.name for m in QWEN3.weights(d) for tensor in m.tensors}
        assert ("lm_head.weight" in QWEN3.tied_copies(d)) is tied
        assert ("lm_head.weight" in names) is not tied

"""Models that llama.cpp does not load, or would compute otherwise, are refused before anything is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from serving.contexts import context_of
from serving.tiny_models import write_model
from torch import Tensor

from surogate_core.api import ConfigError
from surogate_export_gguf import plugin, writer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a tiny model, written once."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda name: write_model(name, root / name))


class Given:
    """A tensor of the context with values of a test."""

    def __init__(self, name: str, values: Tensor) -> None:
        self.name, self.values = name, values
        self.shape, self.dtype = tuple(values.shape), values.dtype

    def __getitem__(self, rows: Any) -> Tensor:
        return self.values if rows is ... else self.values[rows]


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with other values; those of RoPE go into what it has."""
    rope = {**config.get("rope_parameters", {}), **changes.get("rope_parameters", {})}
    return {**config, **changes, **({"rope_parameters": rope} if "rope_parameters" in changes else {})}


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
BAD: list[tuple[str, Mapping[str, Any], str]] = [
    ("qwen3", {"model_type": "acme"}, "model_type: acme is not known to transformers"),
    (
        "qwen3",
        {"model_type": "gpt2"},
        "model_type: the form of llama.cpp is known for gemma2, gemma3_text, glm4_moe, gpt_oss",
    ),
    ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha: llama.cpp computes the gate with 1.702 (got 1.5)"),
    ("gpt-oss", {"swiglu_limit": 10.0}, "swiglu_limit: llama.cpp computes the gate with 7.0 (got 10.0)"),
    ("gpt-oss", {"layer_types": ["full_attention"] * 4}, "layer_types: llama.cpp has windows in each second layer"),
    ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "GGUF files are written of language models"),
    ("qwen3", {"architectures": []}, "architectures: GGUF files are written of language models"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act: llama.cpp computes silu in this family (got gelu)"),
    ("qwen3", {"rope_parameters": {**SCALED, "original_max_position_embeddings": 128}}, "no such RoPE in its qwen3"),
    (
        "qwen3",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 4096, "beta_fast": 16.0}},
        "would rotate by frequencies that differ by up to",
    ),
    (
        "qwen3",
        {"rope_parameters": {**YARN, "truncate": False}},
        "yarn with beta_fast 32, beta_slow 1 and truncate: true",
    ),
    ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "llama.cpp rotates whole heads of 64 in its qwen3"),
    ("qwen2.5", {"head_dim": 64}, "num_attention_heads * head_dim: llama.cpp takes heads that are together as wide"),
    ("qwen3-moe", {"norm_topk_prob": False}, "always normalizes the weights of the chosen experts (got False)"),
    ("qwen3-moe", {"mlp_only_layers": [1]}, "mlp_only_layers: llama.cpp has experts in every layer"),
    ("qwen3-moe", {"num_experts": 16, "num_local_experts": 16}, "there are 8 experts, config.json says 16"),
    ("qwen2-moe", {"norm_topk_prob": True}, "never normalizes the weights of the chosen experts (got True)"),
    ("qwen2-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step: llama.cpp has experts in every layer"),
    ("glm4-moe", {"n_group": 2, "topk_group": 1}, "n_group: llama.cpp chooses from all experts in this family (got 2)"),
    ("qwen3.5", {"linear_value_head_dim": 32}, "linear_value_head_dim: llama.cpp takes values as wide as keys, 64"),
    ("qwen3.5", {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 2}, "attention in each n-th layer"),
    ("olmoe", {"norm_topk_prob": True}, "never normalizes the weights of the chosen experts (got True)"),
    ("olmoe", {"clip_qkv": 3.0}, "clip_qkv: llama.cpp does not clip queries, keys and values (got 3.0)"),
    ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads: llama.cpp takes as many as query heads, 4 (got 2)"),
    (
        "gemma2",
        {"query_pre_attn_scalar": 32},
        "query_pre_attn_scalar: llama.cpp divides queries by the square root of 64",
    ),
    ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping: llama.cpp always caps"),
    ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings: llama.cpp has no head of its own in its gemma2"),
    ("gemma3", {"query_pre_attn_scalar": 32}, "in a model of 7 layers (got 32)"),
    ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, "no_rope_layers: llama.cpp leaves RoPE out of each fourth layer"),
    ("llama3", {"tie_word_embeddings": False, "num_hidden_layers": 5}, "layer 4 of the model has no tensor for"),
]


@pytest.mark.parametrize(("name", "changes", "line"), BAD, ids=[f"{n}-{next(iter(c))}" for n, c, _ in BAD])
def test_a_model_that_llama_cpp_has_not_is_one_line(
    models: Any, name: str, changes: Mapping[str, Any], line: str
) -> None:
    folder = models(name)
    config = changed(json.loads((folder / "config.json").read_text()), changes)
    with pytest.raises(ConfigError) as raised:
        plugin.GGUF.check(context_of(folder, "q8_0", config=config))
    text = str(raised.value)
    assert line in text and "\n" not in text and text.endswith((".", "?"))


def with_tensor(folder: Path, name: str, values: Tensor | None, kind: str = "f16") -> Any:
    """Return the argument for a model with another tensor, or without one."""
    tensors = dict(context_of(folder, kind).tensors)
    if values is None:
        del tensors[name]
    else:
        tensors[name] = Given(name, values)
    return context_of(folder, kind, tensors=tensors)


TENSORS: list[tuple[str, str, Tensor | None, str]] = [
    ("qwen3", "model.layers.1.mlp.up_proj.bias", torch.zeros(256), "mlp.up_proj.bias: llama.cpp has no such tensor"),
    (
        "qwen3",
        "model.layers.1.acme.weight",
        torch.zeros(4, 4),
        "acme.weight: llama.cpp has no such tensor in its qwen3",
    ),
    ("qwen3", "model.layers.1.mlp.up_proj.weight", None, "layer 1 of the model has no tensor for ffn_up.weight"),
    ("llama3", "lm_head.weight", None, "has no tensor lm_head.weight, and tie_word_embeddings is false"),
]


@pytest.mark.parametrize(("name", "tensor", "values", "line"), TENSORS, ids=[case[1] for case in TENSORS])
def test_a_tensor_too_many_or_too_few_is_named(
    models: Any, name: str, tensor: str, values: Tensor | None, line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        plugin.GGUF.check(with_tensor(models(name), tensor, values))


def test_a_stored_head_counts_whatever_the_config_says(models: Any) -> None:
    """So does it in transformers, which unties embeddings that are stored with another head."""
    context = with_tensor(models("qwen3"), "lm_head.weight", torch.ones(1024, 128))
    assert [t.sources for t in writer.prepare(context).targets if t.name == "output.weight"] == [("lm_head.weight",)]
    with pytest.raises(ConfigError, match=r"the model may not hold lm_head.weight \(got True\)"):
        writer.prepare(with_tensor(models("gemma2"), "lm_head.weight", torch.ones(1184, 128)))


NUMBERS = [
    ("bf16", float("nan"), "ffn_up.weight has NaN or inf"),
    ("q4_0", float("inf"), "ffn_up.weight has NaN or inf. The training failed before this checkpoint"),
    ("f16", 1e6, r"F16 holds numbers up to 65504, this one is (1e\+06|9.99e\+05). Export with --format gguf:bf16"),
    ("q8_0", -1e6, "Q8_0 holds numbers up to 65504"),
]


@pytest.mark.parametrize(("kind", "value", "line"), NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_a_type_cannot_hold_are_refused(
    models: Any, tmp_path: Path, kind: str, value: float, line: str, dtype: torch.dtype
) -> None:
    values = torch.zeros(256, 128, dtype=dtype)
    values[200, 7] = value
    context = with_tensor(models("qwen3"), "model.layers.1.mlp.up_proj.weight", values, kind)
    with pytest.raises(ConfigError, match=line):
        writer.write_model(context, tmp_path / "x.gguf")


NOTICES: list[tuple[str, Mapping[str, Any], str]] = [
    ("mistral", {"sliding_window": 64}, "llama.cpp has no windows in its llama: it differs after 64 tokens"),
    ("phi3", {"sliding_window": 64}, "llama.cpp has no windows in its phi3: it differs after 64 tokens"),
    (
        "qwen3",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "no dynamic RoPE: it differs after 512 tokens",
    ),
    ("phi4-mini", {}, "llama.cpp uses the long factors of RoPE as soon as its context is larger than 1024 tokens"),
]


@pytest.mark.parametrize(("name", "changes", "line"), NOTICES)
def test_what_differs_in_long_texts_is_a_notice(models: Any, name: str, changes: Mapping[str, Any], line: str) -> None:
    folder, notices = models(name), list[str]()
    config = changed(json.loads((folder / "config.json").read_text()), changes)
    writer.prepare(context_of(folder, "bf16", notices.append, config=config))
    assert any(line in notice for notice in notices)


def test_a_window_that_no_text_reaches_is_no_notice(models: Any) -> None:
    folder, notices = models("nemo"), list[str]()
    config = changed(json.loads((folder / "config.json").read_text()), {"sliding_window": 512})
    writer.prepare(context_of(folder, "bf16", notices.append, config=config))
    assert not any("windows" in notice for notice in notices)


def test_windows_in_other_layers_are_in_the_file(models: Any) -> None:
    folder = models("gemma3")
    config = json.loads((folder / "config.json").read_text())
    kinds = ["full_attention", *["sliding_attention"] * 6]
    keys = writer.prepare(context_of(folder, "bf16", config={**config, "layer_types": kinds})).writer.kv_data[0]
    assert keys["gemma3.attention.sliding_window_pattern"].value == [False, *[True] * 6]
    usual = writer.prepare(context_of(folder, "bf16")).writer.kv_data[0]
    assert "gemma3.attention.sliding_window_pattern" not in usual

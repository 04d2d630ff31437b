"""Published models of each family: their config.json yields the published number of parameters."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from transformers import AutoConfig

from surogate_core.api import BatchInputs
from surogate_core.errors import ConfigError
from surogate_core.program.builder import Builder
from surogate_models.api import read_layer_types
from surogate_models.rope import LongRope

from .harness import MODELS, OPS, tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN: dict[str, Any] = {"rope_theta": 1000000.0, "use_sliding_window": False, "rms_norm_eps": 1e-6}
LLAMA: dict[str, Any] = {"model_type": "llama", "rope_theta": 500000.0, "vocab_size": 128256, "rms_norm_eps": 1e-5}
LLAMA |= {"attention_bias": False, "mlp_bias": False, "max_position_embeddings": 131072}
MISTRAL: dict[str, Any] = {"model_type": "mistral", "rope_theta": 1000000.0, "rms_norm_eps": 1e-5}
GEMMA: dict[str, Any] = {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
GEMMA3 = {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 512}
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, int], bool, int]] = {
    # keys common to the family; (hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
    # intermediate_size); tied; number of parameters, each counted once, from the model's files on the hub
    "Qwen2.5-0.5B": (QWEN | {"vocab_size": 151936}, (896, 24, 14, 2, 4864), True, 494_032_768),
    "Qwen2.5-1.5B": (QWEN | {"vocab_size": 151936}, (1536, 28, 12, 2, 8960), True, 1_543_714_304),
    "Qwen2.5-3B": (QWEN | {"vocab_size": 151936}, (2048, 36, 16, 2, 11008), True, 3_085_938_688),
    "Qwen2.5-7B": (QWEN | {"vocab_size": 152064}, (3584, 28, 28, 4, 18944), False, 7_615_616_512),
    "Qwen2.5-14B": (QWEN | {"vocab_size": 152064}, (5120, 48, 40, 8, 13824), False, 14_770_033_664),
    "Qwen2.5-32B": (QWEN | {"vocab_size": 152064}, (5120, 64, 40, 8, 27648), False, 32_763_876_352),
    "Qwen2.5-72B": (QWEN | {"vocab_size": 152064}, (8192, 80, 64, 8, 29568), False, 72_706_203_648),
    "Llama-3.1-8B": (LLAMA | {"rope_scaling": LLAMA3}, (4096, 32, 32, 8, 14336), False, 8_030_261_248),
    "Llama-3.1-70B": (LLAMA | {"rope_scaling": LLAMA3}, (8192, 80, 64, 8, 28672), False, 70_553_706_496),
    "Llama-3.2-1B": (
        LLAMA | {"rope_scaling": LLAMA3 | {"factor": 32.0}, "head_dim": 64},
        (2048, 16, 32, 8, 8192),
        True,
        1_235_814_400,
    ),
    "Llama-3.2-3B": (
        LLAMA | {"rope_scaling": LLAMA3 | {"factor": 32.0}, "head_dim": 128},
        (3072, 28, 24, 8, 8192),
        True,
        3_212_749_824,
    ),
    "Qwen3-0.6B": (
        QWEN | {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128},
        (1024, 28, 16, 8, 3072),
        True,
        596_049_920,
    ),
    "Mistral-7B-v0.1": (
        MISTRAL | {"sliding_window": 4096, "vocab_size": 32000},
        (4096, 32, 32, 8, 14336),
        False,
        7_241_732_096,
    ),
    "gemma-2-2b": (
        GEMMA | {"model_type": "gemma2", "vocab_size": 256000},
        (2304, 26, 8, 4, 9216),
        True,
        2_614_341_888,
    ),
    "gemma-3-1b-pt": (GEMMA | GEMMA3 | {"vocab_size": 262144}, (1152, 26, 4, 1, 6912), True, 999_885_952),
    "Mistral-Nemo-Base-2407": (
        MISTRAL | {"sliding_window": None, "vocab_size": 131072, "head_dim": 128},
        (5120, 40, 32, 8, 14336),
        False,
        12_247_782_400,
    ),
}
PUBLISHED |= {
    "SmolLM3-3B": (
        {"model_type": "smollm3", "vocab_size": 128256, "no_rope_layer_interval": 4, "rope_theta": 5000000.0},
        (2048, 36, 16, 4, 11008),
        True,
        3_075_098_624,
    ),
    "OLMo-2-0425-1B": (
        {"model_type": "olmo2", "vocab_size": 100352, "rope_theta": 500000},
        (2048, 16, 16, 16, 8192),
        False,
        1_484_916_736,
    ),
    "Qwen3-30B-A3B": (
        QWEN
        | {"model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "num_experts": 128, "mlp_only_layers": []}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1},
        (2048, 48, 32, 4, 6144),
        False,
        30_532_122_624,
    ),
    "Qwen1.5-MoE-A2.7B": (
        QWEN
        | {"model_type": "qwen2_moe", "vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False}
        | {"decoder_sparse_step": 1},
        (2048, 24, 16, 16, 5632),
        False,
        14_315_784_192,
    ),
    "OLMoE-1B-7B-0924": (
        {"model_type": "olmoe", "vocab_size": 50304, "num_experts": 64, "num_experts_per_tok": 8, "clip_qkv": None},
        (2048, 16, 16, 16, 1024),
        False,
        6_919_161_856,
    ),
    "Phi-3-mini-4k-instruct": (
        {"model_type": "phi3", "vocab_size": 32064, "sliding_window": 2047},
        (3072, 32, 32, 32, 8192),
        False,
        3_821_079_552,
    ),
    "phi-4": (
        {"model_type": "phi3", "vocab_size": 100352, "rope_theta": 250000},
        (5120, 40, 40, 10, 17920),
        False,
        14_659_507_200,
    ),
}
KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def config_of(name: str) -> dict[str, Any]:
    common, sizes, tied, _ = PUBLISHED[name]
    defaults = {"model_type": "qwen2", "hidden_act": "silu", "max_position_embeddings": 32768}
    return defaults | common | dict(zip(KEYS, sizes, strict=True)) | {"tie_word_embeddings": tied}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_published_number_of_parameters(name: str) -> None:
    config = config_of(name)
    model = MODELS[config["model_type"]]
    dims = model.dims(config)
    b = Builder(OPS, "bf16")
    batch = BatchInputs(
        tokens=b.input("tokens", (16,), "int32"),
        targets=b.input("targets", (16,), "int32"),
        positions=b.input("positions", (16,), "int32"),
        cu_seqlens=b.input("cu_seqlens", (3,), "int32"),
        loss_scale=b.input("loss_scale", (), "fp32"),
        seq_len=8,
    )
    with b.record("forward"):
        model.build(b, dims, batch)
    params = [value for value in b.declared if value.role == "param"]
    assert sum(prod(param.shape) for param in params) == PUBLISHED[name][-1]
    tensors = [tensor for weight in model.weights(dims) for tensor in weight.tensors]
    assert sum(prod(tensor.shape) for tensor in tensors) == PUBLISHED[name][-1]


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral"])
def test_head_dim_defaults_to_hidden_size_divided_by_heads(family: str) -> None:
    dims = MODELS[family].dims
    without = {k: v for k, v in tiny_config(model_type=family).items() if k != "head_dim"}
    assert dims(without).q_rows == 48
    assert dims(without | {"head_dim": 16}).q_rows == 64
    with pytest.raises(ConfigError, match=r"^hidden_size: must be a multiple of num_attention_heads 4 .*\(got 50\)"):
        dims(without | {"hidden_size": 50})


def test_missing_keys_of_llama_1_have_its_defaults() -> None:
    config = tiny_config(model_type="llama", rope_parameters=None)
    del config["num_key_value_heads"], config["max_position_embeddings"]
    d = MODELS["llama"].dims(config)
    assert (d.n_kv_heads, d.rope.theta, d.max_positions) == (4, 10000.0, 2048)


def test_layers_of_other_kinds_are_read_by_a_family_that_knows_them() -> None:
    kinds, known = ["linear_attention", "full_attention"], ("full_attention", "linear_attention")
    assert read_layer_types({"layer_types": kinds}, 2, default=(), known=known) == kinds
    assert read_layer_types({}, 2, default=kinds, known=known) == kinds
    with pytest.raises(ConfigError, match=r"layer_types: must be 2 times full_attention or linear_attention \(got"):
        read_layer_types({"layer_types": ["sliding_attention"] * 2}, 2, default=kinds, known=known)
    with pytest.raises(ConfigError, match="must be 2 times full_attention or sliding_attention"):
        read_layer_types({"layer_types": kinds}, 2, default=kinds)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen2", {"hidden_act": "gelu"}),
        ("qwen2", {"attention_dropout": 0.1}),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("llama", {"vision_config": {"hidden_size": 8}}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"attention_dropout": 0.1}),
        ("llama", {"attention_bias": "yes"}),
        ("llama", {"mlp_bias": 1}),
        ("llama", {"head_dim": 15}),
        ("llama", {"num_key_value_heads": 3}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
        ("smollm3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 2]}),
        ("olmo2", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("olmo2", {"hidden_act": "gelu"}),
        ("olmo2", {"attention_bias": "yes"}),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}),
        ("olmo3", {"rope_scaling": "yarn", "rope_parameters": None}),
        ("olmo3", {"layer_types": ["full_attention", "chunked_attention"] * 2, "rope_parameters": None}),
        ("olmo3", {"sliding_window": None, "rope_parameters": None}),
        ("phi3", {"audio_config": {"hidden_size": 8}}),
        ("phi3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("phi3", {"resid_pdrop": 0.1}),
        ("phi3", {"embd_pdrop": 0.1}),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("phi3", {"partial_rotary_factor": 0.2}),
        ("phi3", {"hidden_act": "gelu"}),
        ("mistral", {"vision_config": {"hidden_size": 8}}),
        ("mistral", {"sliding_window": 0}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma2", {"final_logit_softcapping": -1}),
        ("gemma2", {"layer_types": ["sliding_attention"]}),
        ("gemma3_text", {"use_bidirectional_attention": True, "rope_parameters": None}),
        ("gemma3_text", {"vision_config": {"hidden_size": 8}, "rope_parameters": None}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}),
        ("gemma3_text", {"rope_scaling": "linear", "rope_parameters": None}),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("ministral", {"layer_types": ["full_attention", "chunked_attention"] * 2}),
        ("ministral", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("ministral", {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"] * 2}),
    ],
    ids=str,
)
def test_errors_name_the_invalid_key(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(changes))}.*\(got .*\)"):
        MODELS[family].dims(tiny_config(model_type=family, **changes))


@pytest.mark.parametrize(
    ("given", "has_rope"),
    [
        ({"no_rope_layers": [0, 1, 1, 0, 1]}, (False, True, True, False)),
        ({"no_rope_layer_interval": 2}, (True, False, True, False)),
        ({}, (True, True, True, False)),
    ],
    ids=str,
)
def test_layers_of_smollm3_have_rope_as_in_transformers(given: dict[str, Any], has_rope: tuple[bool, ...]) -> None:
    config = tiny_config(model_type="smollm3", **given)
    theirs = AutoConfig.for_model(**config).no_rope_layers
    assert MODELS["smollm3"].dims(config).has_rope == has_rope == tuple(map(bool, theirs[:4]))


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_reads_the_types_of_older_files_as_longrope(kind: str) -> None:
    scaling = {"type": kind, "short_factor": [1.5] * 6, "long_factor": [4.0] * 6}
    config = tiny_config(model_type="phi3", rope_scaling=scaling, partial_rotary_factor=0.75, rope_parameters=None)
    config |= {"hidden_size": 64, "rope_theta": 5e5, "max_position_embeddings": 16384}
    with pytest.raises(ConfigError, match="original_max_position_embeddings: is required"):
        MODELS["phi3"].dims(config)
    config["rope_scaling"] = scaling | {"original_max_position_embeddings": 4096}
    theirs = AutoConfig.for_model(**deepcopy(config)).rope_parameters
    assert (theirs["rope_type"], theirs["original_max_position_embeddings"]) == ("longrope", 4096)
    rope = MODELS["phi3"].dims(config).rope
    assert rope == replace(rope, scaling=LongRope((1.5,) * 6, (4.0,) * 6, 4096), theta=theirs["rope_theta"])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_theta": 3e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9e3}}},
        {"layer_types": ["full_attention"] * 4},
    ],
    ids=str,
)
def test_layers_of_olmo3_have_the_window_and_rope_of_transformers(given: dict[str, Any]) -> None:
    config = {key: value for key, value in tiny_config(model_type="olmo3").items() if key != "rope_parameters"} | given
    theirs = AutoConfig.for_model(**deepcopy(config))
    dims = MODELS["olmo3"].dims(config)
    for rope, window, kind in zip(dims.ropes, dims.windows, theirs.layer_types, strict=True):
        expected = theirs.rope_parameters[kind]
        assert rope.theta == expected["rope_theta"]
        assert (rope.scaling is None) is (expected["rope_type"] == "default")
        assert window == (theirs.sliding_window if kind == "sliding_attention" else 0)

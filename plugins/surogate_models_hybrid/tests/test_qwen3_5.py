"""Configurations and programs of Qwen3.5. Parity with transformers and exports are tested for all families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_model import Model
from models.harness import MODELS, tiny_config
from models.test_parity import QWEN3_5, QWEN3_5_MOE
from outer_models import OUTER
from torch import Tensor

from surogate_conformance import bench_folder
from surogate_conformance.bench import Bench
from surogate_conformance.kinds import models
from surogate_conformance.subject import found
from surogate_core.api import ConfigError
from surogate_models_hybrid import qwen3_5, reference
from surogate_models_hybrid.qwen3_5 import QWEN3_5 as TEXT
from surogate_models_hybrid.qwen3_5 import QWEN3_5_OUTER, HybridDims

PUBLISHED: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
"""The keys of a published text_config of 9B."""


def test_the_keys_of_a_published_file_are_read() -> None:
    d = TEXT.dims(PUBLISHED)
    assert isinstance(d, HybridDims)
    assert d.linear == ((True,) * 3 + (False,)) * 8 and d.conv_width == 4 and d.norm_offset == 1
    assert (d.delta_rows, d.v_rows, d.rope.rotary_dim, d.rope.theta) == (8192, 4096, 64, 1e7)
    without = {key: value for key, value in PUBLISHED.items() if key != "layer_types"}
    assert TEXT.dims(without) == d
    absent = ("head_dim", "num_key_value_heads", "full_attention_interval", "partial_rotary_factor", "mamba_ssm_dtype")
    assert TEXT.dims({key: value for key, value in without.items() if key not in absent}) == d


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, r"layer_types: must be 4 times linear_attention or full_att"),
        ({"layer_types": ["full_attention"] * 3}, r"layer_types: must be 4 times"),
        ({"layer_types": None, "full_attention_interval": 0}, r"full_attention_interval: must be .*got 0"),
        ({"linear_conv_kernel_dim": 2}, r"linear_conv_kernel_dim: must be a whole number from 3 to 7 \(got 2\)"),
        ({"linear_conv_kernel_dim": 8}, r"linear_conv_kernel_dim: must be a whole number from 3 to 7 \(got 8\)"),
        ({"linear_key_head_dim": 12}, r"linear_key_head_dim: must be a multiple of 8 and at most 256 \(got 12\)"),
        ({"linear_value_head_dim": 264}, r"linear_value_head_dim: must be a multiple of 8 and at most 256 \(got 264\)"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads: must be a multiple of .*_key_heads 2 \(got 3\)"),
        ({"attention_bias": True}, r"attention_bias: biases of attention are not supported by .* must be false"),
        ({"attn_output_gate": False}, r"attn_output_gate: attention without its gate is not supported; must be true"),
        ({"output_gate_type": "sigmoid"}, r"output_gate_type: must be swish or silu \(got 'sigmoid'\)"),
        ({"mamba_ssm_dtype": "bfloat16"}, r"mamba_ssm_dtype: must be float32 \(got 'bfloat16'\)"),
        ({"hidden_act": "gelu"}, r"hidden_act: must be silu \(got 'gelu'\)"),
        ({"vision_config": {"depth": 1}}, r"vision_config: towers of images or sound are not supported"),
        ({"partial_rotary_factor": 0.2}, r"partial_rotary_factor: must rotate an even number of the 16 elements"),
    ],
)  # fmt: skip
def test_a_config_that_the_program_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TEXT.dims(tiny_config(**QWEN3_5 | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mlp_only_layers": [0]},
            r"mlp_only_layers: transformers ignores it in this model; must be empty \(got \[0\]\)",
        ),
        (
            {"norm_topk_prob": False},
            r"norm_topk_prob: transformers ignores it in this model; must be true \(got False\)",
        ),
        ({"num_experts_per_tok": 6}, r"num_experts_per_tok: must be at most the number of experts 5 \(got 6\)"),
        ({"output_router_logits": True}, r"output_router_logits: .* not supported yet; must be false \(got True\)"),
        ({"n_group": 2}, r"n_group: groups of experts are not supported by this model \(got 2\)"),
        ({"linear_conv_kernel_dim": 2}, r"linear_conv_kernel_dim: must be a whole number from 3 to 7 \(got 2\)"),
    ],
)
def test_a_mixture_that_the_program_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MODELS["qwen3_5_moe_text"].dims(tiny_config(**QWEN3_5_MOE | changes))


def test_the_outer_class_names_the_key_of_the_text() -> None:
    given = OUTER["qwen3_5"]
    text = given["text_config"]
    with pytest.raises(ConfigError, match=r"^text_config\.mamba_ssm_dtype: must be float32"):
        QWEN3_5_OUTER.dims({**given, "text_config": text | {"mamba_ssm_dtype": "float16"}})
    with pytest.raises(ConfigError, match=r"^vision_config: is required by Qwen3_5ForConditionalGeneration"):
        QWEN3_5_OUTER.dims({"text_config": text})
    with pytest.raises(ConfigError, match=r"^text_config\.model_type: must be qwen3_5_text \(got 'qwen3_5_moe_text'\)"):
        QWEN3_5_OUTER.dims({**given, "text_config": text | {"model_type": "qwen3_5_moe_text"}})


def test_small_projections_stay_precise_and_decays_in_fp32() -> None:
    assert MODELS["qwen3_5_text"] is TEXT
    d = TEXT.dims(tiny_config(**QWEN3_5))
    maps = {m.param: m for m in TEXT.weights(d)}
    assert [name for name, m in maps.items() if m.precise] == ["layers.0.attn.ba", "layers.2.attn.ba"]
    assert maps["layers.0.attn.conv"].kind == "vector"
    params = Model(tiny_config(**QWEN3_5), fp8=False).assembly.params
    kept = {name for name, value in params.items() if value.dtype == "fp32"}
    assert kept == {f"layers.{i}.attn.{name}" for i in (0, 2) for name in ("a_log", "dt_bias")}
    assert params["layers.0.attn.a_log"].init is not None and params["layers.0.attn.a_log"].init.kind == "log_uniform"


def kinds(recompute: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    program = Model(tiny_config(**QWEN3_5), fp8=False, recompute=recompute).assembly.programs["micro_first"]
    return [(op.phase, op.kind) for op in program.ops if op.kind.startswith("gated_delta") and op.block == 0]


def test_recomputed_attention_drops_the_states_alone() -> None:
    """The forward pass does not write them then. What reads the outputs of the rule finds these still in memory."""
    backward = ("backward", "gated_delta_rule_bwd")
    assert kinds() == [("forward", "gated_delta_rule"), backward]
    assert kinds(frozenset({"att"})) == [
        ("forward", "gated_delta_out"),
        ("recompute", "gated_delta_states"),
        backward,
    ]
    assert kinds(frozenset({"block"})) == [("forward", "gated_delta_out"), ("recompute", "gated_delta_rule"), backward]


def _one_document(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a function of the references take all tokens for one document."""
    function = getattr(reference, name)

    def leaking(*given: Any) -> Any:
        places = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.dtype == torch.int32]
        return function(*(torch.arange(len(x)) if i in places else x for i, x in enumerate(given)))

    monkeypatch.setattr(reference, name, leaking)


def _check_documents() -> None:
    with found("surogate-models-hybrid") as subject, bench_folder() as folder:
        models.documents_of_a_row_do_not_see_each_other(TEXT, Bench(subject, Path(folder)))


@pytest.mark.parametrize("leaks", ["_masks", "_tap"])
def test_the_conformance_suite_finds_a_leak_between_documents(leaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the state, or of the convolution."""
    _check_documents()
    _one_document(monkeypatch, leaks)
    with pytest.raises(AssertionError, match="tokens of the first document change the loss of the others"):
        _check_documents()


def test_the_conformance_suite_finds_a_state_that_leaks_though_decays_are_drawn_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sets them to the slowest. With those drawn, the state of another document is lost at its first token."""
    drawn = qwen3_5.Init
    fast = {"low": 0.01, "high": 1e9}
    monkeypatch.setattr(qwen3_5, "Init", lambda **init: drawn(**init | (fast if "low" in init else {})))
    _one_document(monkeypatch, "_masks")
    with pytest.raises(AssertionError, match="tokens of the first document change the loss of the others"):
        _check_documents()
    monkeypatch.setattr(models, "_slow_decays", lambda steps: None)
    _check_documents()

"""Configurations of Qwen3-Next and of Qwen3.5 mixtures; sizes that the kernels serve. Runs: tests/end_to_end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from models.harness import tiny_config
from models.test_parity import QWEN3_NEXT
from outer_models import OUTER

from surogate_core.api import ConfigError, Op, Target, Value
from surogate_core.testing.binding import choose
from surogate_core.testing.devices import DEVICES
from surogate_models_hybrid.kernels import KERNELS
from surogate_models_hybrid.ops import OPS
from surogate_models_hybrid.qwen3_5_moe import QWEN3_5_MOE_OUTER, HybridMixtureDims
from surogate_models_hybrid.qwen3_next import QWEN3_NEXT as MODEL

PUBLISHED: dict[str, Any] = {
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""The keys of the published config.json of 80B-A3B."""


def test_the_keys_of_a_published_file_are_read() -> None:
    d = MODEL.dims(PUBLISHED)
    assert isinstance(d, HybridMixtureDims)
    assert d.linear == ((True,) * 3 + (False,)) * 12 and d.dense == frozenset() and d.norm_offset == 1
    assert (d.delta_rows, d.v_rows, d.rope.rotary_dim, d.rope.theta) == (8192, 4096, 64, 1e7)
    assert (d.mixture.n_experts, d.mixture.k, d.mixture.d_expert, d.mixture.d_shared) == (512, 10, 512, 512)
    assert d.mixture.shared_gated and d.mixture.router.normalize
    absent = ("head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    absent += ("full_attention_interval", "partial_rotary_factor", "linear_num_value_heads", "num_key_value_heads")
    assert MODEL.dims({key: value for key, value in PUBLISHED.items() if key not in absent}) == d
    (qkvz,) = (m for m in MODEL.weights(d) if m.param == "layers.0.attn.qkvz")
    assert [(t.name, t.shape) for t in qkvz.tensors] == [
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", (12288, 2048))
    ]
    assert {m.param for m in MODEL.weights(d) if m.precise} >= {"layers.0.attn.ba", "layers.46.attn.ba"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["chunked_attention"] * 3}, r"layer_types: must be 3 times linear_attention or full_att"),
        ({"linear_conv_kernel_dim": 8}, r"linear_conv_kernel_dim: must be a whole number from 3 to 7 \(got 8\)"),
        ({"linear_key_head_dim": 260}, r"linear_key_head_dim: must be a multiple of 8 and at most 256 \(got 260\)"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads: must be a multiple of .*_key_heads 2 \(got 3\)"),
        ({"mamba_ssm_dtype": "bfloat16"}, r"mamba_ssm_dtype: must be float32 \(got 'bfloat16'\)"),
        ({"attention_bias": True}, r"attention_bias: biases of attention are not supported by .* must be false"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers: must be a list of numbers of layers, from 0 to 2 \(got \[3\]\)"),
        ({"mlp_only_layers": [0, 1, 2]}, r"mlp_only_layers: leaves no layer with experts. Such a model is a Qwen3.5"),
        ({"decoder_sparse_step": 4}, r"decoder_sparse_step: leaves no layer with experts. Such a model is a Qwen3.5"),
        ({"num_experts_per_tok": 6}, r"num_experts_per_tok: must be at most the number of experts 5 \(got 6\)"),
        ({"output_router_logits": True}, r"output_router_logits: .* not supported yet; must be false \(got True\)"),
        ({"n_group": 2}, r"n_group: groups of experts are not supported by this model \(got 2\)"),
        ({"hidden_act": "gelu"}, r"hidden_act: must be silu \(got 'gelu'\)"),
    ],
)  # fmt: skip
def test_a_config_that_the_program_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MODEL.dims(tiny_config(**QWEN3_NEXT | changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "qwen3_5_text"}, r"^text_config\.model_type: must be qwen3_5_moe_text \(got 'qwen3_5_text'\)"),
        ({"mamba_ssm_dtype": "float16"}, r"^text_config\.mamba_ssm_dtype: must be float32 \(got 'float16'\)"),
        ({"layer_types": ["mamba", "mamba"]}, r"^text_config\.layer_types: must be 2 times linear_attention or full"),
        ({"norm_topk_prob": False}, r"^text_config\.norm_topk_prob: transformers ignores it in this model"),
    ],
)
def test_the_outer_class_names_the_key_of_the_text(text: dict[str, Any], message: str) -> None:
    given = OUTER["qwen3_5_moe"]
    with pytest.raises(ConfigError, match=message):
        QWEN3_5_MOE_OUTER.dims({**given, "text_config": given["text_config"] | text})


def test_the_outer_class_without_its_tower_or_with_sound_is_refused() -> None:
    given = OUTER["qwen3_5_moe"]
    with pytest.raises(ConfigError, match=r"^vision_config: is required by Qwen3_5MoeForConditionalGeneration"):
        QWEN3_5_MOE_OUTER.dims({"text_config": given["text_config"]})
    with pytest.raises(ConfigError, match=r"^audio_config: Qwen3_5MoeForConditionalGeneration has no such part here"):
        QWEN3_5_MOE_OUTER.dims({**given, "audio_config": {"hidden_size": 8}})


def op(kind: str, *shapes: tuple[str, tuple[int, ...]], **attrs: Any) -> Op:
    """Return an op on inputs of these dtypes and shapes."""
    (definition,) = (found for found in OPS if found.kind == kind)
    ins = tuple(Value(f"in{i}", shape, dtype, "act") for i, (dtype, shape) in enumerate(shapes))
    specs = definition.infer(ins, attrs)
    return Op(kind, ins, tuple(Value(s.label, s.shape, s.dtype, "act") for s in specs), attrs, phase="forward")


def delta(tokens: int = 128, k_dim: int = 128, v_dim: int = 128) -> Op:
    sizes = {"n_k_heads": 1, "n_v_heads": 2, "k_dim": k_dim, "v_dim": v_dim}
    shapes = [("bf16", (tokens, 2 * k_dim + 2 * v_dim)), ("bf16", (tokens, 4)), ("fp32", (2,)), ("fp32", (2,))]
    return op("gated_delta_rule", *shapes, ("int32", (tokens,)), **sizes)


def norm(dim: int) -> Op:
    return op("gated_rmsnorm", ("bf16", (64, 2 * dim)), ("bf16", (64, 2 * dim)), ("bf16", (dim,)), eps=1e-6)


def key_heads(v_dim: int) -> Op:
    sizes = {"n_k_heads": 1, "n_v_heads": 2, "k_dim": 8, "v_dim": v_dim}
    return op("split_key_heads", ("bf16", (64, 16 + 4 * v_dim)), ("bf16", (64, 4)), **sizes)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (delta(), ""),
        (delta(tokens=96), "the tokens of a micro-step must be a multiple of 64, got 96"),
        (delta(k_dim=64), "heads must have 128 elements, got 64"),
        (delta(v_dim=256), "heads must have 128 elements, got 256"),
        (norm(128), ""),
        (norm(96), "heads must have 64, 128, 256 elements, got 96"),
        (key_heads(8), ""),
        (key_heads(12), "widths must be multiples of 8, got 12"),
    ],
)  # fmt: skip
def test_kernels_name_the_size_that_they_lack(given: Op, reason: str) -> None:
    (kernel,) = (kernel for kernel in KERNELS if kernel.op == given.kind)
    found = kernel.supports(given, Target(DEVICES["h200"]))
    assert (found.ok, found.reason) == (not reason, reason)


ROWS = "bf16", (64, 256)
SUMS = (
    (op("causal_conv_bwd", ROWS, ROWS, ("bf16", (256, 1, 4)), ("int32", (64,))), (1,)),
    (op("gated_rmsnorm_bwd", ROWS, ROWS, ROWS, ("bf16", (128,)), ("fp32", (64, 2))), (2,)),
    (
        op(
            "gated_delta_rule_bwd",
            ROWS,
            *((v.dtype, v.shape) for v in delta(64).ins),
            ("bf16", (1, 2, 128, 128)),
            **delta().attrs,
        ),
        (2, 3),
    ),
)
"""Ops, and their outputs that are gradients of params."""


@pytest.mark.parametrize(("given", "sums"), SUMS, ids=lambda x: x.kind if isinstance(x, Op) else "")
def test_gradients_of_params_are_added_in_fp32_and_written_in_bf16(given: Op, sums: tuple[int, ...]) -> None:
    h200, added = Target(DEVICES["h200"]), frozenset(sums)
    outs = tuple(replace(out, dtype="bf16") if i in sums else out for i, out in enumerate(given.outs))
    for served in (given, replace(given, accumulate=added), replace(given, outs=outs)):
        assert choose(KERNELS, served, h200).op == given.kind
    with pytest.raises(AssertionError, match=f"cannot accumulate into .*{outs[sums[0]].label}"):
        choose(KERNELS, replace(given, outs=outs, accumulate=added), h200)

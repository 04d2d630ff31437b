"""Parity of every family with transformers in fp32, with the same random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .harness import (
    PlannedModel,
    as_stored,
    hf_loss_sum,
    random_documents,
    random_hf_model,
    relative_error,
    tiny_config,
    valid_tokens,
)

TOLERANCE, OF_SINKS = 1e-5, 2e-5
"""Terms of all tokens cancel in the gradient of a sink: in fp32, that of transformers is 5e-6 off float64."""


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    """Return a RoPE scaling that affects the 24 positions of these tests: some pairs unchanged, some scaled, some
    interpolated."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    original = {"original_max_position_embeddings": 32} if kind in ("llama3", "yarn") else {}
    return {"rope_parameters": rope | original | more}


def longrope(original: int) -> dict[str, Any]:
    """Return a config with LongRoPE on 12 of the 16 elements of a head, and a context of four times the original."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.0 + 1.5 * i for i in range(6)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
    rope |= {"attention_factor": 1.25} if original == 1 else {}  # the default is infinite
    sizes = {"original_max_position_embeddings": original, "max_position_embeddings": 128, "hidden_size": 64}
    return {"rope_parameters": rope, **sizes}


QWEN2: dict[str, Any] = {"model_type": "qwen2"}
LLAMA: dict[str, Any] = {"model_type": "llama"}
SMOLLM3: dict[str, Any] = {"model_type": "smollm3", "no_rope_layers": [1, 0, 0, 1]}
PHI3: dict[str, Any] = {"model_type": "phi3", "sliding_window": None}
OLMO2: dict[str, Any] = {"model_type": "olmo2", "initializer_range": 0.1}
"""No norm is in front of attention: with small embeddings its gradients lose digits, in transformers too."""
OLMO3: dict[str, Any] = OLMO2 | {
    "model_type": "olmo3",
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": scaled("yarn", beta_fast=4.0)["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
MISTRAL: dict[str, Any] = {"model_type": "mistral", "sliding_window": 6}
MINISTRAL3: dict[str, Any] = {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 5,
        "max_position_embeddings": 80,
        "beta_fast": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.7,
    },
}
"""The longest document has queries with five factors."""
GEMMA: dict[str, Any] = {"sliding_window": 6, "query_pre_attn_scalar": 7, "tie_word_embeddings": True}
GEMMA3_ROPE: dict[str, Any] = {
    "model_type": "gemma3_text",
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 5, "num_hidden_layers": 2}
QWEN3_MOE: dict[str, Any] = MOE | {"model_type": "qwen3_moe", "moe_intermediate_size": 20, "norm_topk_prob": True}
OLMOE: dict[str, Any] = MOE | {"model_type": "olmoe", "head_dim": 12, "intermediate_size": 20}
GLM4_MOE: dict[str, Any] = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
LATENT: dict[str, Any] = {
    "head_dim": 6,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 16,
}
GLM4_MOE_LITE: dict[str, Any] = GLM4_MOE | LATENT | {"model_type": "glm4_moe_lite", "first_k_dense_replace": 1}
DEEPSEEK_V3: dict[str, Any] = GLM4_MOE | LATENT | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1}
QWEN2_MOE: dict[str, Any] = MOE | {
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-3,
}
"""The output at the first token of a document is a multiple of its value, however small: its norm, with an eps of 1e-6,
makes rounding errors of it as large as the output."""
QWEN3_5_MOE: dict[str, Any] = (
    QWEN3_5
    | MOE
    | {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    }
)
QWEN3_NEXT: dict[str, Any] = QWEN3_5_MOE | {"model_type": "qwen3_next", "mlp_only_layers": [1]}
QWEN3_5_OTHER: dict[str, Any] = QWEN3_5 | {
    "layer_types": None,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 7,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
    "intermediate_size": 20,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "swiglu_limit": 0.1,
    "attention_bias": True,
    "initializer_range": 0.2,
    **scaled("yarn", beta_fast=4.0, truncate=False),
}
"""The limit is one that a part of the gates and values reach."""
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_tied": {"tie_word_embeddings": True},
    "qwen3_biased": {"attention_bias": True},
    "qwen3_one_group": {"num_key_value_heads": 1, "head_dim": 12},
    "qwen2": QWEN2,
    "qwen2_tied": QWEN2 | {"tie_word_embeddings": True},
    "llama": LLAMA,
    "llama_tied": LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "llama_biased": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama_llama3": LLAMA | scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    "llama_linear": LLAMA | scaled("linear"),
    "llama_dynamic": LLAMA | scaled("dynamic"),
    "qwen2_yarn": QWEN2 | scaled("yarn", beta_fast=4.0),
    "qwen3_yarn": scaled("yarn", beta_fast=4.0, attention_factor=1.5),
    "smollm3": SMOLLM3 | {"tie_word_embeddings": True},
    "olmo2": OLMO2,
    "olmo2_biased": OLMO2 | {"attention_bias": True, "tie_word_embeddings": True},
    "olmo3": OLMO3,
    "phi3": PHI3 | {"sliding_window": 6},
    "phi3_short": PHI3 | longrope(original=24),
    "phi3_long": PHI3 | longrope(original=1) | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "mistral": MISTRAL,
    "gemma2": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    "gemma2_untied": GEMMA | {"model_type": "gemma2", "tie_word_embeddings": False, "attention_bias": True},
    "gemma3_text": GEMMA | GEMMA3_ROPE | {"sliding_window_pattern": 2},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_dense": QWEN3_MOE | {"norm_topk_prob": False, "mlp_only_layers": [0]},
    "olmoe": OLMOE,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_groups": GLM4_MOE | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "attention_bias": True},
    "glm4_moe_plain": GLM4_MOE | {"norm_topk_prob": False, "use_qk_norm": True, "partial_rotary_factor": 0.25},
    "glm4_moe_lite": GLM4_MOE_LITE,
    "deepseek_v3": DEEPSEEK_V3 | {"v_head_dim": 9},
    "deepseek_v3_groups": DEEPSEEK_V3 | {"n_group": 4, "topk_group": 2, "rope_interleave": False},
    "deepseek_v3_yarn": DEEPSEEK_V3
    | {"q_lora_rank": None, "attention_bias": True}
    | scaled("yarn", beta_fast=4.0, mscale=0.7, mscale_all_dim=0.9),
    "qwen2_moe": QWEN2_MOE,
    "qwen2_moe_dense": QWEN2_MOE | {"norm_topk_prob": True, "mlp_only_layers": [0], "qkv_bias": False},
    "gpt_oss": GPT_OSS,
    "gpt_oss_other": GPT_OSS
    | {
        "attention_bias": False,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_key_value_heads": 1,
        "swiglu_alpha": 1.2,
        "swiglu_limit": 7.0,
        **scaled("yarn", beta_fast=4.0),
    },
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_other": QWEN3_5_OTHER,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next_plain": QWEN3_NEXT
    | {"linear_num_value_heads": 6, "norm_topk_prob": False, "mlp_only_layers": [], "tie_word_embeddings": True},
    "ministral3": MINISTRAL3,
    "ministral3_tied": MINISTRAL3 | {"tie_word_embeddings": True, "sliding_window": 6, "num_key_value_heads": 1},
    "ministral": MISTRAL | {"model_type": "ministral", "layer_types": ["full_attention", "sliding_attention"] * 2},
}
FAMILIES = (
    "qwen3",
    "qwen2",
    "llama",
    "smollm3",
    "mistral",
    "ministral3",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen3_moe",
    "glm4_moe",
    "qwen2_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "gpt_oss",
)
PACKINGS = {"unpacked": [[24], [24], [24]], "packed": [[7, 12, 5], [24], [2, 9, 3]]}


def documents_in_rows(lengths: list[list[int]]) -> list[list[list[int]]]:
    flat = iter(random_documents([n for row in lengths for n in row], tiny_config()["vocab_size"]))
    return [[next(flat) for _ in row] for row in lengths]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_every_gradient_equal_transformers(variant: str, packing: str) -> None:
    config = tiny_config(**VARIANTS[variant])
    hf = random_hf_model(config)
    rows = documents_in_rows(PACKINGS[packing])
    documents = [document for row in rows for document in row]
    scale = 1 / valid_tokens(documents)
    expected = hf_loss_sum(hf, documents) * scale
    expected.backward()

    model = PlannedModel(config, batch_size=3, seq_len=24, lmhead_chunks=3)
    model.load(hf.state_dict())
    loss = model.micro_step(rows, scale)

    assert loss == pytest.approx(expected.item(), rel=TOLERANCE)
    theirs = as_stored({name: parameter.grad for name, parameter in hf.named_parameters()})
    assert model.gradients.keys() == theirs.keys()
    errors = {name: relative_error(grad, theirs[name]) for name, grad in model.gradients.items()}
    far = {name: e for name, e in errors.items() if not e <= (OF_SINKS if name.endswith("sinks") else TOLERANCE)}
    assert not far, far


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, packing: str) -> None:
    config = tiny_config(**VARIANTS[variant])
    hf = random_hf_model(config)
    rows = documents_in_rows(PACKINGS[packing])
    model = PlannedModel(config, batch_size=3, seq_len=24)
    model.load(hf.state_dict())
    logits = model.logits(rows).view(3, 24, -1)
    for row, ours in zip(rows, logits, strict=True):
        with torch.no_grad():
            theirs = torch.cat([hf(input_ids=torch.tensor(document)[None]).logits[0] for document in row])
        assert relative_error(ours[: len(theirs)], theirs) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_loss_equals_sum_over_documents(family: str) -> None:
    config = tiny_config(**VARIANTS[family])
    rows = documents_in_rows([[7, 12, 5], [24], [2, 9, 3]])
    model = PlannedModel(config, batch_size=3, seq_len=24)
    model.load(random_hf_model(config).state_dict())
    packed = model.micro_step(rows, 1.0)
    alone = [model.micro_step([[document], [], []], 1.0) for row in rows for document in row]
    assert packed == pytest.approx(sum(alone), rel=1e-6)


def test_two_micro_steps_equal_one_large_batch() -> None:
    config = tiny_config(tie_word_embeddings=True)
    state = random_hf_model(config).state_dict()
    rows = documents_in_rows([[7, 12, 5], [24], [5, 7], [12]])  # transformers runs those of a length together
    whole, halves = (PlannedModel(config, batch_size=size, seq_len=24) for size in (4, 2))
    whole.load(state)
    halves.load(state)
    expected = whole.micro_step(rows, 0.01)
    halves.micro_step(rows[:2], 0.01)
    assert halves.micro_step(rows[2:], 0.01, first=False) == pytest.approx(expected, rel=1e-6)
    for name, grad in halves.gradients.items():
        assert relative_error(grad, whole.gradients[name]) <= 2e-6, name


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_any_part_gives_bit_identical_gradients(family: str) -> None:
    config = tiny_config(**VARIANTS[family])
    state = random_hf_model(config).state_dict()
    rows = documents_in_rows([[7, 12, 5], [24]])
    plain = PlannedModel(config, batch_size=2, seq_len=24)
    plain.load(state)
    plain.micro_step(rows, 0.02)
    for parts in ({"rmsnorm"}, {"swiglu"}, {"qkv"}, {"att"}, {"ffn"}, {"block"}):
        model = PlannedModel(config, batch_size=2, seq_len=24, recompute=frozenset(parts))
        model.load(state)
        model.micro_step(rows, 0.02)
        assert all(torch.equal(grad, plain.gradients[name]) for name, grad in model.gradients.items()), parts


@pytest.mark.parametrize("family", FAMILIES)
def test_block_recomputation_keeps_one_residual_per_block(family: str) -> None:
    config = tiny_config(**VARIANTS[family])
    model = PlannedModel(config, batch_size=2, seq_len=24, recompute=frozenset({"block"}))
    program = model.assembly.programs["micro_first"]
    forward = {v for op in program.ops if op.phase == "forward" and op.block >= 0 for v in op.outs}
    kept = {v for op in program.ops if op.phase != "forward" for v in op.ins if v in forward}
    assert [v.label for v in sorted(kept, key=lambda v: v.block)] == ["residual"] * (config["num_hidden_layers"] - 1)


TRAINED = ("qwen3", "qwen2_tied", "llama_biased", "smollm3", "mistral", "gemma2", "gemma3_text", "olmo3", "phi3_short")
TRAINED += ("qwen3_moe", "olmoe", "ministral3", "glm4_moe", "qwen2_moe", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss")
TRAINED_OFTEN = ("qwen3", "qwen2_tied", "gemma3_text", "qwen3_moe")
"""Plain blocks, a tied head with biases, sliding windows with scaled embeddings, experts."""


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in TRAINED_OFTEN else pytest.mark.slow) for name in TRAINED]
)
def test_twenty_adamw_steps_match_torch(variant: str) -> None:
    """Gradients are clipped at every step, matrices have weight decay, and each step has two micro-steps.

    The taps of a convolution are no matrix, and neither are the biases of all experts.
    """
    config = tiny_config(**VARIANTS[variant])
    hf = random_hf_model(config)
    model = PlannedModel(config, batch_size=2, seq_len=24, weight_decay=0.1, max_grad_norm=0.5)
    model.load(hf.state_dict())
    model.executor.run("start")
    no_matrix = ("conv1d", "_bias")
    decay = {
        name: 0.1 if p.ndim >= 2 and not any(part in name for part in no_matrix) else 0.0
        for name, p in hf.named_parameters()
    }
    groups = [
        {"params": [p for name, p in hf.named_parameters() if decay[name] == value], "weight_decay": value}
        for value in (0.1, 0.0)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    rows = documents_in_rows([[7, 12, 5], [24], [5, 7], [12]])  # transformers runs those of a length together
    documents = [document for row in rows for document in row]
    scale = 1 / valid_tokens(documents)
    for step in range(1, 21):
        lr = 3e-3 * step / 20
        model.micro_step(rows[:2], scale)
        ours = model.micro_step(rows[2:], scale, first=False)
        model.update(step, lr)

        optimizer.zero_grad()
        theirs = hf_loss_sum(hf, documents) * scale
        theirs.backward()
        norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()

        assert norm > 0.5
        assert float(model.buffers.persistent(model.assembly.grad_norm)) == pytest.approx(norm.item(), rel=1e-4)
        assert ours == pytest.approx(theirs.item(), rel=TOLERANCE), step

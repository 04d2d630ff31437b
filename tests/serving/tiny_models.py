"""Models of a million random weights, one for each family and kind of RoPE that GGUF files are written of.

Weights are random but not small: norms differ from 1, biases from 0, and logits spread over some nats, so that a
permuted row, a forgotten offset or another rotary base shows. Windows and original contexts are shorter than the text
that is compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from .tiny_tokenizers import tokenizer_of

TEMPLATES = Path(__file__).parents[1] / "data/templates"

SAME = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 128}


def rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    """Return the parameters of a RoPE."""
    return {"rope_theta": theta, "rope_type": kind, **more}


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONG = {"long_factor": [1.0 + 0.5 * i for i in range(12)], "short_factor": [1.0 + 0.05 * i for i in range(12)]}
BY_LAYER = {"full_attention": rope(1e6, "linear", factor=8.0), "sliding_attention": rope(2e4)}


DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
SHARED = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}


@dataclass(frozen=True)
class Tiny:
    """A model.

    model_type  in transformers
    tokenizer   of `tiny_tokenizers`
    template    of `tests/data/templates`
    text        keys of the config, or of its text
    vision      keys of the tower's config; empty: there is none
    """

    model_type: str
    tokenizer: str
    template: str
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)


MODELS: Mapping[str, Tiny] = {
    "llama3": Tiny("llama", "llama3", "llama-3.1", {"rope_parameters": rope(5e5, "llama3", **LLAMA_SCALING)}),
    "llama-biases": Tiny("llama", "llama3", "llama-3", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Tiny("mistral", "mistral", "mistral-v3", {"sliding_window": None, "rope_parameters": rope(1e6)}),
    "nemo": Tiny("mistral", "tekken", "mistral-v3-tekken", {"sliding_window": None, "head_dim": 64}),
    "ministral3": Tiny(
        "ministral3",
        "tekken",
        "mistral-v3-tekken",
        {
            "head_dim": 64,
            "rope_parameters": rope(1e6, "yarn", **YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
        },
    ),
    "qwen2.5": Tiny("qwen2", "qwen", "qwen2.5", {"tie_word_embeddings": True, "rope_parameters": rope(1e6)}),
    "qwen3": Tiny(
        "qwen3", "qwen", "qwen3", {"head_dim": 64, "tie_word_embeddings": True, "rope_parameters": rope(1e6)}
    ),
    "qwen3-yarn": Tiny("qwen3", "qwen", "qwen3", {"head_dim": 64, "rope_parameters": rope(1e6, "yarn", **YARN)}),
    "qwen3-moe": Tiny(
        "qwen3_moe",
        "qwen",
        "qwen3",
        {
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
            "rope_parameters": rope(1e6),
        },
    ),
    "olmoe": Tiny(
        "olmoe",
        "olmoe",
        "qwen2.5",
        {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
    ),
    "gpt-oss": Tiny(
        "gpt_oss",
        "qwen",
        "gpt-oss",
        {
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "rope_parameters": rope(150000.0, "yarn", **YARN, beta_fast=32.0, beta_slow=1.0),
        },
    ),
    "qwen2-moe": Tiny(
        "qwen2_moe", "qwen", "qwen2.5", {**SHARED, "shared_expert_intermediate_size": 128, "num_experts": 8}
    ),
    "glm4-moe": Tiny("glm4_moe", "qwen", "qwen2.5", {**SHARED, "head_dim": 64, "n_routed_experts": 8}),
    "qwen3.5": Tiny("qwen3_5_text", "qwen", "qwen3", DELTA),
    "qwen3.5-moe": Tiny(
        "qwen3_5_moe_text",
        "qwen",
        "qwen3",
        {**DELTA, **SHARED, "shared_expert_intermediate_size": 128, "num_experts": 8},
    ),
    "qwen3-next": Tiny(
        "qwen3_next",
        "qwen",
        "qwen3",
        {**DELTA, **SHARED, "shared_expert_intermediate_size": 128, "num_experts": 8, "norm_topk_prob": True},
    ),
    "gemma2": Tiny("gemma2", "gemma", "gemma-2", {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64}),
    "gemma3": Tiny(
        "gemma3_text",
        "gemma",
        "gemma-2",
        {
            "num_hidden_layers": 7,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 64,
            "rope_parameters": BY_LAYER,
        },
    ),
    "gemma3-windows": Tiny(
        "gemma3_text",
        "gemma",
        "gemma-2",
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 64,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "rope_parameters": BY_LAYER,
        },
    ),
    "phi3": Tiny("phi3", "phi3", "phi-3", {"sliding_window": None}),
    "phi4-mini": Tiny(
        "phi3",
        "llama3",
        "llama-3.1",
        {
            "tie_word_embeddings": True,
            "sliding_window": None,
            "max_position_embeddings": 2048,
            "original_max_position_embeddings": 1024,
            "rope_parameters": rope(1e4, "longrope", partial_rotary_factor=0.75, **LONG),
        },
    ),
    "smollm3": Tiny("smollm3", "smollm3", "smollm3", {"tie_word_embeddings": True, "rope_parameters": rope(5e6)}),
    "olmo2": Tiny("olmo2", "olmo", "qwen2.5", {"rope_parameters": rope(5e5)}),
    "olmo3": Tiny(
        "olmo3",
        "olmo",
        "qwen2.5",
        {
            "num_hidden_layers": 5,
            "tie_word_embeddings": True,
            "sliding_window": 64,
            "rope_parameters": {
                "full_attention": rope(5e5, "yarn", attention_factor=1.2, **YARN),
                "sliding_attention": rope(5e5),
            },
        },
    ),
    "gemma3-vision": Tiny(
        "gemma3",
        "gemma",
        "gemma-2",
        {
            "num_hidden_layers": 7,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
            "rope_parameters": BY_LAYER,
        },
        {**VISION, "image_size": 28, "patch_size": 14},
    ),
    "mistral3-vision": Tiny(
        "mistral3", "tekken", "mistral-v3-tekken", {"model_type": "mistral", "head_dim": 64}, {**VISION, "head_dim": 16}
    ),
    "smolvlm-vision": Tiny(
        "smolvlm",
        "llama3",
        "llama-3.1",
        {"model_type": "llama", "head_dim": 64, "rope_parameters": rope(1e5)},
        {**VISION, "image_size": 28, "patch_size": 14},
    ),
    "qwen2.5-vl": Tiny(
        "qwen2_5_vl",
        "qwen",
        "qwen2.5",
        {"rms_norm_eps": 1e-12, "rope_parameters": rope(1e6, mrope_section=[4, 6, 6])},
        {**QWEN_VISION, "fullatt_block_indexes": [1]},
    ),
    "qwen3-vl": Tiny(
        "qwen3_vl",
        "qwen",
        "qwen3",
        {"head_dim": 64, "rope_parameters": rope(1e6, mrope_section=[11, 11, 10], mrope_interleaved=True)},
        {**QWEN_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
    ),
}


def config_of(tiny: Tiny, size: int, eos: int, **sizes: Any) -> Any:
    """Return the config of a model with so many tokens. sizes: keys of the text in place of its own."""
    ids = {"vocab_size": size, "eos_token_id": eos, "bos_token_id": None, "pad_token_id": None}
    text = {**SAME, **ids, **tiny.text, **sizes}
    made = CONFIG_MAPPING[tiny.model_type]
    if not tiny.vision:
        return made(**text)
    outer = {"tie_word_embeddings": bool(text.get("tie_word_embeddings"))}
    vision = {**tiny.vision, "out_hidden_size": text["hidden_size"]}
    return made(text_config=text, vision_config=vision, **outer)


def randomize(model: PreTrainedModel, seed: int = 0) -> None:
    """Draw weights whose logits spread over some nats."""
    torch.manual_seed(seed)
    gemma = "Gemma" in type(model).__name__
    added = gemma or any(
        kind in type(model).__name__ for kind in ("Qwen3_5", "Qwen3Next")
    )  # norms multiply by 1 + weight
    for name, x in model.named_parameters():
        if "norm" in name:
            x.data = (0.0 if added else 1.0) + 0.25 * torch.randn_like(x)
        elif name.endswith(("bias", "sinks")):
            x.data = 0.25 * torch.randn_like(x)
        elif "embed" in name:
            x.data = torch.randn_like(x) * (x.shape[-1] ** -0.5 if gemma else 0.25)
        else:
            x.data = torch.randn_like(x) * x.shape[-1] ** -0.5 * (2.0 if "lm_head" in name else 1.0)
    for name, x in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            x.copy_(0.25 * torch.randn_like(x))


def write_model(name: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """Write a model as a run writes it, and return its folder."""
    tiny = MODELS[name]
    tokenizer, roles = tokenizer_of(tiny.tokenizer)
    size = -(-tokenizer.get_vocab_size() // 32) * 32  # padded, as published models are
    by = AutoModelForImageTextToText if tiny.vision else AutoModelForCausalLM
    model = by.from_config(
        config_of(tiny, size, tokenizer.token_to_id(roles["eos_token"]), **sizes), dtype=torch.float32
    )
    randomize(model)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, tiny.tokenizer, tiny.template)
    return folder


def write_tokenizer(folder: Path, kind: str, template: str) -> None:
    """Write a tokenizer and a chat template beside a model."""
    tokenizer, roles = tokenizer_of(kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(
        (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"), encoding="utf-8"
    )

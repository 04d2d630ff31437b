"""The table of families: the files that the graphs of llama.cpp expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gguf import MODEL_ARCH as ARCH

from surogate_core.api import ConfigError

Refusal = Callable[[Any], None]
"""Raises ConfigError if llama.cpp does not compute what the config asks for."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family in the form that llama.cpp expects.

    arch           its name there
    paired         the two rows of a head that RoPE rotates together are next to each other
    norm_offset    what a norm adds to its weight here, and the file has added
    head           own: a tied embedding is stored a second time as the head; tied: there is no other; either
    frequencies    reads a factor for each frequency of RoPE, as the rescaled RoPE of Llama 3 needs
    partial        RoPE may rotate a part of each head
    full_every     layers have windows, but for each of this number; 0: all tokens see all before them
    square         all heads together are as wide as the model
    biases         parts that may have a bias
    untruncated    YaRN may be without rounding, which llama.cpp rounds all the same: told, not refused
    refuse         what else cannot be represented
    """

    arch: ARCH
    paired: bool = False
    norm_offset: float = 0.0
    head: Literal["either", "own", "tied"] = "either"
    frequencies: bool = False
    partial: bool = False
    full_every: int = 0
    square: bool = False
    biases: tuple[str, ...] = ()
    untruncated: bool = False
    refuse: tuple[Refusal, ...] = ()


def refused(key: str, reason: str, value: Any) -> ConfigError:
    """Return the error for a value of config.json that a GGUF file cannot express."""
    return ConfigError(f"{key}: {reason} (got {value}). Export this model with --format hf.")


def activation(text: Any) -> None:
    """Refuse another activation than the one that llama.cpp computes for the family."""
    gelu = text.model_type.startswith("gemma")
    key, only = ("hidden_activation", "gelu_pytorch_tanh") if gelu else ("hidden_act", "silu")
    if getattr(text, key) != only:
        raise refused(key, f"llama.cpp computes {only} in this family", getattr(text, key))


def query_scale(text: Any, deepest: int) -> None:
    """Refuse another scale of queries than the one that llama.cpp takes for a Gemma. `deepest`: layers of the 27B."""
    last = text.num_hidden_layers == deepest
    scale = text.hidden_size // text.num_attention_heads if last else text.head_dim
    if text.query_pre_attn_scalar != scale:
        reason = (
            f"llama.cpp divides queries by the square root of {scale} in a model of {text.num_hidden_layers} layers"
        )
        raise refused("query_pre_attn_scalar", reason, text.query_pre_attn_scalar)


def gemma2(text: Any) -> None:
    """Refuse a Gemma 2 without soft caps, which llama.cpp always applies."""
    query_scale(text, 46)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if not getattr(text, key):
            raise refused(key, "llama.cpp always caps, so it must be a number", getattr(text, key))


def gemma3(text: Any) -> None:
    """Refuse scores that llama.cpp does not compute."""
    query_scale(text, 62)


def normalized(text: Any) -> None:
    """Refuse a Qwen3-MoE whose chosen experts are not weighted to a sum of 1, or that has dense layers."""
    if not text.norm_topk_prob:
        raise refused("norm_topk_prob", "llama.cpp always normalizes the weights of the chosen experts", False)
    experts_everywhere(text)


def experts_everywhere(text: Any) -> None:
    """Refuse layers without experts."""
    for key, only in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if getattr(text, key) != only:
            raise refused(key, f"llama.cpp has experts in every layer, so it must be {only}", getattr(text, key))


def qwen2_moe(text: Any) -> None:
    """Refuse what llama.cpp leaves out of a Qwen2-MoE."""
    if text.norm_topk_prob:
        raise refused("norm_topk_prob", "llama.cpp never normalizes the weights of the chosen experts", True)
    experts_everywhere(text)


def glm4_moe(text: Any) -> None:
    """Refuse a GLM-4-MoE whose experts are chosen by groups."""
    if text.n_group != 1:
        raise refused("n_group", "llama.cpp chooses from all experts in this family", text.n_group)


def qwen3_5(text: Any) -> None:
    """Refuse a Qwen3.5 with other heads or layers than llama.cpp has."""
    if text.linear_key_head_dim != text.linear_value_head_dim:
        reason = f"llama.cpp takes values as wide as keys, {text.linear_key_head_dim}"
        raise refused("linear_value_head_dim", reason, text.linear_value_head_dim)
    every = full_interval(text)
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(text.num_hidden_layers)]
    if list(text.layer_types) != kinds:
        raise refused("layer_types", "llama.cpp has attention in each n-th layer", text.layer_types)


def full_interval(text: Any) -> int:
    """Return n: each n-th layer of a Qwen3.5 has attention."""
    kinds = [*text.layer_types, "full_attention"]
    return kinds.index("full_attention") + 1


def olmoe(text: Any) -> None:
    """Refuse what llama.cpp leaves out of an OLMoE."""
    if text.norm_topk_prob:
        raise refused("norm_topk_prob", "llama.cpp never normalizes the weights of the chosen experts", True)
    if text.clip_qkv is not None:
        raise refused("clip_qkv", "llama.cpp does not clip queries, keys and values", text.clip_qkv)
    if text.num_key_value_heads != text.num_attention_heads:
        reason = f"llama.cpp takes as many as query heads, {text.num_attention_heads}"
        raise refused("num_key_value_heads", reason, text.num_key_value_heads)


def gpt_oss(text: Any) -> None:
    """Refuse a gpt-oss with another gate or other windows than the ones that llama.cpp computes."""
    for key, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if getattr(text, key) != only:
            raise refused(key, f"llama.cpp computes the gate with {only}", getattr(text, key))
    windows = ["full_attention" if i % 2 else "sliding_attention" for i in range(text.num_hidden_layers)]
    if list(text.layer_types) != windows:
        raise refused("layer_types", "llama.cpp has windows in each second layer, from the first on", text.layer_types)


def every_fourth_without_rope(text: Any) -> None:
    """Refuse a SmolLM3 whose layers without RoPE are not each fourth one."""
    layers = [int((i + 1) % 4 != 0) for i in range(text.num_hidden_layers)]
    if [int(bool(x)) for x in text.no_rope_layers] != layers:
        raise refused("no_rope_layers", "llama.cpp leaves RoPE out of each fourth layer", text.no_rope_layers)


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LINEAR = (*QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

QWEN35: Mapping[str, Any] = {"norm_offset": 1.0, "partial": True, "refuse": (qwen3_5,)}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(arch=ARCH.LLAMA, paired=True, frequencies=True, biases=LINEAR),
    "mistral": Family(arch=ARCH.LLAMA, paired=True, frequencies=True),
    "ministral": Family(arch=ARCH.LLAMA, paired=True, frequencies=True),
    "ministral3": Family(arch=ARCH.MISTRAL3, paired=True, frequencies=True),
    "smollm3": Family(arch=ARCH.SMOLLM3, paired=True, refuse=(every_fourth_without_rope,)),
    "qwen2": Family(arch=ARCH.QWEN2, square=True, biases=QKV),
    "qwen2_5_vl_text": Family(arch=ARCH.QWEN2VL, square=True, biases=QKV),
    "qwen3": Family(arch=ARCH.QWEN3),
    "qwen3_vl_text": Family(arch=ARCH.QWEN3VL),
    "qwen2_moe": Family(arch=ARCH.QWEN2MOE, head="own", square=True, biases=QKV, refuse=(qwen2_moe,)),
    "qwen3_moe": Family(arch=ARCH.QWEN3MOE, refuse=(normalized,)),
    "qwen3_5_text": Family(arch=ARCH.QWEN35, **QWEN35),
    "qwen3_5_moe_text": Family(arch=ARCH.QWEN35MOE, **QWEN35),
    "qwen3_next": Family(arch=ARCH.QWEN3NEXT, norm_offset=1.0, partial=True, refuse=(qwen3_5, normalized)),
    "glm4_moe": Family(arch=ARCH.GLM4_MOE, partial=True, biases=QKV, refuse=(glm4_moe,)),
    "gemma2": Family(arch=ARCH.GEMMA2, norm_offset=1.0, head="tied", full_every=2, refuse=(gemma2,)),
    "gemma3_text": Family(arch=ARCH.GEMMA3, norm_offset=1.0, full_every=6, refuse=(gemma3,)),
    "phi3": Family(arch=ARCH.PHI3, square=True, partial=True),
    "olmo2": Family(arch=ARCH.OLMO2, head="own", square=True),
    "olmo3": Family(arch=ARCH.OLMO2, head="own", square=True, full_every=4),
    "gpt_oss": Family(
        arch=ARCH.GPT_OSS,
        head="own",
        full_every=2,
        biases=(*QKV, "self_attn.o_proj", "mlp.router"),
        untruncated=True,
        refuse=(gpt_oss,),
    ),
    "olmoe": Family(arch=ARCH.OLMOE, head="own", square=True, refuse=(olmoe,)),
}
"""By `model_type` of the text."""

TOWERS: Mapping[str, tuple[str, ...]] = {
    "Gemma3ForConditionalGeneration": ("vision_tower", "multi_modal_projector"),
    "Idefics3ForConditionalGeneration": ("vision_model", "connector"),
    "Mistral3ForConditionalGeneration": ("vision_tower", "multi_modal_projector"),
    "Qwen2_5_VLForConditionalGeneration": ("visual",),
    "Qwen3VLForConditionalGeneration": ("visual",),
    "Qwen3_5ForConditionalGeneration": ("visual",),
    "Qwen3_5MoeForConditionalGeneration": ("visual",),
    "SmolVLMForConditionalGeneration": ("vision_model", "connector"),
}
"""Classes around a text, and the parts of them that a GGUF file of the text does not have."""


def read_config(config: Mapping[str, Any]) -> Any:
    """Return the config as transformers reads it, with every default. Raises ConfigError."""
    from transformers import CONFIG_MAPPING

    architecture, model_type = (config.get("architectures") or ["none"])[0], str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"model_type: {model_type} is not known to transformers. config.json must name one that is.")
    if architecture not in TOWERS and not architecture.endswith("ForCausalLM"):
        reason = "GGUF files are written of language models, whose class ends with ForCausalLM"
        raise refused("architectures", reason, architecture)
    return CONFIG_MAPPING[model_type].from_dict(dict(config))


def family_of(text: Any) -> Family:
    """Return the row of the table for a text. Raises ConfigError for what llama.cpp cannot compute."""
    if text.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise refused("model_type", f"the form of llama.cpp is known for {known}", text.model_type)
    family = FAMILIES[text.model_type]
    width = text.num_attention_heads * head_width(text)
    if family.square and width != text.hidden_size:
        reason = f"llama.cpp takes heads that are together as wide as the model, {text.hidden_size}"
        raise refused("num_attention_heads * head_dim", reason, width)
    activation(text)
    for refuse in family.refuse:
        refuse(text)
    return family


def experts_of(text: Any) -> int:
    """Return how many experts a layer has, by the key of the family."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(count) for key in keys if (count := getattr(text, key, None))), 0)


def head_width(text: Any) -> int:
    """Return the width of a head."""
    given: int | None = getattr(text, "head_dim", None)
    return given or text.hidden_size // text.num_attention_heads

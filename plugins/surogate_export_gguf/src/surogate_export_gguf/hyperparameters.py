"""The keys of a GGUF file that say the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gguf import MODEL_ARCH as ARCH
from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType

from .families import Family, experts_of, full_interval, head_width, refused
from .rope import Rotation, rotation_of

Notice = Callable[[str], None]
QWEN35_SECTIONS = (11, 11, 10)
"""Of the positions of images, where config.json does not say them. In a text all positions are the same."""


def describe(writer: GGUFWriter, config: Mapping[str, Any], text: Any, family: Family, notice: Notice) -> Rotation:
    """Add the sizes of a text. Returns its RoPE, whose factors are tensors. Raises ConfigError."""
    describe_sizes(writer, text, family)
    full, sliding = ropes_of(text, family)
    describe_rope(writer, full, notice)
    if text.rope_parameters.get("rope_type") == "dynamic":
        notice(f"llama.cpp has no dynamic RoPE: it differs after {text.max_position_embeddings} tokens")
    describe_windows(writer, text, family, full, sliding, notice)
    describe_family(writer, config, text, family)
    return full


def describe_sizes(writer: GGUFWriter, text: Any, family: Family) -> None:
    """Add what every family has."""
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_block_count(text.num_hidden_layers)
    if width := getattr(text, "intermediate_size", None):  # mixtures without dense layers have none
        writer.add_feed_forward_length(width)
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv(text.num_key_value_heads or text.num_attention_heads)
    writer.add_key_length(head_width(text))
    writer.add_value_length(head_width(text))
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    writer.add_vocab_size(text.vocab_size)


def ropes_of(text: Any, family: Family) -> tuple[Rotation, Rotation]:
    """Return the RoPE of layers that see all tokens, and of layers with windows."""
    kinds = [key for key in ("full_attention", "sliding_attention") if key in text.rope_parameters]
    if not kinds:
        rope = rotation_of(text, family)
        return rope, rope
    ropes = [rotation_of(text, family, kind) for kind in kinds]
    return ropes[0], ropes[-1]


def describe_rope(writer: GGUFWriter, rope: Rotation, notice: Notice) -> None:
    """Add the RoPE of layers that see all tokens."""
    writer.add_rope_freq_base(rope.base)
    writer.add_rope_dimension_count(rope.width)
    if rope.scaling:
        writer.add_rope_scaling_type(RopeScalingType(rope.scaling))
    if rope.factor != 1:
        writer.add_rope_scaling_factor(rope.factor)
    if rope.original:
        writer.add_rope_scaling_orig_ctx_len(rope.original)
    if rope.attention != 1:
        writer.add_rope_scaling_attn_factors(rope.attention)
    if rope.differs:
        notice(
            f"llama.cpp rounds where YaRN begins and ends (truncate: false): its frequencies differ by up to "
            f"{rope.differs:.0%} from those of training"
        )
    if rope.scaling == "longrope":
        notice(
            f"llama.cpp uses the long factors of RoPE as soon as its context is larger than {rope.original} tokens, "
            f"transformers as soon as the text is: give llama.cpp -c {rope.original} if texts are shorter"
        )


def describe_windows(
    writer: GGUFWriter, text: Any, family: Family, full: Rotation, sliding: Rotation, notice: Notice
) -> None:
    """Add the windows of layers, or tell the user that llama.cpp has none in the family."""
    windows = [kind == "sliding_attention" for kind in getattr(text, "layer_types", None) or []]
    window = getattr(text, "sliding_window", None)
    if not family.full_every:
        if (any(windows) or not windows) and window and window < text.max_position_embeddings:
            arch = family.arch.name.lower()
            notice(f"llama.cpp has no windows in its {arch}: it differs after {window} tokens (sliding_window)")
        return
    if sliding.scaling and full is not sliding:
        raise refused("rope_parameters", "llama.cpp does not scale RoPE in layers with windows", sliding.scaling)
    if family.arch is ARCH.OLMO2 and sliding.base != full.base:
        raise refused("rope_theta", "llama.cpp takes one base for all layers of an OLMo 3", (full.base, sliding.base))
    writer.add_sliding_window(int(text.sliding_window))
    if family.arch is ARCH.GEMMA3:
        writer.add_rope_freq_base_swa(sliding.base)
    usual = [(i + 1) % family.full_every != 0 for i in range(text.num_hidden_layers)]
    if windows != usual:
        writer.add_sliding_window_pattern(windows)


def describe_family(writer: GGUFWriter, config: Mapping[str, Any], text: Any, family: Family) -> None:
    """Add what one family alone has."""
    if experts := experts_of(text):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(text.num_experts_per_tok)
        if family.arch is not ARCH.OLMOE:
            writer.add_expert_feed_forward_length(getattr(text, "moe_intermediate_size", text.intermediate_size))
    if shared := getattr(text, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared)
    match family.arch:
        case ARCH.GLM4_MOE:
            writer.add_expert_shared_count(text.n_shared_experts)
            writer.add_leading_dense_block_count(text.first_k_dense_replace)
            writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_scale(text.routed_scaling_factor)
            writer.add_expert_weights_norm(text.norm_topk_prob)
        case ARCH.QWEN35 | ARCH.QWEN35MOE | ARCH.QWEN3NEXT:
            if family.arch is not ARCH.QWEN3NEXT:
                sections = text.rope_parameters.get("mrope_section", QWEN35_SECTIONS)
                writer.add_rope_dimension_sections([*sections, 0, 0, 0, 0][:4])
            writer.add_ssm_conv_kernel(text.linear_conv_kernel_dim)
            writer.add_ssm_state_size(text.linear_key_head_dim)
            writer.add_ssm_group_count(text.linear_num_key_heads)
            writer.add_ssm_time_step_rank(text.linear_num_value_heads)
            writer.add_ssm_inner_size(text.linear_value_head_dim * text.linear_num_value_heads)
            writer.add_full_attention_interval(full_interval(text))
        case ARCH.GEMMA2:
            writer.add_attn_logit_softcapping(text.attn_logit_softcapping)
            writer.add_final_logit_softcapping(text.final_logit_softcapping)
        case ARCH.GEMMA3 if text.final_logit_softcapping:
            writer.add_final_logit_softcapping(text.final_logit_softcapping)
        case ARCH.MISTRAL3 if beta := text.rope_parameters.get("llama_4_scaling_beta"):
            writer.add_attn_temperature_scale(beta)
        case ARCH.QWEN2VL | ARCH.QWEN3VL:
            sections = [*text.rope_parameters["mrope_section"], 0, 0, 0, 0][:4]
            writer.add_rope_dimension_sections(sections)
            if family.arch is ARCH.QWEN3VL:
                levels = (config.get("vision_config") or {}).get("deepstack_visual_indexes") or []
                writer.add_num_deepstack_layers(len(levels))

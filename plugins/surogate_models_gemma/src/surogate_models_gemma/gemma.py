"""Gemma 2 and Gemma 3, text: sliding windows by layer, norms on both sides of attention and MLP, GeGLU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from struct import pack, unpack
from typing import Any

from surogate_core.api import BatchInputs, Builder, Head, ModelDef, Value, WeightMap
from surogate_models.api import (
    BEFORE_LANGUAGE_MODEL,
    DecoderDims,
    ResidualStream,
    Rope,
    add_norm,
    attention,
    attention_weights,
    decoder,
    invalid,
    is_given,
    lm_head,
    mlp,
    mlp_weights,
    norms_around_weights,
    outer,
    qk_norm_weights,
    read_bool,
    read_dims,
    read_int,
    read_layer_types,
    read_n_kv_heads,
    read_positive,
    read_rope,
    read_rope_by_layer_type,
    vocabulary,
    window_in,
)


@dataclass(frozen=True, kw_only=True)
class GemmaDims(DecoderDims):
    """Sizes of a model.

    windows      of each layer, how many tokens a token sees, itself included; 0: all before it
    ropes        RoPE of each layer
    score_scale  what products of queries and keys are multiplied by
    score_cap    soft cap of the scores; 0: none
    logit_cap    soft cap of the logits; 0: none
    """

    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    score_scale: float
    score_cap: float
    logit_cap: float


# -------------------------------------------------------------------------------------------------- from config.json


def cap(config: Mapping[str, Any], key: str, *, default: float = 0.0) -> float:
    """Return a soft cap. Null means none, which is 0. transformers loads no integer."""
    if key in config and config[key] is None:
        return 0.0
    if type(config.get(key)) is int:
        raise invalid(key, f"transformers takes no integer; write {config[key]}.0", config[key])
    return read_positive(config, key, default=default) if is_given(config, key) else default


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for what these models may have and the program has not."""
    if config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":  # transformers refuses null
        raise invalid("hidden_activation", "must be gelu_pytorch_tanh", config["hidden_activation"])
    if read_bool(config, "use_bidirectional_attention"):
        raise invalid("use_bidirectional_attention", "must be false", True)


def read_gemma(config: Mapping[str, Any], *, pattern: int, max_positions: int, qk_norm: bool, **caps: Any) -> GemmaDims:
    """Read what both generations have. `caps`: score_cap and logit_cap.

    pattern: without `layer_types`, every `pattern`-th layer is global. The RoPE is that of transformers: one for all
    layers, or `rope_parameters` by layer type.
    """
    refuse_unsupported(config)
    head_dim = read_int(config, "head_dim", default=256)
    local, whole = ropes_of(config, head_dim, qk_norm)
    bias = read_bool(config, "attention_bias")
    sizes = read_dims(
        {"tie_word_embeddings": True, **config, "hidden_act": "silu"},  # checked above, by the key of this family
        n_kv_heads=read_n_kv_heads(config, default=4),
        head_dim=head_dim,
        rope=local,
        max_positions=read_int(config, "max_position_embeddings", default=max_positions),
        qk_norm=qk_norm,
        qkv_bias=bias,
        o_bias=bias,
    )
    every = ["sliding_attention"] * (pattern - 1) + ["full_attention"]
    absent = [every[i % pattern] for i in range(sizes.n_layers)]
    kinds = read_layer_types(config, sizes.n_layers, default=absent)
    window = read_int(config, "sliding_window", default=4096)
    return GemmaDims(
        **vars(sizes) | {"norm_offset": 1.0},
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        ropes=tuple(local if kind == "sliding_attention" else whole for kind in kinds),
        score_scale=read_int(config, "query_pre_attn_scalar", default=256) ** -0.5,
        **caps,
    )


def ropes_of(config: Mapping[str, Any], head_dim: int, by_layer_type: bool) -> tuple[Rope, Rope]:
    """Return the RoPE of layers with a window, and of those without one, which alone `rope_scaling` is for."""
    if not by_layer_type:
        rope = read_rope(config, head_dim, default_theta=10_000.0)
        return rope, rope
    local, whole = (
        config[key] if is_given(config, key) else default
        for key, default in (("rope_local_base_freq", 10_000.0), ("rope_theta", 1_000_000.0))
    )
    return (
        read_rope_by_layer_type(config, head_dim, "sliding_attention", theta=local, scaled=False),
        read_rope_by_layer_type(config, head_dim, "full_attention", theta=whole, scaled=True),
    )


def gemma2_dims(config: Mapping[str, Any]) -> GemmaDims:
    """Read the sizes of a Gemma 2 from a parsed `config.json` of transformers 4 or 5.

    Missing keys have the defaults of transformers. Raises ConfigError ("key: what is wrong (got value)") if a key is
    missing or invalid, or if the model needs an unsupported feature.
    """
    caps = {
        "score_cap": cap(config, "attn_logit_softcapping", default=50.0),
        "logit_cap": cap(config, "final_logit_softcapping", default=30.0),
    }
    return read_gemma(config, pattern=2, max_positions=8192, qk_norm=False, **caps)


def gemma3_dims(config: Mapping[str, Any]) -> GemmaDims:
    """Read the sizes of a Gemma 3, text, as `gemma2_dims` does."""
    if config.get("attn_logit_softcapping") is not None:
        reason = "must be null: transformers ignores it in Gemma 3"
        raise invalid("attn_logit_softcapping", reason, config["attn_logit_softcapping"])
    pattern = read_int(config, "sliding_window_pattern", default=6)
    logit_cap = cap(config, "final_logit_softcapping")
    return read_gemma(config, pattern=pattern, max_positions=131072, qk_norm=True, score_cap=0.0, logit_cap=logit_cap)


# ------------------------------------------------------------------------------------------------------- the program


def build(b: Builder, d: GemmaDims, batch: BatchInputs) -> Head:
    """Emit the forward program up to the last hidden state."""
    embedding = vocabulary(b, d, "embedding")
    embedded = b.apply("embedding", batch.tokens, embedding)
    stream = ResidualStream(b.apply("scale", embedded, factor=rounded(d.d_model**0.5, embedded.dtype)))
    for i in range(d.n_layers):
        with b.block(i):
            stream = block(b, d, batch, i, stream)
    return lm_head(b, d, stream, embedding, **({"softcap": d.logit_cap} if d.logit_cap else {}))


def rounded(x: float, dtype: str) -> float:
    """Return a number as values of `dtype`, fp64, fp32 or bf16, hold it: transformers has the factor in their dtype."""
    if dtype == "fp64":
        return x
    (bits,) = unpack("<I", pack("<f", x))
    if dtype == "bf16":
        bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    (value,) = unpack("<f", pack("<I", bits))
    return float(value)


def block(b: Builder, d: GemmaDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + norm(attention(norm(x))), then x + norm(mlp(norm(x))). Rows that fit in a window have none."""
    name = f"layers.{i}"
    scores = {
        "window": window_in(batch, d.windows[i]),
        "scale": d.score_scale,
        "softcap": d.score_cap,
    }
    norm, residual = add_norm(b, d, stream, f"{name}.attn.norm")
    attn_out = attention(b, d, batch, f"{name}.attn", norm, rope=d.ropes[i], **scores)
    mixed = post_norm(b, d, f"{name}.attn.post_norm", attn_out)
    norm, residual = add_norm(b, d, ResidualStream(residual, mixed), f"{name}.mlp.norm", label="residual_mid")
    mlp_out = mlp(b, d, f"{name}.mlp", norm, gated="geglu")
    return ResidualStream(residual, post_norm(b, d, f"{name}.mlp.post_norm", mlp_out))


def post_norm(b: Builder, d: GemmaDims, name: str, x: Value) -> Value:
    """Emit the norm of the output of attention or MLP."""
    return add_norm(b, d, ResidualStream(x), name)[0]


def block_weights(d: GemmaDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `block`."""
    return [
        *attention_weights(d, f"{name}.attn", f"{source}.self_attn"),
        *mlp_weights(d, f"{name}.mlp", f"{source}.mlp"),
        *norms_around_weights(d, name, source),
        *qk_norm_weights(d, f"{name}.attn", f"{source}.self_attn"),
    ]


def _model(
    name: str, summary: str, architecture: str, model_type: str, dims: Callable[[Mapping[str, Any]], GemmaDims]
) -> ModelDef:
    model = decoder(
        name=name,
        summary=summary,
        architecture=architecture,
        model_type=model_type,
        dims=dims,
        block=block,
        block_weights=block_weights,
    )
    return replace(model, build=build)


GEMMA2 = _model("gemma2", "Gemma 2: windows, soft caps, GeGLU", "Gemma2ForCausalLM", "gemma2", gemma2_dims)
GEMMA3 = _model(
    "gemma3", "Gemma 3, text: windows, QK-norm, two RoPE bases, GeGLU", "Gemma3ForCausalLM", "gemma3_text", gemma3_dims
)
GEMMA3_OUTER = outer(
    GEMMA3,
    name="gemma3_vision",
    summary="Gemma 3 with a vision tower, which is kept: 4B, 12B and 27B as they are published",
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    text_types=("gemma3_text",),
    towers={"vision_config": ("model.vision_tower.*", "model.multi_modal_projector.*")},
    tied=True,
    defaults={  # of Gemma3TextConfig in transformers
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    published_names=(BEFORE_LANGUAGE_MODEL,),
)

"""Muse Glimmer, text: windows and RoPE in most layers, gated attention, norms on both sides of attention and MLP.

Norms of the residual stream multiply by 1 + w, the last one by w. Those of the embedding and of each query and key
have no weight. Logits are scaled before their soft cap, which is done to the last hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from surogate_core.api import BatchInputs, Builder, Head, Value, WeightMap
from surogate_models.api import (
    DecoderDims,
    ResidualStream,
    add_norm,
    attention_weights,
    decoder,
    invalid,
    linear,
    linear_weights,
    lm_head,
    mlp,
    mlp_weights,
    norms_around_weights,
    outer,
    read_bool,
    read_dims,
    read_int,
    read_layer_types,
    read_n_kv_heads,
    read_positive,
    read_rope,
    unrotated,
    vocabulary,
    window_in,
)


@dataclass(frozen=True, kw_only=True)
class MuseDims(DecoderDims):
    """Sizes of a model.

    windows        of each layer, how many tokens a token sees, itself included; 0: all before it
    rotated        of each layer, whether it has RoPE
    score_scale    what products of queries and keys are multiplied by
    post_norm_eps  of the norms behind attention and MLP
    logit_scale    what logits are multiplied by before their soft cap
    logit_cap      soft cap of the logits
    """

    windows: tuple[int, ...]
    rotated: tuple[bool, ...]
    score_scale: float
    post_norm_eps: float
    logit_scale: float
    logit_cap: float


# -------------------------------------------------------------------------------------------------- from config.json


def dims(config: Mapping[str, Any]) -> MuseDims:
    """Read the sizes from a parsed `config.json`. A key that is missing has the default of transformers.

    Raises ConfigError ("key: what is wrong (got value)") if a key is missing or invalid, or if the model needs an
    unsupported feature.
    """
    if config.get("hidden_activation", "silu") != "silu":
        raise invalid("hidden_activation", "must be silu", config["hidden_activation"])
    head_dim = read_int(config, "head_dim", default=128)
    bias = read_bool(config, "attention_bias")
    sizes = read_dims(
        {"rms_norm_eps": 1e-5, **config},
        n_kv_heads=read_n_kv_heads(config, default=2),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_theta=10_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=131_072),
        qkv_bias=bias,
        o_bias=bias,
    )
    n_layers = sizes.n_layers
    whole = [(n_layers - 1 - i) % 4 == 0 for i in range(n_layers)]
    kinds = read_layer_types(
        config, n_layers, default=["full_attention" if all_of else "sliding_attention" for all_of in whole]
    )
    window = read_int(config, "sliding_window", default=2048)
    return MuseDims(
        **vars(sizes) | {"norm_offset": 1.0},
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        rotated=read_rotated(config, sizes.rope.theta, [not all_of for all_of in whole]),
        score_scale=head_dim**-0.5 * read_positive(config, "qk_scale_factor", default=3.87),
        post_norm_eps=read_positive(config, "post_norm_eps", default=1e-8),
        logit_scale=read_positive(config, "output_multiplier", default=0.19611613513818404),
        logit_cap=read_positive(config, "final_logit_softcapping", default=20.0),
    )


def read_rotated(config: Mapping[str, Any], theta: float, default: list[bool]) -> tuple[bool, ...]:
    """Return whether each layer has RoPE: `layer_rope_theta` is 0 where it has none."""
    key = "layer_rope_theta"
    bases = config.get(key)
    if bases is None:
        return tuple(default)
    if not isinstance(bases, list | tuple) or len(bases) != len(default) or any(x not in (0, theta) for x in bases):
        raise invalid(key, f"must be {len(default)} times 0 or rope_theta {theta:g}, which transformers takes", bases)
    return tuple(x != 0 for x in bases)


# ------------------------------------------------------------------------------------------------------- the program


def build(b: Builder, d: MuseDims, batch: BatchInputs) -> Head:
    """Emit the forward program up to the last hidden state, scaled as the logits are."""
    embedding = vocabulary(b, d, "embedding")
    embedded = b.apply("embedding", batch.tokens, embedding)
    weight, labels = ones(b, embedded, d.d_model), ("embedding", "rstd")
    stream = ResidualStream(b.emit("rmsnorm", embedded, weight, label=labels, eps=d.norm_eps)[0])
    for i in range(d.n_layers):
        with b.block(i):
            stream = block(b, d, batch, i, stream)
    head = lm_head(b, replace(d, norm_offset=0.0), stream, embedding, softcap=d.logit_cap)
    return replace(head, x=b.apply("scale", head.x, factor=d.logit_scale))


def ones(b: Builder, x: Value, size: int) -> Value:
    """Emit the weight of a norm that has none."""
    return b.apply("fill", shape=(size,), dtype=x.dtype, value=1.0)


def block(b: Builder, d: MuseDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""
    name, behind = f"layers.{i}", replace(d, norm_eps=d.post_norm_eps)
    norm, residual = add_norm(b, d, stream, f"{name}.attn.norm")
    attn_out = gated_attention(b, d, batch, i, norm)
    mixed, _ = add_norm(b, behind, ResidualStream(attn_out), f"{name}.attn.post_norm")
    norm, residual = add_norm(b, d, ResidualStream(residual, mixed), f"{name}.mlp.norm", label="residual_mid")
    mlp_out, _ = add_norm(b, behind, ResidualStream(mlp(b, d, f"{name}.mlp", norm)), f"{name}.mlp.post_norm")
    return ResidualStream(residual, mlp_out)


def gated_attention(b: Builder, d: MuseDims, batch: BatchInputs, i: int, x: Value) -> Value:
    """Emit attention whose output is multiplied by the sigmoid of a gate, of x [T, d_model]: -> [T, d_model]."""
    name = f"layers.{i}.attn"
    qkv = linear(b, d, x, f"{name}.qkv", d.q_rows + 2 * d.kv_rows, label="qkv", bias=d.qkv_bias)
    gate = linear(b, d, x, f"{name}.gate", d.q_rows, label="qkv")
    rope = d.rope.of_rows(batch.seq_len) if d.rotated[i] else unrotated(d.head_dim)
    norm, attrs = ones(b, qkv, d.head_dim), {**d.heads, **rope.attrs, "eps": d.norm_eps}
    normed = b.apply("qk_norm_rope", qkv, norm, norm, batch.positions, label="rope", **attrs)
    attrs = {**d.heads, "window": window_in(batch, d.windows[i]), "scale": d.score_scale}
    attended = b.apply("attention", normed, batch.cu_seqlens, seq_len=batch.seq_len, **attrs)
    gated = b.apply("sigmoid_gate", attended, gate)
    return linear(b, d, gated, f"{name}.o", d.d_model, label="attn_out", bias=d.o_bias)


def block_weights(d: MuseDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `block`."""
    attention = f"{source}.self_attn"
    return [
        *attention_weights(d, f"{name}.attn", attention),
        *linear_weights(f"{name}.attn.gate", d.d_model, False, (f"{attention}.gate_proj", d.q_rows)),
        *mlp_weights(d, f"{name}.mlp", f"{source}.mlp"),
        *norms_around_weights(d, name, source),
    ]


_TEXT = decoder(
    name="muse_glimmer_text",
    summary="Muse Glimmer, text",
    architecture="MuseGlimmerTextModel",
    dims=dims,
    block=block,
    block_weights=block_weights,
)
MUSE_GLIMMER = outer(
    replace(_TEXT, build=build),
    name="muse_glimmer",
    summary="Muse Glimmer: the text is trained, the vision tower is kept",
    architecture="MuseGlimmerForConditionalGeneration",
    model_type="muse_glimmer",
    text_types=("muse_glimmer_text",),
    towers={"vision_config": ("model.vision_tower.*", "model.vision_adapter.*", "model.vision_projection.*")},
    tied=False,
    defaults={  # of MuseGlimmerTextConfig in transformers
        "vocab_size": 202_048,
        "hidden_size": 6656,
        "intermediate_size": 19_968,
        "num_hidden_layers": 52,
        "num_attention_heads": 32,
    },
)

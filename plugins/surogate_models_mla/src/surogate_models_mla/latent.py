"""Multi-head latent attention: queries, keys and values are projections of narrow latents.

x -> q_a -> RMS norm -> q_b -> queries, or x -> q -> queries
x -> kv_a -> a latent and one key with RoPE for all heads; the latent -> RMS norm -> kv_b -> keys without RoPE, values

For training all heads are made in full (`latent_qkv`), and attention is that of any model, with values as wide as keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any

from surogate_core.api import BatchInputs, Builder, Value, WeightMap
from surogate_models.api import (
    DecoderDims,
    ResidualStream,
    add_norm,
    invalid,
    is_given,
    linear,
    linear_weights,
    norm_weight,
    read_bool,
    read_dims,
    read_int,
    read_positive,
    read_rope,
    weight_map,
)
from surogate_models_moe.api import MixtureDims, mixture_or_mlp, mixture_weights

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` is, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class LatentDims(MixtureDims):
    """Sizes of a model. `head_dim` is that of queries and keys, nope + rotary.

    q_rank       width of the latent of queries; 0: they are projected from x
    kv_rank      width of the latent of keys and values
    nope         elements of a query or key without RoPE
    rotary       elements with RoPE
    v_dim        elements of a value
    interleaved  pairs that RoPE rotates are side by side
    score_scale  what products of queries and keys are multiplied by
    predicting   layers behind the last one that predict further tokens. No run computes with them; outputs keep those
                 that files have.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rotary: int
    v_dim: int
    interleaved: bool
    score_scale: float
    predicting: int


# -------------------------------------------------------------------------------------------------- from config.json


def read_latent(config: Mapping[str, Any], *, max_positions: int) -> dict[str, Any]:
    """Read what `LatentDims` has besides the mixture. `config` has the defaults of its family."""
    nope, rotary = (read_int(config, f"qk_{part}_head_dim") for part in ("nope", "rope"))
    heads = read_int(config, "num_attention_heads")
    if read_int(config, "num_key_value_heads", default=heads) != heads:
        reason = f"must be num_attention_heads, {heads}: each query head has its key"
        raise invalid("num_key_value_heads", reason, config["num_key_value_heads"])
    if is_given(config, "head_dim") and config["head_dim"] not in (rotary, nope + rotary):
        raise invalid("head_dim", f"must be qk_rope_head_dim, {rotary}", config["head_dim"])
    v_dim = read_int(config, "v_head_dim")
    if v_dim > nope + rotary:
        reason = f"values must not be wider than keys, {nope} + {rotary}"
        raise invalid("v_head_dim", reason, v_dim)
    bias = read_bool(config, "attention_bias")
    sizes: DecoderDims = read_dims(
        {key: value for key, value in config.items() if key != "head_dim"},
        n_kv_heads=heads,
        head_dim=nope + rotary,
        rope=replace(read_rope(config, rotary, default_theta=10_000.0), rotary_dim=rotary),
        max_positions=read_int(config, "max_position_embeddings", default=max_positions),
        qkv_bias=bias,
        o_bias=bias,
    )
    predicted = "num_nextn_predict_layers"
    return {
        **vars(sizes),
        "q_rank": read_int(config, "q_lora_rank") if is_given(config, "q_lora_rank") else 0,
        "kv_rank": read_int(config, "kv_lora_rank"),
        "nope": nope,
        "rotary": rotary,
        "v_dim": v_dim,
        "interleaved": read_bool(config, "rope_interleave", default=True),
        "score_scale": (nope + rotary) ** -0.5 * _sharpened(config),
        "predicting": read_int(config, predicted) if config.get(predicted) else 0,
    }


def _sharpened(config: Mapping[str, Any]) -> float:
    """Return the factor of scores by `mscale_all_dim` of the RoPE mapping, as DeepSeek's YaRN has it."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    factor = read_positive(scaling, "factor", within="rope_parameters.")
    mscale = read_positive(scaling, "mscale_all_dim", within="rope_parameters.")
    return (0.1 * mscale * log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def predicting_layers(d: LatentDims) -> list[str]:
    """Return the patterns of the tensors of layers that predict further tokens."""
    return [f"model.layers.{d.n_layers + i}.*" for i in range(d.predicting)]


# ------------------------------------------------------------------------------------------------------- the program


def block(b: Builder, d: LatentDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + attention(norm(x)), then x + mixture(norm(x)), or the MLP of a dense layer."""
    name = f"layers.{i}.attn"
    norm, residual = add_norm(b, d, stream, f"{name}.norm")
    attn_out = latent_attention(b, d, batch, name, norm)
    return mixture_or_mlp(b, d, batch, i, replace(stream, residual=residual, pending=attn_out))


def latent_attention(b: Builder, d: LatentDims, batch: BatchInputs, name: str, x: Value) -> Value:
    """Emit latent attention of x [T, d_model] with its projections: -> [T, d_model]."""

    def projected(y: Value, which: str, rows: int, *, bias: bool = False) -> Value:
        return linear(b, d, y, f"{name}.{which}", rows, label="qkv", bias=bias)

    def normed(y: Value, which: str) -> Value:
        weight, labels = norm_weight(b, f"{name}.{which}", y.shape[1]), ("qkv", "rstd")
        return b.emit("rmsnorm", y, weight, label=labels, eps=_LATENT_EPS)[0]

    if d.q_rank:
        q = projected(normed(projected(x, "q_a", d.q_rank, bias=d.qkv_bias), "q_norm"), "q_b", d.q_rows)
    else:
        q = projected(x, "q", d.q_rows)
    kv_a = projected(x, "kv_a", d.kv_rank + d.rotary, bias=d.qkv_bias)
    latent, rotated = b.emit("latent_split", kv_a, rank=d.kv_rank)
    kv = projected(normed(latent, "kv_norm"), "kv_b", d.n_heads * (d.nope + d.v_dim))
    qkv = b.apply("latent_qkv", q, kv, rotated, n_heads=d.n_heads, nope=d.nope, interleaved=d.interleaved)
    rope = d.rope.of_rows(batch.seq_len)
    qkv = b.apply("rope", qkv, batch.positions, label="rope", **d.heads, **rope.attrs)
    y = b.apply("attention", qkv, batch.cu_seqlens, seq_len=batch.seq_len, **d.heads, scale=d.score_scale)
    if d.v_dim < d.head_dim:
        y = b.apply("latent_values", y, n_heads=d.n_heads, v_dim=d.v_dim)
    return linear(b, d, y, f"{name}.o", d.d_model, label="attn_out", bias=d.o_bias)


def block_weights(d: LatentDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `block`."""
    attn, own = f"{name}.attn", f"{source}.self_attn"
    if d.q_rank:
        queries = [
            *linear_weights(f"{attn}.q_a", d.d_model, d.qkv_bias, (f"{own}.q_a_proj", d.q_rank)),
            weight_map(f"{attn}.q_norm", (f"{own}.q_a_layernorm.weight", d.q_rank)),
            *linear_weights(f"{attn}.q_b", d.q_rank, False, (f"{own}.q_b_proj", d.q_rows)),
        ]
    else:
        queries = linear_weights(f"{attn}.q", d.d_model, False, (f"{own}.q_proj", d.q_rows))
    kv_rows = d.n_heads * (d.nope + d.v_dim)
    return [
        *queries,
        *linear_weights(f"{attn}.kv_a", d.d_model, d.qkv_bias, (f"{own}.kv_a_proj_with_mqa", d.kv_rank + d.rotary)),
        weight_map(f"{attn}.kv_norm", (f"{own}.kv_a_layernorm.weight", d.kv_rank)),
        *linear_weights(f"{attn}.kv_b", d.kv_rank, False, (f"{own}.kv_b_proj", kv_rows)),
        *linear_weights(f"{attn}.o", d.n_heads * d.v_dim, d.o_bias, (f"{own}.o_proj", d.d_model)),
        weight_map(f"{attn}.norm", (f"{source}.input_layernorm.weight", d.d_model)),
        *mixture_weights(d, name, source),
    ]

"""gpt-oss: attention with sinks and windows in every second layer, and a mixture of experts with biases.

Block: norm -> one projection of queries, keys and values with biases -> RoPE -> attention, in a window of 128 tokens
in layers 0, 2, 4 and so on -> sinks -> output projection with a bias; norm -> router with a bias, softmax over the
chosen experts -> experts with biases, whose gates and values alternate in rows and are clamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from surogate_core.api import BatchInputs, Builder, Init, Value, WeightMap
from surogate_models.api import (
    ResidualStream,
    add_norm,
    attention_weights,
    decoder,
    linear,
    read_bool,
    read_dims,
    read_int,
    read_layer_types,
    read_n_kv_heads,
    read_positive,
    read_rope,
    rotate,
    weight_map,
    window_in,
)
from surogate_models_moe.api import (
    Gate,
    MixtureDims,
    Router,
    metrics,
    mixture_or_mlp,
    read_mixture,
    router_weights,
    stacked_expert_weights,
)

_THETA = 150_000.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""RoPE of a config without it."""


@dataclass(frozen=True, kw_only=True)
class GptOssDims(MixtureDims):
    """Sizes of a model. windows: of each layer, the tokens that a token sees; 0: all before it."""

    windows: tuple[int, ...]


def dims(config: Mapping[str, Any]) -> GptOssDims:
    """Read the sizes from a parsed `config.json`. A key that is missing has the default of transformers.

    Raises ConfigError ("key: what is wrong (got value)") if a key is missing or invalid, or if the model needs an
    unsupported feature.
    """
    head_dim, bias = read_int(config, "head_dim", default=64), read_bool(config, "attention_bias", default=True)
    given = dict(config)
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        given["rope_parameters"] = {"rope_theta": config.get("rope_theta", _THETA), **_YARN}
    sizes = read_dims(
        {"rms_norm_eps": 1e-5, **config},
        n_kv_heads=read_n_kv_heads(config, default=8),
        head_dim=head_dim,
        rope=read_rope(given, head_dim, default_theta=_THETA),
        max_positions=read_int(config, "max_position_embeddings", default=131072),
        qkv_bias=bias,
        o_bias=bias,
    )
    mixture = read_mixture(
        config,
        count="num_local_experts",
        n_experts=128,
        k=4,
        d_expert=sizes.d_ff,
        router=Router(normalize=True, biased=True),
        gate=Gate(
            alpha=read_positive(config, "swiglu_alpha", default=1.702),
            limit=read_positive(config, "swiglu_limit", default=7.0),
            offset=1.0,
            interleaved=True,
        ),
        biased=True,
        reads=("swiglu_limit",),
    )
    return GptOssDims(**vars(sizes), mixture=mixture, windows=read_windows(config, sizes.n_layers))


def read_windows(config: Mapping[str, Any], n_layers: int) -> tuple[int, ...]:
    """Return the window of each layer; 0: it sees all."""
    absent = ["full_attention" if i % 2 else "sliding_attention" for i in range(n_layers)]
    kinds = read_layer_types(config, n_layers, default=absent)
    if "sliding_attention" not in kinds:
        return (0,) * n_layers
    window = read_int(config, "sliding_window", default=128)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def block(b: Builder, d: GptOssDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + attention(norm(x)), then x + mixture(norm(x))."""
    name = f"layers.{i}.attn"
    norm, residual = add_norm(b, d, stream, f"{name}.norm")
    qkv = linear(b, d, norm, f"{name}.qkv", d.q_rows + 2 * d.kv_rows, label="qkv", bias=d.qkv_bias)
    y = attended(b, d, batch, name, rotate(b, d, batch, name, qkv, rope=d.rope), d.windows[i])
    y = linear(b, d, y, f"{name}.o", d.d_model, label="attn_out", bias=d.o_bias)
    return mixture_or_mlp(b, d, batch, i, replace(stream, residual=residual, pending=y))


def attended(b: Builder, d: GptOssDims, batch: BatchInputs, name: str, qkv: Value, window: int) -> Value:
    """Emit attention with a sink for each head."""
    sinks = b.param(f"{name}.sinks", (d.n_heads,), Init(kind="normal", std=d.init_std))
    attrs = {**d.heads, "seq_len": batch.seq_len, "window": window_in(batch, window)}
    out, lse = b.emit("attention", qkv, batch.cu_seqlens, **attrs)
    return b.emit("add_sinks", qkv, batch.cu_seqlens, out, lse, sinks, **attrs)[0]


def block_weights(d: GptOssDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `block`. Checkpoints hold the experts of a layer as one tensor [E, K, N]."""
    attn, mlp = f"{source}.self_attn", f"{source}.mlp"
    return [
        *attention_weights(d, f"{name}.attn", attn),
        weight_map(f"{name}.attn.sinks", (f"{attn}.sinks", d.n_heads)),
        *router_weights(d, f"{name}.mlp", f"{mlp}.router"),
        *stacked_expert_weights(d, f"{name}.mlp", f"{mlp}.experts", transposed=True),
        weight_map(f"{name}.attn.norm", (f"{source}.input_layernorm.weight", d.d_model)),
        weight_map(f"{name}.mlp.norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
    ]


GPT_OSS = decoder(
    name="gpt_oss",
    summary="gpt-oss: attention sinks, alternating windows, experts with biases and a clamped gate",
    architecture="GptOssForCausalLM",
    dims=dims,
    block=block,
    block_weights=block_weights,
    metrics=metrics,
)

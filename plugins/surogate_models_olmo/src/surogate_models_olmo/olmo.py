"""OLMo 2 and 3: norms after attention and MLP, and of all queries and all keys of a token, not of each head.

Queries, keys and values are products of their own, because the norms read whole rows. OLMo 3 adds sliding windows, and
layers with a window have a RoPE of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_core.api import BatchInputs, Builder, Value, WeightMap
from surogate_models.api import (
    DecoderDims,
    ResidualStream,
    Rope,
    attend,
    decoder,
    invalid,
    is_given,
    linear_weights,
    mlp,
    mlp_weights,
    norm_weight,
    normed_qkv,
    normed_qkv_weights,
    read_bool,
    read_dims,
    read_head_dim,
    read_int,
    read_layer_types,
    read_n_kv_heads,
    read_rope,
    read_rope_by_layer_type,
    refuse_layer_types,
    weight_map,
    window_in,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class OlmoDims(DecoderDims):
    """Sizes of a model.

    ropes    RoPE of each layer
    windows  of each layer, how many tokens a token sees, itself included; 0: all before it
    """

    ropes: tuple[Rope, ...]
    windows: tuple[int, ...]


# -------------------------------------------------------------------------------------------------- from config.json


def olmo2_dims(config: Mapping[str, Any]) -> OlmoDims:
    """Read the sizes of an OLMo 2 from a parsed `config.json` of transformers 4 or 5.

    Missing keys have the defaults of transformers. Raises ConfigError ("key: what is wrong (got value)") if a key is
    missing or invalid, or if the model needs an unsupported feature: dropout or an activation other than SiLU.
    """
    refuse_layer_types(config)
    rope = read_rope(config, read_head_dim(config), default_theta=10_000.0)
    sizes = _sizes(config, rope)
    return OlmoDims(**vars(sizes), ropes=(rope,) * sizes.n_layers, windows=(0,) * sizes.n_layers)


def olmo3_dims(config: Mapping[str, Any]) -> OlmoDims:
    """Read the sizes of an OLMo 3, as `olmo2_dims` does."""
    ropes = {kind: _rope_of(config, kind) for kind in (_FULL, _SLIDING)}
    sizes = _sizes(config, ropes[_FULL])
    absent = [_SLIDING if (i + 1) % 4 else _FULL for i in range(sizes.n_layers)]
    kinds = read_layer_types(config, sizes.n_layers, default=absent)
    if "sliding_window" in config and not is_given(config, "sliding_window"):
        raise invalid("sliding_window", "must be a number; transformers runs no OLMo 3 without one", None)
    window = read_int(config, "sliding_window", default=4096)
    windows = tuple(window if kind == _SLIDING else 0 for kind in kinds)
    return OlmoDims(**vars(sizes), ropes=tuple(ropes[kind] for kind in kinds), windows=windows)


def _sizes(config: Mapping[str, Any], rope: Rope) -> DecoderDims:
    bias = read_bool(config, "attention_bias")
    return read_dims(
        {"rms_norm_eps": 1e-5, **config},
        n_kv_heads=read_n_kv_heads(config, default=read_int(config, "num_attention_heads")),
        head_dim=read_head_dim(config),
        rope=rope,
        max_positions=read_int(config, "max_position_embeddings", default=2048),
        qkv_bias=bias,
        o_bias=bias,
    )


def _rope_of(config: Mapping[str, Any], kind: str) -> Rope:
    """Return the RoPE of layers of a kind. `rope_scaling` and `rope_theta` of transformers 4 are of full attention.

    As in transformers, layers with a window have the default base if `rope_parameters` gives them none.
    """
    whole = kind == _FULL
    theta = config["rope_theta"] if whole and is_given(config, "rope_theta") else 500_000.0
    return read_rope_by_layer_type(config, read_head_dim(config), kind, theta=theta, scaled=whole)


# -------------------------------------------------------------------------------------------------------- the program


def block(b: Builder, d: OlmoDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + norm(attention(x)), then x + norm(mlp(x))."""
    name, residual = f"layers.{i}", stream.residual
    if stream.pending is not None:
        residual = b.apply("add", stream.pending, residual, label="residual")
    qkv = normed_qkv(b, d, f"{name}.attn", residual)
    window = window_in(batch, d.windows[i])
    attn_out = attend(b, d, batch, f"{name}.attn", qkv, rope=d.ropes[i], window=window)
    mixed = _norm(b, d, f"{name}.attn.post_norm", attn_out)
    residual = b.apply("add", mixed, residual, label="residual_mid")
    mlp_out = mlp(b, d, f"{name}.mlp", residual)
    return ResidualStream(residual, _norm(b, d, f"{name}.mlp.post_norm", mlp_out))


def _norm(b: Builder, d: OlmoDims, name: str, x: Value) -> Value:
    """Emit the RMS norm of the rows of x."""
    return b.apply("rmsnorm", x, norm_weight(b, name, x.shape[1]), **d.norm)


def block_weights(d: OlmoDims, name: str, source: str) -> Sequence[WeightMap]:
    """Return the weight maps of `block`."""
    attn, ours = f"{source}.self_attn", f"{name}.attn"
    return [
        *normed_qkv_weights(d, ours, attn),
        *linear_weights(f"{ours}.o", d.q_rows, d.o_bias, (f"{attn}.o_proj", d.d_model)),
        *mlp_weights(d, f"{name}.mlp", f"{source}.mlp"),
        weight_map(f"{ours}.post_norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
        weight_map(f"{name}.mlp.post_norm", (f"{source}.post_feedforward_layernorm.weight", d.d_model)),
    ]


OLMO2 = decoder(
    name="olmo2",
    summary="OLMo 2 dense: norms after attention and MLP, and of whole queries and keys",
    architecture="Olmo2ForCausalLM",
    dims=olmo2_dims,
    block=block,
    block_weights=block_weights,
)
OLMO3 = decoder(
    name="olmo3",
    summary="OLMo 3 dense: OLMo 2 with sliding windows, and RoPE by type of layer",
    architecture="Olmo3ForCausalLM",
    dims=olmo3_dims,
    block=block,
    block_weights=block_weights,
)

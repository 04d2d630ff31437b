"""SmolLM3: Llama with layers that have no RoPE, every fourth if `no_rope_layers` does not say which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surogate_core.api import BatchInputs, Builder

from .config_json import invalid, is_given, read_bool, read_int
from .decoder import ResidualStream, decoder, pre_norm_block
from .dims import DecoderDims, read_dims, read_head_dim, read_n_kv_heads, refuse_layer_types
from .rope import read_rope
from .weight_maps import pre_norm_weights


@dataclass(frozen=True, kw_only=True)
class SmolLM3Dims(DecoderDims):
    """Sizes of a model. has_rope: of each layer."""

    has_rope: tuple[bool, ...]


def dims(config: Mapping[str, Any]) -> SmolLM3Dims:
    """Read the sizes from a parsed `config.json` of transformers 4 or 5.

    Missing keys have the defaults of transformers. Raises ConfigError ("key: what is wrong (got value)") if a key is
    missing or invalid, or if the model needs an unsupported feature: sliding windows, attention dropout or an
    activation other than SiLU.
    """
    refuse_layer_types(config)
    named = config.get("layer_types") is not None
    if not named and read_bool(config, "use_sliding_window") and is_given(config, "sliding_window"):
        raise invalid("use_sliding_window", "sliding windows are not supported yet; must be false", True)
    attention_bias = read_bool(config, "attention_bias")
    head_dim = read_head_dim(config)
    sizes = read_dims(
        {"tie_word_embeddings": True, **config},
        n_kv_heads=read_n_kv_heads(config, default=4),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_theta=2_000_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=32768),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=read_bool(config, "mlp_bias"),
    )
    return SmolLM3Dims(**vars(sizes), has_rope=_has_rope(config, sizes.n_layers))


def _has_rope(config: Mapping[str, Any], n_layers: int) -> tuple[bool, ...]:
    given = config.get("no_rope_layers")
    if given is None:
        interval = read_int(config, "no_rope_layer_interval", default=4)
        return tuple((i + 1) % interval != 0 for i in range(n_layers))
    if (
        not isinstance(given, list | tuple)
        or len(given) < n_layers
        or any(
            type(flag) is not int or flag not in (0, 1)
            for flag in given  # transformers loads no booleans
        )
    ):
        raise invalid("no_rope_layers", f"must be a list of 1 (with RoPE) or 0 (without) for {n_layers} layers", given)
    return tuple(bool(flag) for flag in given[:n_layers])


def block(b: Builder, d: SmolLM3Dims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit one transformer block."""
    return pre_norm_block(b, d, batch, i, stream, rope=d.rope if d.has_rope[i] else None)


SMOLLM3 = decoder(
    name="smollm3",
    summary="SmolLM3 dense: grouped-query attention, layers without RoPE, tied or untied embeddings",
    architecture="SmolLM3ForCausalLM",
    dims=dims,
    block=block,
    block_weights=pre_norm_weights,
)

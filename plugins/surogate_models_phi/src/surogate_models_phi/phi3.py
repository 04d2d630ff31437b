"""Phi-3 and Phi-4: Llama with one tensor of queries, keys and values and one of gate and up, and with LongRoPE.

These tensors are stored as the params are, [q; k; v] and [gate; up], so an adapter has one projection of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_core.api import BatchInputs, Builder, WeightMap
from surogate_models.api import (
    DecoderDims,
    ResidualStream,
    Rope,
    decoder,
    invalid,
    is_given,
    linear_weights,
    pre_norm_block,
    read_dims,
    read_head_dim,
    read_int,
    read_n_kv_heads,
    read_partial_rope,
    weight_map,
    window_in,
)

_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
"""Values of transformers for missing keys, where they are not those of all families."""

_ORIGINAL_POSITIONS = 4096
"""Length of the pre-training that transformers takes for a config without one, whatever the RoPE mapping says."""


@dataclass(frozen=True, kw_only=True)
class PhiDims(DecoderDims):
    """Sizes of a model. window: how many tokens a token sees, itself included; 0: all before it."""

    window: int


def dims(config: Mapping[str, Any]) -> PhiDims:
    """Read the sizes from a parsed `config.json` of transformers 4 or 5.

    Raises ConfigError ("key: what is wrong (got value)") if a key is missing or invalid, or if the model needs an
    unsupported feature: dropout or an activation other than SiLU.
    """
    config = {**_DEFAULTS, **config}
    for key in ("resid_pdrop", "embd_pdrop"):
        if config.get(key) not in (None, 0):
            raise invalid(key, "dropout is not supported yet; must be 0", config[key])
    head_dim = read_head_dim(config)
    sizes = read_dims(
        config,
        n_kv_heads=read_n_kv_heads(config, default=read_int(config, "num_attention_heads")),
        head_dim=head_dim,
        rope=_rope(config, head_dim),
        max_positions=read_int(config, "max_position_embeddings"),
    )
    window = read_int(config, "sliding_window") if is_given(config, "sliding_window") else 0
    expected, kinds = "sliding_attention" if window else "full_attention", config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list | tuple) or any(kind != expected for kind in kinds)):
        raise invalid("layer_types", f"must be {expected} in all layers, as sliding_window says", kinds)
    return PhiDims(**vars(sizes), window=window)


def _rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """As in transformers, the types "su" and "yarn" of older files are longrope, and there are no others."""
    config = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if isinstance(given, Mapping) and given:
            kind = given.get("rope_type", given.get("type", "default"))
            kind = "longrope" if kind in ("su", "yarn") else kind
            if kind not in ("default", "longrope"):
                raise invalid(f"{key}.rope_type", "must be default or longrope", kind)
            if kind == "longrope":
                _check_original_positions(config, given, key)
            config[key] = {**given, "rope_type": kind}
    return read_partial_rope(config, head_dim, default_theta=10_000.0)


def _check_original_positions(config: Mapping[str, Any], given: Mapping[str, Any], within: str) -> None:
    """Raise ConfigError unless the config has the length of the pre-training where transformers reads it."""
    name = "original_max_position_embeddings"
    if is_given(config, name):
        return
    if not is_given(given, name):
        read_int(config, name)  # required
    if given[name] != _ORIGINAL_POSITIONS:
        reason = (
            f"transformers takes {_ORIGINAL_POSITIONS} unless config.json has the key beside {within}; write it there"
        )
        raise invalid(f"{within}.{name}", reason, given[name])


def block(b: Builder, d: PhiDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit one transformer block."""
    return pre_norm_block(b, d, batch, i, stream, rope=d.rope, window=window_in(batch, d.window))


def block_weights(d: PhiDims, name: str, source: str) -> Sequence[WeightMap]:
    """Return the weight maps of one block."""
    attn, mlp = f"{source}.self_attn", f"{source}.mlp"
    return [
        *linear_weights(f"{name}.attn.qkv", d.d_model, False, (f"{attn}.qkv_proj", d.q_rows + 2 * d.kv_rows)),
        *linear_weights(f"{name}.attn.o", d.q_rows, False, (f"{attn}.o_proj", d.d_model)),
        *linear_weights(f"{name}.mlp.gate_up", d.d_model, False, (f"{mlp}.gate_up_proj", 2 * d.d_ff)),
        *linear_weights(f"{name}.mlp.down", d.d_ff, False, (f"{mlp}.down_proj", d.d_model)),
        weight_map(f"{name}.attn.norm", (f"{source}.input_layernorm.weight", d.d_model)),
        weight_map(f"{name}.mlp.norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
    ]


PHI3 = decoder(
    name="phi3",
    summary="Phi-3 and Phi-4 dense: fused projections, partial RoPE, LongRoPE, a sliding window or none",
    architecture="Phi3ForCausalLM",
    dims=dims,
    block=block,
    block_weights=block_weights,
)

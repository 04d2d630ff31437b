"""Mistral and Ministral: Llama with a sliding window, in all layers or in those that `layer_types` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surogate_core.api import BatchInputs, Builder
from surogate_models.api import (
    DecoderDims,
    ResidualStream,
    decoder,
    invalid,
    pre_norm_block,
    pre_norm_weights,
    read_dims,
    read_head_dim,
    read_int,
    read_layer_types,
    read_n_kv_heads,
    read_rope,
    window_in,
)


@dataclass(frozen=True, kw_only=True)
class MistralDims(DecoderDims):
    """Sizes of a model. `windows`: of each layer, how many tokens a token sees, itself included; 0: all before it."""

    windows: tuple[int, ...]


def window_of(config: Mapping[str, Any]) -> int:
    """Return `sliding_window`: 4,096 if the key is missing, as in transformers. Null means none, which is 0."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return 0
    return read_int(config, "sliding_window", default=4096)


def one_window(config: Mapping[str, Any], n_layers: int) -> tuple[int, ...]:
    """Return the windows of a Mistral. transformers ignores `layer_types` in one, so a mixture is refused."""
    window, kinds = window_of(config), config.get("layer_types")
    expected = "sliding_attention" if window else "full_attention"
    if kinds is not None and (not isinstance(kinds, list | tuple) or any(kind != expected for kind in kinds)):
        reason = f"must be {expected} in all layers, as sliding_window says; MinistralForCausalLM has layer types"
        raise invalid("layer_types", reason, kinds)
    return (window,) * n_layers


def windows_by_layer(config: Mapping[str, Any], n_layers: int) -> tuple[int, ...]:
    """Return the windows of a Ministral, from `layer_types`. Without them all layers have `sliding_window`."""
    window = window_of(config)
    absent = ["sliding_attention" if window else "full_attention"] * n_layers
    kinds = read_layer_types(config, n_layers, default=absent)
    if "sliding_attention" in kinds and not window:
        raise invalid("sliding_window", "must be given, because layer_types names sliding_attention", None)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def reader(windows: Callable[[Mapping[str, Any], int], tuple[int, ...]]) -> Callable[[Mapping[str, Any]], MistralDims]:
    """Return the function that reads the sizes from a parsed `config.json` of transformers 4 or 5.

    Missing keys have the defaults of transformers. It raises ConfigError ("key: what is wrong (got value)") if a key is
    missing or invalid, or if the model needs an unsupported feature: dropout or an activation other than SiLU.
    """

    def dims(config: Mapping[str, Any]) -> MistralDims:
        head_dim = read_head_dim(config)
        sizes = read_dims(
            config,
            n_kv_heads=read_n_kv_heads(config, default=8),
            head_dim=head_dim,
            rope=read_rope(config, head_dim, default_theta=10_000.0),
            max_positions=read_int(config, "max_position_embeddings", default=131072),
        )
        return MistralDims(**vars(sizes), windows=windows(config, sizes.n_layers))

    return dims


def block(b: Builder, d: MistralDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit one transformer block. A window that is as long as the rows is none."""
    return pre_norm_block(b, d, batch, i, stream, rope=d.rope, window=window_in(batch, d.windows[i]))


MISTRAL = decoder(
    name="mistral",
    summary="Mistral dense: grouped-query attention, a sliding window or none",
    architecture="MistralForCausalLM",
    dims=reader(one_window),
    block=block,
    block_weights=pre_norm_weights,
)
MINISTRAL = decoder(
    name="ministral",
    summary="Ministral dense: grouped-query attention, sliding windows by layer",
    architecture="MinistralForCausalLM",
    dims=reader(windows_by_layer),
    block=block,
    block_weights=pre_norm_weights,
)

"""Sizes and features of a decoder, read from a parsed `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .config_json import invalid, is_given, read_bool, read_int, read_positive
from .rope import Rope

_MOST_LAYERS = 1024


@dataclass(frozen=True, kw_only=True)
class DecoderDims:
    """Sizes and features of a model. `head_dim` need not equal d_model / n_heads. A family with more of them derives a
    class: `AcmeDims(**vars(read_dims(...)), window=4096)`.

    qk_norm   each query and key head has an RMS norm before RoPE
    qkv_bias  the query, key and value projections have a bias
    o_bias    the attention output projection has a bias
    mlp_bias  all three projections of the MLP have a bias
    norm_offset  what RMS norms add to their weights
    """

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    norm_eps: float
    rope: Rope
    max_positions: int
    init_std: float
    norm_offset: float = 0.0

    @property
    def norm(self) -> dict[str, Any]:
        """Attributes of the ops that have an RMS norm."""
        return {"eps": self.norm_eps} | ({"offset": self.norm_offset} if self.norm_offset else {})

    @property
    def q_rows(self) -> int:
        """Number of rows of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Number of rows of the key projection, and of the value projection."""
        return self.n_kv_heads * self.head_dim

    @property
    def heads(self) -> dict[str, Any]:
        """Attributes of the ops on queries, keys and values."""
        return {"n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads, "head_dim": self.head_dim}


def read_dims(
    config: Mapping[str, Any],
    *,
    n_kv_heads: int,
    head_dim: int,
    rope: Rope,
    max_positions: int,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
) -> DecoderDims:
    """Read the keys common to all families from a parsed `config.json` of transformers 4 or 5.

    The keyword arguments are values that the caller has read by the rules of its family. Raises ConfigError if a key is
    missing or invalid, and for what no decoder has: dropout, activations other than SiLU, towers of other modalities.
    """
    for key in ("vision_config", "audio_config"):
        if is_given(config, key):
            raise invalid(key, "towers of images or sound are not supported; use a text model", config[key])
    if config.get("hidden_act", "silu") != "silu":
        raise invalid("hidden_act", "must be silu", config["hidden_act"])
    if config.get("attention_dropout") not in (None, 0):
        raise invalid("attention_dropout", "dropout is not supported yet; must be 0", config["attention_dropout"])
    n_heads = read_int(config, "num_attention_heads")
    if n_heads % n_kv_heads:
        raise invalid("num_key_value_heads", f"must divide num_attention_heads {n_heads}", n_kv_heads)
    if head_dim % 2:
        raise invalid("head_dim", "must be even, because RoPE rotates pairs of elements", head_dim)
    return DecoderDims(
        n_layers=read_int(config, "num_hidden_layers", most=_MOST_LAYERS),
        d_model=read_int(config, "hidden_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=read_int(config, "intermediate_size"),
        vocab_size=read_int(config, "vocab_size"),
        tied_embeddings=read_bool(config, "tie_word_embeddings"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        norm_eps=read_positive(config, "rms_norm_eps", default=1e-6),
        rope=rope,
        max_positions=max(max_positions, rope.max_positions),
        init_std=read_positive(config, "initializer_range", default=0.02),
    )


def read_head_dim(config: Mapping[str, Any]) -> int:
    """Return `head_dim`, or hidden_size / num_attention_heads if the key is missing or null."""
    if is_given(config, "head_dim"):
        return read_int(config, "head_dim")
    d_model, n_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
    if d_model % n_heads:
        raise invalid(
            "hidden_size", f"must be a multiple of num_attention_heads {n_heads} if head_dim is unset", d_model
        )
    return d_model // n_heads


def read_n_kv_heads(config: Mapping[str, Any], *, default: int) -> int:
    """Return `num_key_value_heads`: `default` if the key is missing. Null means one key/value head per query head."""
    key = "num_key_value_heads"
    if key in config and not is_given(config, key):
        return read_int(config, "num_attention_heads")
    return read_int(config, key, default=default)


def read_layer_types(
    config: Mapping[str, Any],
    n_layers: int,
    *,
    default: Sequence[str],
    known: Sequence[str] = ("full_attention", "sliding_attention"),
) -> Sequence[str]:
    """Return `layer_types`: of each layer one of `known`.

    default: what it is if the key is missing or null.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list | tuple) or len(kinds) != n_layers or any(kind not in known for kind in kinds):
        raise invalid("layer_types", f"must be {n_layers} times {' or '.join(known)}", kinds)
    return kinds


def refuse_layer_types(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if `layer_types` names layers without full attention."""
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list | tuple) or any(kind != "full_attention" for kind in kinds)):
        raise invalid("layer_types", "only full_attention layers are supported by this model", kinds)


def refuse_sliding_windows(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if any layer uses sliding-window attention.

    `layer_types` determines this if present. Otherwise, with `use_sliding_window`, all layers from `max_window_layers`
    on have a window.
    """
    refuse_layer_types(config)
    if config.get("layer_types") is None and read_bool(config, "use_sliding_window"):
        full = config.get("max_window_layers", 28)
        if isinstance(full, bool) or not isinstance(full, int) or full < read_int(config, "num_hidden_layers"):
            reason = f"sliding-window attention (from layer {full!r} on, by max_window_layers) is not supported yet"
            raise invalid("use_sliding_window", f"{reason}; must be false", True)

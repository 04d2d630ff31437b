"""The names for packages of other model families. Everything else of `surogate_models` may change without notice.

A dense family is its sizes (a function from `config.json`, mostly `read_dims`), its block, and its weight maps:

    from surogate_models.api import decoder, pre_norm, pre_norm_weights

    MODEL = decoder(
        name="acme",
        summary="Acme dense",
        architecture="AcmeForCausalLM",
        dims=dims,
        block=pre_norm,
        block_weights=pre_norm_weights,
    )

A block is a function of the functions of `decoder.py`, in any order, and of ops of the family's own.

Ops that a family may emit: `rope`, `qk_norm_rope` and `join_qkv`, besides those of core.
"""

from __future__ import annotations

from .config_json import invalid, is_given, read_bool, read_int, read_positive
from .decoder import (
    Block,
    ResidualStream,
    add_norm,
    attend,
    attention,
    decoder,
    linear,
    lm_head,
    mlp,
    norm_weight,
    normed_qkv,
    pre_norm,
    pre_norm_block,
    rotate,
    vocabulary,
    window_in,
)
from .dims import (
    DecoderDims,
    read_dims,
    read_head_dim,
    read_layer_types,
    read_n_kv_heads,
    refuse_layer_types,
    refuse_sliding_windows,
)
from .layouts import Interleaved, Stacked, Transposed
from .outer import BEFORE_LANGUAGE_MODEL, outer
from .rope import (
    QueryScaling,
    Rope,
    read_partial_rope,
    read_query_scaling,
    read_rope,
    read_rope_by_layer_type,
    unrotated,
)
from .tiny_config import TINY_CONFIG
from .weight_maps import (
    attention_weights,
    decoder_weights,
    linear_weights,
    mlp_weights,
    normed_qkv_weights,
    norms_around_weights,
    pre_norm_weights,
    qk_norm_weights,
    weight_map,
)

__all__ = [
    "BEFORE_LANGUAGE_MODEL",
    "TINY_CONFIG",
    "Block",
    "DecoderDims",
    "Interleaved",
    "QueryScaling",
    "ResidualStream",
    "Rope",
    "Stacked",
    "Transposed",
    "add_norm",
    "attend",
    "attention",
    "attention_weights",
    "decoder",
    "decoder_weights",
    "invalid",
    "is_given",
    "linear",
    "linear_weights",
    "lm_head",
    "mlp",
    "mlp_weights",
    "norm_weight",
    "normed_qkv",
    "normed_qkv_weights",
    "norms_around_weights",
    "outer",
    "pre_norm",
    "pre_norm_block",
    "pre_norm_weights",
    "qk_norm_weights",
    "read_bool",
    "read_dims",
    "read_head_dim",
    "read_int",
    "read_layer_types",
    "read_n_kv_heads",
    "read_partial_rope",
    "read_positive",
    "read_query_scaling",
    "read_rope",
    "read_rope_by_layer_type",
    "refuse_layer_types",
    "refuse_sliding_windows",
    "rotate",
    "unrotated",
    "vocabulary",
    "weight_map",
    "window_in",
]

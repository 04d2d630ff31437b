"""Qwen3 dense: QK-norm, grouped-query attention, SwiGLU, tied or untied embeddings.

Nine ops a block: [add_]rmsnorm -> linear -> qk_norm_rope -> attention -> linear -> add_rmsnorm -> linear -> swiglu
-> linear. The projections of queries, keys and values are one param of row blocks [q; k; v], those of gate and up one
of halves [gate; up]; the weight map says which checkpoint tensors they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from surogate_core.api import BatchInputs, HFTensor, Init, ModelDef, Value, WeightMap
from surogate_core.errors import ConfigError
from surogate_core.program.builder import Builder

_LARGEST = 2**31 - 1  # token ids and positions are int32
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class Qwen3Dims:
    """The sizes of a Qwen3 model. `head_dim` need not be d_model / n_heads."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    tied_embeddings: bool
    attention_bias: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    init_std: float

    @property
    def q_rows(self) -> int:
        """Rows of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.n_kv_heads * self.head_dim


# -------------------------------------------------------------------------------------------------- from config.json


def dims(config: Mapping[str, Any]) -> Qwen3Dims:
    """Read the sizes from a parsed `config.json` of transformers 4 or 5; an absent key means what it means there.

    Raises ConfigError, "key: what is wrong (got value)", when a key is missing or wrong, and when the model needs what
    is not built: sliding windows, scaled RoPE, attention dropout, another activation.
    """
    _refuse_unbuilt(config)
    n_heads = _integer(config, "num_attention_heads")
    n_kv_heads = n_heads if _is_null(config, "num_key_value_heads") else _integer(config, "num_key_value_heads")
    head_dim = _integer(config, "head_dim", default=128)
    if n_heads % n_kv_heads:
        raise _error("num_key_value_heads", f"must divide num_attention_heads {n_heads}", n_kv_heads)
    if head_dim % 2:
        raise _error("head_dim", "must be even, since RoPE turns pairs", head_dim)
    return Qwen3Dims(
        n_layers=_integer(config, "num_hidden_layers", most=_MOST_LAYERS),
        d_model=_integer(config, "hidden_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=_integer(config, "intermediate_size"),
        vocab_size=_integer(config, "vocab_size"),
        tied_embeddings=_boolean(config, "tie_word_embeddings"),
        attention_bias=_boolean(config, "attention_bias"),
        norm_eps=_positive(config, "rms_norm_eps", default=1e-6),
        rope_theta=_rope_theta(config),
        max_positions=_integer(config, "max_position_embeddings", default=32768),
        init_std=_positive(config, "initializer_range", default=0.02),
    )


def _refuse_unbuilt(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise _error("hidden_act", "must be silu", config["hidden_act"])
    windows = config.get("layer_types") or ()
    if _boolean(config, "use_sliding_window"):
        raise _error("use_sliding_window", "sliding-window attention is not yet built; must be false", True)
    if not isinstance(windows, list | tuple) or any(kind != "full_attention" for kind in windows):
        raise _error("layer_types", "only full_attention layers are built, not yet others", windows)
    if config.get("attention_dropout") not in (None, 0):
        raise _error("attention_dropout", "dropout is not yet built; must be 0", config["attention_dropout"])


def _rope_theta(config: Mapping[str, Any]) -> float:
    """transformers 5 writes rope_parameters {rope_type, rope_theta}; 4 wrote rope_theta, and rope_scaling if any."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise _error(key, "must be a mapping", rope)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
            raise _error(key, "scaled RoPE is not yet built; must be of type default", dict(rope))
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise _error(key, "partial RoPE is not yet built; partial_rotary_factor must be 1", dict(rope))
    given = config.get("rope_parameters") or {}
    if "rope_theta" in given:
        return _positive(given, "rope_theta", within="rope_parameters.")
    return _positive(config, "rope_theta")


def _error(key: str, expected: str, value: object) -> ConfigError:
    text = repr(value)
    return ConfigError(f"{key}: {expected} (got {text if len(text) <= 80 else text[:77] + '...'})")


def _is_null(config: Mapping[str, Any], key: str) -> bool:
    return key in config and config[key] is None


def _integer(config: Mapping[str, Any], key: str, *, default: int | None = None, most: int = _LARGEST) -> int:
    value = config.get(key, default)
    if key not in config and default is None:
        raise ConfigError(f"{key}: is required for a Qwen3 model")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _error(key, f"must be a whole number from 1 to {most}", value)
    return value


def _positive(config: Mapping[str, Any], key: str, *, default: float | None = None, within: str = "") -> float:
    value = config.get(key, default)
    if key not in config and default is None:
        raise ConfigError(f"{within}{key}: is required for a Qwen3 model")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _error(within + key, "must be a positive number", value)
    if not value < 1e300 or not isfinite(value) or value <= 0:
        raise _error(within + key, "must be a positive number", value)
    return float(value)


def _boolean(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _error(key, "must be true or false", value)
    return bool(value)


# ------------------------------------------------------------------------------------------------------- the program


def build(b: Builder, d: Qwen3Dims, batch: BatchInputs) -> Value:
    """Emit the forward program; returns the loss: loss_scale * sum of cross-entropies over labelled positions."""
    matrix = Init(kind="normal", std=d.init_std)
    embedding = b.param("embedding", (d.vocab_size, d.d_model), matrix)
    residual = b.apply("embedding", batch.tokens, embedding)
    mlp_out: Value | None = None
    for i in range(d.n_layers):
        with b.block(i):
            mlp_out, residual = _block(b, d, batch, f"layers.{i}", mlp_out, residual)
    assert mlp_out is not None
    norm, _, _ = b.emit("add_rmsnorm", mlp_out, residual, _norm(b, "norm", d.d_model), eps=d.norm_eps)
    lm_head = embedding if d.tied_embeddings else b.param("lm_head", (d.vocab_size, d.d_model), matrix)
    return b.apply("lm_head_ce", norm, lm_head, batch.targets, batch.loss_scale, chunks=batch.lmhead_chunks)


def _block(
    b: Builder, d: Qwen3Dims, batch: BatchInputs, name: str, x: Value | None, residual: Value
) -> tuple[Value, Value]:
    """One transformer block: (output of the previous MLP, residual) -> (output of this MLP, residual).

    Each sum into the residual stream is fused with the norm that follows it, so the MLP's output is added by the next
    block; the first block has nothing to add.
    """
    heads: dict[str, Any] = {"n_heads": d.n_heads, "n_kv_heads": d.n_kv_heads, "head_dim": d.head_dim}
    weight = _norm(b, f"{name}.attn.norm", d.d_model)
    if x is None:
        norm = b.apply("rmsnorm", residual, weight, eps=d.norm_eps)
    else:
        norm, _, residual = b.emit("add_rmsnorm", x, residual, weight, eps=d.norm_eps)
    qkv = _linear(b, d, norm, f"{name}.attn.qkv", d.q_rows + 2 * d.kv_rows, label="qkv", bias=d.attention_bias)
    q_norm, k_norm = (_norm(b, f"{name}.attn.{which}_norm", d.head_dim) for which in "qk")
    rope = b.apply(
        "qk_norm_rope", qkv, q_norm, k_norm, batch.positions, label="rope", theta=d.rope_theta, eps=d.norm_eps, **heads
    )
    attention = b.apply("attention", rope, batch.cu_seqlens, seq_len=batch.seq_len, **heads)
    attn_out = _linear(b, d, attention, f"{name}.attn.o", d.d_model, label="attn_out", bias=d.attention_bias)
    norm, _, residual = b.emit(
        "add_rmsnorm",
        attn_out,
        residual,
        _norm(b, f"{name}.mlp.norm", d.d_model),
        label=("norm", "rstd", "residual_mid"),  # inside the block: whole-block recomputation may drop it
        eps=d.norm_eps,
    )
    gate_up = _linear(b, d, norm, f"{name}.mlp.gate_up", 2 * d.d_ff, label="gate_up")
    return _linear(b, d, b.apply("swiglu", gate_up), f"{name}.mlp.down", d.d_model, label="mlp_out"), residual


def _norm(b: Builder, name: str, size: int) -> Value:
    return b.param(name, (size,), Init(kind="ones"))


def _linear(b: Builder, d: Qwen3Dims, x: Value, name: str, rows: int, *, label: str, bias: bool = False) -> Value:
    init = Init(kind="normal", std=d.init_std, residual_projection=label in ("attn_out", "mlp_out"))
    ins = [b.param(name, (rows, x.shape[1]), init)]
    if bias:
        ins.append(b.param(f"{name}_bias", (rows,), Init(kind="zeros")))
    return b.apply("linear", x, *ins, label=label)


# -------------------------------------------------------------------------------------------------------- checkpoints


def weights(d: Qwen3Dims) -> list[WeightMap]:
    """The tensors of a Qwen3ForCausalLM checkpoint that each param is made of."""
    maps = [_map("embedding", ("model.embed_tokens.weight", d.vocab_size, d.d_model))]
    for i in range(d.n_layers):
        maps += _block_weights(d, f"layers.{i}", f"model.layers.{i}")
    maps.append(_map("norm", ("model.norm.weight", d.d_model)))
    if not d.tied_embeddings:
        maps.append(_map("lm_head", ("lm_head.weight", d.vocab_size, d.d_model)))
    return maps


def _block_weights(d: Qwen3Dims, name: str, source: str) -> list[WeightMap]:
    attn, mlp = f"{source}.self_attn", f"{source}.mlp"
    qkv = (("q", d.q_rows), ("k", d.kv_rows), ("v", d.kv_rows))
    maps = [
        _map(f"{name}.attn.qkv", *((f"{attn}.{x}_proj.weight", rows, d.d_model) for x, rows in qkv)),
        _map(f"{name}.attn.o", (f"{attn}.o_proj.weight", d.d_model, d.q_rows)),
        _map(f"{name}.attn.q_norm", (f"{attn}.q_norm.weight", d.head_dim)),
        _map(f"{name}.attn.k_norm", (f"{attn}.k_norm.weight", d.head_dim)),
        _map(f"{name}.mlp.gate_up", *((f"{mlp}.{x}_proj.weight", d.d_ff, d.d_model) for x in ("gate", "up"))),
        _map(f"{name}.mlp.down", (f"{mlp}.down_proj.weight", d.d_model, d.d_ff)),
        _map(f"{name}.attn.norm", (f"{source}.input_layernorm.weight", d.d_model)),
        _map(f"{name}.mlp.norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
    ]
    if d.attention_bias:
        maps += [
            _map(f"{name}.attn.qkv_bias", *((f"{attn}.{x}_proj.bias", rows) for x, rows in qkv)),
            _map(f"{name}.attn.o_bias", (f"{attn}.o_proj.bias", d.d_model)),
        ]
    return maps


def _map(param: str, *tensors: tuple[str, *tuple[int, ...]]) -> WeightMap:
    return WeightMap(param, tuple(HFTensor(name, tuple(shape)) for name, *shape in tensors))


def ignored_tensors(d: Qwen3Dims) -> tuple[str, ...]:
    """The RoPE frequencies that old checkpoints carry, and the copy of tied embeddings."""
    return ("model.layers.*.rotary_emb.inv_freq", *(("lm_head.weight",) if d.tied_embeddings else ()))


QWEN3 = ModelDef(
    name="qwen3",
    summary="Qwen3 dense: QK-norm, grouped-query attention, tied or untied embeddings",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    dims=dims,
    build=build,
    weights=weights,
    ignored_tensors=ignored_tensors,
)

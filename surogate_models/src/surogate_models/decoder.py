"""The decoder shared by Qwen2.5, Qwen3 and Llama: RMS norms, grouped-query attention with RoPE, SwiGLU.

A block has nine ops: [add_]rmsnorm -> linear -> qk_norm_rope or rope -> attention -> linear -> add_rmsnorm -> linear ->
swiglu -> linear. The query, key and value projections are rows [q; k; v] of one param, the gate and up projections are
halves [gate; up] of another. The weight map assigns the checkpoint tensors to them. `DecoderDims` holds what differs
between families: which projections have a bias, whether queries and keys are normalized, and how RoPE is scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surogate_core.api import BatchInputs, Builder, HFTensor, Init, Value, WeightMap

from .config_json import boolean, integer, is_given, positive, wrong
from .rope import Rope

_MOST_LAYERS = 1024


@dataclass(frozen=True, kw_only=True)
class DecoderDims:
    """Sizes and features of a model. `head_dim` need not equal d_model / n_heads.

    qk_norm   each query and key head has an RMS norm before RoPE
    qkv_bias  the query, key and value projections have a bias
    o_bias    the attention output projection has a bias
    mlp_bias  all three projections of the MLP have a bias
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

    @property
    def q_rows(self) -> int:
        """Number of rows of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Number of rows of the key projection, and of the value projection."""
        return self.n_kv_heads * self.head_dim


# -------------------------------------------------------------------------------------------------- from config.json


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
    missing or invalid, and for dropout or an activation other than SiLU.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise wrong("hidden_act", "must be silu", config["hidden_act"])
    if config.get("attention_dropout") not in (None, 0):
        raise wrong("attention_dropout", "dropout is not supported yet; must be 0", config["attention_dropout"])
    n_heads = integer(config, "num_attention_heads")
    if n_heads % n_kv_heads:
        raise wrong("num_key_value_heads", f"must divide num_attention_heads {n_heads}", n_kv_heads)
    if head_dim % 2:
        raise wrong("head_dim", "must be even, because RoPE rotates pairs of elements", head_dim)
    return DecoderDims(
        n_layers=integer(config, "num_hidden_layers", most=_MOST_LAYERS),
        d_model=integer(config, "hidden_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=integer(config, "intermediate_size"),
        vocab_size=integer(config, "vocab_size"),
        tied_embeddings=boolean(config, "tie_word_embeddings"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        norm_eps=positive(config, "rms_norm_eps", default=1e-6),
        rope=rope,
        max_positions=max(max_positions, rope.max_positions),
        init_std=positive(config, "initializer_range", default=0.02),
    )


def head_dim_of(config: Mapping[str, Any]) -> int:
    """Return `head_dim`, or hidden_size / num_attention_heads if the key is missing or null."""
    if is_given(config, "head_dim"):
        return integer(config, "head_dim")
    d_model, n_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if d_model % n_heads:
        raise wrong("hidden_size", f"must be a multiple of num_attention_heads {n_heads} if head_dim is unset", d_model)
    return d_model // n_heads


def n_kv_heads_of(config: Mapping[str, Any], *, absent: int) -> int:
    """Return `num_key_value_heads`: `absent` if the key is missing. Null means one key/value head per query head."""
    key = "num_key_value_heads"
    if key in config and not is_given(config, key):
        return integer(config, "num_attention_heads")
    return integer(config, key, default=absent)


def refuse_sliding_windows(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if any layer uses sliding-window attention.

    `layer_types` determines this if present. Otherwise, with `use_sliding_window`, all layers from `max_window_layers`
    on have a window.
    """
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or any(kind != "full_attention" for kind in kinds):
            raise wrong("layer_types", "only full_attention layers are supported so far", kinds)
    elif boolean(config, "use_sliding_window"):
        full = config.get("max_window_layers", 28)
        if isinstance(full, bool) or not isinstance(full, int) or full < integer(config, "num_hidden_layers"):
            reason = f"sliding-window attention (from layer {full!r} on, by max_window_layers) is not supported yet"
            raise wrong("use_sliding_window", f"{reason}; must be false", True)


# ------------------------------------------------------------------------------------------------------- the program


def build(b: Builder, d: DecoderDims, batch: BatchInputs) -> Value:
    """Emit the forward program. Return the loss: loss_scale * sum of cross-entropies over labelled positions."""
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
    b: Builder, d: DecoderDims, batch: BatchInputs, name: str, x: Value | None, residual: Value
) -> tuple[Value, Value]:
    """Emit a transformer block: (output of the previous MLP, residual) -> (output of this MLP, residual).

    Each addition to the residual stream is fused with the norm that follows it. The next block therefore adds this
    MLP's output; x is None in the first block, which has nothing to add.
    """
    weight = _norm(b, f"{name}.attn.norm", d.d_model)
    if x is None:
        norm = b.apply("rmsnorm", residual, weight, eps=d.norm_eps)
    else:
        norm, _, residual = b.emit("add_rmsnorm", x, residual, weight, eps=d.norm_eps)
    attn_out = _attention(b, d, batch, f"{name}.attn", norm)
    norm, _, residual = b.emit(
        "add_rmsnorm",
        attn_out,
        residual,
        _norm(b, f"{name}.mlp.norm", d.d_model),
        label=("norm", "rstd", "residual_mid"),  # a label of its own, so that recomputing whole blocks can drop it
        eps=d.norm_eps,
    )
    gate_up = _linear(b, d, norm, f"{name}.mlp.gate_up", 2 * d.d_ff, label="gate_up", bias=d.mlp_bias)
    swiglu = b.apply("swiglu", gate_up)
    return _linear(b, d, swiglu, f"{name}.mlp.down", d.d_model, label="mlp_out", bias=d.mlp_bias), residual


def _attention(b: Builder, d: DecoderDims, batch: BatchInputs, name: str, norm: Value) -> Value:
    heads: dict[str, Any] = {"n_heads": d.n_heads, "n_kv_heads": d.n_kv_heads, "head_dim": d.head_dim}
    qkv = _linear(b, d, norm, f"{name}.qkv", d.q_rows + 2 * d.kv_rows, label="qkv", bias=d.qkv_bias)
    if d.qk_norm:
        norms = [_norm(b, f"{name}.{which}_norm", d.head_dim) for which in "qk"]
        attrs = {**heads, **d.rope.attrs, "eps": d.norm_eps}
        rope = b.apply("qk_norm_rope", qkv, *norms, batch.positions, label="rope", **attrs)
    else:
        rope = b.apply("rope", qkv, batch.positions, label="rope", **heads, **d.rope.attrs)
    attention = b.apply("attention", rope, batch.cu_seqlens, seq_len=batch.seq_len, **heads)
    return _linear(b, d, attention, f"{name}.o", d.d_model, label="attn_out", bias=d.o_bias)


def _norm(b: Builder, name: str, size: int) -> Value:
    return b.param(name, (size,), Init(kind="ones"))


def _linear(b: Builder, d: DecoderDims, x: Value, name: str, rows: int, *, label: str, bias: bool) -> Value:
    init = Init(kind="normal", std=d.init_std, residual_projection=label in ("attn_out", "mlp_out"))
    ins = [b.param(name, (rows, x.shape[1]), init)]
    if bias:
        ins.append(b.param(f"{name}_bias", (rows,), Init(kind="zeros")))
    return b.apply("linear", x, *ins, label=label)


# -------------------------------------------------------------------------------------------------------- checkpoints


def weights(d: DecoderDims) -> list[WeightMap]:
    """Return the checkpoint tensors that each param consists of."""
    maps = [_map("embedding", ("model.embed_tokens.weight", d.vocab_size, d.d_model))]
    for i in range(d.n_layers):
        maps += _block_weights(d, f"layers.{i}", f"model.layers.{i}")
    maps.append(_map("norm", ("model.norm.weight", d.d_model)))
    if not d.tied_embeddings:
        maps.append(_map("lm_head", ("lm_head.weight", d.vocab_size, d.d_model)))
    return maps


def _block_weights(d: DecoderDims, name: str, source: str) -> list[WeightMap]:
    attn, mlp = f"{source}.self_attn", f"{source}.mlp"
    qkv = tuple((f"{attn}.{x}_proj", rows) for x, rows in (("q", d.q_rows), ("k", d.kv_rows), ("v", d.kv_rows)))
    gate_up = tuple((f"{mlp}.{x}_proj", d.d_ff) for x in ("gate", "up"))
    maps = [
        *_linear_map(f"{name}.attn.qkv", d.d_model, d.qkv_bias, *qkv),
        *_linear_map(f"{name}.attn.o", d.q_rows, d.o_bias, (f"{attn}.o_proj", d.d_model)),
        *_linear_map(f"{name}.mlp.gate_up", d.d_model, d.mlp_bias, *gate_up),
        *_linear_map(f"{name}.mlp.down", d.d_ff, d.mlp_bias, (f"{mlp}.down_proj", d.d_model)),
        _map(f"{name}.attn.norm", (f"{source}.input_layernorm.weight", d.d_model)),
        _map(f"{name}.mlp.norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
    ]
    if d.qk_norm:
        maps += [_map(f"{name}.attn.{x}_norm", (f"{attn}.{x}_norm.weight", d.head_dim)) for x in "qk"]
    return maps


def _linear_map(param: str, columns: int, bias: bool, *parts: tuple[str, int]) -> list[WeightMap]:
    """`parts`: modules and their rows, one above another in the param."""
    maps = [_map(param, *((f"{module}.weight", rows, columns) for module, rows in parts))]
    if bias:
        maps.append(_map(f"{param}_bias", *((f"{module}.bias", rows) for module, rows in parts)))
    return maps


def _map(param: str, *tensors: tuple[str, *tuple[int, ...]]) -> WeightMap:
    return WeightMap(param, tuple(HFTensor(name, tuple(shape)) for name, *shape in tensors))


def ignored_tensors(d: DecoderDims) -> tuple[str, ...]:
    """Return the checkpoint tensors to ignore: RoPE frequencies in old checkpoints."""
    return ("model.layers.*.rotary_emb.inv_freq",)


def tied_copies(d: DecoderDims) -> dict[str, str]:
    """Return {copy: original} of tensors that some checkpoints store twice: the head of tied embeddings."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if d.tied_embeddings else {}

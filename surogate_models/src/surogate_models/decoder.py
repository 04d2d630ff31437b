"""The decoder that Qwen2.5, Qwen3 and Llama have in common: RMS norms, grouped-query attention with RoPE, SwiGLU.

Nine ops a block: [add_]rmsnorm -> linear -> qk_norm_rope or rope -> attention -> linear -> add_rmsnorm -> linear ->
swiglu -> linear. The projections of queries, keys and values are one param of row blocks [q; k; v], those of gate and
up one of halves [gate; up]; the weight map says which checkpoint tensors they are. What differs between families is
in `DecoderDims`: which of the products have a bias, whether queries and keys are normed, how RoPE is scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surogate_core.api import BatchInputs, HFTensor, Init, Value, WeightMap
from surogate_core.program.builder import Builder

from .config_json import boolean, integer, is_given, positive, wrong
from .rope import Rope

_MOST_LAYERS = 1024


@dataclass(frozen=True, kw_only=True)
class DecoderDims:
    """The sizes of a model. `head_dim` need not be d_model / n_heads.

    qk_norm: each head of queries and keys has an RMS norm before RoPE. The biases: of the projections of queries, keys
    and values, of attention's output, and of all three products of the MLP.
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
        """Rows of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
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
    """What all families read alike from a parsed `config.json` of transformers 4 or 5, and what theirs has found.

    Raises ConfigError when a key is missing or wrong, and for dropout or another activation than SiLU.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise wrong("hidden_act", "must be silu", config["hidden_act"])
    if config.get("attention_dropout") not in (None, 0):
        raise wrong("attention_dropout", "dropout is not yet built; must be 0", config["attention_dropout"])
    n_heads = integer(config, "num_attention_heads")
    if n_heads % n_kv_heads:
        raise wrong("num_key_value_heads", f"must divide num_attention_heads {n_heads}", n_kv_heads)
    if head_dim % 2:
        raise wrong("head_dim", "must be even, since RoPE turns pairs", head_dim)
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
    """`head_dim`, or hidden_size / num_attention_heads where it is not given."""
    if is_given(config, "head_dim"):
        return integer(config, "head_dim")
    d_model, n_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if d_model % n_heads:
        raise wrong("hidden_size", f"must be a multiple of num_attention_heads {n_heads} without a head_dim", d_model)
    return d_model // n_heads


def n_kv_heads_of(config: Mapping[str, Any], *, absent: int) -> int:
    """`num_key_value_heads`: `absent` where the key is not there; null means one for each query head."""
    key = "num_key_value_heads"
    if key in config and not is_given(config, key):
        return integer(config, "num_attention_heads")
    return integer(config, key, default=absent)


def refuse_sliding_windows(config: Mapping[str, Any]) -> None:
    """ConfigError if any layer would attend to a window: by `layer_types`, else from `max_window_layers` on."""
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or any(kind != "full_attention" for kind in kinds):
            raise wrong("layer_types", "only full_attention layers are built, not yet others", kinds)
    elif boolean(config, "use_sliding_window"):
        full = config.get("max_window_layers", 28)
        if isinstance(full, bool) or not isinstance(full, int) or full < integer(config, "num_hidden_layers"):
            told = f"sliding-window attention, here from layer {full!r} on (max_window_layers), is not yet built"
            raise wrong("use_sliding_window", f"{told}; must be false", True)


# ------------------------------------------------------------------------------------------------------- the program


def build(b: Builder, d: DecoderDims, batch: BatchInputs) -> Value:
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
    b: Builder, d: DecoderDims, batch: BatchInputs, name: str, x: Value | None, residual: Value
) -> tuple[Value, Value]:
    """One transformer block: (output of the previous MLP, residual) -> (output of this MLP, residual).

    Each sum into the residual stream is fused with the norm that follows it, so the MLP's output is added by the next
    block; the first block has nothing to add.
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
        label=("norm", "rstd", "residual_mid"),  # inside the block: whole-block recomputation may drop it
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
        turn = {**heads, **d.rope.attrs, "eps": d.norm_eps}
        rope = b.apply("qk_norm_rope", qkv, *norms, batch.positions, label="rope", **turn)
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
    """The tensors of a checkpoint that each param is made of."""
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
    """The RoPE frequencies that old checkpoints carry."""
    return ("model.layers.*.rotary_emb.inv_freq",)


def tied_copies(d: DecoderDims) -> dict[str, str]:
    """The head of tied embeddings, which some checkpoints store a second time."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if d.tied_embeddings else {}

"""The parts of decoders: functions that emit parts of the program, and those that assemble a model from blocks.

A `Block` emits one transformer block. A `ResidualStream` passes through blocks: what has been added up, and the output
of the last MLP, which is still to be added. So each addition is fused with the norm that follows it.

`pre_norm` is the block of Qwen2.5, Qwen3 and Llama. It has nine ops: [add_]rmsnorm -> linear -> qk_norm_rope or rope ->
attention -> linear -> add_rmsnorm -> linear -> swiglu -> linear. The query, key and value projections are rows [q; k;
v] of one param, the gate and up projections are halves [gate; up] of another. The weight map (`weight_maps.py`) assigns
the checkpoint tensors to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surogate_core.api import (
    BatchInputs,
    Builder,
    Head,
    Init,
    Metric,
    ModelDef,
    RowChoice,
    Value,
    WeightMap,
)

from .dims import DecoderDims
from .rope import Rope, long_rope_of_rows, unrotated
from .weight_maps import decoder_weights, ignored_tensors, tied_copies


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream in front of a block: `residual` + `pending`, or `residual` alone in the first block.

    collected  what the blocks before have collected for the metrics of the model
    """

    residual: Value
    pending: Value | None = None
    collected: Value | None = None


Block = Callable[[Builder, Any, BatchInputs, int, ResidualStream], ResidualStream]
"""(builder, dims, batch, number of the block, stream) -> stream. Emits one transformer block."""


# ------------------------------------------------------------------------------------------------------------- models


def decoder(
    *,
    name: str,
    summary: str,
    architecture: str,
    dims: Callable[[Mapping[str, Any]], DecoderDims],
    block: Block,
    block_weights: Callable[[Any, str, str], Sequence[WeightMap]],
    model_type: str | None = None,
    metrics: Callable[[Any, Value], Sequence[Metric]] | None = None,
) -> ModelDef:
    """Return a model: an embedding, blocks, a last norm, and an LM head that may be tied to the embedding.

    dims            reads the sizes from `config.json`
    block           emits one block
    block_weights   (dims, param prefix, checkpoint prefix) -> the weight maps of one block; prefixes of the first are
                    "layers.0" and "model.layers.0"
    model_type      `model_type` of `config.json`, if it is not `name`
    metrics         (dims, `ResidualStream.collected` of the last block) -> what the model reports
    """

    def build(b: Builder, d: DecoderDims, batch: BatchInputs) -> Head:
        embedding = vocabulary(b, d, "embedding")
        stream = ResidualStream(b.apply("embedding", batch.tokens, embedding))
        for i in range(d.n_layers):
            with b.block(i):
                stream = block(b, d, batch, i, stream)
        head = lm_head(b, d, stream, embedding)
        return replace(head, metrics=metrics(d, stream.collected)) if metrics and stream.collected else head

    def row_choice(config: Mapping[str, Any], length: int) -> RowChoice | None:
        d = dims(config)
        return long_rope_of_rows(config, getattr(d, "ropes", (d.rope,)), length)

    return ModelDef(
        name=name,
        summary=summary,
        architectures=(architecture,),
        model_types=(model_type or name,),
        dims=dims,
        build=build,
        weights=lambda d: decoder_weights(d, block_weights),
        ignored_tensors=ignored_tensors,
        tied_copies=tied_copies,
        row_choice=row_choice,
    )


def vocabulary(b: Builder, d: DecoderDims, name: str) -> Value:
    """Declare the embedding or the LM head, [vocab_size, d_model]."""
    return b.param(name, (d.vocab_size, d.d_model), Init(kind="normal", std=d.init_std))


def lm_head(b: Builder, d: DecoderDims, stream: ResidualStream, embedding: Value, **attrs: Any) -> Head:
    """Emit the last norm. Return what the loss takes; `attrs`: further attributes of the ops that compute logits."""
    norm, _ = add_norm(b, d, stream, "norm")
    return Head(norm, embedding if d.tied_embeddings else vocabulary(b, d, "lm_head"), attrs=attrs)


# ------------------------------------------------------------------------------------------------------------- blocks


def pre_norm(b: Builder, d: DecoderDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + attention(norm(x)), then x + mlp(norm(x))."""
    return pre_norm_block(b, d, batch, i, stream, rope=d.rope)


def pre_norm_block(
    b: Builder, d: DecoderDims, batch: BatchInputs, i: int, stream: ResidualStream, *, rope: Rope | None, **attrs: Any
) -> ResidualStream:
    """Emit the block of `pre_norm` with this layer's RoPE (None: without) and attributes of `attention`."""
    name = f"layers.{i}"
    norm, residual = add_norm(b, d, stream, f"{name}.attn.norm")
    attn_out = attention(b, d, batch, f"{name}.attn", norm, rope=rope, **attrs)
    # The label is one of its own, so that recomputing whole blocks can drop the value.
    norm, residual = add_norm(b, d, ResidualStream(residual, attn_out), f"{name}.mlp.norm", label="residual_mid")
    return ResidualStream(residual, mlp(b, d, f"{name}.mlp", norm))


def attention(
    b: Builder, d: DecoderDims, batch: BatchInputs, name: str, x: Value, *, rope: Rope | None, **attrs: Any
) -> Value:
    """Emit attention of x [T, d_model] with its projections: -> [T, d_model]. `attrs`: attributes of `attention`."""
    qkv = linear(b, d, x, f"{name}.qkv", d.q_rows + 2 * d.kv_rows, label="qkv", bias=d.qkv_bias)
    return attend(b, d, batch, name, qkv, rope=rope, **attrs)


def attend(
    b: Builder, d: DecoderDims, batch: BatchInputs, name: str, qkv: Value, *, rope: Rope | None, **attrs: Any
) -> Value:
    """Emit RoPE, attention and the output projection of qkv [T, (H + 2G) D]: -> [T, d_model]. See `attention`."""
    rotated = rotate(b, d, batch, name, qkv, rope=rope)
    attended = b.apply("attention", rotated, batch.cu_seqlens, seq_len=batch.seq_len, **d.heads, **attrs)
    return linear(b, d, attended, f"{name}.o", d.d_model, label="attn_out", bias=d.o_bias)


def normed_qkv(b: Builder, d: DecoderDims, name: str, x: Value) -> Value:
    """Emit the queries, keys and values of x [T, d_model], side by side, for `attend`.

    All queries of a token have one RMS norm, as have all keys. The three products have params of their own, because
    the norms read whole rows.
    """
    q, k, v = (
        linear(b, d, x, f"{name}.{part}", rows, label="qkv", bias=d.qkv_bias)
        for part, rows in (("q", d.q_rows), ("k", d.kv_rows), ("v", d.kv_rows))
    )
    q, k = (
        b.emit("rmsnorm", y, norm_weight(b, f"{name}.{part}_norm", y.shape[1]), label=("qkv", "rstd"), **d.norm)[0]
        for part, y in (("q", q), ("k", k))
    )
    return b.apply("join_qkv", q, k, v, label="qkv")


def window_in(batch: BatchInputs, window: int) -> int:
    """Return the attribute `window` of attention: 0, for none, if rows are not longer, which is the same and faster."""
    return window if window < batch.seq_len else 0


def rotate(b: Builder, d: DecoderDims, batch: BatchInputs, name: str, qkv: Value, *, rope: Rope | None) -> Value:
    """Emit RoPE of the queries and keys, after an RMS norm of each head if the model has such norms."""
    if d.qk_norm:
        norms = [norm_weight(b, f"{name}.{which}_norm", d.head_dim, offset=d.norm_offset) for which in "qk"]
        attrs = {**d.heads, **(rope or unrotated(d.head_dim)).of_rows(batch.seq_len).attrs, **d.norm}
        return b.apply("qk_norm_rope", qkv, *norms, batch.positions, label="rope", **attrs)
    if rope is None:
        return qkv
    return b.apply("rope", qkv, batch.positions, label="rope", **d.heads, **rope.of_rows(batch.seq_len).attrs)


def mlp(b: Builder, d: DecoderDims, name: str, x: Value, *, gated: str = "swiglu") -> Value:
    """Emit the MLP of x [T, d_model]: -> [T, d_model]. `gated`: the op between the two products."""
    gate_up = linear(b, d, x, f"{name}.gate_up", 2 * d.d_ff, label="gate_up", bias=d.mlp_bias)
    return linear(b, d, b.apply(gated, gate_up), f"{name}.down", d.d_model, label="mlp_out", bias=d.mlp_bias)


# ------------------------------------------------------------------------------------------------------------- layers


def add_norm(
    b: Builder, d: DecoderDims, stream: ResidualStream, name: str, *, label: str = "residual"
) -> tuple[Value, Value]:
    """Emit the sum of the stream and its RMS norm: (norm, sum). `label`: that of the sum."""
    weight = norm_weight(b, name, d.d_model, offset=d.norm_offset)
    if stream.pending is None:
        return b.apply("rmsnorm", stream.residual, weight, **d.norm), stream.residual
    labels = ("norm", "rstd", label)
    norm, _, residual = b.emit("add_rmsnorm", stream.pending, stream.residual, weight, label=labels, **d.norm)
    return norm, residual


def norm_weight(b: Builder, name: str, size: int, *, offset: float = 0.0) -> Value:
    """Declare the weight of an RMS norm, [size]. A new model starts with 1, or with 0 and an offset of 1."""
    return b.param(name, (size,), Init(kind="zeros" if offset == 1 else "ones"))


def linear(
    b: Builder, d: DecoderDims, x: Value, name: str, rows: int, *, label: str, bias: bool = False, **attrs: Any
) -> Value:
    """Emit a linear layer of x [T, C]: -> [T, rows]. Its params are `name` [rows, C] and `name`_bias [rows].

    attrs: attributes of the op, such as `dtype`.
    """
    init = Init(kind="normal", std=d.init_std, residual_projection=label in ("attn_out", "mlp_out"))
    ins = [b.param(name, (rows, x.shape[1]), init)]
    if bias:
        ins.append(b.param(f"{name}_bias", (rows,), Init(kind="zeros")))
    return b.apply("linear", x, *ins, label=label, **attrs)

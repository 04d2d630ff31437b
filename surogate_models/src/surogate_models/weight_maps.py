"""The checkpoint tensors that the params of a decoder consist of: for every function of `decoder.py`, one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from surogate_core.api import HFTensor, ParamKind, WeightMap

from .dims import DecoderDims


def decoder_weights(d: DecoderDims, block_weights: Callable[[Any, str, str], Sequence[WeightMap]]) -> list[WeightMap]:
    """Return the weight maps of a model. `block_weights`: see `decoder`."""
    maps = [weight_map("embedding", ("model.embed_tokens.weight", d.vocab_size, d.d_model))]
    for i in range(d.n_layers):
        maps += block_weights(d, f"layers.{i}", f"model.layers.{i}")
    maps.append(weight_map("norm", ("model.norm.weight", d.d_model)))
    if not d.tied_embeddings:
        maps.append(weight_map("lm_head", ("lm_head.weight", d.vocab_size, d.d_model)))
    return maps


def pre_norm_weights(d: DecoderDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `pre_norm`, in the names of Llama."""
    return [
        *attention_weights(d, f"{name}.attn", f"{source}.self_attn"),
        *mlp_weights(d, f"{name}.mlp", f"{source}.mlp"),
        weight_map(f"{name}.attn.norm", (f"{source}.input_layernorm.weight", d.d_model)),
        weight_map(f"{name}.mlp.norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
        *qk_norm_weights(d, f"{name}.attn", f"{source}.self_attn"),
    ]


def attention_weights(d: DecoderDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of the projections of `attention`."""
    qkv = tuple((f"{source}.{x}_proj", rows) for x, rows in (("q", d.q_rows), ("k", d.kv_rows), ("v", d.kv_rows)))
    return [
        *linear_weights(f"{name}.qkv", d.d_model, d.qkv_bias, *qkv),
        *linear_weights(f"{name}.o", d.q_rows, d.o_bias, (f"{source}.o_proj", d.d_model)),
    ]


def normed_qkv_weights(d: DecoderDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `normed_qkv`."""
    maps, rows = [], {"q": d.q_rows, "k": d.kv_rows, "v": d.kv_rows}
    for x, size in rows.items():
        maps += linear_weights(f"{name}.{x}", d.d_model, d.qkv_bias, (f"{source}.{x}_proj", size))
    return [*maps, *(weight_map(f"{name}.{x}_norm", (f"{source}.{x}_norm.weight", rows[x])) for x in "qk")]


def qk_norm_weights(d: DecoderDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of the norms of queries and keys, if the model has them."""
    which = "qk" if d.qk_norm else ""
    return [weight_map(f"{name}.{x}_norm", (f"{source}.{x}_norm.weight", d.head_dim)) for x in which]


def mlp_weights(d: DecoderDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `mlp`."""
    gate_up = tuple((f"{source}.{x}_proj", d.d_ff) for x in ("gate", "up"))
    return [
        *linear_weights(f"{name}.gate_up", d.d_model, d.mlp_bias, *gate_up),
        *linear_weights(f"{name}.down", d.d_ff, d.mlp_bias, (f"{source}.down_proj", d.d_model)),
    ]


def norms_around_weights(d: DecoderDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of the norms of a block with one in front of attention and MLP and one behind each."""
    norms = {
        "attn.norm": "input_layernorm",
        "attn.post_norm": "post_attention_layernorm",
        "mlp.norm": "pre_feedforward_layernorm",
        "mlp.post_norm": "post_feedforward_layernorm",
    }
    return [weight_map(f"{name}.{ours}", (f"{source}.{theirs}.weight", d.d_model)) for ours, theirs in norms.items()]


def linear_weights(name: str, columns: int, bias: bool, *parts: tuple[str, int]) -> list[WeightMap]:
    """Return the weight maps of `linear`. `parts`: modules and their rows, one above another in the param."""
    maps = [weight_map(name, *((f"{module}.weight", rows, columns) for module, rows in parts))]
    if bias:
        maps.append(weight_map(f"{name}_bias", *((f"{module}.bias", rows) for module, rows in parts)))
    return maps


def weight_map(
    param: str,
    *tensors: tuple[str, *tuple[int, ...]],
    kind: ParamKind | None = None,
    trained: bool = True,
    precise: bool = False,
    matrices: int = 1,
    parameter: str = "",
) -> WeightMap:
    """Return the map of a param. `tensors`: names and shapes, one above another in the param. Else see `WeightMap`."""
    stored = tuple(HFTensor(name, tuple(shape)) for name, *shape in tensors)
    return WeightMap(param, stored, kind=kind, trained=trained, precise=precise, matrices=matrices, parameter=parameter)


def ignored_tensors(d: DecoderDims) -> tuple[str, ...]:
    """Return the checkpoint tensors to ignore: RoPE frequencies in old checkpoints."""
    return ("model.layers.*.rotary_emb.inv_freq",)


def tied_copies(d: DecoderDims) -> dict[str, str]:
    """Return {copy: original} of tensors that some checkpoints store twice: the head of tied embeddings."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if d.tied_embeddings else {}

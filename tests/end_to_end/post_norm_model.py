"""OLMo 2 as a third party would write it: norms after attention and MLP, and over all heads of queries and of keys.

Its own op has no `vjp`, so core differentiates the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import BatchInputs, Builder, Head, HFTensor, Init, ModelDef, OpDef, OutSpec, Value, WeightMap


@dataclass(frozen=True)
class Olmo2Dims:
    """Sizes of the model, from config.json."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    vocab_size: int
    max_positions: int
    eps: float
    theta: float

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


def dims(config: Mapping[str, Any]) -> Olmo2Dims:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = [config[name] for name in (*names, "vocab_size", "max_position_embeddings")]
    return Olmo2Dims(*sizes, config["rms_norm_eps"], config["rope_parameters"]["rope_theta"])


def _params(d: Olmo2Dims) -> dict[str, tuple[int, ...]]:
    """Map each param to one tensor of the checkpoint, in the order of the forward pass."""
    kv_rows = d.n_kv_heads * d.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (d.vocab_size, d.d_model)}
    for i in range(d.n_layers):
        block = f"model.layers.{i}"
        for which, rows in (("q", d.d_model), ("k", kv_rows), ("v", kv_rows), ("o", d.d_model)):
            shapes[f"{block}.self_attn.{which}_proj.weight"] = (rows, d.d_model)
            shapes[f"{block}.self_attn.{which}_proj.bias"] = (rows,)
        shapes[f"{block}.self_attn.q_norm.weight"] = (d.d_model,)
        shapes[f"{block}.self_attn.k_norm.weight"] = (kv_rows,)
        shapes[f"{block}.post_attention_layernorm.weight"] = (d.d_model,)
        shapes |= {f"{block}.mlp.{which}_proj.weight": (d.d_ff, d.d_model) for which in ("gate", "up")}
        shapes[f"{block}.mlp.down_proj.weight"] = (d.d_model, d.d_ff)
        shapes[f"{block}.post_feedforward_layernorm.weight"] = (d.d_model,)
    return shapes | {"model.norm.weight": (d.d_model,), "lm_head.weight": (d.vocab_size, d.d_model)}


def weights(d: Olmo2Dims) -> Sequence[WeightMap]:
    return [WeightMap(name, (HFTensor(name, shape),)) for name, shape in _params(d).items()]


def build(b: Builder, d: Olmo2Dims, batch: BatchInputs) -> Head:
    shapes = _params(d)

    def param(name: str) -> Value:
        return b.param(name, shapes[name], Init(kind="normal", std=0.02))

    def norm(x: Value, name: str) -> Value:
        return b.apply("rmsnorm", x, param(name), eps=d.eps)

    heads = {"n_heads": d.n_heads, "n_kv_heads": d.n_kv_heads, "head_dim": d.head_dim}
    x = b.apply("embedding", batch.tokens, param("model.embed_tokens.weight"))
    for i in range(d.n_layers):
        with b.block(i):
            block, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
            q, k, v = (
                b.apply("linear", x, param(f"{attn}.{w}_proj.weight"), param(f"{attn}.{w}_proj.bias")) for w in "qkv"
            )
            packed = b.apply("test_columns", norm(q, f"{attn}.q_norm.weight"), norm(k, f"{attn}.k_norm.weight"), v)
            turned = b.apply("rope", packed, batch.positions, **heads, theta=d.theta)
            mixed = b.apply("attention", turned, batch.cu_seqlens, seq_len=batch.seq_len, **heads)
            out = b.apply("linear", mixed, param(f"{attn}.o_proj.weight"), param(f"{attn}.o_proj.bias"))
            x = b.apply("add", x, norm(out, f"{block}.post_attention_layernorm.weight"), label="residual_mid")
            gate, up = (b.apply("linear", x, param(f"{block}.mlp.{w}_proj.weight")) for w in ("gate", "up"))
            hidden = b.apply("swiglu", b.apply("test_columns", gate, up))
            down = b.apply("linear", hidden, param(f"{block}.mlp.down_proj.weight"))
            x = b.apply("add", x, norm(down, f"{block}.post_feedforward_layernorm.weight"), label="residual")
    last = norm(x, "model.norm.weight")
    return Head(last, param("lm_head.weight"))


def columns(*parts: Tensor) -> Tensor:
    """Concatenate matrices along their columns."""
    return torch.cat(parts, dim=1)


COLUMNS = OpDef(
    kind="test_columns",
    infer=lambda ins, attrs: [OutSpec("columns", (ins[0].shape[0], sum(v.shape[1] for v in ins)), ins[0].dtype)],
    reference=f"{__name__}:columns",
)

OLMO2 = ModelDef(
    name="olmo2",
    summary="OLMo 2",
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    dims=dims,
    build=build,
    weights=weights,
)

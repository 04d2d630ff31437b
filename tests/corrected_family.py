"""A plugin of one file, and the model of transformers that it trains: Qwen3 with two parts that training spares.

- A mixture of experts whose router is corrected: a bias in fp32, which is never trained, chooses with the scores, and
  does not scale (DeepSeek-V3). transformers has it as a parameter, and its gradient is zero.
- Heads are scaled by a gate of eight rows, which is never quantized.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import BatchInputs, Builder, Init, OpDef, OutSpec, Value, WeightMap, provides
from surogate_models.api import (
    DecoderDims,
    ResidualStream,
    add_norm,
    attention_weights,
    decoder,
    linear,
    qk_norm_weights,
    rotate,
    weight_map,
)
from surogate_models.qwen3 import dims as qwen3_dims

SUROGATE_API = {"ops": 1, "models": 1}
GATES = 8
"""Rows of the gate."""
OWN: Mapping[str, Any] = {
    "architectures": ["CorrectedForCausalLM"],
    "model_type": "corrected",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
"""Keys of config.json beside those of Qwen3."""


@dataclass(frozen=True, kw_only=True)
class Dims(DecoderDims):
    n_experts: int
    k: int
    d_expert: int


def dims(config: Mapping[str, Any]) -> Dims:
    own = {"n_experts": "num_experts", "k": "num_experts_per_tok", "d_expert": "moe_intermediate_size"}
    return Dims(**vars(qwen3_dims(config)), **{name: config.get(key, OWN[key]) for name, key in own.items()})


# ---------------------------------------------------------------------------------------------------------------- ops


def corrected_route(logits: Tensor, bias: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """The k experts with the highest score + bias, and their scores, which add up to 1."""
    scores = logits.float().sigmoid()
    experts = torch.topk(scores + bias, k, dim=-1).indices
    chosen = scores.gather(1, experts)
    return chosen / chosen.sum(-1, keepdim=True), experts.int()


def corrected_route_bwd(d_weights: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
    with torch.enable_grad():
        given = logits.detach().float().requires_grad_()
        chosen = given.sigmoid().gather(1, experts.long())
        (chosen / chosen.sum(-1, keepdim=True)).backward(d_weights.float())
    assert given.grad is not None
    return given.grad.to(logits.dtype)


def gated_heads(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, C] sigmoid(gate [T, G]), for each of G groups of columns."""
    scaled = x.float().unflatten(1, (gate.shape[1], -1)) * gate.float().sigmoid()[:, :, None]
    return scaled.flatten(1).to(x.dtype)


def _op(kind: str, **fields: Any) -> OpDef:
    return OpDef(kind=f"test_{kind}", reference=f"{__name__}:{kind}", **fields)


OPS = (
    _op(
        "corrected_route",
        attrs={"k": int},
        infer=lambda ins, attrs: [
            OutSpec("route_weights", (ins[0].shape[0], attrs["k"]), "fp32"),
            OutSpec("experts", (ins[0].shape[0], attrs["k"]), "int32"),
        ],
        vjp=lambda b, op, grads: (b.apply("test_corrected_route_bwd", grads[0], op.ins[0], op.outs[1]), None),
    ),
    _op("corrected_route_bwd", infer=lambda ins, attrs: [OutSpec("d_logits", ins[1].shape, ins[1].dtype)]),
    _op("gated_heads", infer=lambda ins, attrs: [OutSpec("attention", ins[0].shape, ins[0].dtype)]),
)

# -------------------------------------------------------------------------------------------------------------- model


def block(b: Builder, d: Dims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    attn, mlp = f"layers.{i}.attn", f"layers.{i}.mlp"
    norm, residual = add_norm(b, d, stream, f"{attn}.norm")
    qkv = linear(b, d, norm, f"{attn}.qkv", d.q_rows + 2 * d.kv_rows, label="qkv")
    rotated = rotate(b, d, batch, attn, qkv, rope=d.rope)
    attended = b.apply("attention", rotated, batch.cu_seqlens, seq_len=batch.seq_len, **d.heads)
    attended = b.apply("test_gated_heads", attended, linear(b, d, norm, f"{attn}.gate", GATES, label="qkv"))
    out = linear(b, d, attended, f"{attn}.o", d.d_model, label="attn_out")
    norm, residual = add_norm(b, d, ResidualStream(residual, out), f"{mlp}.norm", label="residual_mid")
    return ResidualStream(residual, mixture(b, d, mlp, norm))


def mixture(b: Builder, d: Dims, name: str, x: Value) -> Value:
    logits = linear(b, d, x, f"{name}.router", d.n_experts, label="router_logits")
    bias = b.param(f"{name}.bias", (d.n_experts,), Init(kind="normal", std=0.5), dtype="fp32")
    weights, experts = b.emit("test_corrected_route", logits, bias, k=d.k)
    order, place, ends = b.emit("expert_order", experts, n_experts=d.n_experts)
    rows, init = b.apply("gather_rows", x, order, place), Init(kind="normal", std=d.init_std)
    gate_up = b.param(f"{name}.gate_up", (d.n_experts * 2 * d.d_expert, d.d_model), init)
    down = b.param(f"{name}.down", (d.n_experts * d.d_model, d.d_expert), init)
    middle = b.apply("weighted_swiglu", b.apply("grouped_linear", rows, gate_up, ends, label="gate_up"), weights, order)
    y = b.apply("grouped_linear", middle, down, ends, label="expert_out")
    return b.apply("sum_rows", y, order, place, k=d.k)


def block_weights(d: Dims, name: str, source: str) -> list[WeightMap]:
    attn, mlp, own, experts = f"{name}.attn", f"{name}.mlp", f"{source}.self_attn", f"{source}.mlp"
    return [
        *attention_weights(d, attn, own),
        *qk_norm_weights(d, attn, own),
        weight_map(f"{attn}.gate", (f"{own}.gate_proj.weight", GATES, d.d_model), precise=True),
        weight_map(f"{attn}.norm", (f"{source}.input_layernorm.weight", d.d_model)),
        weight_map(f"{mlp}.norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
        weight_map(f"{mlp}.router", (f"{experts}.router.weight", d.n_experts, d.d_model), kind="router"),
        weight_map(f"{mlp}.bias", (f"{experts}.bias", d.n_experts), trained=False),
        weight_map(f"{mlp}.gate_up", (f"{experts}.gate_up", d.n_experts * 2 * d.d_expert, d.d_model)),
        weight_map(f"{mlp}.down", (f"{experts}.down", d.n_experts * d.d_model, d.d_expert)),
    ]


MODEL = decoder(
    name="corrected",
    summary="Qwen3 with a corrected router and gated heads",
    architecture="CorrectedForCausalLM",
    dims=dims,
    block=block,
    block_weights=block_weights,
)
surogate_ops = provides([*OPS])
surogate_models = provides([MODEL])


def marked(**marks: bool) -> Any:
    """Return the model whose gates are marked in another way."""

    def weights(d: Dims) -> list[WeightMap]:
        return [replace(m, **marks) if m.param.endswith(".gate") else m for m in MODEL.weights(d)]

    return replace(MODEL, weights=weights)


# ----------------------------------------------------------------------------------------------------- in transformers


def in_transformers() -> type:
    """Register the model in transformers, and return its class."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    class CorrectedConfig(Qwen3Config):  # type: ignore[misc]
        model_type = "corrected"
        num_experts: int = OWN["num_experts"]
        num_experts_per_tok: int = OWN["num_experts_per_tok"]
        moe_intermediate_size: int = OWN["moe_intermediate_size"]

    class Mixture(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            experts, width, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
            self.k, self.n = config.num_experts_per_tok, experts
            self.router = torch.nn.Linear(width, experts, bias=False)
            self.bias = torch.nn.Parameter(torch.zeros(experts))
            self.gate_up = torch.nn.Parameter(torch.zeros(experts * 2 * inner, width))
            self.down = torch.nn.Parameter(torch.zeros(experts * width, inner))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, -2)
            scores = self.router(flat).sigmoid()
            chosen = torch.topk(scores + self.bias, self.k, dim=-1).indices
            weights = scores.gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True) + 0 * self.bias.sum()
            total = torch.zeros_like(flat)
            for e, (up, down) in enumerate(zip(self.gate_up.chunk(self.n), self.down.chunk(self.n), strict=True)):
                gate, value = (flat @ up.T).chunk(2, dim=-1)
                share = (weights * (chosen == e)).sum(-1, keepdim=True).to(flat.dtype)
                total = total + share * ((torch.nn.functional.silu(gate) * value) @ down.T)
            return total.unflatten(0, x.shape[:-1])

    class CorrectedForCausalLM(Qwen3ForCausalLM):  # type: ignore[misc]
        config_class = CorrectedConfig
        _keep_in_fp32_modules_strict = ("mlp.bias",)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp, attention = Mixture(config), layer.self_attn
                attention.gate_proj = torch.nn.Linear(config.hidden_size, GATES, bias=False)
                attention.register_forward_pre_hook(_keep_gates, with_kwargs=True)
                attention.o_proj.register_forward_pre_hook(
                    lambda module, args, attention=attention: (gated(args[0], attention.gates),)
                )

    def _keep_gates(attention: Any, args: Any, kwargs: Any) -> None:
        attention.gates = attention.gate_proj(args[0] if args else kwargs["hidden_states"])

    def gated(x: Tensor, gates: Tensor) -> Tensor:
        return (x.unflatten(-1, (GATES, -1)) * gates.sigmoid()[..., None]).flatten(-2)

    AutoConfig.register("corrected", CorrectedConfig, exist_ok=True)
    AutoModelForCausalLM.register(CorrectedConfig, CorrectedForCausalLM, exist_ok=True)
    return CorrectedForCausalLM


def write_corrected(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a model with random weights in bf16, but for its biases, whose values bf16 cannot hold."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    d, draw = dims(config), torch.Generator().manual_seed(0)
    tensors = {}
    for m in MODEL.weights(d):
        for tensor in m.tensors:
            x = torch.randn(tensor.shape, generator=draw)
            whole = 0.3 * x if not m.trained else (1 + 0.1 * x if x.dim() == 1 else 0.08 * x)
            tensors[tensor.name] = whole if not m.trained else whole.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder

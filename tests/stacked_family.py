"""A plugin of one file: gpt-oss, whose checkpoints hold the experts of a layer as one tensor [E, K, N].

Its sizes are those of `transformers.GptOssConfig`, without scaled RoPE. `docs/write-a-plugin/family.md` shows its maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.api import (
    BatchInputs,
    Builder,
    Emitter,
    Gradients,
    HFTensor,
    Init,
    Op,
    OpDef,
    OutSpec,
    ProgramError,
    Value,
    WeightMap,
    provides,
)
from surogate_models.api import (
    DecoderDims,
    ResidualStream,
    Stacked,
    Transposed,
    add_norm,
    attention_weights,
    decoder,
    linear,
    read_dims,
    read_int,
    read_layer_types,
    read_positive,
    read_rope,
    rotate,
    weight_map,
    window_in,
)

if TYPE_CHECKING:
    from torch import Tensor

SUROGATE_API = {"ops": 1, "models": 1}
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SUROGATE_EXAMPLES = {"model gpt_oss": [CONFIG | {"vocab_size": 300}]}


@dataclass(frozen=True, kw_only=True)
class Dims(DecoderDims):
    windows: tuple[int, ...]
    n_experts: int
    k: int
    alpha: float
    limit: float


def dims(config: Mapping[str, Any]) -> Dims:
    head_dim = read_int(config, "head_dim", default=64)
    sizes = read_dims(
        {"rms_norm_eps": 1e-5, **config},
        n_kv_heads=read_int(config, "num_key_value_heads", default=8),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, default_theta=150_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=131072),
        qkv_bias=True,
        o_bias=True,
    )
    absent = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes.n_layers)]
    kinds = read_layer_types(config, sizes.n_layers, default=absent)
    window = read_int(config, "sliding_window", default=128)
    return Dims(
        **vars(sizes),
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        n_experts=read_int(config, "num_local_experts", default=128),
        k=read_int(config, "num_experts_per_tok", default=4),
        alpha=read_positive(config, "swiglu_alpha", default=1.702),
        limit=read_positive(config, "swiglu_limit", default=7.0),
    )


# ------------------------------------------------------------------------------------------------------------- program


def block(b: Builder, d: Dims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    name, attn = f"layers.{i}", f"layers.{i}.attn"
    norm, residual = add_norm(b, d, stream, f"{attn}.norm")
    qkv = linear(b, d, norm, f"{attn}.qkv", d.q_rows + 2 * d.kv_rows, label="qkv", bias=True)
    qkv = rotate(b, d, batch, attn, qkv, rope=d.rope)
    sinks = b.param(f"{attn}.sinks", (d.n_heads,), Init(kind="normal", std=d.init_std))
    window = window_in(batch, d.windows[i])
    attrs = {**d.heads, "seq_len": batch.seq_len, "window": window}
    attention = b.emit("attention", qkv, batch.cu_seqlens, **attrs)
    y, _ = b.emit("acme_sinks", qkv, batch.cu_seqlens, *attention, sinks, **attrs)
    y = linear(b, d, y, f"{attn}.o", d.d_model, label="attn_out", bias=True)
    norm, residual = add_norm(b, d, ResidualStream(residual, y), f"{name}.mlp.norm", label="residual_mid")
    return ResidualStream(residual, experts(b, d, f"{name}.mlp", norm))


def experts(b: Builder, d: Dims, name: str, x: Value) -> Value:
    def param(which: str, *shape: int) -> Value:
        return b.param(f"{name}.{which}", shape, Init(kind="normal", std=d.init_std))

    logits = linear(b, d, x, f"{name}.router", d.n_experts, label="router_logits", bias=True)
    weights, chosen = b.emit("route", logits, k=d.k, normalize=True)
    order, place, ends = b.emit("expert_order", chosen, n_experts=d.n_experts)
    rows = b.apply("gather_rows", x, order, place)
    y = b.apply("grouped_linear", rows, param("gate_up", d.n_experts * 2 * d.d_ff, d.d_model), ends, label="gate_up")
    y = b.apply("acme_gate", y, param("gate_up_bias", d.n_experts, 2 * d.d_ff), ends, alpha=d.alpha, limit=d.limit)
    y = b.apply("grouped_linear", y, param("down", d.n_experts * d.d_model, d.d_ff), ends, label="expert_out")
    y = b.apply("acme_weighted", y, param("down_bias", d.n_experts, d.d_model), ends, weights, order)
    return b.apply("sum_rows", y, order, place, k=d.k)


def block_weights(d: Dims, name: str, source: str) -> list[WeightMap]:
    mlp, ff = f"{name}.mlp", f"{source}.mlp.experts"
    return [
        *attention_weights(d, f"{name}.attn", f"{source}.self_attn"),
        weight_map(f"{name}.attn.sinks", (f"{source}.self_attn.sinks", d.n_heads)),
        weight_map(f"{name}.attn.norm", (f"{source}.input_layernorm.weight", d.d_model)),
        weight_map(f"{mlp}.norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
        weight_map(f"{mlp}.router", (f"{source}.mlp.router.weight", d.n_experts, d.d_model), kind="router"),
        weight_map(f"{mlp}.router_bias", (f"{source}.mlp.router.bias", d.n_experts)),
        *expert_weights(d, mlp, ff),
        weight_map(f"{mlp}.gate_up_bias", (f"{ff}.gate_up_proj_bias", d.n_experts, 2 * d.d_ff)),
        weight_map(f"{mlp}.down_bias", (f"{ff}.down_proj_bias", d.n_experts, d.d_model)),
    ]


def expert_weights(d: Dims, mlp: str, ff: str) -> list[WeightMap]:
    """Return the maps of the stacks: checkpoints have gate_up_proj [E, K, N] and down_proj."""
    gate_up = HFTensor(f"{ff}.gate_up_proj", (d.n_experts, d.d_model, 2 * d.d_ff), Stacked(2 * d.d_ff, Transposed()))
    down = HFTensor(f"{ff}.down_proj", (d.n_experts, d.d_ff, d.d_model), Stacked(d.d_model, Transposed()))
    return [
        WeightMap(f"{mlp}.gate_up", (gate_up,), matrices=d.n_experts, parameter=gate_up.name),
        WeightMap(f"{mlp}.down", (down,), matrices=d.n_experts, parameter=down.name),
    ]


def by_expert(m: WeightMap) -> WeightMap:
    """Return the map with a tensor for each expert, as no checkpoint of gpt-oss has them."""
    if m.matrices == 1:
        return m
    (tensor,) = m.tensors
    rows, width = tensor.rows[0] // m.matrices, tensor.rows[1]
    names = [f"{tensor.name}.{e}" for e in range(m.matrices)]
    return replace(m, tensors=tuple(HFTensor(name, (rows, width)) for name in names), matrices=1)


# ----------------------------------------------------------------------------------------------------------------- ops


def sinks(qkv: Tensor, cu_seqlens: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    """A sink takes the share exp(sink) / (exp(sink) + exp(lse)) of a softmax: the rest is sigmoid(lse - sink)."""
    import torch

    from surogate_core.reference.rounding import accumulator

    sink = sinks.to(lse.dtype)[:, None]
    kept = (lse - sink).sigmoid().T[..., None]
    wide = out.to(accumulator(out.dtype)).view(len(out), len(sinks), -1)
    return (wide * kept).reshape(out.shape).to(out.dtype), torch.logaddexp(lse, sink)


def sinks_bwd(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Minus the sum over tokens of the share of the sink times dout . out."""
    from surogate_core.reference.rounding import accumulator

    wide = accumulator(out.dtype)
    delta = (dout.to(wide) * out.to(wide)).view(len(out), len(sinks), -1).sum(-1).T
    return -((sinks.to(lse.dtype)[:, None] - lse).exp() * delta).sum(1).to(sinks.dtype)


def gate(gate_up: Tensor, bias: Tensor, ends: Tensor, *, alpha: float, limit: float) -> Tensor:
    """The gated product of columns in turn, clamped, of what the bias of its expert is added to."""
    wide = _biased(gate_up, bias, ends)
    gate, value = wide[:, ::2].clamp(max=limit), wide[:, 1::2].clamp(-limit, limit)
    return ((value + 1) * gate * (alpha * gate).sigmoid()).to(gate_up.dtype)


def weighted(y: Tensor, bias: Tensor, ends: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The weight of its route times a row with the bias of its expert."""
    return (weights.flatten()[order.long(), None] * _biased(y, bias, ends)).to(y.dtype)


def _biased(y: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    import torch

    from surogate_core.reference.rounding import accumulator

    expert = torch.searchsorted(ends.long(), torch.arange(len(y)), right=True)
    return y.to(accumulator(y.dtype)) + bias.to(accumulator(y.dtype))[expert]


def _checked(fits: bool, ins: Sequence[Value], width: int) -> list[OutSpec]:
    if not fits:
        raise ProgramError(f"does not take {ins!r}")
    return [OutSpec(ins[0].label, (ins[0].shape[0], width), ins[0].dtype)]


def _fits(ins: Sequence[Value]) -> bool:
    y, bias, ends = ins[:3]
    return bias.shape == (ends.size, y.shape[1])


def _sinks(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    _, _, out, lse, sinks = ins
    _checked(sinks.shape == (attrs["n_heads"],), ins, 0)
    return [OutSpec("attention", out.shape, out.dtype), OutSpec("lse", lse.shape, lse.dtype)]


def _sinks_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """Attention's own out and lse have no gradient: that of qkv is here, by those with the sink."""
    (qkv, cu_seqlens, _, _, sinks), (out, lse), dout = op.ins, op.outs, grads[0]
    dqkv = b.apply("attention_bwd", dout, qkv, out, lse, cu_seqlens, label="d_qkv", own=False, **op.attrs)
    return dqkv, None, None, None, b.apply("acme_sinks_bwd", dout, out, lse, sinks)


def _op(kind: str, infer: Any, **fields: Any) -> OpDef:
    return OpDef(kind=f"acme_{kind}", infer=infer, reference=f"{__name__}:{kind}", **fields)


OPS = [
    _op(
        "sinks",
        _sinks,
        attrs={"n_heads": int, "n_kv_heads": int, "head_dim": int, "seq_len": int, "window": (int, 0)},
        vjp=_sinks_vjp,
        flops=lambda op: op.outs[0].size,
    ),
    _op(
        "sinks_bwd",
        lambda ins, attrs: [OutSpec("d_sinks", ins[3].shape, ins[3].dtype)],
        flops=lambda op: 2 * op.ins[0].size,
    ),
    _op(
        "gate",
        lambda ins, attrs: _checked(_fits(ins), ins, ins[0].shape[1] // 2),
        attrs={"alpha": float, "limit": float},
        flops=lambda op: 8 * op.outs[0].size,
        param_kinds={1: "vector"},
    ),
    _op(
        "weighted",
        lambda ins, attrs: _checked(_fits(ins), ins, ins[0].shape[1]),
        flops=lambda op: 2 * op.outs[0].size,
        param_kinds={1: "vector"},
    ),
]
MODEL = decoder(
    name="gpt_oss",
    summary="gpt-oss: sinks, alternating windows, experts with biases",
    architecture="GptOssForCausalLM",
    dims=dims,
    block=block,
    block_weights=block_weights,
)
surogate_ops = provides(OPS)
surogate_models = provides([MODEL])


def random_model(seed: int = 0, **changes: Any) -> Any:
    """Return the model of transformers in fp32 with random weights, biases and sinks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**CONFIG | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.1)
            elif name.endswith("router.weight"):
                parameter.normal_(0, 0.3)
    return model


def write_base(folder: Path, **changes: Any) -> Path:
    """Write a random model, with the tokenizer of the tests, as transformers writes it."""
    from end_to_end.product import write_model

    random_model(**changes).save_pretrained(folder)
    written = (folder / "config.json").read_text()
    write_model(folder)
    (folder / "config.json").write_text(written)
    return folder

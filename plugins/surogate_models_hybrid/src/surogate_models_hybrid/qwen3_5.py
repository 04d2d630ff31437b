"""Qwen3.5, text: the gated delta rule in most layers, attention with an output gate in the others.

Linear layer: three projections of the input (queries, keys and values together; the gate z; b and a) -> causal
convolution and SiLU of the first -> gated delta rule -> RMS norm of each head, times silu(z) -> output projection.
Full layer: one projection, of which each query head has the query and then its gate -> norms and RoPE -> attention ->
times sigmoid of the gate -> output projection. Norms multiply by 1 + w, but that of the linear layers by w.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from surogate_core.api import BatchInputs, Builder, Init, Value, WeightMap
from surogate_models.api import (
    DecoderDims,
    ResidualStream,
    add_norm,
    decoder,
    invalid,
    is_given,
    linear,
    linear_weights,
    mlp,
    mlp_weights,
    norm_weight,
    outer,
    qk_norm_weights,
    read_bool,
    read_dims,
    read_int,
    read_n_kv_heads,
    read_partial_rope,
    rotate,
    weight_map,
)

from .ops import WIDTHS

_KINDS = ("linear_attention", "full_attention")
_MOST_HEAD_DIM = 256


@dataclass(frozen=True, kw_only=True)
class HybridDims(DecoderDims):
    """Sizes of a model.

    linear      of each layer, whether it has the gated delta rule in place of attention
    conv_width  taps of the convolution
    n_k_heads   key heads of the delta rule, each shared by as many value heads
    n_v_heads   value heads of the delta rule
    k_dim       elements of a query or key of the delta rule
    v_dim       elements of a value of the delta rule
    """

    linear: tuple[bool, ...]
    conv_width: int
    n_k_heads: int
    n_v_heads: int
    k_dim: int
    v_dim: int

    @property
    def delta(self) -> dict[str, Any]:
        """Attributes of the gated delta rule."""
        return {name: getattr(self, name) for name in ("n_k_heads", "n_v_heads", "k_dim", "v_dim")}

    @property
    def v_rows(self) -> int:
        """Number of rows of the values of the delta rule, and of its gate."""
        return self.n_v_heads * self.v_dim

    @property
    def delta_rows(self) -> int:
        """Number of rows of the queries, keys and values of the delta rule."""
        return 2 * self.n_k_heads * self.k_dim + self.v_rows


# -------------------------------------------------------------------------------------------------- from config.json


def dims(config: Mapping[str, Any]) -> HybridDims:
    """Read the sizes from a parsed `config.json`. A key that is missing has the default of transformers.

    Raises ConfigError ("key: what is wrong (got value)") if a key is missing or invalid, or if the model needs an
    unsupported feature.
    """
    refuse_unsupported(config)
    head_dim = read_int(config, "head_dim", default=256)
    sizes = read_dims(
        config,
        n_kv_heads=read_n_kv_heads(config, default=4),
        head_dim=head_dim,
        rope=read_partial_rope({"partial_rotary_factor": 0.25, **config}, head_dim, default_theta=10_000.0),
        max_positions=read_int(config, "max_position_embeddings", default=32768),
        qk_norm=True,
    )
    n_k_heads = read_int(config, "linear_num_key_heads", default=16)
    n_v_heads = read_int(config, "linear_num_value_heads", default=32)
    if n_v_heads % n_k_heads:
        raise invalid("linear_num_value_heads", f"must be a multiple of linear_num_key_heads {n_k_heads}", n_v_heads)
    width = read_int(config, "linear_conv_kernel_dim", default=4)
    if width not in WIDTHS:
        raise invalid("linear_conv_kernel_dim", f"must be a whole number from {WIDTHS[0]} to {WIDTHS[-1]}", width)
    return HybridDims(
        **vars(sizes) | {"norm_offset": 1.0},
        linear=read_kinds(config, sizes.n_layers),
        conv_width=width,
        n_k_heads=n_k_heads,
        n_v_heads=n_v_heads,
        k_dim=read_delta_dim(config, "linear_key_head_dim"),
        v_dim=read_delta_dim(config, "linear_value_head_dim"),
    )


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for what these models may have and the program has not, or what transformers ignores."""
    if read_bool(config, "attention_bias"):
        raise invalid("attention_bias", "biases of attention are not supported by this model; must be false", True)
    if not read_bool(config, "attn_output_gate", default=True):
        raise invalid("attn_output_gate", "attention without its gate is not supported; must be true", False)
    for key, known in (("output_gate_type", ("swish", "silu")), ("mamba_ssm_dtype", ("float32",))):
        if is_given(config, key) and config[key] not in known:
            raise invalid(key, f"must be {' or '.join(known)}", config[key])


def read_kinds(config: Mapping[str, Any], n_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has the delta rule: by `layer_types`, or by `full_attention_interval` without it."""
    kinds = config.get("layer_types")
    if kinds is None:
        every = read_int(config, "full_attention_interval", default=4)
        return tuple((i + 1) % every != 0 for i in range(n_layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != n_layers or any(kind not in _KINDS for kind in kinds):
        raise invalid("layer_types", f"must be {n_layers} times {' or '.join(_KINDS)}", kinds)
    return tuple(kind == _KINDS[0] for kind in kinds)


def read_delta_dim(config: Mapping[str, Any], key: str) -> int:
    """Return the size of a head of the delta rule."""
    size = read_int(config, key, default=128)
    if size % 8 or size > _MOST_HEAD_DIM:
        raise invalid(key, f"must be a multiple of 8 and at most {_MOST_HEAD_DIM}", size)
    return size


# ------------------------------------------------------------------------------------------------------- the program


def block(b: Builder, d: HybridDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
    """Emit the block x + mixer(norm(x)), then x + mlp(norm(x))."""
    name = f"layers.{i}.mlp"
    norm, residual = add_norm(b, d, mixer(b, d, batch, i, stream), f"{name}.norm", label="residual_mid")
    return ResidualStream(residual, mlp(b, d, name, norm))


def projections(b: Builder, d: HybridDims, name: str, x: Value) -> tuple[Value, Value, Value]:
    """Emit the projections of a layer of the delta rule, of x [T, d_model]: -> [q; k; v], z, [b; a]."""
    qkv = linear(b, d, x, f"{name}.qkv", d.delta_rows, label="qkv")
    z = linear(b, d, x, f"{name}.z", d.v_rows, label="qkv")
    return qkv, z, linear(b, d, x, f"{name}.ba", 2 * d.n_v_heads, label="qkv")


def mixer(
    b: Builder,
    d: HybridDims,
    batch: BatchInputs,
    i: int,
    stream: ResidualStream,
    project: Callable[[Builder, HybridDims, str, Value], tuple[Value, Value, Value]] = projections,
) -> ResidualStream:
    """Emit the first half of a block: the delta rule or attention of the norm of the stream, which is still to be
    added. project: as `projections`.
    """
    name = f"layers.{i}.attn"
    norm, residual = add_norm(b, d, stream, f"{name}.norm")
    if d.linear[i]:
        mixed = gated_delta(b, d, batch, name, *project(b, d, name, norm))
    else:
        mixed = gated_attention(b, d, batch, name, norm)
    return replace(stream, residual=residual, pending=mixed)


def gated_attention(b: Builder, d: HybridDims, batch: BatchInputs, name: str, x: Value) -> Value:
    """Emit attention whose output is multiplied by the sigmoid of a gate, of x [T, d_model]: -> [T, d_model]."""
    rows = 2 * d.q_rows + 2 * d.kv_rows
    fused = linear(b, d, x, f"{name}.qkv", rows, label="qkv")
    qkv, gate = b.emit("split_gate", fused, n_heads=d.n_heads, head_dim=d.head_dim)
    rotated = rotate(b, d, batch, name, qkv, rope=d.rope)
    attended = b.apply("attention", rotated, batch.cu_seqlens, seq_len=batch.seq_len, **d.heads)
    return linear(b, d, b.apply("sigmoid_gate", attended, gate), f"{name}.o", d.d_model, label="attn_out")


def gated_delta(b: Builder, d: HybridDims, batch: BatchInputs, name: str, qkv: Value, z: Value, ba: Value) -> Value:
    """Emit a layer of the gated delta rule behind its `projections`: -> [T, d_model]."""
    conv = b.param(f"{name}.conv", (d.delta_rows, 1, d.conv_width), Init(kind="normal", std=d.init_std))
    heads = (d.n_v_heads,)
    a_log = b.param(f"{name}.a_log", heads, Init(kind="log_uniform", low=0.01, high=16.0), dtype="fp32")
    dt_bias = b.param(f"{name}.dt_bias", heads, Init(kind="ones"), dtype="fp32")
    mixed = b.apply("causal_conv", qkv, conv, batch.positions)
    y = b.apply("gated_delta_rule", mixed, ba, a_log, dt_bias, batch.positions, **d.delta)
    y = b.apply("gated_rmsnorm", y, z, norm_weight(b, f"{name}.gated_norm", d.v_dim), eps=d.norm_eps)
    return linear(b, d, y, f"{name}.o", d.d_model, label="attn_out")


def block_weights(d: HybridDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `block`."""
    return [
        *mixer_weights(d, name, source),
        *mlp_weights(d, f"{name}.mlp", f"{source}.mlp"),
        weight_map(f"{name}.mlp.norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
    ]


def projection_weights(d: HybridDims, name: str, module: str) -> list[WeightMap]:
    """Return the weight maps of `projections`.

    b and a have a row for each head: in 8 or 4 bits these would save little, and they decide what a state keeps.
    """
    both = ((f"{module}.in_proj_b", d.n_v_heads), (f"{module}.in_proj_a", d.n_v_heads))
    (ba,) = linear_weights(f"{name}.ba", d.d_model, False, *both)
    return [
        *linear_weights(f"{name}.qkv", d.d_model, False, (f"{module}.in_proj_qkv", d.delta_rows)),
        *linear_weights(f"{name}.z", d.d_model, False, (f"{module}.in_proj_z", d.v_rows)),
        replace(ba, precise=True),
    ]


def mixer_weights(
    d: HybridDims,
    name: str,
    source: str,
    project_weights: Callable[[HybridDims, str, str], list[WeightMap]] = projection_weights,
) -> list[WeightMap]:
    """Return the weight maps of `mixer`. project_weights: those of its `project`."""
    attn, own = f"{name}.attn", f"{source}.linear_attn"
    if d.linear[int(name.rpartition(".")[2])]:
        weights = [*project_weights(d, attn, own), *delta_weights(d, attn, own)]
    else:
        weights = gated_attention_weights(d, attn, source)
    return [
        *weights,
        weight_map(f"{name}.attn.norm", (f"{source}.input_layernorm.weight", d.d_model)),
    ]


def gated_attention_weights(d: HybridDims, name: str, source: str) -> list[WeightMap]:
    """Return the weight maps of `gated_attention`. Its gates are rows of the query projection."""
    own = f"{source}.self_attn"
    parts = (("q", 2 * d.q_rows), ("k", d.kv_rows), ("v", d.kv_rows))
    return [
        *linear_weights(f"{name}.qkv", d.d_model, False, *((f"{own}.{x}_proj", rows) for x, rows in parts)),
        *linear_weights(f"{name}.o", d.q_rows, False, (f"{own}.o_proj", d.d_model)),
        *qk_norm_weights(d, name, own),
    ]


def delta_weights(d: HybridDims, name: str, module: str) -> list[WeightMap]:
    """Return the weight maps of `gated_delta`."""
    heads = d.n_v_heads
    return [
        weight_map(f"{name}.conv", (f"{module}.conv1d.weight", d.delta_rows, 1, d.conv_width), kind="vector"),
        weight_map(f"{name}.a_log", (f"{module}.A_log", heads)),
        weight_map(f"{name}.dt_bias", (f"{module}.dt_bias", heads)),
        weight_map(f"{name}.gated_norm", (f"{module}.norm.weight", d.v_dim)),
        *linear_weights(f"{name}.o", d.v_rows, False, (f"{module}.out_proj", d.d_model)),
    ]


QWEN3_5 = replace(
    decoder(
        name="qwen3_5_text",
        summary="Qwen3.5 dense, text: gated delta rule in most layers, gated attention in the others",
        architecture="Qwen3_5ForCausalLM",
        dims=dims,
        block=block,
        block_weights=block_weights,
    ),
    recompute={"recompute_qkv": frozenset({"conv"}), "recompute_att": frozenset({"delta_states"})},
)
QWEN3_5_OUTER = outer(
    QWEN3_5,
    name="qwen3_5",
    summary="Qwen3.5 dense with a vision tower and a head for further tokens, which are kept",
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    text_types=("qwen3_5_text",),
    towers={"vision_config": ("model.visual.*",)},
    may_lack=("mtp.*",),
    tied=False,
)

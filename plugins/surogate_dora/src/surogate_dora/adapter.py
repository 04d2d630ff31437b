"""DoRA (Liu et al. 2024): y = m / |W + s B A| * (W x + s B (A x)), with W frozen and a trained m for each row.

The norms |W + s B A| of rows are computed in every micro-step and have no gradient (section 4.3 of the paper). m starts
as the norms of W. Projections that are stored as one matrix (q, k, v; gate, up) get an A, a B and an m each, named
after the checkpoint's own projections: `model.layers.0.self_attn.q_proj.lora_A`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, Any

from surogate_core.api import (
    ADAPTER_LABEL,
    AdapterContext,
    Builder,
    ConfigError,
    Init,
    Op,
    Precision,
    Program,
    Scalars,
    Value,
    WeightMap,
)
from surogate_core.api.peft import PeftFormat

from .options import ALL_LINEAR, DoraOptions, scale_of

if TYPE_CHECKING:
    from torch import Tensor

A, B, MAGNITUDE = ".lora_A", ".lora_B", ".lora_magnitude_vector"

# ------------------------------------------------------------------------------------------------------------ in a run


@dataclass(frozen=True)
class _Projection:
    """A linear module of the checkpoint: rows `row` to `row + rows` of the stored matrix."""

    module: str
    row: int
    rows: int


def apply(forward: Program, scalars: Scalars, context: AdapterContext[DoraOptions]) -> Program:
    """Give every target its A [r, K], drawn as PEFT draws it, its B [N, r], zero, and its m [N].

    Raises ConfigError for a target that the model does not have, naming what it has.
    """
    b, precision, options = context.builder, context.precision, context.options
    chosen = _chosen(forward, context.weights, options.dora_target_modules)
    made: dict[str, tuple[Value, Value, Value]] = {}
    ops: list[Op] = []
    for op in forward.ops:
        projections = chosen.get(op.ins[1].name) if op.kind == "linear" else None
        if not projections:
            ops.append(op)
            continue
        with b.record("forward", op.block) as emitted:
            for p in projections:
                if p.module not in made:
                    made[p.module] = _params(b, p, op.ins[1].shape[1], precision, options)
            _adapt(b, op, projections, [made[p.module] for p in projections], precision, options.scale)
        ops += emitted
    return replace(forward, ops=tuple(ops))


def _params(
    b: Builder, p: _Projection, width: int, precision: Precision, options: DoraOptions
) -> tuple[Value, Value, Value]:
    """Declare A, uniform in +-1 / sqrt(K), which is Kaiming's with a = sqrt(5); B; and m, which `start` computes."""
    rank, dtype = options.dora_rank, precision.adapter
    down = b.param(p.module + A, (rank, width), Init(kind="uniform", bound=1 / sqrt(width)), dtype)
    up = b.param(p.module + B, (p.rows, rank), Init(kind="zeros"), dtype)
    return down, up, b.param(p.module + MAGNITUDE, (p.rows,), Init(kind="ones"), dtype)


def _adapt(
    b: Builder,
    op: Op,
    projections: Sequence[_Projection],
    params: Sequence[tuple[Value, Value, Value]],
    precision: Precision,
    scale: float,
) -> None:
    """Emit the linear op, its branches as one product, the norms of rows, and the op that scales the sum.

    The packed matrices, x A^T and the norms are labelled as the adapter's. Everything else has the label of the output,
    with which it is recomputed. The bias is added last: it is not scaled.
    """
    x, weight, *bias = op.ins
    y = op.outs[0]
    places = tuple((p.row, p.rows) for p in projections)
    down, up = b.emit(
        "dora_pack",
        *(matrix for a_and_b in params for matrix in a_and_b[:2]),
        label=[ADAPTER_LABEL] * 2,
        rows=weight.shape[0],
        places=places,
        scale=scale,
        dtype=_dtype_of_products(precision),
    )
    norm = b.apply("dora_norm", weight, down, up, label=ADAPTER_LABEL)
    base = b.apply("linear", x, weight, label=y.label, **op.attrs)
    inner = b.apply("linear", x, down, label=ADAPTER_LABEL)
    branches = b.apply("linear", inner, up, label=y.label, dtype=y.dtype)
    total = b.apply("add", base, branches, label=y.label)
    b.emit("dora_scale", total, norm, *(magnitude for *_, magnitude in params), *bias, outs=[y], places=places)


def _dtype_of_products(precision: Precision) -> str:
    """The dtype of products, so that no op casts; that of the model where products have a narrower form."""
    return precision.matmul if precision.matmul in ("fp64", "fp32", "bf16") else precision.model


def start(params: Mapping[str, Value], context: AdapterContext[DoraOptions]) -> None:
    """Emit what computes each m: the norms of the rows of W, which are those of W + s B A, because B is zero."""
    b = context.builder
    for weight in context.weights:
        found = [(p, params[p.module + MAGNITUDE]) for p in _projections(weight) if p.module + MAGNITUDE in params]
        if found:
            stored = params[weight.param]
            with b.block(stored.block):
                b.emit(
                    "dora_magnitude",
                    stored,
                    outs=[magnitude for _, magnitude in found],
                    places=tuple((p.row, p.rows) for p, _ in found),
                    dtype=found[0][1].dtype,
                )


def _chosen(
    forward: Program, weights: Sequence[WeightMap], targets: Sequence[str]
) -> Mapping[str, tuple[_Projection, ...]]:
    """Return {param of a linear op: those of its projections that `targets` name}."""
    linear = {op.ins[1].name for op in forward.ops if op.kind == "linear"}
    found = {m.param: _projections(m) for m in weights if m.param in linear and m.kind != "router"}
    modules = [p.module for projections in found.values() for p in projections]
    for target in targets:
        if target != ALL_LINEAR and not any(_is_target(module, target) for module in modules):
            names = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
            raise ConfigError(
                f"dora_target_modules: {target!r} is no linear projection of this model's blocks. It has {names}. Name "
                f"some of them, or {ALL_LINEAR}."
            )
    if ALL_LINEAR in targets:
        return found
    return {
        param: tuple(p for p in projections if any(_is_target(p.module, target) for target in targets))
        for param, projections in found.items()
    }


def _is_target(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _projections(weight: WeightMap) -> tuple[_Projection, ...]:
    projections, row = [], 0
    for tensor in weight.tensors:
        projections.append(_Projection(tensor.name.removesuffix(".weight"), row, tensor.rows[0]))
        row += tensor.rows[0]
    return tuple(projections)


# ------------------------------------------------------------------------------------------------------------ in files


def merged(weight: Tensor, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return m / |W + s B A| * (W + s B A) by rows."""
    total = weight + scale_of(config) * (parts[B] @ parts[A])
    return (parts[MAGNITUDE] / total.norm(dim=1))[:, None] * total


FORMAT = PeftFormat(
    peft_type="LORA",
    marks={"use_dora": True},
    parts={A: f"{A}.weight", B: f"{B}.weight", MAGNITUDE: MAGNITUDE},
    merged=merged,
    keys={"r": "dora_rank", "lora_alpha": "dora_alpha", "use_rslora": "dora_use_rslora"},
    values={"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")},
    inert=("lora_dropout", "megatron_core", "qalora_group_size", "eva_config"),
)

DORA = FORMAT.adapter(
    name="dora",
    summary="DoRA: LoRA with trained magnitudes of the rows, in PEFT's format",
    options=DoraOptions,
    apply=apply,
    start=start,
    trainable=lambda param, stored, options: stored is None,
    trains_tokens="adapter: lora and lora_modules_to_save: [embed_tokens, lm_head]",
)

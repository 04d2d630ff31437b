"""LoRA (Hu et al. 2021): y = W x + scale * B (A x), with W frozen.

Projections that are stored as one matrix (q, k, v; gate, up) get an A and a B each, named after the checkpoint's own
projections, so that an adapter is the same whatever is fused. Param names: `model.layers.0.self_attn.q_proj.lora_A`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from surogate_core.api import AdapterDef, Init, Op, Precision, Program, Value, WeightMap
from surogate_core.errors import ConfigError
from surogate_core.program.builder import Builder

from .files import CONFIG_FILE, load, merge, save
from .options import ALL_LINEAR, LoraOptions
from .use import check, commands

_WEIGHT = ".weight"


@dataclass(frozen=True)
class _Projection:
    """A linear module of the checkpoint: columns `column` to `column + width` of what the stored matrix yields."""

    module: str
    column: int
    width: int


def apply(
    forward: Program, b: Builder, precision: Precision, weights: Sequence[WeightMap], options: LoraOptions
) -> Program:
    """Give every target its A [r, K], drawn as PEFT draws it, and its B [N, r], zero: the model starts as its base.

    Raises ConfigError for a target that the model does not have, naming what it has.
    """
    chosen = _chosen(forward, weights, options.lora_target_modules)
    made: dict[str, tuple[Value, Value]] = {}
    ops: list[Op] = []
    for op in forward.ops:
        projections = chosen.get(op.ins[1].name) if op.kind == "linear" else None
        if not projections:
            ops.append(op)
            continue
        with b.record("forward", op.block) as emitted:
            _add_branches(b, op, projections, precision.lora, options, made)
        ops += emitted
    return replace(forward, ops=tuple(ops))


def _add_branches(
    b: Builder,
    op: Op,
    projections: Sequence[_Projection],
    dtype: str,
    options: LoraOptions,
    made: dict[str, tuple[Value, Value]],
) -> None:
    """Emit the linear op and its branches. All have the label of its output, so that they are recomputed together."""
    x, y = op.ins[0], op.outs[0]
    base = b.apply("linear", *op.ins, label=y.label, **op.attrs)
    branches = []
    for p in projections:
        if p.module not in made:
            made[p.module] = _matrices(b, p, x.shape[1], dtype, options.lora_rank)
        down, up = made[p.module]
        branches.append(b.apply("linear", b.apply("linear", x, down, label=y.label), up, label=y.label))
    b.emit("lora_add", base, *branches, outs=[y], columns=tuple(p.column for p in projections), scale=options.scale)


def _matrices(b: Builder, p: _Projection, width: int, dtype: str, rank: int) -> tuple[Value, Value]:
    """A uniform in +-1 / sqrt(K), which is Kaiming's with a = sqrt(5)."""
    down = b.param(f"{p.module}.lora_A", (rank, width), Init(kind="uniform", bound=1 / sqrt(width)), dtype)
    return down, b.param(f"{p.module}.lora_B", (p.width, rank), Init(kind="zeros"), dtype)


def _chosen(
    forward: Program, weights: Sequence[WeightMap], targets: Sequence[str]
) -> Mapping[str, tuple[_Projection, ...]]:
    """Param of a linear op -> those of its projections that `targets` name."""
    linear = {op.ins[1].name for op in forward.ops if op.kind == "linear"}
    found = {m.param: _projections(m) for m in weights if m.param in linear}
    modules = [p.module for projections in found.values() for p in projections]
    for target in targets:
        if target.lower() not in ALL_LINEAR and not any(_matches(module, target) for module in modules):
            names = dict.fromkeys(module.rpartition(".")[2] for module in modules)
            raise ConfigError(
                f"lora_target_modules: {target!r} is no linear projection of this model's blocks. "
                f"It has {', '.join(names)}. Name some of them, or all-linear."
            )
    if any(target.lower() in ALL_LINEAR for target in targets):
        return found
    return {
        param: tuple(p for p in projections if any(_matches(p.module, target) for target in targets))
        for param, projections in found.items()
    }


def _projections(m: WeightMap) -> tuple[_Projection, ...]:
    projections, column = [], 0
    for tensor in m.tensors:
        projections.append(_Projection(tensor.name.removesuffix(_WEIGHT), column, tensor.shape[0]))
        column += tensor.shape[0]
    return tuple(projections)


def _matches(module: str, target: str) -> bool:
    """As PEFT matches: the whole name, or its end from a dot on."""
    return module == target or module.endswith(f".{target}")


def trainable(param: Value, options: LoraOptions) -> bool:
    return param.name.endswith((".lora_A", ".lora_B"))


LORA = AdapterDef(
    name="lora",
    summary="LoRA: low-rank matrices beside the linear projections, in PEFT's format",
    options=LoraOptions,
    config_file=CONFIG_FILE,
    apply=apply,
    trainable=trainable,
    save=save,
    load=load,
    merge=merge,
    library="peft",
    check=check,
    commands=commands,
)

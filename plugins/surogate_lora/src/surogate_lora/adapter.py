"""LoRA (Hu et al. 2021): y = W x + scale * B (A x), with W frozen.

Projections that are stored as one matrix (q, k, v; gate, up) get an A and a B each, named after the checkpoint's own
projections, so that an adapter is the same whatever is fused. Param names: `model.layers.0.self_attn.q_proj.lora_A`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from zlib import crc32

from surogate_core.api import AdapterDef, Init, Op, Precision, Program, Scalars, Value, WeightMap
from surogate_core.errors import ConfigError
from surogate_core.program.builder import Builder

from . import saved_modules
from .files import CONFIG_FILE, load, merge, save
from .matching import is_target, pattern_of
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
    forward: Program,
    b: Builder,
    precision: Precision,
    weights: Sequence[WeightMap],
    scalars: Scalars,
    options: LoraOptions,
) -> Program:
    """Give every target its A [r, K], drawn as PEFT draws it, and its B [N, r], zero: the model starts as its base.

    Raises ConfigError for a target, pattern or module that the model does not have, naming what it has.
    """
    saved_modules.check(forward, weights, options.lora_modules_to_save)
    chosen = _chosen(forward, weights, options.lora_target_modules)
    _check_patterns(options, [p.module for projections in chosen.values() for p in projections])
    made: dict[str, tuple[Value, Value]] = {}
    ops: list[Op] = []
    for op in forward.ops:
        projections = chosen.get(op.ins[1].name) if op.kind == "linear" else None
        if not projections:
            ops.append(op)
            continue
        with b.record("forward", op.block) as emitted:
            _add_branches(b, op, projections, precision.adapter, scalars, options, made)
        ops += emitted
    return replace(forward, ops=tuple(ops))


def _add_branches(
    b: Builder,
    op: Op,
    projections: Sequence[_Projection],
    dtype: str,
    scalars: Scalars,
    options: LoraOptions,
    made: dict[str, tuple[Value, Value]],
) -> None:
    """Emit the linear op and its branches. All have the label of its output, so that they are recomputed together.

    Branches of one scale are added by one op.
    """
    x, y = op.ins[0], op.outs[0]
    total = b.apply("linear", *op.ins, label=y.label, **op.attrs)
    added: dict[float, list[tuple[int, Value]]] = {}
    for p in projections:
        if p.module not in made:
            made[p.module] = _matrices(b, p, x.shape[1], dtype, options.rank_of(p.module))
        down, up = made[p.module]
        seen = _with_dropout(b, x, p.module, y.label, scalars, options.lora_dropout)
        branch = b.apply("linear", b.apply("linear", seen, down, label=y.label), up, label=y.label)
        added.setdefault(options.scale_of(p.module), []).append((p.column, branch))
    *others, last = added
    for scale in others:
        columns, branches = zip(*added[scale], strict=True)
        total = b.apply("lora_add", total, *branches, label=y.label, columns=columns, scale=scale)
    columns, branches = zip(*added[last], strict=True)
    b.emit("lora_add", total, *branches, outs=[y], columns=columns, scale=last)


def _with_dropout(b: Builder, x: Value, module: str, label: str, scalars: Scalars, rate: float) -> Value:
    """What a branch sees of `x`: of every projection other elements, and other ones in every micro-step."""
    if not rate:
        return x
    stream = crc32(f"{module}.lora_dropout".encode())
    return b.apply("lora_dropout", x, scalars.micro_step, scalars.seed, label=label, rate=rate, stream=stream)


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
        if target.lower() not in ALL_LINEAR and not any(is_target(module, target) for module in modules):
            names = dict.fromkeys(module.rpartition(".")[2] for module in modules)
            raise ConfigError(
                f"lora_target_modules: {target!r} is no linear projection of this model's blocks. "
                f"It has {', '.join(names)}. Name some of them, or all-linear."
            )
    if any(target.lower() in ALL_LINEAR for target in targets):
        return found
    return {
        param: tuple(p for p in projections if any(is_target(p.module, target) for target in targets))
        for param, projections in found.items()
    }


def _projections(m: WeightMap) -> tuple[_Projection, ...]:
    projections, column = [], 0
    for tensor in m.tensors:
        projections.append(_Projection(tensor.name.removesuffix(_WEIGHT), column, tensor.shape[0]))
        column += tensor.shape[0]
    return tuple(projections)


def _check_patterns(options: LoraOptions, modules: Collection[str]) -> None:
    for key in ("lora_rank_pattern", "lora_alpha_pattern"):
        patterns = getattr(options, key)
        unused = patterns.keys() - {pattern_of(patterns, module) for module in modules}
        if unused:
            names = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
            raise ConfigError(
                f"{key}: {min(unused)!r} is the first pattern to fit no projection that has an adapter. Those are "
                f"{names} of every block (layers.0.mlp.up_proj). Remove it, or set it before the pattern that hides it."
            )


def trainable(param: Value, stored: WeightMap | None, options: LoraOptions) -> bool:
    """The adapter's own matrices, and the modules that are trained in full."""
    return stored is None or saved_modules.is_trained(stored, options.lora_modules_to_save)


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

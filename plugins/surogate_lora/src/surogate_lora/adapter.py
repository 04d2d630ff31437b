"""LoRA (Hu et al. 2021): y = W x + scale * B (A x), with W frozen.

Projections that are stored as one matrix (q, k, v; gate, up) get an A and a B each, named after the checkpoint's own
projections, so that an adapter is the same whatever is fused. Param names: `model.layers.0.self_attn.q_proj.lora_A`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt
from typing import Any
from zlib import crc32

from surogate_core.api import (
    ADAPTER_LABEL,
    DTYPES,
    AdapterContext,
    AdapterDef,
    Builder,
    ConfigError,
    Init,
    ModelDef,
    Op,
    Precision,
    Program,
    Scalars,
    Value,
    WeightMap,
)
from surogate_core.api.peft import PEFT_CONFIG, PEFT_TASKS, check_in_peft

from . import experts, saved_modules
from .files import load, matches, merge, save
from .gradients import fuse_gradients
from .matching import is_target, pattern_of
from .options import ALL_LINEAR, LoraOptions
from .packing import Packing, firsts
from .principal import DOWN, FIRST_DOWN, FIRST_UP, UP, check_rank, start
from .use import commands

_WEIGHT = ".weight"


@dataclass(frozen=True)
class _Projection:
    """A linear module of the checkpoint: columns `column` to `column + width` of what the stored matrix yields."""

    module: str
    column: int
    width: int


@dataclass(frozen=True)
class _Packed:
    """The matrices of an op's branches, together, in the dtype of products; R is the sum of their ranks.

    down: all A, stacked, [R, K]; with dropout, under which each branch sees another input, one [r, K] each.
    up: [N, R], scale * B of each branch where its columns of the output and its ranks meet, zeros elsewhere.
    """

    down: tuple[Value, ...]
    up: Value


def apply(forward: Program, scalars: Scalars, context: AdapterContext[LoraOptions]) -> Program:
    """Give every target its A [r, K], drawn as PEFT draws it, and its B [N, r], zero: the model starts as its base.

    Raises ConfigError for a target, pattern or module that the model does not have, naming what it has.
    """
    b, weights, options = context.builder, context.weights, context.options
    saved_modules.check(forward, weights, options.lora_modules_to_save)
    saved_modules.refuse_untrained(context.untrained, options.lora_modules_to_save)
    of_experts = experts.chosen(b, forward, weights, options.lora_target_parameters)
    chosen = _chosen(forward, weights, options.lora_target_modules)
    _check_patterns(options, [*(p.module for found in chosen.values() for p in found), *of_experts.values()])
    adapted = {op: chosen[op.ins[1].name] for op in forward.ops if op.kind == "linear" and chosen.get(op.ins[1].name)}
    matrices = _Matrices(b, context.precision, options)
    stacks = experts.Stacks(b, context.precision.adapter, options)
    packed: dict[Op, _Packed] = {}
    ops: list[Op] = []
    for op in forward.ops:
        parameter = of_experts.get(op.ins[1].name) if len(op.ins) > 1 else None
        if op not in adapted and parameter is None:
            ops.append(op)
            continue
        with b.record("forward", op.block) as emitted:
            if parameter is not None:
                stacks.add_branch(op, parameter)
            else:
                if op not in packed:
                    packed |= matrices.pack({each: p for each, p in adapted.items() if each.block == op.block})
                _add_branches(b, op, adapted[op], packed[op], scalars, options)
        ops += emitted
    return replace(forward, ops=tuple(ops))


def _add_branches(
    b: Builder, op: Op, projections: Sequence[_Projection], packed: _Packed, scalars: Scalars, options: LoraOptions
) -> None:
    """Emit the linear op and its branches.

    The thin values of the branches (x A^T, and x where elements are dropped) are labelled as the adapter's: it is their
    only reader, and the wide output is recomputed from them. Everything else has the label of the output.
    """
    x, y = op.ins[0], op.outs[0]
    base = b.apply("linear", *op.ins, label=y.label, **op.attrs)
    if options.lora_dropout:
        seen = [_dropped(b, x, p.module, scalars, options.lora_dropout) for p in projections]
        thin = [b.apply("linear", s, a, label=ADAPTER_LABEL) for s, a in zip(seen, packed.down, strict=True)]
        inner = b.apply("lora_join", *thin, label=ADAPTER_LABEL) if len(thin) > 1 else thin[0]
    else:
        inner = b.apply("linear", x, *packed.down, label=ADAPTER_LABEL)
    branches = b.apply("linear", inner, packed.up, label=y.label, dtype=y.dtype)
    b.emit("add", base, branches, outs=[y])


def _dropped(b: Builder, x: Value, module: str, scalars: Scalars, rate: float) -> Value:
    """Return the elements of `x` that a branch reads. They differ by projection and by micro-step."""
    stream = crc32(f"{module}.lora_dropout".encode())
    return b.apply("lora_dropout", x, scalars.micro_step, scalars.seed, label=ADAPTER_LABEL, rate=rate, stream=stream)


_Pair = tuple[Value, Value, float]
"""A, B and the factor of B A x."""


@dataclass(frozen=True)
class _Matrices:
    """Declares A and B of projections, each pair once, and emits what packs them."""

    b: Builder
    precision: Precision
    options: LoraOptions
    made: dict[str, tuple[_Pair, ...]] = field(default_factory=dict)

    def pack(self, adapted: Mapping[Op, Sequence[_Projection]]) -> dict[Op, _Packed]:
        """Emit one `lora_pack` for all branches of these ops."""
        packing = Packing()
        indices: dict[Op, tuple[list[int], int]] = {}
        for op, projections in adapted.items():
            width, columns = op.ins[0].shape[1], op.outs[0].shape[1]
            pairs = [(p, *pair) for p in projections for pair in self._pairs(p, width)]
            ranks = [a.shape[0] for _, a, _, _ in pairs]
            places = list(zip(pairs, firsts(ranks), strict=True))
            if self.options.lora_dropout:
                down = [packing.add(a.shape, [(a, 0, 0, 1.0)]) for _, a, _, _ in pairs]
            else:
                down = [packing.add((sum(ranks), width), [(a, first, 0, 1.0) for (_, a, _, _), first in places])]
            up = [(b, p.column, first, factor) for (p, _, b, factor), first in places]
            indices[op] = down, packing.add((columns, sum(ranks)), up)
        made = packing.emit(self.b, ADAPTER_LABEL, self._dtype())
        return {op: _Packed(tuple(made[i] for i in down), made[up]) for op, (down, up) in indices.items()}

    def _dtype(self) -> str:
        """The dtype of products, so that no op casts; that of the model where products have a narrower form."""
        return self.precision.matmul if DTYPES[self.precision.matmul].has_grad else self.precision.model

    def _pairs(self, p: _Projection, width: int) -> tuple[_Pair, ...]:
        """A uniform in +-1 / sqrt(K), which is Kaiming's with a = sqrt(5). With PiSSA also the frozen first ones."""
        if p.module not in self.made:
            rank, scale = self.options.rank_of(p.module), self.options.scale_of(p.module)
            zeros, drawn = Init(kind="zeros"), Init(kind="uniform", bound=1 / sqrt(width))

            def pair(down: str, up: str, init: Init, factor: float) -> _Pair:
                a = self.b.param(p.module + down, (rank, width), init, self.precision.adapter)
                b = self.b.param(p.module + up, (p.width, rank), zeros, self.precision.adapter)
                return a, b, factor

            pairs = [pair(DOWN, UP, drawn, scale)]
            if self.options.lora_init == "pissa":
                check_rank(p.module, rank, (p.width, width))
                pairs.append(pair(FIRST_DOWN, FIRST_UP, zeros, -scale))
            self.made[p.module] = tuple(pairs)
        return self.made[p.module]


def _chosen(
    forward: Program, weights: Sequence[WeightMap], targets: Sequence[str]
) -> Mapping[str, tuple[_Projection, ...]]:
    """Param of a linear op -> those of its projections that `targets` name. all-linear names no router."""
    linear = {op.ins[1].name for op in forward.ops if op.kind == "linear"}
    found = {m.param: _projections(m) for m in weights if m.param in linear}
    modules = [p.module for projections in found.values() for p in projections]
    for target in targets:
        if target.lower() not in ALL_LINEAR and not any(is_target(module, target) for module in modules):
            names = dict.fromkeys(module.rpartition(".")[2] for module in modules)
            raise ConfigError(
                f"lora_target_modules: {target!r} is no linear projection of this model's blocks. "
                f"It has {', '.join(names)}. Name some of them, or all-linear."
                + (" Experts are named by lora_target_parameters." if experts.are_in(weights) else "")
            )
    if any(target.lower() in ALL_LINEAR for target in targets):
        routers = {m.param for m in weights if m.kind == "router"}
        return {param: projections for param, projections in found.items() if param not in routers}
    return {
        param: tuple(p for p in projections if any(is_target(p.module, target) for target in targets))
        for param, projections in found.items()
    }


def _projections(m: WeightMap) -> tuple[_Projection, ...]:
    projections, column = [], 0
    for tensor in m.tensors:
        projections.append(_Projection(tensor.name.removesuffix(_WEIGHT), column, tensor.rows[0]))
        column += tensor.rows[0]
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
    """The adapter's own matrices but the first ones of PiSSA, and the modules that are trained in full."""
    if stored is None:
        return not param.name.endswith((FIRST_DOWN, FIRST_UP))
    return stored.new or saved_modules.is_trained(stored, options.lora_modules_to_save)


def rate(param: Value, stored: WeightMap | None, options: LoraOptions) -> float:
    """Return the ratio of LoRA+ for B and for vectors, the groups of PEFT's `create_loraplus_optimizer`."""
    is_up = stored is None and param.name.endswith((UP, experts.UP))
    return (options.loraplus_lr_ratio or 1.0) if is_up or len(param.shape) == 1 else 1.0


def fuse(program: Program, options: LoraOptions) -> Program:
    """Compute products of experts with their branches, and the gradients of a block by one op.

    With dropout that would keep what every branch sees in memory, so each product has its own, and only in long rows.
    """
    return fuse_gradients(experts.fuse_branches(program), apart=bool(options.lora_dropout))


def with_head(adapter: AdapterDef[LoraOptions], model: ModelDef) -> AdapterDef[LoraOptions]:
    """The adapter of a model with the head of a loss, which its files hold as one of PEFT's `modules_to_save`, or with
    towers."""
    task = PEFT_TASKS.get(model.loaded_by)
    by = {"loaded_by": model.loaded_by, **model.loading}
    return replace(adapter, save=partial(save, task=task), commands=partial(commands, **by))


def of_model(adapter: AdapterDef[LoraOptions], weights: Sequence[WeightMap]) -> AdapterDef[LoraOptions]:
    """The adapter of a model, in whose files adapters of experts have the names and the order of its parameters."""
    known = {"parameters": experts.parameters_of(weights)}
    own: tuple[Any, ...] = (adapter.save, adapter.load, adapter.merge)  # of `files.py`, perhaps with a task
    save, load, merge = (partial(function, **known) for function in own)
    return replace(adapter, save=save, load=load, merge=merge)


LORA = AdapterDef(
    name="lora",
    summary="LoRA: low-rank matrices of the linear projections, in PEFT's format",
    options=LoraOptions,
    config_file=PEFT_CONFIG,
    apply=apply,
    start=start,
    fuse=fuse,
    trainable=trainable,
    rate=rate,
    save=save,
    load=load,
    merge=partial(merge, parameters=None),
    library="peft",
    check=check_in_peft,
    with_head=with_head,
    of_model=of_model,
    matches=matches,
    commands=commands,
    trains_tokens=f"lora_modules_to_save: [{saved_modules.EMBEDDING}, {saved_modules.HEAD}]",
)

"""LoRA of experts: a pair of A and B for each of the matrices that one param holds one above another.

    y = W_e x + s B_e (A_e x)    for the rows x of expert e

A [E r, K] and B [E N, r] are stacked as the weights [E N, K] are, so that the op that multiplies these
(`OpDef.group_ends`) multiplies A and B too: whatever has rows of groups computes them, forward and backward, and no B A
is ever held.

PEFT has such adapters of parameters [E, N, K] (`target_parameters`). transformers holds all experts of a layer in them,
in a module `experts` with two such parameters; checkpoints hold each projection of each expert.

    in a run                  ...mlp.experts.down_proj.lora_A_experts  [E r, K]    ...lora_B_experts  [E N, r]
    in PEFT's files           ...mlp.experts.lora_A.weight             [E r, K]    ...lora_B.weight   [N, r E]

PEFT wraps a module once for each of its parameters that has an adapter. So the last parameter has the names above, and
the one before it `...mlp.experts.base_layer.lora_A.weight`. The expert is the last index of its B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import TYPE_CHECKING, Any

from surogate_core.api import ADAPTER_LABEL, Builder, ConfigError, Init, Op, Program, Value, WeightMap

from .matching import is_target
from .options import LoraOptions
from .packing import Packing

if TYPE_CHECKING:
    from torch import Tensor

DOWN, UP = ".lora_A_experts", ".lora_B_experts"
"""Ends of the names of A and B in a run."""

_PRODUCTS = ("grouped_linear", "grouped_linear_dgrad")
"""Products of experts. Each has a kind `..._add`, which adds to a base, and `..._pair`, the sum of two."""

_UNBIASED = 3
"""Inputs of a product that adds no bias. No op adds a branch to one that does."""

_QUANTIZED = "fp8_grouped_linear"
"""Either product in FP8, the second one with `beside`. Further inputs are the operands of a product that it adds."""

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json that may hold the number of experts."""

_MODULE = ".experts"
_WRAPPED = ".base_layer"
_PARAMETERS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The parameters of a module `experts` in their order, and the projections whose rows each holds of an expert."""


# ------------------------------------------------------------------------------------------------------------ in a run


def chosen(b: Builder, forward: Program, weights: Sequence[WeightMap], targets: Sequence[str]) -> dict[str, str]:
    """Return {param: the parameter of transformers that it is} of those that `targets` name.

    Raises ConfigError for a target that the model does not have, naming what it has.
    """
    counts = {op.ins[1].name: op.ins[at].size for op in forward.ops if (at := b.ops[op.kind].group_ends) is not None}
    known = {m.param: _parameter(m, counts[m.param]) for m in weights if m.param in counts}
    for target in targets:
        if not any(name and is_target(name, target) for name in known.values()):
            names = dict.fromkeys(".".join(name.rsplit(".", 3)[-3:]) for name in known.values() if name)
            raise ConfigError(
                f"lora_target_parameters: {target!r} is no parameter of this model's experts. "
                + (f"It has {', '.join(names)}." if names else "It has none: remove the key.")
            )
    return {param: name for param, name in known.items() if any(is_target(name, target) for target in targets)}


def _parameter(m: WeightMap, experts: int) -> str:
    """Return the name in transformers of the parameter that holds the tensors of a param, or ""."""
    found = [tensor.name.removesuffix(".weight").rsplit(".", 2) for tensor in m.tensors]
    module = found[0][0]
    for parameter, projections in _PARAMETERS.items():
        if found == [[module, str(e), p] for e in range(experts) for p in projections] and module.endswith(_MODULE):
            return f"{module}.{parameter}"
    return ""


def are_in(weights: Sequence[WeightMap]) -> bool:
    """Return whether a model has experts."""
    return any(f"{_MODULE}." in m.tensors[0].name for m in weights)


@dataclass(frozen=True)
class Stacks:
    """Declares A and B of experts, each pair once, and emits their branches."""

    b: Builder
    dtype: str
    options: LoraOptions
    made: dict[str, tuple[Value, Value]] = field(default_factory=dict)

    def add_branch(self, op: Op, parameter: str) -> None:
        """Emit the product of `op` and the branch.

        The thin value is scaled, because it is smaller than B. A and B in the dtype of x are not thin: they have the
        label of the output, with which they are made again.
        """
        b, (x, w), y, at = self.b, op.ins[:2], op.outs[0], self.b.ops[op.kind].group_ends
        assert at is not None
        groups, added = op.ins[2 : at + 1], op.ins[at + 1 :]  # a bias, which the branch does not add again
        if parameter not in self.made:
            self.made[parameter] = self._pair(op, parameter)
        down, up = (
            v if v.dtype == x.dtype else b.apply("cast", v, label=y.label, dtype=x.dtype) for v in self.made[parameter]
        )
        base = b.apply(op.kind, x, w, *groups, *added, label=y.label, **op.attrs)
        inner = b.apply(op.kind, x, down, *groups, label=ADAPTER_LABEL, **op.attrs)
        packing = Packing()
        packing.add(inner.shape, [(inner, 0, 0, self.options.scale_of(parameter))])
        (scaled,) = packing.emit(b, ADAPTER_LABEL, inner.dtype)
        b.emit("add", base, b.apply(op.kind, scaled, up, *groups, label=y.label, **op.attrs), outs=[y])

    def _pair(self, op: Op, parameter: str) -> tuple[Value, Value]:
        """Declare A, drawn as PEFT draws it, and B, zero."""
        at, (rows, width), rank = self.b.ops[op.kind].group_ends, op.ins[1].shape, self.options.rank_of(parameter)
        assert at is not None
        drawn, zeros, experts = Init(kind="uniform", bound=1 / sqrt(width)), Init(kind="zeros"), op.ins[at].size
        down = self.b.param(parameter + DOWN, (experts * rank, width), drawn, self.dtype, matrices=experts)
        return down, self.b.param(parameter + UP, (rows, rank), zeros, self.dtype, matrices=experts)


def fuse_branches(program: Program) -> Program:
    """Compute a product of experts and the branch that adds to it by one op, where nothing else reads the product.

    After the recipe, which may have quantized the product.
    """
    products = {op.outs[0]: op for op in program.ops if op.kind in (*_PRODUCTS, _QUANTIZED)}
    reads = Counter(v for op in program.ops for v in op.ins) + Counter(program.outputs)
    fused: dict[Op, Op] = {}
    gone: set[Op] = set()
    for op in program.ops:
        product = products.get(op.ins[-1]) if op.kind.endswith("_add") else None
        if product is None or reads[op.ins[-1]] > 1:
            continue
        is_quantized = product.kind == _QUANTIZED
        if not is_quantized and len(product.ins) > _UNBIASED:
            continue
        kind = _PRODUCTS[product.attrs["beside"]] if is_quantized else product.kind
        if (op.kind, op.phase, op.block) == (f"{kind}_add", product.phase, product.block):
            pair = product.kind if is_quantized else f"{kind}_pair"
            fused[op] = op.changed(kind=pair, ins=(*product.ins, *op.ins[:2]), attrs=product.attrs)
            gone.add(product)
    return replace(program, ops=tuple(fused.get(op, op) for op in program.ops if op not in gone))


# ------------------------------------------------------------------------------------------------------------ in files


def as_saved(tensors: Mapping[str, Tensor], options: LoraOptions) -> dict[str, Tensor]:
    """Return the tensors of an adapter with those of experts as PEFT names and orders them."""
    held = {name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)}
    found = {}
    for name, tensor in tensors.items():
        if name.endswith((DOWN, UP)):
            parameter, _, kind = name.removesuffix("_experts").rpartition(".")
            module, _, last = parameter.rpartition(".")
            order = list(_PARAMETERS)
            outside = [p for p in order[order.index(last) + 1 :] if f"{module}.{p}" in held]
            name = f"{module}{_WRAPPED * len(outside)}.{kind}"
            if kind == "lora_B":
                rank = options.rank_of(parameter)
                experts = tensors[parameter + DOWN].shape[0] // rank
                tensor = tensor.view(experts, -1, rank).permute(1, 2, 0).reshape(-1, rank * experts)
        found[name] = tensor
    return found


def are_parameters(targets: Any) -> bool:
    """Return whether PEFT's `target_parameters` can be parameters of experts, or weights of linear modules."""
    names = [] if targets is None else targets
    return isinstance(names, list) and all(str(name).rpartition(".")[2] in (*_PARAMETERS, "weight") for name in names)


def parameter_of(holder: str, targets: Sequence[str]) -> str:
    """Return the parameter whose A and B PEFT's files name after `holder`; "" if that is a linear module."""
    module = holder
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    names = [f"{module}.{p}" for p in _PARAMETERS] if module.endswith(_MODULE) else []
    wrapping = [name for name in reversed(names) if any(is_target(name, target) for target in targets)]
    depth = (len(holder) - len(module)) // len(_WRAPPED)
    return wrapping[depth] if depth < len(wrapping) else ""


def in_run(place: str, kind: str, saved: Tensor, rank: int) -> tuple[str, Tensor]:
    """Return the end of the name and the tensor in a run of what PEFT's files hold as `kind`, .lora_A or .lora_B.

    Raises ConfigError, which begins with `place`, for a tensor of another rank.
    """
    experts, rest = divmod(saved.shape[0 if kind == ".lora_A" else 1], rank)
    if rest or not experts:
        raise ConfigError(f"{place} is {list(saved.shape)}, which is no stack of matrices of rank {rank}.")
    if kind == ".lora_A":
        return DOWN, saved
    return UP, saved.reshape(-1, rank, experts).permute(2, 0, 1).reshape(-1, rank)


def of_projections(parameter: str, down: Tensor, up: Tensor, rank: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (tensor of the checkpoint, its A, its B) of each expert and projection of a parameter."""
    module, _, last = parameter.rpartition(".")
    projections = _PARAMETERS[last]
    experts = down.shape[0] // rank
    for e, (a, b) in enumerate(zip(down.chunk(experts), up.chunk(experts), strict=True)):
        for projection, rows in zip(projections, b.chunk(len(projections)), strict=True):
            yield f"{module}.{e}.{projection}.weight", a, rows

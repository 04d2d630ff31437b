"""LoRA of experts: a pair of A and B for each of the matrices that one param holds one above another.

    y = W_e x + s B_e (A_e x)    for the rows x of expert e

A [E r, K] and B [E N, r] are stacked as the weights [E N, K] are, so that the op that multiplies these
(`OpDef.group_ends`) multiplies A and B too: whatever has rows of groups computes them, forward and backward, and no B A
is ever held.

PEFT has such adapters of parameters [E, N, K] or [E, K, N] (`target_parameters`), in which transformers holds all the
experts of a layer. `WeightMap.parameter` says which one a param is. Checkpoints hold it as it is, or each projection of
each expert.

    in a run                  ...mlp.experts.down_proj.lora_A_experts  [E r, K]    ...lora_B_experts  [E N, r]
    in PEFT's files           ...mlp.experts.lora_A.weight             [E r, K]    ...lora_B.weight   [N, r E]

PEFT wraps a module once for each of its parameters that has an adapter. So the last parameter has the names above, and
the one before it `...mlp.experts.base_layer.lora_A.weight`. The expert is the last index of its B. Whether the class
holds [E, N, K] or [E, K, N] makes no difference to A and B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import TYPE_CHECKING

from surogate_core.api import (
    ADAPTER_LABEL,
    Builder,
    ConfigError,
    HFTensor,
    Init,
    Op,
    Program,
    ProgramError,
    Value,
    WeightMap,
)

from .matching import is_target
from .options import LoraOptions

if TYPE_CHECKING:
    from torch import Tensor

DOWN, UP = ".lora_A_experts", ".lora_B_experts"
"""Ends of the names of A and B in a run."""

_PRODUCTS = ("grouped_linear", "grouped_linear_dgrad")
"""Products of experts. Each has a kind `..._add`, which adds to a base, and `..._pair`, the sum of two."""

_QUANTIZED = "fp8_grouped_linear"
"""Either product in FP8, the second one with `beside`. Further inputs are the operands of a product that it adds."""

_UNBIASED = {False: 3, True: 5}
"""Inputs of a product that adds no bias, in FP8 or not. No op adds a branch to one that does."""

_WRAPPED = ".base_layer"

Parameters = Mapping[str, WeightMap]
"""The parameters of transformers that hold a model's experts, with their weight maps, in the order of the class."""


def parameters_of(weights: Sequence[WeightMap]) -> Parameters:
    return {m.parameter: m for m in weights if m.parameter}


# ------------------------------------------------------------------------------------------------------------ in a run


def chosen(b: Builder, forward: Program, weights: Sequence[WeightMap], targets: Sequence[str]) -> dict[str, str]:
    """Return {param: the parameter of transformers that it is} of those that `targets` name.

    Raises ConfigError for a target that the model does not have, naming what it has.
    """
    multiplied = {op.ins[1].name for op in forward.ops if b.ops[op.kind].group_ends is not None}
    known = {m.param: m.parameter for m in weights if m.parameter and m.param in multiplied}
    for target in targets:
        if not any(is_target(name, target) for name in known.values()):
            names = dict.fromkeys(".".join(name.rsplit(".", 3)[-3:]) for name in known.values())
            has = f"It has {', '.join(names)}." if names else "It has none: remove the key."
            if multiplied and not names:
                has = "Its package does not name them (WeightMap.parameter), so they have no adapters: remove the key."
            raise ConfigError(f"lora_target_parameters: {target!r} is no parameter of this model's experts. {has}")
    return {param: name for param, name in known.items() if any(is_target(name, target) for target in targets)}


def are_in(weights: Sequence[WeightMap]) -> bool:
    """Return whether a model has experts that adapters can adapt."""
    return any(m.parameter for m in weights)


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
        scaled = b.apply("lora_scale", inner, label=ADAPTER_LABEL, scale=self.options.scale_of(parameter))
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
        if len(product.ins) > _UNBIASED[is_quantized]:
            continue
        kind = _PRODUCTS[product.attrs["beside"]] if is_quantized else product.kind
        if (op.kind, op.phase, op.block) == (f"{kind}_add", product.phase, product.block):
            pair = product.kind if is_quantized else f"{kind}_pair"
            fused[op] = op.changed(kind=pair, ins=(*product.ins, *op.ins[:2]), attrs=product.attrs)
            gone.add(product)
    return replace(program, ops=tuple(fused.get(op, op) for op in program.ops if op not in gone))


# ------------------------------------------------------------------------------------------------------------ in files


def as_saved(tensors: Mapping[str, Tensor], options: LoraOptions, parameters: Parameters) -> dict[str, Tensor]:
    """Return the tensors of an adapter with those of experts as PEFT names and orders them."""
    held = {name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)}
    found = {}
    for name, tensor in tensors.items():
        if name.endswith((DOWN, UP)):
            parameter, _, kind = name.removesuffix("_experts").rpartition(".")
            module = parameter.rpartition(".")[0]
            order = _of_module(module, parameters)
            outside = [p for p in order[order.index(parameter) + 1 :] if p in held]
            name = f"{module}{_WRAPPED * len(outside)}.{kind}"
            if kind == "lora_B":
                rank = options.rank_of(parameter)
                experts = tensors[parameter + DOWN].shape[0] // rank
                stacked = tensor.view(experts, -1, rank)
                moved = _moved_rows(parameters[parameter], stacked.shape[1])
                stacked = stacked if moved is None else stacked[:, moved]
                tensor = stacked.permute(1, 2, 0).reshape(-1, rank * experts)
        found[name] = tensor
    return found


def _of_module(module: str, parameters: Parameters) -> list[str]:
    return [name for name in parameters if name.rpartition(".")[0] == module]


def _moved_rows(m: WeightMap, rows: int) -> Tensor | None:
    """Return the rows of an expert in the order of the parameter; None: they are in that of the param.

    Raises ProgramError for a layout that does not move whole rows: PEFT's A and B are of the parameter.
    """
    import torch

    tensor = m.tensors[0]
    if tensor.layout is None:
        return None
    if len(m.tensors) > 1:
        raise ProgramError(f"{m.parameter} is {len(m.tensors)} tensors with layouts: adapters of experts know one")
    width = tensor.rows[1]
    stored = tensor.save(torch.arange(rows * width).view(rows, width))[0]
    for matrix in (stored, stored.T):
        if tuple(matrix.shape) == (rows, width):
            order = matrix[:, 0] // width
            if torch.equal(matrix, order[:, None] * width + torch.arange(width)):
                return None if torch.equal(order, torch.arange(rows)) else order
    raise ProgramError(f"{tensor.name} is {tensor.layout}, which moves more than whole rows: it has no adapter in PEFT")


def parameter_of(holder: str, targets: Sequence[str], parameters: Parameters) -> str:
    """Return the parameter whose A and B PEFT's files name after `holder`; "" if that is a linear module."""
    module = holder
    while module.endswith(_WRAPPED):
        module = module.removesuffix(_WRAPPED)
    names = reversed(_of_module(module, parameters))
    wrapping = [name for name in names if any(is_target(name, target) for target in targets)]
    depth = (len(holder) - len(module)) // len(_WRAPPED)
    return wrapping[depth] if depth < len(wrapping) else ""


def in_run(place: str, kind: str, saved: Tensor, rank: int, m: WeightMap) -> tuple[str, Tensor]:
    """Return the end of the name and the tensor in a run of what PEFT's files hold as `kind`, .lora_A or .lora_B.

    Raises ConfigError, which begins with `place`, for a tensor of another rank.
    """
    experts, rest = divmod(saved.shape[0 if kind == ".lora_A" else 1], rank)
    if rest or not experts:
        raise ConfigError(f"{place} is {list(saved.shape)}, which is no stack of matrices of rank {rank}.")
    if kind == ".lora_A":
        return DOWN, saved
    stacked = saved.reshape(-1, rank, experts).permute(2, 0, 1)
    moved = _moved_rows(m, stacked.shape[1]) if sum(t.rows[0] for t in m.tensors) == stacked[..., 0].numel() else None
    return UP, (stacked if moved is None else stacked[:, moved.argsort()]).reshape(-1, rank)


Change = Callable[["Tensor"], "Tensor"]


def changes_of(
    place: str, m: WeightMap, down: Tensor, up: Tensor, rank: int, factor: float
) -> Iterator[tuple[str, Change]]:
    """Yield (tensor of the checkpoint, its change by an adapter) for a parameter.

    Raises ConfigError, which begins with `place`, for a base of other experts.
    """
    rows, width, experts = sum(tensor.rows[0] for tensor in m.tensors), m.tensors[0].rows[1], down.shape[0] // rank
    if up.shape[0] != rows or down.shape[1] != width or rows % experts:
        shape = [up.shape[0], down.shape[1]]
        what = f"is of a weight {shape} of {experts} experts; the base's is {[rows, width]}"
        raise ConfigError(f"{place} {what}. Name its own base.")
    each = rows // experts

    def delta(first: int, count: int) -> Tensor:
        """Return the update of rows of the param: of each expert by its own A."""
        import torch

        found, at = [], first
        while at < first + count:
            e = at // each
            stop = min((e + 1) * each, first + count)
            found.append(up[at:stop].float() @ down[e * rank : (e + 1) * rank].float())
            at = stop
        return factor * torch.cat(found)

    row = 0
    for tensor in m.tensors:
        yield tensor.name, _change(place, tensor, row, delta)
        row += tensor.rows[0]


def _change(place: str, tensor: HFTensor, row: int, delta: Callable[[int, int], Tensor]) -> Change:
    def merged(weight: Tensor) -> Tensor:
        if list(weight.shape) != list(tensor.shape):
            shapes = f"is of a weight {list(tensor.shape)}; the base's is {list(weight.shape)}"
            raise ConfigError(f"{place} {shapes}. Name its own base.")
        if tensor.layout is None:
            return (weight.float() + delta(row, tensor.rows[0])).to(weight.dtype)
        result, height = weight.new_empty(weight.shape), tensor.rows[0] // len(weight)
        for i in range(len(weight)):
            result[i : i + 1] = weight[i : i + 1].float() + tensor.save(delta(row + i * height, height))
        return result

    return merged

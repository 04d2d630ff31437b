"""Products of quantized operands: the part of a recipe's lowering that does not depend on the format.

The products with a weight, y = x w^T, dx = dy w and dw = dy^T x (`OpDef.product`), read three kinds of tensors: x, dy
and w. `lower_products` finds them in a program, and calls the recipe's `Quantizer` to emit ops in their places: it
quantizes each x and each dy once, where it is computed, and multiplies. All other products are in bf16, with casts
where a model computes in fp32, such as the gradients of a router's logits. All other ops stay as they are.

    weights = quantized_weights(programs, context, options, 32, "MXFP8 products", "use recipe: bf16")
    micro = lower_products(programs.micro, context.builder, weights, lambda operands: MyQuantizer(...))

Products of groups of rows (`OpDef.group_ends`) are among them if the recipe asks for `groups`, all but their dw: it
sums over the rows of a group, whose number only the device knows. Their bias is a row for each group, [G, N].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import ConfigError
from ..front_end import called
from ..origin import Count
from ..program.op import Op, Program
from ..program.opdef import OpDef, Product
from ..program.value import Value
from .product_dtypes import cast_operands
from .recipes import LowerContext, ParamInfo, Precision, PrecisionRequest, Programs

if TYPE_CHECKING:
    from ..program.builder import Builder


class SkippedBlocks(BaseModel):
    """Options of recipes that leave blocks in bf16. They inherit it, so that they share the keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    skip_quant_first_layers: Count = Field(0, description="First blocks of the model whose products stay in bf16.")
    skip_quant_last_layers: Count = Field(0, description="Last blocks of the model whose products stay in bf16.")

    def skipped(self, blocks: int) -> tuple[int, int]:
        """Return how many blocks of a model of `blocks` stay in bf16: first ones and last ones."""
        return self.skip_quant_first_layers, self.skip_quant_last_layers


def quantized_precision(request: PrecisionRequest, recipe: str, matmul: str, gradient: str) -> Precision:
    """Return the dtypes of a recipe with bf16 activations. Masters default to bf16, gradients of params to fp32.

    Raises ConfigError for another `model_dtype`.
    """
    if request.model_dtype not in (None, "bf16"):
        raise ConfigError(f"model_dtype: {request.model_dtype}: recipe {recipe} needs bf16. Remove the key.")
    return Precision(
        model="bf16",
        matmul=matmul,
        gradient=gradient,
        master=request.master_dtype or "bf16",
        adapter=request.adapter_dtype or "fp32",
        param_grad=request.param_grad_dtype or "fp32",
        optimizer_state=request.optimizer_state_dtype or "fp32",
    )


@dataclass(frozen=True)
class QuantizedWeights:
    """The weights whose products are quantized.

    params        the weights
    grads         {gradient of one of them: the weight}
    by_dgrad      those that backward products read
    forward_only  those whose backward products stay as they are
    """

    params: frozenset[Value]
    grads: Mapping[Value, Value]
    by_dgrad: frozenset[Value]
    forward_only: frozenset[Value] = frozenset()

    def is_trained(self, weight: Value) -> bool:
        return weight in self.grads.values()


@dataclass(eq=False)
class Operand:
    """A tensor that quantized products read.

    which     "x", the input of forward products, or "dy", the gradient of their result
    weight    of the first such product in the program, which names the tensor: no other tensor has the same name
    by_rows   y or dx reads it, which sum over its columns
    by_wgrad  dw reads it, which sums over its rows
    is_wide   something besides these products reads it
    """

    value: Value
    which: Literal["x", "dy"]
    weight: Value
    by_rows: bool = False
    by_wgrad: bool = False
    is_wide: bool = False

    @property
    def name(self) -> str:
        return f"{self.weight.name}.{self.which}"


class Quantizer(ABC):
    """Emits the ops of quantized products, for one program, whose ops it is given in their order."""

    @abstractmethod
    def quantize(self, operand: Operand) -> Collection[Op]:
        """Quantize a tensor that exists. Return ops of the program whose results this computes too, if any."""

    def quantize_result(self, op: Op, operand: Operand) -> bool:
        """Emit a form of `op`, which is no product, that quantizes its first output. Return whether there is one."""
        return False

    @abstractmethod
    def multiply(self, op: Op, left: Operand, weight: Value, *, base: Value | None, bias: Value | None) -> None:
        """Emit y = x w^T if `left` is x, dx = dy w if it is dy, plus `base` or `bias`, with the outputs of `op`."""

    @abstractmethod
    def wgrad(self, op: Op, dy: Operand, x: Operand) -> None:
        """Emit dw = dy^T x, with the outputs of `op`, to which it adds where `op.accumulate` says so."""


def lower_products(
    program: Program,
    builder: Builder,
    weights: QuantizedWeights,
    quantizer: Callable[[Mapping[Value, Operand]], Quantizer],
) -> Program:
    """Return `program` with the products of `weights` as `quantizer`, called with what they read, emits them."""
    operands, ops = product_operands(program, builder, weights), []
    lowering = _Lowering(builder, weights, quantizer(operands), operands)
    for op in program.ops:
        with builder.record(op.phase, op.block) as emitted:
            lowering.lower(op)
        ops += emitted
    return cast_operands(replace(program, ops=tuple(ops)), builder, forward="bf16", backward="bf16")


def _weight(op: Op, definition: OpDef, weights: QuantizedWeights) -> Value | None:
    """Return the weight of a product that is quantized; None for any other op."""
    product = definition.product
    if product is None:
        return None
    if product.of == "wgrad":
        return weights.grads.get(op.outs[0]) if definition.group_ends is None else None
    plain = weights.forward_only if product.of == "dgrad" else ()
    return op.ins[1] if op.ins[1] in weights.params and op.ins[1] not in plain else None


def _added(op: Op, product: Product, definition: OpDef) -> Value | None:
    """Return what an op adds to the product of its first two inputs."""
    at = 2 if definition.group_ends is None else definition.group_ends + 1
    return op.ins[at] if product.adds and len(op.ins) > at else None


class _Lowering:
    def __init__(
        self, builder: Builder, weights: QuantizedWeights, quantizer: Quantizer, operands: Mapping[Value, Operand]
    ) -> None:
        self._b, self._weights, self._quantizer, self._operands = builder, weights, quantizer, operands
        self._quantized: set[Operand] = set()
        self._computed: set[Op] = set()

    def lower(self, op: Op) -> None:
        product = self._b.ops[op.kind].product
        weight = _weight(op, self._b.ops[op.kind], self._weights)
        if product is not None and weight is not None:
            self._multiply(op, product, weight)
        elif op in self._computed or self._quantizes_result(op):
            return
        else:
            self._b.append(op)
        for value in op.outs:
            if value in self._operands:
                self._quantized_operand(value)

    def _quantizes_result(self, op: Op) -> bool:
        operand = self._operands.get(op.outs[0]) if op.outs else None
        if operand is None or not self._quantizer.quantize_result(op, operand):
            return False
        self._quantized.add(operand)
        return True

    def _quantized_operand(self, value: Value) -> Operand:
        """Return an operand, quantized: here, if no op of the program computes it."""
        operand = self._operands[value]
        if operand not in self._quantized:
            self._quantized.add(operand)
            self._computed.update(self._quantizer.quantize(operand))
        return operand

    def _multiply(self, op: Op, product: Product, weight: Value) -> None:
        left = self._quantized_operand(op.ins[0])
        if product.of == "wgrad":
            self._quantizer.wgrad(op, left, self._quantized_operand(op.ins[1]))
            return
        added = _added(op, product, self._b.ops[op.kind])
        if product.second:
            added = self._b.apply(product.second, *op.ins[2:], label=op.outs[0].label, dtype=op.outs[0].dtype)
        base, bias = (None, added) if product.adds == "bias" else (added, None)
        self._quantizer.multiply(op, left, weight, base=base, bias=bias)


def product_operands(program: Program, builder: Builder, weights: QuantizedWeights) -> dict[Value, Operand]:
    """Return the tensors that quantized products of a program read, in the order in which they do."""
    found: dict[Value, Operand] = {}
    reads: set[tuple[Op, Value]] = set()
    for op in program.ops:
        product = builder.ops[op.kind].product
        weight = _weight(op, builder.ops[op.kind], weights)
        if product is None or weight is None:
            continue
        reads.add((op, op.ins[0]))
        operand = found.setdefault(op.ins[0], Operand(op.ins[0], "x" if product.of == "forward" else "dy", weight))
        if product.of == "wgrad":
            reads.add((op, op.ins[1]))
            operand.by_wgrad = found[op.ins[1]].by_wgrad = True
        else:
            operand.by_rows = True
    readers = program.readers()
    for value, operand in found.items():
        others = any((op, value) not in reads for op in readers.get(value, ()))
        operand.is_wide = others or value in program.outputs or value.role != "act"
    return found


def quantized_weights(
    programs: Programs,
    context: LowerContext,
    options: SkippedBlocks,
    multiple: int,
    what: str,
    otherwise: str,
    *,
    groups: bool = False,
) -> QuantizedWeights:
    """Return the matrices of all blocks that `options` do not skip, those of groups of rows only with `groups`.

    Matrices whose rows or columns are no multiple of `multiple` are left out. Raises ConfigError if no matrix is left,
    or if the tokens of a product, "NVFP4 products" for instance, are no such multiple. `otherwise` is the remedy where
    another batch does not help.
    """
    ops = context.builder.ops
    multiplies = [op for op in programs.evaluate.ops if ops[op.kind].product is not None]
    multiplies = [op for op in multiplies if groups or ops[op.kind].group_ends is None]
    read = {op.ins[1] for op in multiplies}
    infos = [info for info in context.params.values() if is_block_matrix(info) and info.param in read]
    if not infos:
        raise ConfigError(f"recipe: this model has no matrix in blocks that {what} may read. For it {otherwise}.")
    blocks = 1 + max((op.block for op in programs.evaluate.ops), default=-1)
    first, last = options.skipped(blocks)
    chosen = {info.param: info for info in infos if first <= info.param.block < blocks - last}
    if not chosen:
        raise ConfigError(
            f"skip_quant_first_layers: {first} and skip_quant_last_layers: {last} leave none of the {blocks} blocks to "
            f"quantize. Lower them, or {otherwise}."
        )
    misfits: dict[Value, str] = {}
    for op in (op for op in multiplies if op.ins[1] in chosen):
        if op.ins[0].shape[0] % multiple:
            remedy = f"Change {called('batch_size')} or {called('seq_len')}"
            size = f"tokens in a micro-step, got {op.ins[0].shape[0]}"
            raise ConfigError(f"recipe: {what} need a multiple of {multiple} {size}. {remedy}.")
        if misfit := _misfit(op, ops[op.kind], multiple):
            misfits.setdefault(op.ins[1], misfit)
    if misfits.keys() == chosen.keys():
        first_of_all = next(iter(misfits.values()))
        raise ConfigError(f"recipe: {what} need a multiple of {multiple} {first_of_all}. For this model {otherwise}.")
    chosen = {param: info for param, info in chosen.items() if param not in misfits}
    products = ((op, ops[op.kind].product) for op in programs.micro.ops)
    return QuantizedWeights(
        params=frozenset(chosen),
        grads={info.grad: param for param, info in chosen.items() if info.grad is not None},
        by_dgrad=frozenset(op.ins[1] for op, product in products if product is not None and product.of == "dgrad"),
    )


def is_block_matrix(info: ParamInfo) -> bool:
    """Return whether a param is a matrix of a block of the model, not of an adapter, and not a precise one."""
    return info.of_model and info.param.block >= 0 and info.kind == "matrix" and not info.precise


def _misfit(op: Op, definition: OpDef, multiple: int) -> str:
    """Return the dimension of a product's weight, or of each group's, that is no multiple of `multiple`; "": none."""
    weight, at = op.ins[1], definition.group_ends
    rows = weight.shape[0] // (1 if at is None else op.ins[at].size)
    sizes = ((rows, "rows"), (weight.shape[1], "columns"))
    return next((f"{unit} in {weight.name}, got {size}" for size, unit in sizes if size % multiple), "")

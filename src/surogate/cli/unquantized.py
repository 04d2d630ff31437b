"""The products of a plan that its recipe leaves in the model's dtype, where it quantizes others."""

from __future__ import annotations

from collections.abc import Mapping

from surogate_core.assembly.assembly import Assembly
from surogate_core.planning.plan import Plan
from surogate_core.program.op import Op
from surogate_core.program.opdef import OpDef
from surogate_core.program.value import WEIGHT_LABEL, Value

_WEIGHT = ".weight"
_NO_MATRIX = ("router", "vector")
"""Kinds of params with two dimensions that no recipe quantizes: routers, and biases of experts."""


def unquantized_blocks(plan: Plan) -> list[int]:
    """Return the blocks whose products the recipe leaves as they are, where it quantizes those of other blocks."""
    wide, matrices = _wide(plan), _quantizable(plan.assembly)
    blocks = {block for block in matrices.values() if block >= 0}
    plain = {block for block in blocks if {name for name, at in matrices.items() if at == block} <= wide.keys()}
    return sorted(plain) if len(plain) < len(blocks) else []


def unquantized_matrices(plan: Plan) -> list[str]:
    """Return what multiplies in the model's dtype in the other blocks: the kinds of ops of which the recipe has no
    quantized form, then the modules of matrices that no recipe quantizes or whose sizes do not fit this one."""
    if plan.inputs.precision.matmul == plan.inputs.precision.model:
        return []
    plain, kinds, modules = unquantized_blocks(plan), set[str](), dict[str, None]()
    maps = {m.param: m for m in plan.assembly.weights if m.kind not in _NO_MATRIX}
    for name, op in _wide(plan).items():
        if op.block < 0 or op.block in plain or name not in maps:
            continue
        if _has_form(plan.inputs.ops[op.kind]):
            modules |= dict.fromkeys(tensor.name.removesuffix(_WEIGHT).split(".")[-1] for tensor in maps[name].tensors)
        else:
            kinds.add(op.kind)
    return [*sorted(kinds), *modules]


def _quantizable(assembly: Assembly) -> Mapping[str, int]:
    """Return {matrix that a recipe may quantize: its block}."""
    blocks = {v.name: v.block for v in assembly.declared if v.role == "param"}
    maps = (m for m in assembly.weights if m.kind not in _NO_MATRIX and not m.precise)
    return {m.param: blocks[m.param] for m in maps if len(m.tensors[0].rows) > 1}


def _wide(plan: Plan) -> Mapping[str, Op]:
    """Return {matrix of a block: the op that multiplies by it in the model's dtype}."""
    assembly, dtype = plan.assembly, plan.inputs.precision.model
    every = [op for op in assembly.only("evaluate").ops if op.phase != "reference"]
    ops = [op for op in every if op.block >= 0 and op.lane == "compute"]
    made = {value: op for op in every for value in op.outs}
    of_state = {state.name: param for param, states in assembly.stored.items() for state in states}
    matrices = {m.param for m in assembly.weights if len(m.tensors[0].rows) > 1}

    def matrix(value: Value) -> str | None:
        """Return the matrix that a value is, or is gathered, moved or dequantized from."""
        name = of_state.get(value.name, value.name)
        if name in matrices:
            return name
        op = made.get(value)
        if op is None or (op.lane == "compute" and value.label != WEIGHT_LABEL):
            return None
        moves = op.lane != "compute" and len(op.ins) == len(op.outs)  # several at once, each to its own output
        made_of = [op.ins[op.outs.index(value)]] if moves else op.ins
        return next(filter(None, map(matrix, made_of)), None)

    reading = ((op, value) for op in ops for value in op.ins[1:] if value.dtype == dtype)
    return {name: op for op, value in reading if (name := matrix(value))}


def _has_form(definition: OpDef) -> bool:
    """Return whether it is for the matrix, and not for the kind of op, that a recipe leaves it as it is.

    Every recipe of narrow products has a form of a product that is not of groups.
    """
    return definition.product is not None and definition.group_ends is None

"""The kind of each param and the logical matrices that it consists of, for optimizers."""

from __future__ import annotations

from collections.abc import Mapping

from ..api import Matrix, WeightMap
from ..program.op import Program
from ..program.opdef import OpDef, ParamKind
from ..program.value import Value


def special_kinds(program: Program, ops: Mapping[str, OpDef]) -> dict[Value, ParamKind]:
    """Return the kinds that ops of `program` declare for the params that they read (`OpDef.param_kinds`).

    If several ops read a param, the first one that declares a kind decides.
    """
    kinds: dict[Value, ParamKind] = {}
    for op in program.ops:
        for i, kind in ops[op.kind].param_kinds.items():
            kinds.setdefault(op.ins[i], kind)
    return kinds


def kind_by_shape(param: Value) -> ParamKind:
    """Return the kind of a param for which no op declares one."""
    return "vector" if len(param.shape) < 2 else "matrix"


def logical_matrices(param: Value, stored: WeightMap | None) -> tuple[Matrix, ...]:
    """Return the matrices of `param`, from its weight map if it is a weight of the model."""
    if len(param.shape) != 2:
        return ()
    if stored is None:
        return (Matrix(param.name, param.shape[0]),)
    return tuple(Matrix(tensor.name, tensor.rows[0]) for tensor in stored.tensors)

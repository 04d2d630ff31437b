"""Shared by the files of the standard ops: the form of a definition, and checks of shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import need
from ..program.op import Op
from ..program.opdef import OpDef, OutSpec, RowWise
from ..program.value import Value

REFERENCE = "surogate_core.reference.ops"
Attrs = Mapping[str, Any]
Ins = Sequence[Value]
Infer = Callable[[Ins, Attrs], list[OutSpec]]


def matrix(value: Value, name: str) -> tuple[int, int]:
    need(len(value.shape) == 2, f"{name} must have two dimensions")
    return value.shape[0], value.shape[1]


def elements(per_element: int) -> Any:
    return lambda op: per_element * max(v.size for v in (*op.ins, *op.outs))


def define(kind: str, infer: Any, *, module: str = REFERENCE, **fields: Any) -> OpDef:
    return OpDef(kind=kind, infer=infer, reference=f"{module}:{kind}", **fields)


def rows(ins: Sequence[int], outs: Sequence[int] = (0,), sums: Sequence[int] = ()) -> Callable[[Op], RowWise]:
    """Return the `OpDef.row_wise` of an op whose inputs and outputs with rows are always the same."""
    found = RowWise(ins=tuple(ins), outs=tuple(outs), sums=tuple(sums))
    return lambda op: found


def recomputed_by(kind: str, own: slice) -> Callable[[Op, Op], str]:
    """Return the `Rewrites.recompute_kind` of a backward op with the inputs `own` of the op `kind` among its own."""
    return lambda op, again: f"{op.kind}_recompute" if again.kind == kind and again.ins == op.ins[own] else ""

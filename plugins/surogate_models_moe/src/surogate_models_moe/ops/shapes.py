"""Checks of shapes that the ops of this package share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surogate_core.api import Op, OpDef, RowWise, Value, accumulator, need

Ins = Sequence[Value]
Attrs = Mapping[str, Any]

_REFERENCE = "surogate_models_moe.reference"


def define(kind: str, infer: Any, **fields: Any) -> OpDef:
    """Return an op whose reference is the function of its name."""
    return OpDef(kind=kind, infer=infer, reference=f"{_REFERENCE}:{kind}", **fields)


def rows(
    ins: Sequence[int],
    outs: Sequence[int] = (0,),
    *,
    sums: Sequence[int] = (),
    local: Sequence[int] = (),
    takes: Sequence[int] = (),
) -> Callable[[Op], RowWise]:
    """Return the `OpDef.row_wise` of an op whose inputs and outputs with rows are always the same.

    Rows of experts, their order and their ends are those of the tokens of the op alone: `local`, and `takes`.
    """
    found = RowWise(ins=tuple(ins), outs=tuple(outs), sums=tuple(sums), local=tuple(local), takes=tuple(takes))
    return lambda op: found


def matrix(value: Value, name: str) -> tuple[int, int]:
    """Return rows and columns."""
    need(len(value.shape) == 2, f"{name} must have two dimensions, not {value!r}")
    return value.shape[0], value.shape[1]


def indices(value: Value, name: str, *shape: int) -> None:
    """Require int32 of a shape."""
    need(value.dtype == "int32" and value.shape == shape, f"{name} must be int32 {list(shape)}, not {value!r}")


def expert_bias(bias: Value, experts: int, columns: int) -> None:
    """Require a row for each expert, in any dtype."""
    need(bias.shape == (experts, columns), f"bias must have the shape [{experts}, {columns}], not {bias!r}")


def route_weights(weights: Value, rows: int, dtype: str) -> None:
    """Require a weight for each row, in the dtype in which sums of `dtype` are accumulated."""
    total = accumulator(dtype)
    need(weights.size == rows and weights.dtype == total, f"weights must be {total} with {rows} elements")

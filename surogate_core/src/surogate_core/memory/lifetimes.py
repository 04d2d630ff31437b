"""Lifetimes: the first and last op that needs each arena value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..program.op import Op, Program
from ..program.value import Value
from .alignment import align


class Lifetime(NamedTuple):
    """`value` occupies `nbytes` (aligned) while ops `first` to `last` run, both included. scratch: of one op alone.

    A named tuple, because a micro-step of a 70B model has 17,000 of them and a frozen dataclass takes three times as
    long to make.
    """

    value: Value
    nbytes: int
    first: int
    last: int
    scratch: bool = False


def lifetimes(program: Program, workspace: Callable[[Op], int]) -> list[Lifetime]:
    """Return the lifetime of each arena value, in order of first use.

    Outputs of the program live until its end. The workspace of an op lives during that op; its value is named
    "<index>.workspace" and labelled "workspace".
    """
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    scratch: set[Value] = set()
    for index, op in enumerate(program.ops):
        for value in (*op.ins, *op.outs):
            if value.role == "act":
                first.setdefault(value, index)
                last[value] = index
        nbytes = workspace(op)
        if nbytes:
            value = Value(f"{index}.workspace", (nbytes,), "uint8", "act", "workspace", op.block)
            scratch.add(value)
            first[value] = last[value] = index
    for value in program.outputs:
        if value in first:
            last[value] = len(program.ops) - 1
    return [Lifetime(v, align(v.nbytes), first[v], last[v], v in scratch) for v in first]


def live_bytes(lives: Sequence[Lifetime], n_ops: int) -> list[int]:
    """Bytes that are live while each op runs: no arena can be smaller than the largest."""
    change = [0] * (n_ops + 1)
    for life in lives:
        change[life.first] += life.nbytes
        change[life.last + 1] -= life.nbytes
    total, result = 0, []
    for delta in change[:n_ops]:
        total += delta
        result.append(total)
    return result

"""Lifetimes: the first and last op that needs each arena value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..program.lanes import lane_order
from ..program.op import Program
from ..program.value import Place, Value
from .alignment import align


class Lifetime(NamedTuple):
    """`value` occupies `nbytes` (aligned) while ops `first` to `last` run, both included. scratch: of one op alone.

    `overwritten` are the values that had the same place before, one after another (`Op.in_place`).

    A named tuple, because a micro-step of a 70B model has 17,000 of them and a frozen dataclass takes three times as
    long to make.
    """

    value: Value
    nbytes: int
    first: int
    last: int
    scratch: bool = False
    overwritten: tuple[Value, ...] = ()


def lifetimes(program: Program, workspace: Sequence[int]) -> dict[Place, list[Lifetime]]:
    """Return the lifetime of each piece of the arenas on the device and the host, in order of first use.

    Rows are used where their whole value is. A value that is written in place and the values that it overwrites have
    one piece. Outputs live until the end of the program. What an op of a side lane uses lives until that op is known to
    be done. The `workspace` of each op lives during the op, on the device; it is named "<index>.workspace" and labelled
    "workspace".
    """
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    overwritten: dict[Value, tuple[Value, ...]] = {}
    scratch: set[Value] = set()
    for index, (op, nbytes) in enumerate(zip(program.ops, workspace, strict=True)):
        for used in op.ins + op.outs:
            value = used.root
            if value in last:
                last[value] = index
            elif value.role in ("act", "staged"):
                first[value] = last[value] = index
        for out, i in op.in_place.items():
            value, before = op.outs[out], op.ins[i]
            first[value] = first.pop(before)
            overwritten[value] = (*overwritten.pop(before, ()), before)
        if nbytes:
            value = Value(f"{index}.workspace", (nbytes,), "uint8", "act", "workspace", op.block)
            scratch.add(value)
            first[value] = last[value] = index
    for index, until in lane_order(program.ops).done.items():
        op = program.ops[index]
        for value in (v.root for v in op.ins + op.outs):
            if value in last and last[value] < until - 1:
                last[value] = until - 1
    for value in first:
        if value.role == "staged":  # in its place before the program runs
            first[value], last[value] = 0, len(program.ops) - 1
    for value in program.outputs:
        if value in first:
            last[value] = len(program.ops) - 1
    lives: dict[Place, list[Lifetime]] = {"device": [], "host": []}
    for v in sorted(first, key=first.__getitem__):
        life = Lifetime(v, align(v.memory), first[v], last[v], v in scratch, overwritten.get(v, ()))
        lives[v.place].append(life)
    return lives


def live_bytes(lives: Sequence[Lifetime], n_ops: int) -> list[int]:
    """Bytes that are live while each op runs: no arena can be smaller than the largest."""
    change = [0] * (n_ops + 1)
    for life in lives:
        change[life.first] += life.nbytes
        change[life.last + 1] -= life.nbytes
    return list(accumulate(change[:n_ops]))

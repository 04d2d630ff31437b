"""Invariants of a program. They are checked after every pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from ..dtypes import DTYPES
from ..errors import ProgramError
from .op import Lane, Op, Program, Signature
from .opdef import OpDef
from .passes.in_place import fits_in_place
from .value import Rows, Value


@dataclass
class Checked:
    """The ops, signatures and values that `verify` has found valid in the programs of a run so far."""

    ops: set[Op] = field(default_factory=set)
    signatures: set[Signature] = field(default_factory=set)
    values: dict[str, Value] = field(default_factory=dict)


def verify(program: Program, ops: Mapping[str, OpDef], after: str = "", checked: Checked | None = None) -> None:
    """Check the invariants below. Raise ProgramError, naming the op and its source line, if one does not hold.

    - Value names are unique and dtypes are known.
    - An activation has exactly one writer, which runs before all readers. Inputs have no writer. Of an activation that
      is written in rows, each row has one; what reads it runs after the writers of all, what reads rows after theirs.
    - Micro-steps and evaluations write no params, but for gathers of parts that the update has written.
    - Ops accumulate only into gradients and states.
    - Shapes and dtypes equal those that the op's definition infers. A gradient may be stored in a different dtype.
    - Ops change the inputs that their definition names, which are states. No recomputed op changes any.
    - An op that works in place may do so by its definition, on an activation that no later op or output reads, nor an
      earlier op of a side lane, which may still be running.
    - What ranks own is used by ops that only the owner runs, and by the collectives that bring it there or to others.
    - Ops of side lanes use no inputs, which the host overwrites. Only ops whose definition says so use values that are
      placed on the host.
    - Every output of the program is written by the program or outlives it.

    `checked` is what earlier calls for programs of the same run found; this call adds to it. Ops are immutable, so
    the rules about a single op are checked once, however many passes keep it and however many blocks repeat it.
    """
    context = f"{program.name}{f' after {after}' if after else ''}"
    checked = checked or Checked()
    known, overwritten, aside = set[Value](), set[Value](), set[Value]()
    in_rows: _InRows = {}
    for index, op in enumerate(program.ops):
        if not isinstance(op, Op):
            raise ProgramError(f"{context}: op {index} is {op!r:.80}, expected an Op")
        if not known.issuperset(op.ins):
            for value in op.ins:
                if value not in known and value.role == "act" and not _are_written(value, known, in_rows):
                    raise ProgramError(f"{_place(context, index, op)}: reads {value!r} before any op writes it")
            known.update(op.ins)  # adds those that no op need write
        if overwritten and not overwritten.isdisjoint([v.root for v in op.ins]):
            value = next(v for v in op.ins if v.root in overwritten)
            raise ProgramError(f"{_place(context, index, op)}: reads {value!r}, which an op has overwritten")
        for value in op.outs:
            if value.role == "act" and (value in known or _is_written_in_part(value, known, in_rows)):
                raise ProgramError(f"{_place(context, index, op)}: writes {value!r} a second time")
            gathered = op.kind in ("all_gather", "broadcast") and any(part.inside is value for part in op.ins)
            if value.role == "param" and program.stage in ("micro", "evaluate") and not gathered:
                raise ProgramError(f"{_place(context, index, op)}: writes param {value!r}; only the update may")
            known.add(value)
            if isinstance(value, Rows):
                written = in_rows.setdefault(value.whole, [])
                written.append((value.row, value.row + value.shape[0] * op.times))
                if sum(last - first for first, last in written) == value.whole.shape[0]:
                    known.add(value.whole)
        if op.in_place:
            taken = [op.ins[i] for i in op.in_place.values()]
            if aside.intersection(taken):
                raise ProgramError(
                    f"{_place(context, index, op)}: overwrites one of {taken!r}, which a side lane reads"
                )
            overwritten.update(taken)
        if op.lane != "compute":
            aside.update(v.root for v in op.ins)
        if op not in checked.ops:
            place = _place(context, index, op)
            for value in (*op.ins, *op.outs):
                if checked.values.setdefault(value.name, value) is not value:
                    raise ProgramError(f"{place}: two values are named {value.name!r}")
            if op.signature not in checked.signatures:
                _check_op(op, ops, place)
            for out, i in op.in_place.items():
                if ops[op.kind].may_overwrite(op).get(out) != i or not fits_in_place(op, out, i):
                    raise ProgramError(f"{place}: may not write {op.outs[out]!r} in the place of its input {i}")
            _check_owner(op, place)
            checked.signatures.add(op.signature)
            checked.ops.add(op)
    for value in program.outputs:
        if value.role == "act" and value not in known:
            raise ProgramError(f"{context}: output {value!r} is never written")
        if value in overwritten:
            raise ProgramError(f"{context}: output {value!r} is overwritten by an op in place")


_InRows = dict[Value, list[tuple[int, int]]]
"""The first row, and that after the last, of what ops have written of a value so far."""


def _are_written(value: Value, known: set[Value], in_rows: _InRows) -> bool:
    """Return whether ops have written all of some rows."""
    if not isinstance(value, Rows):
        return False
    if value.whole in known:
        return True
    last = value.row + value.shape[0]
    of_them = (min(last, end) - max(value.row, first) for first, end in in_rows.get(value.whole, ()))
    return sum(max(0, rows) for rows in of_them) == value.shape[0]


def _is_written_in_part(value: Value, known: set[Value], in_rows: _InRows) -> bool:
    """Return whether an op has written rows of a value, or some of its rows."""
    if not isinstance(value, Rows):
        return value in in_rows
    last = value.row + value.shape[0]
    others = in_rows.get(value.whole, ())
    return value.whole in known or any(first < last and value.row < end for first, end in others)


def check_states(programs: Iterable[Program]) -> None:
    """Check that programs, in the order in which they first run, read no state before something has set it."""
    known: set[Value] = set()
    for program in programs:
        for op in program.ops:
            for v in op.ins:
                if v.role == "state" and v.init is None and v not in known:
                    what = f"{op.kind} ({op.where}) reads state {v.name}"
                    raise ProgramError(f"{what}, which nothing has set: give it an Init, or write it before")
            known.update(op.written)


def check_collectives(program: Program, other: Program) -> None:
    """Check that two programs issue equal collectives in the same order, because one rank may run each of them."""
    theirs, ours = ([op.signature for op in p.ops if op.lane == "comm"] for p in (program, other))
    if theirs != ours:
        raise ProgramError(
            f"{other.name} has {len(ours)} collectives, which are not the {len(theirs)} of {program.name}; a rank runs "
            "either, by its number of documents, and the others would wait for it"
        )


def _place(context: str, index: int, op: Op) -> str:
    return f"{context}, op {index} {op.kind} (block {op.block}, {op.where})"


def _check_op(op: Op, ops: Mapping[str, OpDef], place: str) -> None:
    """The rules that concern an op alone."""
    definition = ops.get(op.kind)
    if definition is None:
        raise ProgramError(f"{place}: no plugin defines this op")
    for value in (*op.ins, *op.outs):
        if value.dtype not in DTYPES:
            raise ProgramError(f"{place}: {value!r} has no known dtype")
    _check_lane(op, definition, place)
    _check_changes(op, definition, place)
    specs = definition.specs(op.ins, op.attrs, place)
    if len(specs) != len(op.outs):
        raise ProgramError(f"{place}: has {len(op.outs)} outputs, its definition infers {len(specs)}")
    if op.accumulate and max(op.accumulate) >= len(op.outs):
        raise ProgramError(f"{place}: adds to output {max(op.accumulate)}, but has {len(op.outs)}")
    for i, (value, spec) in enumerate(zip(op.outs, specs, strict=True)):
        if value.role == "input":
            raise ProgramError(f"{place}: writes the input {value!r}")
        if i in op.accumulate and value.role not in ("grad", "state"):
            raise ProgramError(f"{place}: adds to {value!r}, but only gradients and states accumulate")
        if value.shape != tuple(spec.shape):
            raise ProgramError(f"{place}: {value!r} should have shape {list(spec.shape)}")
        if value.dtype != spec.dtype and value.role != "grad":
            raise ProgramError(f"{place}: {value!r} should be {spec.dtype}")


def _check_changes(op: Op, definition: OpDef, place: str) -> None:
    if op.changes != tuple(definition.changes(op.ins, op.attrs)):
        raise ProgramError(f"{place}: changes its inputs {op.changes}, by its definition others")
    changed = [op.ins[i] for i in op.changes]
    if any(value.role != "state" for value in changed):
        raise ProgramError(f"{place}: changes {changed!r}, but ops can change only states")
    if changed and op.phase == "recompute":
        raise ProgramError(f"{place}: recomputed, but it changes {changed!r}")


def _check_owner(op: Op, place: str) -> None:
    """Ops without outputs only wait, so they may use values of several owners."""
    moved = {"reduce": op.outs, "broadcast": op.ins}.get(op.kind, ())
    if unowned := [v for v in moved if v.owner is None]:
        raise ProgramError(f"{place}: {unowned[0]!r} has no owner")
    owned = [v for v in (*op.ins, *op.outs) if v.owner is not None and v not in moved]
    if not owned or not op.outs:
        return
    if op.lane == "comm":
        raise ProgramError(f"{place}: exchanges {owned[0]!r}, which only rank {owned[0].owner} has")
    if others := [v for v in (*owned, *op.outs) if v.owner != owned[0].owner]:
        raise ProgramError(f"{place}: only rank {owned[0].owner} has {owned[0]!r}, but not {others[0]!r}")


def _check_lane(op: Op, definition: OpDef, place: str) -> None:
    if op.lane not in get_args(Lane):
        raise ProgramError(f"{place}: lane {op.lane!r} is not one of {', '.join(get_args(Lane))}")
    for value in (*op.ins, *op.outs):
        if value.place == "host" and not (definition.uses_host or definition.zero_copy):
            raise ProgramError(f"{place}: {value!r} is placed on the host; copy it to the device first")
        if value.role == "input" and op.lane != "compute":
            raise ProgramError(f"{place}: on lane {op.lane} it cannot use {value!r}, which the host overwrites")

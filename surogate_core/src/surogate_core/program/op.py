"""Ops and programs. A program is a flat list of ops in execution order."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from ..origin import Origin
from .value import Value, lazy

Phase = Literal["reference", "forward", "backward", "recompute", "update", "derive", "start"]
"""Part of a program. "reference": the model without its adapter, for losses that compare with it."""

Stage = Literal["forward", "micro", "evaluate", "update", "derive", "start"]
"""Stage of a program. "forward" is the recorded model, before passes make "micro" and "evaluate" of it."""

Purpose = Literal["train", "calibrate", "report"]
"""Purpose of a program of the stage "micro". "calibrate": those of the first optimizer steps of a fresh run
(`Programs.calibrate`). "report": the first of an optimizer step whose numerics are reported (`Programs.numerics`).
"train": all others."""

Lane = Literal["compute", "comm", "to_host", "to_device"]
"""The stream that an op runs on: "comm" is for collectives, "to_host" and "to_device" for copies. `lanes.py` has the
order between the ops of different lanes."""


@dataclass(frozen=True, eq=False)
class Op:
    """One operation of a program: `outs = kind(ins, **attrs)`.

    attrs       constants; whatever changes between runs is an input value instead (lr, step, seed)
    accumulate  indices of `outs` that the op adds to (`+=`) instead of overwriting
    block       index of the transformer block, or -1 outside of blocks
    where       "file:line" of the code that emitted the op, for error messages
    lane        stream that the op runs on
    in_place    {index of an output: index of the input whose place in memory it takes}; set by the pass `in_place`
    changes     indices of `ins`, all states, that the op changes (`OpDef.changes`)
    emitter     the definition of a plugin that emitted the op; None: core
    times       alike ops that it stands for, in a sketch (`program/passes/tile.py`)
    """

    kind: str
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    block: int = -1
    phase: Phase = "forward"
    accumulate: frozenset[int] = frozenset()
    where: str = ""
    lane: Lane = "compute"
    in_place: Mapping[int, int] = field(default_factory=dict)
    changes: tuple[int, ...] = ()
    emitter: Origin | None = None
    times: int = 1

    @lazy
    def written(self) -> tuple[Value, ...]:
        """The outputs, and the inputs that the op changes."""
        return (*self.outs, *(self.ins[i] for i in self.changes)) if self.changes else self.outs

    @lazy
    def owner(self) -> int | None:
        """The only rank that runs the op, because it alone has what the op writes; None: all ranks run it."""
        if self.lane == "comm":
            return None
        return next((v.shard.owner for v in self.written if v.shard and v.shard.owner is not None), None)

    def on(self, values: Mapping[Value, Value]) -> Op:
        """Return the op with the keys of `values` replaced by their values; itself if it uses none of them."""
        if values.keys().isdisjoint(self.ins) and values.keys().isdisjoint(self.outs):
            return self
        return self.changed(
            ins=tuple([values.get(v, v) for v in self.ins]), outs=tuple([values.get(v, v) for v in self.outs])
        )

    def changed(self, **changes: Any) -> Op:
        """Return a copy with other values of some fields. Takes a third of the time of `dataclasses.replace`."""
        op = object.__new__(Op)
        fields = op.__dict__
        fields.update(self.__dict__, **changes)
        for computed in ("signature", "written", "owner"):
            fields.pop(computed, None)
        return op

    @lazy
    def signature(self) -> Signature:
        """Equal for ops that differ only in which values they use and in `block` and `where`."""
        values = [v.form for v in self.ins + self.outs]
        attrs, in_place = tuple(self.attrs.items()), tuple(self.in_place.items())
        try:
            return _signature(
                (self.kind, self.phase, self.lane, self.accumulate, in_place, len(self.ins), attrs, *values)
            )
        except TypeError:  # an attr that cannot be hashed
            return Signature()


class Signature:
    """Stands for kind, attrs, phase, lane, accumulated and in-place outputs of an op, and for shape, dtype, role and
    place of its values.

    Shape rule, cost, scratch and choice of kernel depend on nothing else, so they are computed once for each signature
    instead of once for each block. Compared by identity: cheap to look up.
    """

    __slots__ = ()


@lru_cache(maxsize=1 << 16)
def _signature(content: Hashable) -> Signature:
    return Signature()


@dataclass(frozen=True, eq=False)
class Program:
    """A list of ops, and the output values that the caller reads after a run. Ops that produce outputs are not dead.

    name        unique within the programs of a run
    stage       what the program is for
    first       of a micro-step: it writes the gradients; the others add to them
    last        of a micro-step: it sums the gradients over the workers; always False with one worker
    documents   the most documents that a batch may have; None: as many as the run was planned for
    purpose     of a micro-step: which ones it runs
    """

    name: str
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...] = ()
    stage: Stage = "forward"
    first: bool = False
    last: bool = False
    documents: int | None = None
    purpose: Purpose = "train"

    @property
    def base_name(self) -> str:
        """First part of the names of the variants of a micro-step."""
        return "micro" if self.purpose == "train" else self.purpose

    def on(self, values: Mapping[Value, Value]) -> Program:
        """Return the program with the keys of `values` replaced by their values, also among its outputs."""
        keys = values.keys()
        ops = [op if keys.isdisjoint(op.ins) and keys.isdisjoint(op.outs) else op.on(values) for op in self.ops]
        return replace(self, ops=tuple(ops), outputs=tuple(values.get(v, v) for v in self.outputs))

    def producers(self) -> dict[Value, Op]:
        """Return the op that writes each activation."""
        return {v: op for op in self.ops for v in op.outs if v.role == "act"}

    def readers(self) -> dict[Value, list[Op]]:
        """Return the ops that read each value, in order."""
        found: dict[Value, list[Op]] = {}
        for op in self.ops:
            for value in dict.fromkeys(op.ins):
                found.setdefault(value, []).append(op)
        return found

    def values(self) -> list[Value]:
        """Return every value that the program uses, without duplicates, in order of first appearance."""
        seen: dict[Value, None] = {}
        for op in self.ops:
            for value in (*op.ins, *op.outs):
                seen.setdefault(value)
        for value in self.outputs:
            seen.setdefault(value)
        return list(seen)

"""The builder: creates values and ops. Checks the shapes of each op when it is emitted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from ..dtypes import DTYPES
from ..errors import ProgramError
from ..origin import EMITTING
from . import shards
from .contents import misfit
from .op import Lane, Op, Phase, Program, Stage
from .opdef import OpDef
from .value import Collects, Init, Place, Role, Rows, Shard, Value


class Builder:
    """Records ops for a programs of programs that share params, gradients, states and inputs.

    `ops` maps each op kind to its OpDef; plugins extend it. `dtype` is the dtype of params and activations
    (`model_dtype`). Matrices among params, gradients and derived states have room for `parts` parts.

        x = b.apply("linear", h, w, label="qkv")                          # first output
        norm, rstd, residual = b.emit("add_rmsnorm", x, r, w, eps=1e-6)   # all outputs
    """

    def __init__(self, ops: Mapping[str, OpDef], dtype: str, parts: int = 1) -> None:
        self.ops = ops
        self.dtype = dtype
        self.parts = parts
        self._recording: list[Op] = []
        self._phase: Phase = "forward"
        self._block = -1
        self._named: dict[str, Value] = {}
        self._count: dict[str, int] = {}
        self._stacks: dict[str, int] = {}
        self._rows: dict[tuple[Value, int, int], Rows] = {}

    def forked(self) -> Builder:
        """Return a builder with the values declared so far. What it declares and names, this one does not know."""
        copy = Builder(self.ops, self.dtype, self.parts)
        copy._named, copy._count, copy._stacks = dict(self._named), dict(self._count), dict(self._stacks)
        return copy

    # ------------------------------------------------------------------------------------------------------- values

    def input(self, name: str, shape: Sequence[int], dtype: str) -> Value:
        """Declare a value that the training loop writes before a program runs."""
        return self._declare(name, shape, dtype, "input")

    def param(
        self, name: str, shape: Sequence[int], init: Init, dtype: str | None = None, *, matrices: int = 1
    ) -> Value:
        """Declare a model weight. It is trainable unless an adapter freezes it.

        `matrices`: how many equal ones it holds one above another (`ParamInfo.matrices`), such as one of each expert.
        Of a param that checkpoints hold, `WeightMap.matrices` says so, and another number is an error.
        """
        if matrices != 1 and (matrices < 1 or len(shape) != 2 or shape[0] % matrices):
            raise ProgramError(f"{_caller()}: param {name!r} {list(shape)} cannot be {matrices} equal matrices")
        self._stacks[name] = matrices
        return self._declare(name, shape, dtype or self.dtype, "param", init)

    def stack_of(self, param: Value) -> int:
        """Return how many matrices a param was declared with."""
        return self._stacks[param.name]

    def grad(self, param: Value, dtype: str) -> Value:
        """Declare the accumulated gradient of `param`."""
        return self._declare(f"grad.{param.name}", param.shape, dtype, "grad")

    def buffer(self, name: str, shape: Sequence[int], dtype: str, shard: Shard | None = None) -> Value:
        """Declare a gradient, or part, that several params use in turn, while those of the others are elsewhere."""
        return self._declare(name, shape, dtype, "grad", shard=shard)

    def state(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        init: Init | None,
        *,
        label: str = "state",
        collects: Collects = "",
        derived: bool = False,
        place: Place = "device",
        shard: Shard | None = None,
    ) -> Value:
        """Declare a value that outlives its program. `init=None` means that a program writes it before any reads it.

        `label`: WEIGHT_LABEL of a copy of weights, which plans count as weights. The others: see `Value`.
        """
        if collects not in get_args(Collects):
            raise ProgramError(f"{_caller()}: collects of state {name!r} is {collects!r}, expected sum or max")
        fields = {"label": label, "collects": collects, "derived": derived, "place": place, "shard": shard}
        return self._declare(name, shape, dtype, "state", init, **fields)

    def activation(
        self, label: str, shape: Sequence[int], dtype: str, place: Place = "device", *, room: int = 0
    ) -> Value:
        """Return a new activation, named after its block and label. `room`: see `Value`."""
        _check_dtype(label, dtype)
        base = f"{self._block}.{label}" if self._block >= 0 else label
        n = self._count.get(base, 1 if base in self._named else 0)
        self._count[base] = n + 1
        name = f"{base}#{n}" if n else base
        return Value(name, tuple(shape), dtype, "act", label, self._block, place=place, room=room)

    def rows(self, value: Value, first: int, count: int) -> Value:
        """Return `count` rows of an activation, input or state from row `first` on: always the same value.

        Rows of rows are rows of the whole. All rows of a value are itself.
        """
        whole, first = value.root, first + (value.row if isinstance(value, Rows) else 0)
        if (first, count) == (0, whole.shape[0]):
            return whole
        key = whole, first, count
        if key not in self._rows:
            name, shape = f"{whole.name}[{first}:{first + count}]", (count, *whole.shape[1:])
            self._rows[key] = Rows(
                name,
                shape,
                whole.dtype,
                whole.role,
                whole.label,
                whole.block,
                place=whole.place,
                whole=whole,
                row=first,
            )
        return self._rows[key]

    @property
    def declared(self) -> tuple[Value, ...]:
        """Every input, param, grad and state declared so far, in order of declaration."""
        return tuple(self._named.values())

    def on_host(self, value: Value) -> Value:
        """Place a declared param, gradient or state on the host. Return what takes its place in all programs."""
        placed = replace(value, place="host")
        self._named[value.name] = placed
        return placed

    def part(self, whole: Value, parts: int, owner: int | None = None) -> Value:
        """Declare this rank's part of a gradient that is never held as a whole."""
        part = replace(shards.part_of(whole, parts, owner), name=f"{whole.name}/part")
        self._named[part.name] = part
        return part

    def redeclare(self, values: Mapping[Value, Value]) -> None:
        """Declare other values in place of declared ones. The caller replaces them in the programs."""
        self._named = {new.name: new for new in (values.get(value, value) for value in self._named.values())}

    def forget(self, values: Iterable[Value]) -> None:
        """Withdraw declared values, which no program may use any more."""
        for value in values:
            del self._named[value.name]

    def _declare(
        self, name: str, shape: Sequence[int], dtype: str, role: Role, init: Init | None = None, **fields: Any
    ) -> Value:
        if name in self._named or name in self._count:
            raise ProgramError(f"{role} {name!r} is declared twice; names must be unique within a run: rename one")
        if not isinstance(init, Init | None):
            raise ProgramError(f"{_caller()}: init of {role} {name!r} is {init!r:.80}, expected an Init or None")
        if init is not None and (wrong := misfit(init, shape)):
            raise ProgramError(f"{_caller()}: init of {role} {name!r} {list(shape)} {wrong}")
        _check_dtype(name, dtype)
        value = Value(name, tuple(shape), dtype, role, fields.pop("label", role), self._block, init, **fields)
        if (role in ("param", "grad") or value.derived) and shards.is_divisible(value.shape, self.parts):
            value = replace(value, room=shards.room(value.shape, dtype, self.parts))
        self._named[name] = value
        return value

    # ---------------------------------------------------------------------------------------------------------- ops

    def emit(
        self,
        kind: str,
        *ins: Value,
        label: str | Sequence[str] | None = None,
        outs: Sequence[Value] | None = None,
        accumulate: frozenset[int] = frozenset(),
        lane: Lane = "compute",
        **attrs: Any,
    ) -> tuple[Value, ...]:
        """Append an op and return its outputs.

        `label` replaces the label that the op's definition gives to its first output; a sequence replaces those of the
        first `len(label)` outputs. With `outs` the op writes existing values (states, params) instead of new
        activations. Raises ProgramError if the kind is unknown or the shapes do not fit.
        """
        definition, where = self.ops.get(kind), _caller()
        if definition is None:
            raise ProgramError(f"{where}: no installed plugin defines op {kind!r}")
        if wrong := [i for i, value in enumerate(ins) if not isinstance(value, Value)]:
            what = f"input {wrong[0]} of {kind} is {ins[wrong[0]]!r:.80}"
            raise ProgramError(f"{where}: {what}, expected a Value (numbers are attrs)")
        specs = definition.specs(ins, attrs, where)
        if outs is None:
            given = (label,) if isinstance(label, str) else tuple(label or ())
            labels = (*given, *(spec.label for spec in specs[len(given) :]))
            outs = [self.activation(name, s.shape, s.dtype) for name, s in zip(labels, specs, strict=True)]
        changes = tuple(definition.changes(ins, attrs))
        op = Op(
            kind,
            ins,
            tuple(outs),
            attrs,
            self._block,
            self._phase,
            accumulate,
            where,
            lane,
            {},
            changes,
            EMITTING.get(),
        )
        self._recording.append(op)
        return op.outs

    def apply(self, kind: str, *ins: Value, label: str | None = None, **attrs: Any) -> Value:
        """Append an op and return its first output."""
        return self.emit(kind, *ins, label=label, **attrs)[0]

    def append(self, op: Op) -> None:
        """Append an existing op."""
        self._recording.append(op)

    # --------------------------------------------------------------------------------------------------- recordings

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """Assign the values and ops created in this context to transformer block `index`."""
        before, self._block = self._block, index
        try:
            yield
        finally:
            self._block = before

    @contextmanager
    def record(self, phase: Phase, block: int = -1) -> Iterator[list[Op]]:
        """Collect the ops emitted in this context in a separate list, with the given phase and block."""
        before = self._recording, self._phase, self._block
        self._recording, self._phase, self._block = [], phase, block
        try:
            yield self._recording
        finally:
            self._recording, self._phase, self._block = before

    def program(self, name: str, outputs: Sequence[Value] = (), stage: Stage = "forward") -> Program:
        """Return a program of all ops in the current recording."""
        return Program(name, tuple(self._recording), tuple(outputs), stage)


def _check_dtype(name: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ProgramError(f"{_caller()}: {name!r} has the unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")


def _caller() -> str:
    """Return "file:line" of the innermost frame outside this file: the model, rule or pass that emits the op."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


@cache
def _short(filename: str) -> str:
    path = Path(filename)
    return f"{path.parent.name}/{path.name}"

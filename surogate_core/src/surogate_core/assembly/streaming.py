"""Streaming: brings values that the host or all ranks together hold to the device ahead of their use.

A program visits blocks one after another, forward and backward. Between two visits:

    put back what the last visit has written | wait until what the visit before it wrote is back |
    begin to fetch what the visit after the next one uses

So a copy has the time of a visit in each direction, and the device holds the values of three visits at most. Copies of
params and states are activations, whose memory other programs use too. Ops can only add to gradients (`verify`), so
their copies are gradients as well: buffers that every third visit uses.

With `zero_copy` a value that only ops with `OpDef.zero_copy` use in a program stays where it is: they read and write it
over the link, and no copy of it takes memory of the device. "auto" does so for ops outside of blocks, as the update of
the embedding: nothing of that size is there to hide its copies, which follow each other in both directions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

from ..errors import ProgramError
from ..program.builder import Builder
from ..program.op import Op, Program
from ..program.value import Value
from .transfers import HostCopies

_OPEN = 2
"""Blocks whose ops may alternate, because an op of a block can serve the next one too."""

_SETS = 3
"""Visits whose values are on the device at a time."""

_FASTER = 0.5
"""With "auto", ops use the host at more than this share of the link's rate. Copies there and back take twice as long as
both at once."""

ZeroCopy = bool | Literal["auto"]


@dataclass
class _Visit:
    """The ops that use values on the host, of one block, and these values.

    key       the block, or else the op
    fetch_at  index of the op in front of which the copies to the device begin
    ops       indices of the ops
    values    what they use
    fetched   {value: where the copy to the device writes it}
    current   {value: where it is after the ops so far}
    written   values that the ops write
    """

    number: int
    key: tuple[int, int]
    fetch_at: int
    ops: list[int] = field(default_factory=list)
    values: set[Value] = field(default_factory=set)
    fetched: dict[Value, Value] = field(default_factory=dict)
    current: dict[Value, Value] = field(default_factory=dict)
    written: dict[Value, None] = field(default_factory=dict)

    @property
    def block(self) -> int:
        return self.key[0]


class Streaming:
    """Adds the transfers to the programs of a run.

    uncopied  the values that programs so far use on the host because of `zero_copy`
    """

    def __init__(self, transfers: HostCopies, b: Builder, *, zero_copy: ZeroCopy = False) -> None:
        self._transfers = transfers
        self._on_host = frozenset(transfers.places)
        self._values = {place: value for value, place in transfers.places.items()}
        self.uncopied: set[Value] = set()
        self._zero_copy = zero_copy
        self._b = b
        self._buffers: dict[tuple[object, ...], Value] = {}

    def __call__(self, program: Program) -> Program:
        """Return `program` with copies of the values that it uses and that are elsewhere.

        Ops that can use values on the host (`OpDef.uses_host`) read them there. Raises ProgramError if an op adds to a
        param or state, or changes it as an input.
        """
        uncopied = self._left_on_host(program.ops) if self._zero_copy else frozenset()
        self.uncopied |= uncopied
        visits, uses = self._visits(program.ops, uncopied)
        ops, free_at = list(program.ops), dict[Value, int]()
        for index, visit_of in uses.items():
            ops[index] = self._on_copies(ops[index], visit_of)
        puts, waits, fetches = layers = [
            defaultdict[int, list[Op]](list) for _ in range(3)
        ]  # in front of ops, by index
        written = self._places_written(ops)
        for visit in visits:
            begins, ends = visit.ops[0], visit.ops[-1]
            fetch, put, wait = self._copies(visit, ops[begins], ops[ends])
            done = visits[visit.number - _SETS].ops[-1] + 1 if visit.number >= _SETS else 0
            free = (free_at.get(value, 0) for value in visit.fetched)
            made = (at + 1 for value in visit.fetched for at in written.get(value, ()) if at < begins)
            fetches[max([visit.fetch_at, done, *free, *made])] += fetch
            puts[ends + 1] += put
            if visit.number + 2 < len(visits):
                waits[visits[visit.number + 2].ops[0]] += wait
            free_at |= dict.fromkeys(visit.written, ends + 1)
        every = ((*chain(*(layer[at] for layer in layers)), *ops[at : at + 1]) for at in range(len(ops) + 1))
        streamed = replace(program, ops=tuple(chain.from_iterable(every)))
        return streamed.on(self._transfers.places)  # what ops use where it is held

    def _left_on_host(self, ops: Sequence[Op]) -> frozenset[Value]:
        """Return the values on the host that `zero_copy` ops use and that no other op needs a copy of."""
        used: set[Value] = set()
        copied: set[Value] = set()
        for op in filter(self._uses_host, ops):
            definition = self._b.ops[op.kind]
            values = self._on_host & {*op.ins, *op.outs}
            chosen = definition.zero_copy > 0
            if self._zero_copy == "auto":
                chosen = definition.zero_copy > _FASTER and op.block < 0
            if chosen and not op.accumulate and not op.changes:
                used |= values
            elif not definition.uses_host:
                copied |= values
        return frozenset(used - copied)

    def _visits(
        self, ops: Sequence[Op], uncopied: frozenset[Value]
    ) -> tuple[list[_Visit], dict[int, dict[Value, _Visit]]]:
        """Return the visits in order of their first ops, and {index of an op: {value on the host: its visit}}.

        An op outside of blocks is a visit of its own. A value that several blocks use belongs to the visit that used it
        first, as long as that is one of the last two.
        """
        visits: list[_Visit] = []
        uses: dict[int, dict[Value, _Visit]] = {}
        run, last = (0, 0), None  # where the last two runs of ops with one key began
        for index, op in enumerate(ops):
            if not self._uses_host(op):
                continue
            used = dict.fromkeys(v for v in (*op.ins, *op.outs) if v in self._on_host and v not in uncopied)
            if not used or (self._transfers.direct and self._b.ops[op.kind].uses_host):
                continue
            block = max(op.block, *(value.block for value in used))
            key = (block, -1 if block >= 0 else index)
            if key != last:
                run, last = (run[1], index), key
            for value in used:
                open_ = visits[-_OPEN:]
                visit = next((v for v in open_ if value in v.values), next((v for v in open_ if v.key == key), None))
                if visit is None:
                    visit = _Visit(len(visits), key, fetch_at=run[0])
                    visits.append(visit)
                visit.values.add(value)
                visit.ops.append(index)
                uses.setdefault(index, {})[value] = visit
        return visits, uses

    def _places_written(self, ops: Sequence[Op]) -> dict[Value, list[int]]:
        """Return {value: the ops that write to its place}, such as the update of a rank's part."""
        found: dict[Value, list[int]] = {}
        for index, op in enumerate(ops):
            for place in op.written:
                if place in self._values:
                    found.setdefault(self._values[place], []).append(index)
        return found

    def _uses_host(self, op: Op) -> bool:
        return not (self._on_host.isdisjoint(op.ins) and self._on_host.isdisjoint(op.outs))

    def _on_copies(self, op: Op, visit_of: Mapping[Value, _Visit]) -> Op:
        """Return `op` on copies of the values on the host that it uses. Adds to their visits which."""
        added = [op.outs[i] for i in sorted(op.accumulate) if op.outs[i] in visit_of]
        if any(value.role != "grad" for value in added) or any(op.ins[i] in visit_of for i in op.changes):
            raise ProgramError(f"{op.kind} ({op.where}) changes a value that the host holds; ops can only write it")
        for value in (*op.ins, *added):
            visit = visit_of.get(value)
            if visit is not None and value not in visit.current:
                visit.fetched[value] = visit.current[value] = self._copy(value, visit)
        ins = tuple(visit_of[value].current[value] if value in visit_of else value for value in op.ins)
        for value in op.outs:
            if value in visit_of:
                visit_of[value].current[value] = self._copy(value, visit_of[value])
                visit_of[value].written[value] = None
        outs = tuple(visit_of[value].current[value] if value in visit_of else value for value in op.outs)
        return op.changed(ins=ins, outs=outs)

    def _copy(self, value: Value, visit: _Visit) -> Value:
        """Return a new activation, or the buffer of a gradient in this visit."""
        if value.role != "grad":
            with self._b.block(visit.block):
                return self._transfers.copy(self._b, value)
        if value in visit.current:
            return visit.current[value]
        form = (value.shape, value.dtype, value.shard)
        alike = [v for v in visit.current if v.role == "grad" and (v.shape, v.dtype, v.shard) == form]
        key = (visit.number % _SETS, len(alike), *form)
        if key not in self._buffers:
            self._buffers[key] = self._b.buffer(f"streamed.{len(self._buffers)}", *form)
        return self._buffers[key]

    def _copies(self, visit: _Visit, first: Op, last: Op) -> tuple[list[Op], list[Op], list[Op]]:
        """Return what fetches the values of a visit, what puts back those that it writes, and what waits for that."""
        b, transfers = self._b, self._transfers
        places = transfers.places
        with b.record(first.phase, visit.block) as fetch:
            transfers.fetch(b, [(places[value], copy) for value, copy in visit.fetched.items()])
        with b.record(last.phase, visit.block) as put:
            transfers.put(b, [(places[value], visit.current[value]) for value in visit.written])
        with b.record(last.phase, visit.block) as wait:
            transfers.wait(b, [places[value] for value in visit.written])
        return fetch, put, wait

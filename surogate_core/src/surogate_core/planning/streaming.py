"""Streaming: copies params and states that the host holds to the device ahead of their use, and back once written.

A program visits blocks one after another, forward and backward. Between two visits:

    copy to the host what the last visit has written | wait for the copy of the visit before it |
    begin to copy to the device what the visit after the next one uses

So a copy has the time of a visit in each direction, and the device holds the values of three visits at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import ProgramError
from ..program.builder import Builder
from ..program.op import Op, Program
from ..program.value import Value

Insertions = dict[int, list[Op]]
"""Ops to insert in front of the op at an index."""

_OPEN = 2
"""Blocks whose ops may alternate, because an op of a block can serve the next one too."""


@dataclass
class _Visit:
    """The ops that use hosted values of one block, and these values.

    fetch_at  index of the op in front of which the copies to the device begin
    ops       indices of the ops
    fetched   {value: the activation that the copy to the device writes}
    current   {value: the activation that holds it after the ops so far}
    written   values that the ops write
    """

    block: int
    fetch_at: int
    ops: list[int] = field(default_factory=list)
    fetched: dict[Value, Value] = field(default_factory=dict)
    current: dict[Value, Value] = field(default_factory=dict)
    written: dict[Value, None] = field(default_factory=dict)


def streamed(program: Program, hosted: Mapping[Value, Value], b: Builder) -> Program:
    """Return `program` with copies of those values of `hosted`, {value: its place on the host}, that it uses.

    Raises ProgramError if an op adds to such a value, or changes it as an input.
    """
    visits = _visits(program.ops, hosted)
    ops, free_at = list(program.ops), dict[Value, int]()
    puts, waits, fetches = Insertions(), Insertions(), Insertions()
    for number, visit in enumerate(visits):
        for index in visit.ops:
            ops[index] = _on_copies(ops[index], visit, hosted, b)
        begins, ends = visit.ops[0], visit.ops[-1]
        at = max([visit.fetch_at, *(free_at.get(value, 0) for value in visit.fetched)])
        if at > begins:
            raise ProgramError(f"{program.name}: a value of block {visit.block} is used while ops of a block write it")
        with b.record(ops[begins].phase, visit.block) as fetch:
            for value, copy in visit.fetched.items():
                b.emit("move", hosted[value], outs=[copy], lane="to_device")
        with b.record(ops[ends].phase, visit.block) as put:
            for value in visit.written:
                b.emit("move", visit.current[value], outs=[hosted[value]], lane="to_host")
        with b.record(ops[ends].phase, visit.block) as wait:
            if visit.written:
                b.emit("wait", *(hosted[value] for value in visit.written))
        _insert(fetches, at, fetch)
        _insert(puts, ends + 1, put)
        if number + 2 < len(visits):
            _insert(waits, visits[number + 2].ops[0], wait)
        free_at |= dict.fromkeys(visit.written, ends + 1)
    return replace(program, ops=tuple(_with(ops, (puts, waits, fetches)))) if visits else program


def _visits(ops: Sequence[Op], hosted: Mapping[Value, Value]) -> list[_Visit]:
    """Return the visits in order of their first ops. An op outside of blocks is a visit of its own."""
    visits: list[_Visit] = []
    keys: list[tuple[int, int]] = []  # of the visits: the block, or else the op
    run, last = (0, 0), None  # where the last two runs of ops of one visit began
    for index, op in enumerate(ops):
        used = [value for value in (*op.ins, *op.outs) if value in hosted]
        if not used:
            continue
        block = max(op.block, *(value.block for value in used))
        key = (block, -1 if block >= 0 else index)
        if key != last:
            run, last = (run[1], index), key
        if key not in keys[-_OPEN:]:
            keys.append(key)
            visits.append(_Visit(block, fetch_at=run[0]))
        visits[len(keys) - 1 - keys[::-1].index(key)].ops.append(index)
    return visits


def _on_copies(op: Op, visit: _Visit, hosted: Mapping[Value, Value], b: Builder) -> Op:
    """Return `op` on copies of the hosted values that it uses. Adds to `visit` which."""
    if any(op.outs[i] in hosted for i in op.accumulate) or any(op.ins[i] in hosted for i in op.changes):
        raise ProgramError(f"{op.kind} ({op.where}) changes a value that the host holds; only ops that write it can")
    for value in op.ins:
        if value in hosted and value not in visit.current:
            visit.fetched[value] = visit.current[value] = _copy(value, visit, b)
    ins = tuple(visit.current[value] if value in hosted else value for value in op.ins)
    for value in op.outs:
        if value in hosted:
            visit.current[value] = _copy(value, visit, b)
            visit.written[value] = None
    return replace(op, ins=ins, outs=tuple(visit.current[v] if v in hosted else v for v in op.outs))


def _copy(value: Value, visit: _Visit, b: Builder) -> Value:
    with b.block(visit.block):
        return b.activation("streamed", value.shape, value.dtype)


def _insert(insertions: Insertions, index: int, ops: Sequence[Op]) -> None:
    insertions.setdefault(index, []).extend(ops)


def _with(ops: Sequence[Op], layers: Sequence[Insertions]) -> Iterable[Op]:
    """Yield the ops, in front of each those of every layer, and the rest at the end."""
    for index in range(len(ops) + 1):
        for layer in layers:
            yield from layer.get(index, ())
        yield from ops[index : index + 1]

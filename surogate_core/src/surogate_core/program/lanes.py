"""The order between the lanes of a program.

The ops of a lane run in program order. An op of a side lane, that is, of any but "compute", starts when everything
before it on "compute" is done. An op waits for an earlier op of another side lane if both use a value, or rows of it,
and one of them writes it. Everything is done at the end of the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .op import Lane, Op
from .value import Value

Known = dict[Lane, int]
"""By side lane, the last op that is known to be done, by its index in the program."""


@dataclass(frozen=True)
class LaneOrder:
    """The ops that each op of a program waits for.

    waits  {index of an op: the ops of side lanes that it waits for}, without those that are known to be done
    done   {index of an op on a side lane: the first op on "compute" that starts after it is done}; the number of ops if
           no op does
    """

    waits: Mapping[int, tuple[int, ...]]
    done: Mapping[int, int]


Users = dict[Value, tuple[Known, Known]]
"""By value, the last op of each side lane that uses it, and the last one that writes it."""


def lane_order(ops: Sequence[Op]) -> LaneOrder:
    """Return the order of `ops`. That of the last programs is cached: their memory and their time both depend on it."""
    if all(op.lane == "compute" for op in ops):
        return LaneOrder({}, {})
    return _lane_order(tuple(ops))


@lru_cache(maxsize=256)  # the programs of a run, of which a stored base has two for each block
def _lane_order(ops: tuple[Op, ...]) -> LaneOrder:
    users: Users = {}
    waits: dict[int, tuple[int, ...]] = {}
    done: dict[int, int] = {}
    running: dict[Lane, list[int]] = {}
    computed: Known = {}  # what "compute" knows to be done
    started: dict[int, Known] = {}  # what an op of a side lane knew when it started
    for index, op in enumerate(ops):
        if op.lane == "compute" and users.keys().isdisjoint([v.root for v in (*op.ins, *op.outs)]):
            continue
        last = running.get(op.lane, [])[-1:]
        known = computed if op.lane == "compute" else _merged(computed, *(started[i] for i in last))
        if op.lane != "compute":
            known |= dict.fromkeys([op.lane], index)
        own: list[int] = []
        for i in sorted(_needed(op, users), reverse=True):
            lane = ops[i].lane
            if lane != op.lane and i > known.get(lane, -1):
                own.append(i)
                known.update(_merged(known, started[i], {lane: i}))
        if own:
            waits[index] = tuple(own)
        if op.lane == "compute":
            for lane, i in computed.items():
                while running.get(lane) and running[lane][0] <= i:
                    done[running[lane].pop(0)] = index
        else:
            started[index] = known
            running.setdefault(op.lane, []).append(index)
            written = {v.root for v in op.written}
            for value in dict.fromkeys(v.root for v in (*op.ins, *op.outs)):
                using, writing = users.setdefault(value, ({}, {}))
                using[op.lane] = index
                if value in written:
                    writing[op.lane] = index
    return LaneOrder(waits, done | {i: len(ops) for lane in running.values() for i in lane})


def _needed(op: Op, users: Users) -> set[int]:
    """Return the ops on side lanes that must be done before `op`, the last one of each lane for each value."""
    written = {v.root for v in op.written}
    return {
        index
        for value in (v.root for v in (*op.ins, *op.outs))
        if value in users
        for index in users[value][value not in written].values()
    }


def _merged(first: Known, *others: Known) -> Known:
    result = dict(first)
    for known in others:
        for lane, index in known.items():
            if index > result.get(lane, -1):
                result[lane] = index
    return result

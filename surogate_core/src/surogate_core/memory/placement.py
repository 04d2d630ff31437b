"""Placement in an arena: each value gets the lowest offset that is free during its lifetime."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache

Interval = tuple[int, int, int]
"""(bytes, first op, last op) of a value; its lifetime includes both ops."""


@lru_cache(maxsize=64)
def place(values: tuple[Interval, ...]) -> tuple[int, ...]:
    """Return the offsets of `values`, placed in the given order, each at the lowest offset free during its lifetime.

    Takes O(n log n) operations of the index (`Occupied`) for n values. The results of the last 64 lists are cached,
    because the micro-step programs of a run, and most programs that suggestions try, have equal lifetimes.
    """
    occupied = Occupied(max((last for _, _, last in values), default=0) + 1)
    return tuple(occupied.claim(*value) for value in values)


class Occupied:
    """The occupied bytes of an arena at each op: a segment tree over the `n_ops` ops of a program.

    A value with the lifetime [first, last] is stored at the nodes that together cover this range. Each node has two
    sets of bytes: `whole`, of the values stored at it, which are occupied during all of its ops; and `any`, of the
    values stored at it or below, which are occupied during some of its ops. A set is a sorted list of boundaries
    [start, end, start, end, ...] in which adjacent intervals are merged. Values are packed densely, so a set has few
    intervals however many values it contains.
    """

    def __init__(self, n_ops: int) -> None:
        self._leaves = 1 << (n_ops - 1).bit_length()
        self._whole: list[list[int]] = [[] for _ in range(2 * self._leaves)]
        self._any: list[list[int]] = [[] for _ in range(2 * self._leaves)]
        self.probes = 0

    def claim(self, nbytes: int, first: int, last: int) -> int:
        """Occupy `nbytes` from op `first` to op `last` at the lowest free offset, and return it; 0 if `nbytes` is 0."""
        if not nbytes:
            return 0
        nodes, above = self._nodes(first, last)
        at = self._lowest_gap(
            nbytes, [s for s in (*(self._any[n] for n in nodes), *(self._whole[n] for n in above)) if s]
        )
        for node in nodes:
            _add(self._whole[node], at, at + nbytes)
            while node and _add(self._any[node], at, at + nbytes):  # a node's ancestors contain its set
                node //= 2
        return at

    def _lowest_gap(self, nbytes: int, taken: Sequence[list[int]]) -> int:
        """Return the lowest offset at which `nbytes` overlap no interval of any set."""
        at, clear, i = 0, 0, 0
        while clear < len(taken):
            boundaries = taken[i]
            i = (i + 1) % len(taken)
            self.probes += 1
            after = bisect_right(boundaries, at)
            if after % 2:  # inside an interval
                at, clear = boundaries[after], 0
            elif after < len(boundaries) and boundaries[after] < at + nbytes:  # an interval begins before at + nbytes
                at, clear = boundaries[after + 1], 0
            else:
                clear += 1
        return at

    def _nodes(self, first: int, last: int) -> tuple[list[int], list[int]]:
        """Return the nodes that cover [first, last], and all their ancestors."""
        low, high = first + self._leaves, last + self._leaves + 1
        nodes = []
        while low < high:
            if low & 1:
                nodes.append(low)
                low += 1
            if high & 1:
                high -= 1
                nodes.append(high)
            low >>= 1
            high >>= 1
        above = {node >> up for node in nodes for up in range(1, node.bit_length())}
        return nodes, list(above)


def _add(boundaries: list[int], start: int, end: int) -> bool:
    """Add [start, end) to a set, merged with intervals that it overlaps or touches. Return whether the set changed."""
    inside = bisect_right(boundaries, start)
    if inside % 2 and end <= boundaries[inside]:
        return False
    i, j = bisect_left(boundaries, start), bisect_right(boundaries, end)
    boundaries[i:j] = [start] * (i % 2 == 0) + [end] * (j % 2 == 0)
    return True

"""Where values go in an arena: each at the lowest offset that is free during its whole life."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache

Interval = tuple[int, int, int]
"""(bytes, first op, last op) of a value, both ops included."""


@lru_cache(maxsize=64)
def place(values: tuple[Interval, ...]) -> tuple[int, ...]:
    """Offsets of `values`, placed in the order given, each at the lowest offset that is free from `first` to `last`.

    O(n log n) index operations for n values (`Occupied`). The results of the last 64 different lists are kept: the
    micro-step programs of a run, and most of the programs that suggestions try, have equal lives.
    """
    occupied = Occupied(max((last for _, _, last in values), default=0) + 1)
    return tuple(occupied.claim(*value) for value in values)


class Occupied:
    """The parts of an arena that are taken, by op: a segment tree over the `n_ops` ops of a program.

    A value whose life is [first, last] is entered at the nodes that make up this range. A node knows two sets of
    bytes: `whole`, of values entered at it, taken during all of its ops, and `any`, of values entered at it or below,
    taken during some of its ops. A set is a sorted list of boundaries [start, end, start, end, ...] in which parts that
    touch are one. Values are packed densely, so that a set has few parts however many values are in it.
    """

    def __init__(self, n_ops: int) -> None:
        self._leaves = 1 << (n_ops - 1).bit_length()
        self._whole: list[list[int]] = [[] for _ in range(2 * self._leaves)]
        self._any: list[list[int]] = [[] for _ in range(2 * self._leaves)]
        self.probes = 0

    def claim(self, nbytes: int, first: int, last: int) -> int:
        """Take `nbytes` from op `first` to op `last`, at the lowest offset that is free there; nothing is at 0."""
        if not nbytes:
            return 0
        nodes, above = self._nodes(first, last)
        at = self._lowest_gap(
            nbytes, [s for s in (*(self._any[n] for n in nodes), *(self._whole[n] for n in above)) if s]
        )
        for node in nodes:
            _add(self._whole[node], at, at + nbytes)
            while node and _add(self._any[node], at, at + nbytes):  # what a node has, those above it have
                node //= 2
        return at

    def _lowest_gap(self, nbytes: int, taken: Sequence[list[int]]) -> int:
        """The lowest offset at which `nbytes` overlap no part of any set: skips overlaps until there is none."""
        at, clear, i = 0, 0, 0
        while clear < len(taken):
            boundaries = taken[i]
            i = (i + 1) % len(taken)
            self.probes += 1
            after = bisect_right(boundaries, at)
            if after % 2:  # inside of a part
                at, clear = boundaries[after], 0
            elif after < len(boundaries) and boundaries[after] < at + nbytes:  # a part begins too soon
                at, clear = boundaries[after + 1], 0
            else:
                clear += 1
        return at

    def _nodes(self, first: int, last: int) -> tuple[list[int], list[int]]:
        """The nodes that make up [first, last], and all nodes above them."""
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
    """Add [start, end) to a set, merging the parts that it overlaps or touches. Returns whether the set has changed."""
    inside = bisect_right(boundaries, start)
    if inside % 2 and end <= boundaries[inside]:
        return False
    i, j = bisect_left(boundaries, start), bisect_right(boundaries, end)
    boundaries[i:j] = [start] * (i % 2 == 0) + [end] * (j % 2 == 0)
    return True

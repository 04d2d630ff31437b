"""Placement in an arena: each value gets the lowest offset that is free during its lifetime."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import starmap

Interval = tuple[int, int, int]
"""(bytes, first op, last op) of a value; its lifetime includes both ops."""


def place(values: Sequence[Interval]) -> tuple[int, ...]:
    """Return the offsets of `values`, placed in the given order, each at the lowest offset free during its lifetime.

    Takes O(n log n) operations of the index (`Occupied`) for n values.
    """
    starts = sorted({first for _, first, _ in values})
    ends = {last for _, _, last in values}
    peaks = sorted(
        {starts[bisect_right(starts, last) - 1] for last in ends}
    )  # lifetimes that overlap share one of them
    after = {last: bisect_right(peaks, last) - 1 for last in ends}
    at = {first: bisect_left(peaks, first) for first in starts}
    return _placed(len(peaks), tuple([(nbytes, at[first], after[last]) for nbytes, first, last in values]))


@lru_cache(maxsize=64)
def _placed(n_peaks: int, values: tuple[Interval, ...]) -> tuple[int, ...]:
    """Return the offsets of `values`, whose lifetimes count peaks.

    The results of the last 64 lists are cached. Programs that differ only in ops between the peaks share one: the
    micro-steps of a run, and most programs that suggestions try.
    """
    return tuple(starmap(Occupied(n_peaks).claim, values))


class Occupied:
    """The occupied parts of an arena, by op: a tree with four children a node, whose leaves are the ops of a program.

    A value that lives from op `first` to op `last` is entered at the nodes that make up this range. A node knows two
    sets of bytes: `whole`, of values entered at it, occupied during all of its ops, and `any`, of values entered at it
    or below, occupied during some of its ops. A set is a sorted list of boundaries [start, end, start, end, ...] in
    which adjacent parts are one. Values are packed densely, so a set has few parts however many values are in it.

    Most values live for one to three ops: with four children a node their path to the root is half that of a binary
    tree.
    """

    def __init__(self, n_ops: int) -> None:
        self._leaves = 1
        while self._leaves < n_ops:
            self._leaves *= 4
        self._whole: list[list[int]] = [[] for _ in range(2 * self._leaves)]
        self._any: list[list[int]] = [[] for _ in range(2 * self._leaves)]
        self.probes = 0

    def claim(self, nbytes: int, first: int, last: int) -> int:
        """Occupy `nbytes` from op `first` to op `last` at the lowest free offset, and return it. 0 bytes lie at 0."""
        if not nbytes:
            return 0
        nodes, above = self._nodes(first, last)
        some, whole = self._any, self._whole
        occupied = [some[node] for node in nodes if some[node]] + [whole[node] for node in above if whole[node]]
        at = self._lowest_gap(nbytes, occupied)
        for node in nodes:
            if node < self._leaves:  # a leaf is above no other node
                _add(whole[node], at, at + nbytes)
            while node and _add(some[node], at, at + nbytes):  # a node's ancestors have what the node has
                node //= 4
        return at

    def _lowest_gap(self, nbytes: int, occupied: Sequence[list[int]]) -> int:
        """Return the lowest offset at which `nbytes` overlap no part of any set. Skips overlaps until there is none."""
        at, last = max([parts[1] for parts in occupied if not parts[0]], default=0), None
        occupied = [parts for parts in occupied if parts[-1] > at]
        while True:
            self.probes += len(occupied)
            for boundaries in occupied:
                if boundaries is last:  # all others are free here
                    return at
                after = bisect_right(boundaries, at)
                if after % 2:  # inside a part
                    at, last = boundaries[after], boundaries
                    after += 1
                while after < len(boundaries) and boundaries[after] < at + nbytes:  # the next part begins too soon
                    at, last = boundaries[after + 1], boundaries
                    after += 2
            if last is None:
                return at

    def _nodes(self, first: int, last: int) -> tuple[list[int], set[int]]:
        """Return the nodes that make up [first, last], and all nodes above them. Node n is the parent of 4n to 4n+3."""
        low, high = first + self._leaves, last + self._leaves + 1
        nodes: list[int] = []
        while low < high:
            while low % 4 and low < high:
                nodes.append(low)
                low += 1
            while high % 4 and low < high:
                high -= 1
                nodes.append(high)
            low //= 4
            high //= 4
        above: set[int] = set()
        for node in nodes:
            while (node := node // 4) and node not in above:
                above.add(node)
        return nodes, above


def _add(boundaries: list[int], start: int, end: int) -> bool:
    """Add [start, end) to a set and merge the parts that it overlaps or touches. Return whether the set has changed."""
    if not boundaries or boundaries[-1] < start:
        boundaries += start, end
        return True
    if boundaries[-2] <= start:  # the last part, as a rule
        grows = boundaries[-1] < end
        if grows:
            boundaries[-1] = end
        return grows
    inside = bisect_right(boundaries, start)
    if inside % 2 and end <= boundaries[inside]:
        return False
    i, j = bisect_left(boundaries, start), bisect_right(boundaries, end, inside)
    boundaries[i:j] = [start] * (i % 2 == 0) + [end] * (j % 2 == 0)
    return True

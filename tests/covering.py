"""Pairwise covering arrays: few combinations of settings in which every two settings take every pair of values, and
draws that cover as many pairs as their size allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any

SEED = 13


def pairwise(names: Sequence[str], seed: int = SEED) -> list[frozenset[str]]:
    """Return sets of `names` such that of every two names, all four combinations of in and out occur.

    Each set is the best of 50 random ones, drawn from `seed`.
    """
    random = Random(seed)
    missing = {(a, b, x, y) for a, b in combinations(names, 2) for x in (False, True) for y in (False, True)}
    rows: list[frozenset[str]] = []
    while missing:
        drawn = [frozenset(name for name in names if random.random() < 0.5) for _ in range(50)]
        best = max(drawn, key=lambda row: len(missing & _pairs(row, names)))
        missing -= _pairs(best, names)
        rows.append(best)
    return rows


def settings(names: Sequence[str], whole: Sequence[str]) -> list[frozenset[str]]:
    """Return an array of all `names`, one of those not in `whole`, whose members hide the others, and all at once.

    Without the empty set, and each set once.
    """
    rows = [*pairwise(names), *pairwise([name for name in names if name not in whole]), frozenset(names)]
    return [row for row in dict.fromkeys(rows) if row]


def drawn(axes: Mapping[str, Sequence[Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """Return {axis: value} `count` times, each with as many new pairs of values as possible: the best of 40."""
    random, seen, found = Random(seed), set[Any](), []
    for _ in range(count):
        tried = [{axis: random.choice(values) for axis, values in axes.items()} for _ in range(40)]
        pairs = [{frozenset(pair) for pair in combinations(one.items(), 2)} for one in tried]
        best = max(range(len(tried)), key=lambda i: len(pairs[i] - seen))
        seen |= pairs[best]
        found.append(tried[best])
    return found


def _pairs(row: frozenset[str], names: Sequence[str]) -> set[tuple[str, str, bool, bool]]:
    return {(a, b, a in row, b in row) for a, b in combinations(names, 2)}

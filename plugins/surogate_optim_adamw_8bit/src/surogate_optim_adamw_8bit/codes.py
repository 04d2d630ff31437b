"""The 8-bit codes of the moments: the dynamic maps of Dettmers et al. 2022, "8-bit optimizers via block-wise
quantization", and the search for the nearest code.

A map has 256 numbers between -1 (signed) or 0 (unsigned) and 1. Decade i, from 10^(i-7) to 10^(i-6), is divided into
2^i (signed) or 2^(i+1) (unsigned) equal parts, whose centres are in the map, and so are 0 and 1. The numbers are exact
fp32 values. No torch here.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

BLOCK = 256
"""Consecutive elements of a tensor that share a scale, their largest magnitude."""

ZERO = 127
"""The code of 0 in the signed map. In the unsigned map it is 0."""

_DECADES = 7


def rounded(x: float) -> float:
    """Return `x` rounded to fp32."""
    (single,) = struct.unpack("<f", struct.pack("<f", x))
    return float(single)


def bits_of(x: float) -> int:
    """Return the bit pattern of an fp32 number."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    return int(bits)


@cache
def code_map(signed: bool) -> tuple[float, ...]:
    """Return the 256 numbers of a map, in ascending order."""
    numbers = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = [rounded(0.1 + i * (0.9 / parts)) for i in range(parts)] + [1.0]
        for low, high in pairwise(edges):
            centre = rounded(10.0 ** (decade - _DECADES + 1) * rounded(rounded(low + high) / 2))
            numbers += [centre, -centre] if signed else [centre]
    return tuple(sorted(numbers))


@cache
def thresholds(signed: bool) -> tuple[float, ...]:
    """Return 255 numbers: x has a larger code than i if it is not below number i.

    So a code is the nearest, computed exactly. Halfway between two codes it is the even one.
    """
    numbers = code_map(signed)
    return tuple(_threshold(i, numbers[i], numbers[i + 1]) for i in range(len(numbers) - 1))


def _threshold(i: int, low: float, high: float) -> float:
    middle = (low + high) / 2  # exact in fp64
    nearest = rounded(middle)
    if nearest > middle or (nearest == middle and i % 2 == 1):
        return nearest
    return _next_above(nearest)


def _next_above(x: float) -> float:
    bits = bits_of(x) + (1 if x > 0 else -1)
    (above,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(above)


# --------------------------------------------------------------------------------------------- the search of the kernel


@dataclass(frozen=True)
class Lookup:
    """A table that gives the code of a magnitude x > 0 with one access.

    The leading bits of x, `bits >> shift`, select an entry: keys below `first` the first one. An interval of numbers
    with the same key contains at most one threshold. The high byte of an entry is the code at the beginning of the
    interval, and its low 24 bits carry into that byte if the remaining bits of x are at or above the threshold:

        code = (entry + (bits & (2^shift - 1))) >> 24
    """

    shift: int
    first: int
    entries: tuple[int, ...]

    def code(self, x: float) -> int:
        """Return the code of `x` as the kernel does. For tests."""
        bits = bits_of(x)
        entry = self.entries[max(bits >> self.shift, self.first) - self.first]
        return (entry + (bits & ((1 << self.shift) - 1))) >> 24


@cache
def lookup(signed: bool) -> Lookup:
    """Return the table of the positive codes: from 1, because a number that is not 0 never gets the code of 0.

    Signed codes count from that of 0: 1 to 128.
    """
    zero = ZERO if signed else 0
    steps = [bits_of(step) for step in thresholds(signed)[zero + 1 :]]
    shift = 17 if signed else 16
    first = (steps[0] >> shift) - 1
    last = bits_of(1.0) >> shift
    return Lookup(
        shift, first, tuple(_entry(key << shift, (key + 1) << shift, steps) for key in range(first, last + 1))
    )


def _entry(begin: int, end: int, steps: Sequence[int]) -> int:
    """Return the entry for the bit patterns from `begin` to before `end`. steps: the thresholds' bit patterns."""
    passed = bisect_right(steps, begin)
    within = steps[passed : bisect_left(steps, end)]
    assert len(within) <= 1
    return ((1 + passed) << 24) + ((1 << 24) - (within[0] - begin) if within else 0)

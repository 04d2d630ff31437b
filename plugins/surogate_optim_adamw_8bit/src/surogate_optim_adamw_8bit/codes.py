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

LOOKUP_EXPONENT = 31
"""Lookups cover magnitudes from 2^-30 to 1. They are searched scaled by 2^31, so that bit 30 is set in all of them."""

LOOKUP_SIZE = (LOOKUP_EXPONENT - 1) * 128 + 1
"""Entries of a lookup: 128 between a power of two and the next one, and one for 1."""

_SHIFT = 16
_FIRST = bits_of(2.0)


def lookup(signed: bool) -> tuple[int, ...]:
    """Return a table that gives the code of a magnitude with one access: from 1, because a number that is not 0 never
    gets the code of 0. Signed codes count from that of 0: 1 to 128.

    The upper 16 bits of the scaled magnitude select an entry. At most one threshold is in an interval of numbers with
    the same upper bits. The code is the high byte of a sum modulo 2^32, into which the lower bits carry if they are at
    or above the threshold:

        code = (entry + bits) >> 24
    """
    zero = ZERO if signed else 0
    steps = [bits_of(step * 2.0**LOOKUP_EXPONENT) for step in thresholds(signed)[zero + 1 :]]
    begins = range(_FIRST, _FIRST + (LOOKUP_SIZE << _SHIFT), 1 << _SHIFT)
    return tuple(_entry(begin, begin + (1 << _SHIFT), steps) for begin in begins)


def _entry(begin: int, end: int, steps: Sequence[int]) -> int:
    """Return the entry for the bit patterns from `begin` to before `end`. steps: the thresholds' bit patterns."""
    passed = bisect_right(steps, begin)
    within = steps[passed : bisect_left(steps, end)]
    assert len(within) <= 1
    carry = (1 << 24) - (within[0] - begin) if within else 0
    return (((1 + passed) << 24) + carry - begin) % (1 << 32)


def looked_up(entries: Sequence[int], x: float) -> int:
    """Return the code of a magnitude as the kernel does. For tests."""
    bits = max(bits_of(x * 2.0**LOOKUP_EXPONENT), _FIRST)
    return ((entries[(bits - _FIRST) >> _SHIFT] + bits) % (1 << 32)) >> 24

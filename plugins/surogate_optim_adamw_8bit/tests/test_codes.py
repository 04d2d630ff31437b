"""The maps of 8-bit codes, and the search of the nearest code by the table that the kernel uses."""

from __future__ import annotations

import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from random import Random

import pytest

from surogate_optim_adamw_8bit.codes import (
    BLOCK,
    LOOKUP_EXPONENT,
    LOOKUP_SIZE,
    ZERO,
    bits_of,
    code_map,
    looked_up,
    lookup,
    rounded,
    thresholds,
)
from surogate_optim_adamw_8bit.kernels import code_words, packed

HERE = Path(__file__).parent
VECTORS = json.loads((HERE / "vectors.json").read_text())


def of_bits(bits: int) -> float:
    (x,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(x)


def neighbours(x: float) -> list[float]:
    """Return `x` and the fp32 numbers on both sides of it."""
    bits = bits_of(x)
    return [of_bits(bits + step) for step in (-1, 0, 1)]


def magnitudes(signed: bool) -> list[float]:
    """Return all places where a code may change, and numbers of every size."""
    random = Random(7)
    drawn = [rounded(2.0 ** random.uniform(-40, 0)) for _ in range(5_000)]
    edges = [y for x in thresholds(signed) if x > 0 for y in neighbours(x)]
    return [*drawn, *edges, *(x for x in code_map(signed) if x > 0), of_bits(1), of_bits(0x007FFFFF), 1.0]


@pytest.mark.parametrize(("signed", "name"), [(True, "dynamic_map_signed"), (False, "dynamic_map_unsigned")])
def test_the_maps_are_those_of_the_specification_to_the_bit(signed: bool, name: str) -> None:
    assert [f"{bits_of(x):08x}" for x in code_map(signed)] == VECTORS[name]


def test_the_maps_have_seven_decades_with_twice_as_many_codes_in_each() -> None:
    signed, unsigned = code_map(True), code_map(False)
    for values, first in ((signed, 1), (unsigned, 2)):
        assert len(values) == len(set(values)) == 256 and list(values) == sorted(values)
        counts = [sum(10.0 ** (i - 7) < x < 10.0 ** (i - 6) for x in values) for i in range(7)]
        assert counts == [first * 2**i for i in range(7)]
    assert signed[ZERO] == 0 and unsigned[0] == 0 and signed[-1] == unsigned[-1] == 1
    assert [-x for x in signed[:ZERO]] == list(reversed(signed[ZERO + 1 : -1]))
    assert signed[ZERO + 1] == pytest.approx(5.5e-7) and unsigned[1] == pytest.approx(3.25e-7)


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_is_the_nearest_and_the_even_one_halfway_between_two(signed: bool) -> None:
    values, steps = code_map(signed), thresholds(signed)
    for x in magnitudes(signed):
        for number in (x, -x) if signed else (x,):
            above = min(max(bisect_left(values, number), 1), 255)
            distances = {i: abs(Fraction(number) - Fraction(values[i])) for i in (above - 1, above)}
            nearest = [i for i, distance in distances.items() if distance == min(distances.values())]
            assert bisect_right(steps, number) == min(nearest, key=lambda i: i % 2), number


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_gives_the_nearest_code_but_never_that_of_zero(signed: bool) -> None:
    entries, steps, zero = lookup(signed), thresholds(signed), ZERO if signed else 0
    for x in magnitudes(signed):
        assert looked_up(entries, x) == max(bisect_right(steps, x) - zero, 1), x


def test_negative_codes_mirror_positive_ones_and_stop_before_one() -> None:
    """So the kernel searches magnitudes only."""
    steps, entries = thresholds(True), lookup(True)
    for x in magnitudes(True):
        code = bisect_right(steps, -x)
        assert min(code, ZERO - 1) == ZERO - min(looked_up(entries, x), ZERO), x


def nearest(x: Fraction) -> Fraction:
    """Return `x` rounded to 24 bits, halfway between two numbers to the even one."""
    if x == 0:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()  # of x, or one more
    unit = Fraction(2) ** (exponent - (24 if abs(x) < Fraction(2) ** exponent else 23))
    return round(x / unit) * unit


def hardest_quotients(signed: bool) -> Iterator[tuple[int, int, Fraction]]:
    """Yield (x, scale, threshold), each times a power of two: all significands whose quotient is so close to the middle
    between a threshold and the float below that a division with a relative error of 2^-46 might end on the wrong side.

    With a middle of 25 bits, x 2^j - middle scale is then an integer c of at most 8. Each c determines the lowest bits
    of the scale.
    """
    for threshold in thresholds(signed):
        if threshold <= thresholds(signed)[ZERO if signed else 0]:
            continue
        middle = Fraction(threshold + of_bits(bits_of(threshold) - 1)) / 2
        while middle < 2**24:
            middle *= 2
        factor = int(middle)
        assert factor == middle and factor % 2 == 1
        for j, c in product((24, 25), (*range(-8, 0), *range(1, 9))):
            for scale in range(-c * pow(factor, -1, 2**j) % 2**j, 2**24, 2**j):
                x = factor * scale + c >> j
                if scale >= 2**23 and 2**23 <= x < 2**24:
                    yield x, scale, Fraction(factor + 1, 2**j)


@pytest.mark.parametrize("signed", [True, False])
def test_the_division_of_the_kernel_is_on_the_right_side_of_every_threshold(signed: bool) -> None:
    """As `Quotients` in codes.cuh: a product with the rounded reciprocal, and one correction."""
    cases = 0
    for x, scale, threshold in hardest_quotients(signed):
        reciprocal = nearest(Fraction(1, scale))
        quotient = nearest(x * reciprocal)
        quotient = nearest(nearest(x - scale * quotient) * reciprocal + quotient)
        exact = nearest(Fraction(x, scale))
        assert (quotient >= threshold) == (exact >= threshold), (x, scale)
        cases += 1
    assert cases > 500


def test_the_sizes_in_the_kernel_are_those_of_the_tables() -> None:
    source = (HERE.parent / "csrc/codes.cuh").read_text()
    assert f"lookup_size = {LOOKUP_SIZE};" in source and len(lookup(True)) == len(lookup(False)) == LOOKUP_SIZE
    assert f"0x1p{LOOKUP_EXPONENT}f" in source and "first_key = 0x4000;" in source and bits_of(2.0) == 0x40000000
    assert f"zero_code = {ZERO};" in source and BLOCK == 256


def test_the_words_of_the_tables_are_in_the_order_of_the_kernel() -> None:
    words = code_words()
    data = struct.pack(f"<{len(words)}q", *words)
    halves = struct.unpack(f"<{len(data) // 4}I", data)
    expected = [*map(bits_of, (*code_map(True), *code_map(False))), *lookup(True), *lookup(False)]
    assert list(halves[: len(expected)]) == expected and len(halves) - len(expected) < 2
    assert packed([1, 0xFFFFFFFF, 2]) == [1 - (1 << 32), 2]

"""The levels of NF4, and the 8-bit map of double quantization, as exact fp32 values. No torch here."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import cache
from itertools import pairwise

BLOCKS = (64, 128, 256, 512)
"""Consecutive elements of a matrix that share an absmax."""

GROUP = 256
"""Consecutive absmax of a matrix that share a nested absmax."""

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of the normal distribution, scaled to [-1, 1] (Dettmers et al. 2023, "QLoRA")."""

_DECADES = 7


@cache
def absmax_map() -> tuple[float, ...]:
    """Return the 256 numbers of the signed dynamic map of bitsandbytes, in ascending order.

    Decade i, from 10^(i-7) to 10^(i-6), is divided into 2^i equal parts. Their centres are in the map with both signs,
    and so are 0 and 1. Edges are rounded as by `torch.linspace` on CPUs with fused multiply-add: that is the map of
    bitsandbytes on x86.
    """
    numbers = [0.0, 1.0]
    for decade in range(_DECADES):
        for low, high in pairwise(_edges(2**decade)):
            centre = _rounded(_rounded(10.0 ** (decade - _DECADES + 1)) * _rounded(_rounded(low + high) / 2))
            numbers += [centre, -centre]
    return tuple(sorted(numbers))


def _edges(parts: int) -> list[float]:
    """Return the edges of `parts` equal parts of 0.1 to 1: the lower half counted from 0.1, the upper half from 1."""
    begin = _rounded(0.1)
    step = _rounded(_rounded(1.0 - begin) / parts)
    half = (parts + 1) // 2
    return [_rounded(begin + step * i if i < half else 1.0 - step * (parts - i)) for i in range(parts + 1)]


def words_of(numbers: Iterable[float]) -> list[int]:
    """Return fp32 numbers, of which there are evenly many, in pairs: as int64 numbers of the same bytes."""
    values = list(numbers)
    return list(struct.unpack(f"<{len(values) // 2}q", struct.pack(f"<{len(values)}f", *values)))


def _rounded(x: float) -> float:
    (single,) = struct.unpack("<f", struct.pack("<f", x))
    return float(single)

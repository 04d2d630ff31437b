"""The parts of a value that the ranks of a run hold: of equal size, or all of it on one rank, its owner.

A whole value has room for all equal parts in its memory, so its last elements are followed by padding. A part may lie
inside of the whole value (`Value.inside`) or have memory of its own. The padding holds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ..dtypes import DTYPES
from .value import Shard, Value

SMALLEST_CHUNK = 256
"""Elements in the chunks of small values: as many as share a scale in 8-bit optimizers."""

LARGEST_CHUNK = 65536

_CHUNKS = 512
"""Chunks of a large value: parts of it are padded by less than parts / _CHUNKS of its size."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The kinds of values of which each rank holds a part.

    parts         ranks that share the values
    states        the states of the optimizer and the masters (ZeRO 1)
    gradients     the sums of the gradients (ZeRO 2)
    weights       the weights that programs read (ZeRO 3)
    whole_blocks  the first blocks, whose weights every rank holds as a whole all the same
    """

    parts: int = 1
    states: bool = False
    gradients: bool = False
    weights: bool = False
    whole_blocks: int = 0

    def divides(self, weight: Value) -> bool:
        """Return whether a rank holds its part alone of a weight, or of a copy of it, that ranks can divide."""
        return self.weights and not 0 <= weight.block < self.whole_blocks


def chunk_size(size: int) -> int:
    """Return the elements of a chunk of a value of `size` elements: a power of two.

    Parts consist of whole chunks, and sums over a whole value are sums of those of its chunks, so they have the same
    bits however many parts it has.
    """
    chunk = LARGEST_CHUNK
    while chunk > SMALLEST_CHUNK and chunk * _CHUNKS > size:
        chunk //= 2
    return chunk


def part_size(size: int, parts: int) -> int:
    """Return the elements of each of `parts` parts of a value of `size` elements."""
    chunk = chunk_size(size)
    return -(-size // (parts * chunk)) * chunk


def is_divisible(shape: Sequence[int], parts: int) -> bool:
    """Return whether a param or gradient of `shape` is worth dividing: a matrix of at least a chunk for each part."""
    return parts > 1 and len(shape) >= 2 and prod(shape) >= parts * SMALLEST_CHUNK


def room(shape: Sequence[int], dtype: str, parts: int) -> int:
    """Return the bytes of `parts` parts of a value of `shape`."""
    return parts * DTYPES[dtype].nbytes(part_size(prod(shape), parts))


def part_of(whole: Value, parts: int, owner: int | None = None) -> Value:
    """Return the rank's part of a value, with memory and the name of its own: that of the whole."""
    shape = (part_size(whole.size, parts),) if owner is None else whole.shape
    return replace(whole, shape=shape, init=None, shard=Shard(whole.shape, parts, owner), inside=None, room=0)


def part_inside(whole: Value, parts: int, owner: int | None = None) -> Value:
    """Return the rank's part of a value in the memory of the whole, which has room for equal `parts`."""
    of = "" if owner is None else f" of {owner}"
    return replace(part_of(whole, parts, owner), name=f"{whole.name}/part{of}", inside=whole)

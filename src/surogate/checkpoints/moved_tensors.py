"""Tensors that files hold in another order than params (`HFTensor.layout`): the parts that are moved at a time.

A layout that works on each index of the first dimension is applied to a few of them at a time, so that neither a stack
of experts nor a copy of it is ever whole in memory. Any other moves the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from surogate_core.api import HFTensor, StoredTensor

from .manifest import HashedFile

PART = 1 << 22
"""Elements of a part, if an index has no more."""


@dataclass(frozen=True)
class MovedPart:
    """Indices of a tensor, and the rows of the param that they are: `height` from the row `first` on."""

    indices: slice
    first: int
    height: int


def parts_of(tensor: HFTensor) -> Iterator[MovedPart]:
    """Yield the parts of a tensor with a layout, in order."""
    (height, *_), count = tensor.rows, tensor.shape[0]
    each = height // count
    step = max(1, PART // max(1, prod(tensor.shape[1:]))) if tensor.leading else count
    for at in range(0, count, step):
        stop = min(at + step, count)
        yield MovedPart(slice(at, stop), at * each, (stop - at) * each if tensor.leading else height)


def moved_rows(tensor: HFTensor, stored: StoredTensor, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
    """Yield rows of the param, each time with the first one: all from `first` to `last`, and maybe some around them."""
    for part in parts_of(tensor):
        if part.first < last and first < part.first + part.height:
            yield part.first, tensor.load(stored[part.indices])


def write_moved(file: HashedFile, tensor: HFTensor, rows: Callable[[int, int], Tensor]) -> None:
    """Write a tensor as files have it. rows: (first, count) -> rows of the param, on the CPU, in the file's dtype."""
    for part in parts_of(tensor):
        stored = tensor.save(rows(part.first, part.height)).contiguous().view(-1)
        file.write(stored.view(torch.uint8).numpy().data)

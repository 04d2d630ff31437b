"""Elements of a tensor in the memory of a process: all of them, or the parts of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import Tensor

from ..errors import ProgramError
from ..program.value import Value


@dataclass(frozen=True)
class Pieces:
    """The elements from `first` on of a tensor of `shape`, in order of rows: of one flat tensor after another.

    shape  of the tensor as it is stored: rows of packed elements are rows of bytes
    """

    shape: tuple[int, ...]
    first: int
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Pieces:
        return cls(tuple(tensor.shape), 0, [tensor.view(-1)])

    @classmethod
    def of_rows(cls, shape: Sequence[int], row: int, tensor: Tensor) -> Pieces:
        """Return those of a tensor of `shape` that are in `tensor`, its rows from `row` on."""
        return cls(tuple(shape), row * prod(shape[1:]), [tensor.view(-1)])

    @property
    def count(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def complete(self) -> bool:
        return self.count == prod(self.shape)

    def tensor(self) -> Tensor:
        """Return the tensor. Raises ProgramError unless all its elements are in one piece."""
        if len(self.tensors) != 1 or not self.complete:
            raise ProgramError(f"a tensor {list(self.shape)} that ranks divide was used as a whole one")
        return self.tensors[0].view(self.shape)

    def rows(self, row: int, shape: Sequence[int]) -> Pieces:
        """Return those that are in the tensor of `shape` that begins at a row of this one. There may be none."""
        begin = row * prod(self.shape[1:])
        end, at, found = begin + prod(shape), self.first, list[Tensor]()
        for tensor in self.tensors:
            low, high = max(begin, at), min(end, at + tensor.numel())
            if low < high:
                found.append(tensor[low - at : high - at])
            at += tensor.numel()
        return Pieces(tuple(shape), max(self.first - begin, 0) if found else 0, found)


def pieces_of(value: Value, view: Callable[[int], Tensor], ranks: range) -> Pieces:
    """Return the elements that `ranks` have of a value; `view` returns those of a rank. Padding is left out.

    Ranks have the same elements of a value that is no part: those of the first are taken.
    """
    if value.shard is None:
        return Pieces(value.stored_shape, 0, [view(ranks[0]).view(-1)])
    bounds = [min(value.first(rank), value.shard.size) for rank in (*ranks, ranks.stop)]
    held = zip(ranks, pairwise(bounds), strict=True)
    cut = [view(rank).view(-1)[: end - begin] for rank, (begin, end) in held if begin < end]
    return Pieces(value.shard.shape, bounds[0], cut)

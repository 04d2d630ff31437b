"""Collectives of ranks that give each other spans, by any transport but NCCL. Sums have equal bits on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from ...api import Span
from ...api.world import How, Position
from ...reference.rounding import accumulator
from .spans import aligned, check_pairs, check_reducible, chunk, part, tensor

SECONDS = 3600.0
"""For which a rank waits for the others in a collective. What watches the run ends it much earlier, unless a rank does
something that may take long."""

PIECE = 1 << 22
"""Elements that are combined at a time, because sums take memory of their own."""

Item = tuple[Sequence[Span], Sequence[Span]]
"""The spans that a rank gives to each of the others, and spans of the sizes that each of them gives to it."""

Use = Callable[[Iterable[Sequence[Tensor]]], None]
"""Called with what the ranks gave, item by item."""

Pairs = Sequence[tuple[Span, Span]]


def combined(values: Sequence[Tensor], how: str) -> Tensor:
    """Return the sum or the maximum of values of one dtype.

    Sums of floats are added in fp32 (fp64 for fp64) and in order of rank, then rounded once. A NaN makes either NaN.
    """
    first, *others = values
    if how == "max":
        return reduce(torch.maximum, others, first)
    wide = accumulator(first.dtype) if first.dtype.is_floating_point else first.dtype
    return reduce(lambda total, value: total + value.to(wide), others, first.to(wide)).to(first.dtype)


class ExchangingComm:
    """The `Comm` of a rank whose transport exchanges spans: `_exchange`."""

    capturable = False
    allocate = None
    allocated = 0

    def __init__(self, rank: int, world_size: int, device: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.position = Position()

    def _exchange(self, what: str, stream: int, *stages: tuple[Sequence[Item], Use]) -> None:
        """Exchange the items of each stage with all ranks, and use what they gave before the next stage begins.

        Raises CollectiveError if the other ranks do not call it for the same `what`.
        """
        raise NotImplementedError

    def all_reduce(self, spans: Sequence[Span], how: How, stream: int) -> None:
        """Combine a chunk of each span on each rank, then give it to the others."""
        check_reducible("all_reduce", spans)
        chunks = [[chunk(span, rank, self.world_size) for rank in range(self.world_size)] for span in spans]
        own = [of_ranks[self.rank] for of_ranks in chunks]
        given = [(of_ranks, self._all(to)) for of_ranks, to in zip(chunks, own, strict=True)]
        sums = [(taken, of_ranks) for of_ranks, taken in given]
        stages = (given, _summing(own, how, stream)), (sums, _taking(sums, stream))
        self._exchange(f"all_reduce({how}){_sizes(spans)}", stream, *stages)

    def reduce_scatter(self, spans: Pairs, how: How, stream: int) -> None:
        check_pairs("reduce_scatter", spans, self.world_size, 1)
        check_reducible("reduce_scatter", [source for source, _ in spans])
        items = [(self._parts(source), self._all(target)) for source, target in spans]
        use = _summing([target for _, target in spans], how, stream)
        self._exchange(f"reduce_scatter({how}){_sizes_of(spans)}", stream, (items, use))

    def all_gather(self, spans: Pairs, stream: int) -> None:
        check_pairs("all_gather", spans, 1, self.world_size)
        items = [(self._all(source), self._parts(target)) for source, target in spans]
        self._exchange(f"all_gather{_sizes_of(spans)}", stream, (items, _taking(items, stream)))

    def reduce(self, spans: Pairs, roots: Sequence[int], how: How, stream: int) -> None:
        check_pairs("reduce", spans, 1, 1)
        check_reducible("reduce", [source for source, _ in spans])
        pairs = list(zip(spans, roots, strict=True))
        items = [
            (self._only(source, root), self._all(source if root == self.rank else _empty(source)))
            for (source, _), root in pairs
        ]
        targets = [target if root == self.rank else _empty(target) for (_, target), root in pairs]
        what = f"reduce({how}) to ranks {[*roots]}{_sizes_of(spans)}"
        self._exchange(what, stream, (items, _summing(targets, how, stream)))

    def broadcast(self, spans: Pairs, roots: Sequence[int], stream: int) -> None:
        check_pairs("broadcast", spans, 1, 1)
        pairs = list(zip(spans, roots, strict=True))
        items = [
            (self._all(source if root == self.rank else _empty(source)), self._only(target, root))
            for (source, target), root in pairs
        ]
        what = f"broadcast from ranks {[*roots]}{_sizes_of(spans)}"
        self._exchange(what, stream, (items, _taking(items, stream)))

    def all_to_all(self, spans: Pairs, stream: int) -> None:
        check_pairs("all_to_all", spans, 1, 1)
        items = [(self._parts(source), self._parts(target)) for source, target in spans]
        self._exchange(f"all_to_all{_sizes_of(spans)}", stream, (items, _taking(items, stream)))

    def check(self) -> None:
        """See `Comm`. Nothing happens asynchronously: calls raise."""

    def _parts(self, span: Span) -> list[Span]:
        return [part(span, rank, self.world_size) for rank in range(self.world_size)]

    def _all(self, span: Span) -> list[Span]:
        return [span] * self.world_size

    def _only(self, span: Span, root: int) -> list[Span]:
        return [span if rank == root else _empty(span) for rank in range(self.world_size)]


def _empty(span: Span) -> Span:
    return span[0], 0, span[2]


def _summing(targets: Sequence[Span], how: How, stream: int) -> Use:
    """Return what combines the tensors of each item in a target, which may be one of them."""

    def use(found: Iterable[Sequence[Tensor]]) -> None:
        for target, parts in zip(targets, found, strict=True):
            own = tensor(target, stream)
            for to, *values in zip(own.split(PIECE), *(given.split(PIECE) for given in parts), strict=True):
                to.copy_(combined([aligned(value).to(own.device) for value in values], how))

    return use


def _taking(items: Sequence[Item], stream: int) -> Use:
    """Return what copies the tensors of each item to the spans that take them."""

    def use(found: Iterable[Sequence[Tensor]]) -> None:
        for (_, spans), parts in zip(items, found, strict=True):
            for target, given in zip(spans, parts, strict=True):
                to = tensor(target, stream).view(torch.uint8)
                if to.data_ptr() != given.data_ptr():
                    to.copy_(given.view(torch.uint8), non_blocking=True)

    return use


def _sizes_of(spans: Pairs) -> str:
    return _sizes([source for source, _ in spans])


def _sizes(spans: Sequence[Span]) -> str:
    """Return the sizes of spans for messages: " of 10 fp32, 3 bf16"."""
    return (" of " if spans else "") + ", ".join(f"{elements} {dtype}" for _, elements, dtype in spans)

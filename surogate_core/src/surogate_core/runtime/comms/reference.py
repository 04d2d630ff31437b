"""The collectives as plain torch functions from the values of all ranks to the results of all ranks.

Transports without NCCL give these bits. NCCL adds in an order and in a precision of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from ...reference.rounding import accumulator


def combined(values: Sequence[Tensor], how: str) -> Tensor:
    """Return the sum or the maximum of values of one dtype.

    Sums of floats are added in fp32 (fp64 for fp64) and in order of rank, then rounded once. A NaN makes either NaN.
    """
    first, *others = values
    if how == "max":
        return reduce(torch.maximum, others, first)
    wide = accumulator(first.dtype) if first.dtype.is_floating_point else first.dtype
    return reduce(lambda total, value: total + value.to(wide), others, first.to(wide)).to(first.dtype)


def all_reduce(values: Sequence[Tensor], how: str) -> list[Tensor]:
    return [combined(values, how)] * len(values)


def reduce_scatter(values: Sequence[Tensor], how: str) -> list[Tensor]:
    return list(combined(values, how).chunk(len(values)))


def all_gather(values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([*values])] * len(values)


def to_root(values: Sequence[Tensor], root: int, how: str) -> list[Tensor]:
    """The `reduce` of a communicator. Ranks other than the root keep what they have."""
    return [combined(values, how) if rank == root else value for rank, value in enumerate(values)]


def broadcast(values: Sequence[Tensor], root: int) -> list[Tensor]:
    return [values[root]] * len(values)


def all_to_all(values: Sequence[Tensor]) -> list[Tensor]:
    parts = [value.chunk(len(values)) for value in values]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(values))]

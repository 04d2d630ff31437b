"""Torch references of the ops in `standard_ops/collectives.py`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..program.shards import part_size
from .ops import up


def _refuse_several(kind: str, world_size: int) -> None:
    if world_size != 1:
        raise ValueError(
            f"{kind} over {world_size} workers, but the reference runs a single worker and cannot communicate"
        )


def all_reduce(*values: Tensor, world_size: int, how: str = "sum") -> tuple[Tensor, ...]:
    """Return the values unchanged: the sum, or the maximum, over a single worker. Executors of several replace this."""
    _refuse_several("all_reduce", world_size)
    return values


def reduce_scatter(*values: Tensor, world_size: int, how: str = "sum") -> tuple[Tensor, ...]:
    """Return the parts of a single rank: the flat values, padded. Executors of several ranks replace this."""
    _refuse_several("reduce_scatter", world_size)
    return tuple(F.pad(x.flatten(), (0, part_size(x.numel(), world_size) - x.numel())) for x in values)


def take_part(x: Tensor, *, world_size: int) -> Tensor:
    """Return the part of a single rank. Executors of several ranks replace this."""
    return reduce_scatter(x, world_size=world_size)[0]


def all_gather(*parts: Tensor, world_size: int, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return the values of which a single rank has all elements. Executors of several ranks replace this."""
    _refuse_several("all_gather", world_size)
    return tuple(x.flatten()[: prod(shape)].view(tuple(shape)) for x, shape in zip(parts, shapes, strict=True))


def reduce(*values: Tensor, world_size: int, how: str = "sum") -> tuple[Tensor, ...]:
    """Return the values unchanged: a single rank owns all. Executors of several ranks replace this."""
    return all_reduce(*values, world_size=world_size, how=how)


def broadcast(*values: Tensor, world_size: int, shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Return values of `shapes`, made of one or more of the given ones. Executors of several ranks replace this."""
    _refuse_several("broadcast", world_size)
    parts = torch.cat([x.flatten() for x in values]).split([prod(shape) for shape in shapes])
    return tuple(x.view(tuple(shape)) for x, shape in zip(parts, shapes, strict=True))


def global_norm(*grads: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of all gradients and the clipping coefficient min(1, max_norm / (norm + 1e-6)).

    The coefficient is 1 if max_norm is 0, and NaN if the norm is not finite.
    """
    norms = torch.stack([torch.linalg.vector_norm(up(g)) for g in grads])
    norm = torch.linalg.vector_norm(norms).to(torch.float32)
    return norm, _clip_coef(norm, max_norm)


def square_sums(*values: Tensor, chunks: Sequence[int]) -> Tensor:
    """Return the sums of squares of the chunks of each value, fp64: of `chunks[i]` consecutive elements of value i."""
    sums = []
    for x, chunk in zip(values, chunks, strict=True):
        squares = up(x).flatten().square()
        padded = F.pad(squares, (0, -len(squares) % chunk))
        sums.append(padded.view(-1, chunk).sum(dim=1, dtype=torch.float64))
    return torch.cat(sums)


def norm_of_sums(sums: Tensor, *, ranges: Sequence[tuple[int, int]], max_norm: float) -> tuple[Tensor, Tensor]:
    """Return what `global_norm` does, from `square_sums`, of which the `ranges` (first, count) are added.

    They are in the order of the sums of one rank that has all values, hence the result has the same bits.
    """
    total = torch.cat([sums[first : first + count] for first, count in ranges]).sum()
    norm = total.sqrt().to(torch.float32)
    return norm, _clip_coef(norm, max_norm)


def _clip_coef(norm: Tensor, max_norm: float) -> Tensor:
    coef = torch.ones_like(norm) if max_norm == 0 else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(torch.isfinite(norm), coef, torch.full_like(coef, float("nan")))

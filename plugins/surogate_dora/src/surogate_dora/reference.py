"""References of DoRA's ops in torch: in fp32 (fp64 of fp64), rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surogate_core.reference.ops import up
from surogate_core.reference.rounding import TORCH_DTYPES

from .ops import Places


def dora_magnitude(weight: Tensor, *, places: Places, dtype: str) -> tuple[Tensor, ...]:
    """The norms of the rows of each projection."""
    return tuple(up(weight.narrow(0, *place)).norm(dim=1).to(TORCH_DTYPES[dtype]) for place in places)


def dora_pack(*matrices: Tensor, rows: int, places: Places, scale: float, dtype: str) -> tuple[Tensor, Tensor]:
    """All A, one below the other; and scale * B of each, where its rows and the columns of its A meet."""
    down = torch.cat([up(a) for a in matrices[::2]])
    packed = torch.zeros(rows, down.shape[0], dtype=down.dtype)
    column = 0
    for (first, count), b in zip(places, matrices[1::2], strict=True):
        packed[first : first + count, column : column + b.shape[1]] = scale * up(b)
        column += b.shape[1]
    return down.to(TORCH_DTYPES[dtype]), packed.to(TORCH_DTYPES[dtype])


def dora_unpack(
    down: Tensor, packed: Tensor, *, ranks: Sequence[int], places: Places, scale: float, dtypes: Sequence[str]
) -> tuple[Tensor, ...]:
    """The gradients of A and B of each projection, by those of both outputs of `dora_pack`."""
    found: list[Tensor] = []
    column = 0
    for rank, (first, count) in zip(ranks, places, strict=True):
        found.append(up(down[column : column + rank]))
        found.append(scale * up(packed[first : first + count, column : column + rank]))
        column += rank
    return tuple(grad.to(TORCH_DTYPES[dtype]) for grad, dtype in zip(found, dtypes, strict=True))


def dora_norm(weight: Tensor, down: Tensor, packed: Tensor) -> Tensor:
    """The norms of the rows of W + B A, which DoRA takes as constants."""
    return (up(weight) + up(packed) @ up(down)).norm(dim=1).detach()


def dora_scale(h: Tensor, norm: Tensor, *others: Tensor, places: Places) -> Tensor:
    """m / norm * h in the columns of each projection, and the bias on all."""
    y = up(h).clone()
    for (first, count), magnitude in zip(places, others[: len(places)], strict=True):
        columns = slice(first, first + count)
        y[:, columns] = up(magnitude) / up(norm[columns].detach()) * up(h[:, columns])
    bias = others[len(places) :]
    return (y + up(bias[0]) if bias else y).to(h.dtype)


def dora_scale_bwd(dy: Tensor, h: Tensor, norm: Tensor, *magnitudes: Tensor, places: Places) -> tuple[Tensor, ...]:
    """The gradients of h, and of m of each projection."""
    d_h = up(dy).clone()
    found: list[Tensor] = []
    for (first, count), magnitude in zip(places, magnitudes, strict=True):
        columns = slice(first, first + count)
        own = up(dy[:, columns])
        d_h[:, columns] = up(magnitude) / up(norm[columns]) * own
        found.append(((own * up(h[:, columns])).sum(0) / up(norm[columns])).to(norm.dtype))
    return d_h.to(dy.dtype), *found

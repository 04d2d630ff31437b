"""References of DoRA's ops in torch: in fp32 (fp64 of fp64), rounded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from surogate_core.reference.ops import up
from surogate_core.reference.rounding import TORCH_DTYPES

from .ops import Places


def dora_magnitude(weight: Tensor, *, places: Places, dtype: str) -> tuple[Tensor, ...]:
    """The norms of the rows of each projection."""
    return tuple(up(weight.narrow(0, *place)).norm(dim=1).to(TORCH_DTYPES[dtype]) for place in places)


def dora_norm(weight: Tensor, *matrices: Tensor, places: Places, scales: Sequence[float]) -> tuple[Tensor, ...]:
    """The norms of the rows of W + scale * B A of each projection, which DoRA takes as constants."""
    given = zip(places, scales, matrices[::2], matrices[1::2], strict=True)
    return tuple(
        (up(weight.narrow(0, *place)) + scale * (up(b) @ up(a))).norm(dim=1).to(up(weight).dtype).detach()
        for place, scale, a, b in given
    )


def dora_scale(base: Tensor, *others: Tensor, places: Places, scales: Sequence[float]) -> Tensor:
    """m / norm * (base + scale * branch) in the columns of each projection, and the bias on all."""
    y = up(base).clone()
    parts, bias = others[: 3 * len(places)], others[3 * len(places) :]
    for (first, count), scale, branch, norm, magnitude in _each(places, scales, parts):
        columns = y[:, first : first + count]
        y[:, first : first + count] = up(magnitude) / up(norm.detach()) * (columns + scale * up(branch))
    return (y + up(bias[0]) if bias else y).to(base.dtype)


def dora_scale_bwd(
    dy: Tensor, base: Tensor, *parts: Tensor, places: Places, scales: Sequence[float]
) -> tuple[Tensor, ...]:
    """The gradients of base, and of branch and m of each projection."""
    d_base = up(dy).clone()
    found: list[Tensor] = []
    for (first, count), scale, branch, norm, magnitude in _each(places, scales, parts):
        columns = slice(first, first + count)
        dh = up(magnitude) / up(norm) * up(dy[:, columns])
        d_base[:, columns] = dh
        h = up(base[:, columns]) + scale * up(branch)
        found += [(scale * dh).to(dy.dtype), ((up(dy[:, columns]) * h).sum(0) / up(norm)).to(norm.dtype)]
    return d_base.to(dy.dtype), *found


def _each(
    places: Places, scales: Sequence[float], parts: Sequence[Tensor]
) -> Iterator[tuple[tuple[int, int], float, Tensor, Tensor, Tensor]]:
    return zip(places, scales, parts[::3], parts[1::3], parts[2::3], strict=True)

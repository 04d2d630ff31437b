"""Torch reference of the `normuon` op."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from surogate_core.reference.ops import up
from surogate_core.reference.rounding import TORCH_DTYPES, store

from .iterations import METHODS, Iterations
from .scaling import factor

# Philox streams of the two values of a param that may be rounded, combined with the param's own stream.
_MASTER, _MOMENTUM = 0, 0x9E3779B9


def normuon(
    clip_coef: Tensor,
    lr: Tensor,
    step: Tensor,
    seed: Tensor,
    *values: Tensor,
    n: int,
    rows: Sequence[Sequence[int]],
    copied: Sequence[int],
    copy_dtypes: Sequence[str],
    measured: Sequence[int],
    weight_decay: float,
    streams: Sequence[int],
    momentum: float,
    beta2: float,
    cautious: bool,
    lr_scale: str,
    method: str,
) -> tuple[Tensor, ...]:
    """Apply one step to n params, each of which consists of matrices with these `rows`.

    `values` are n gradients, masters, momenta, and second moments of the rows, fp32 [rows of the param].

    g = clip_coef * grad; m = b1 m + (1 - b1) g; u = (1 - b1) g + b1 m; and of each matrix:
    O = orthogonalized u; v = b2 v + (1 - b2) mean of O^2 over columns; O' = O / (sqrt(v) + 1e-10), scaled to the norm
    of O; p -= lr wd p, if `cautious` only where O' p >= 0; p -= lr * factor * O' (scaling.py).
    Arithmetic is fp32; a kernel may round the products of the iterations to bf16. bf16 masters and momenta are stored
    with stochastic rounding. Nothing changes if `clip_coef` is not finite.

    Returns masters, momenta and second moments, then the work copies of the params `copied`, and the largest magnitudes
    of the params `measured`, fp32 []: NaN if an element is NaN.
    """
    grads, masters, momenta, variances = (values[i * n : (i + 1) * n] for i in range(4))
    new: tuple[list[Tensor], ...] = ([], [], [])
    coef, rate, t, key = float(clip_coef), float(lr), int(step), int(seed)
    for i in range(n):
        kept = (masters[i], momenta[i], variances[i])
        if isfinite(coef):
            g, m, p = up(grads[i]) * coef, up(momenta[i]), up(masters[i])
            m = m * momentum + g * (1 - momentum)
            u = g * (1 - momentum) + m * momentum
            updates = [
                _row_normalized(orthogonalized(part, METHODS[method]), v, beta2)
                for part, v in zip(u.split(list(rows[i])), variances[i].split(list(rows[i])), strict=True)
            ]
            o = torch.cat([o * _size(o, norm, lr_scale) for o, norm, _ in updates])
            decay = p * weight_decay * ((o * p) >= 0) if cautious else p * weight_decay
            p = p - rate * decay - rate * o
            kept = (
                store(p, masters[i].dtype, seed=key, stream=streams[i] ^ _MASTER, step=t),
                store(m, momenta[i].dtype, seed=key, stream=streams[i] ^ _MOMENTUM, step=t),
                torch.cat([v for _, _, v in updates]),
            )
        for column, result in zip(new, kept, strict=True):
            column.append(result)
    copies = {i: new[0][i].to(TORCH_DTYPES[dtype]) for i, dtype in zip(copied, copy_dtypes, strict=True)}
    amaxes = [copies.get(i, new[0][i]).abs().max().float() for i in measured]
    return (*new[0], *new[1], *new[2], *copies.values(), *amaxes)


def orthogonalized(x: Tensor, iterations: Iterations) -> Tensor:
    """Return a matrix with the singular vectors of `x` and singular values near 1. Zeros stay zeros."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / (wide.norm() * iterations.safety + iterations.epsilon)
    for a, b, c in iterations.coefficients:
        square = wide @ wide.T
        wide = wide * a + (square * b + square @ square * c) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


def _row_normalized(o: Tensor, v: Tensor, beta2: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return O' of the norm of `o`, that norm, and the new second moments of the rows."""
    norm = o.norm()
    v = v * beta2 + o.square().mean(dim=1) * (1 - beta2)
    scaled = o / (v.sqrt() + 1e-10)[:, None]
    return scaled * (norm / (scaled.norm() + 1e-10)), norm, v


def _size(o: Tensor, norm: Tensor, lr_scale: str) -> float:
    constant, divided = factor(o.shape[0], o.shape[1], lr_scale)
    return constant / (float(norm) + 1e-10) if divided else constant

"""Torch references of the ops in `ops.py`. They compute in fp32 (fp64 for fp64 inputs) and round each output once."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.reference.ops import add_rmsnorm, rmsnorm, rmsnorm_bwd, rmsnorm_dgrad, up

_K, _A = (2 / pi) ** 0.5, 0.044715


def scale(x: Tensor, *, factor: float) -> Tensor:
    """x * factor, with the factor rounded to the dtype of x."""
    return (up(x) * up(torch.tensor(factor, dtype=torch.float64).to(x.dtype))).to(x.dtype)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu(g) = g (1 + tanh(k (g + a g^3))) / 2 with k = sqrt(2 / pi), a = 0.044715."""
    gate, value = up(gate_up).chunk(2, dim=1)
    return (F.gelu(gate, approximate="tanh") * value).to(gate_up.dtype)


def geglu_bwd(dy: Tensor, gate_up: Tensor) -> Tensor:
    """The gradients of gate and up."""
    gate, value = up(gate_up).chunk(2, dim=1)
    t = torch.tanh(_K * (gate + _A * gate**3))
    half = (1 + t) / 2
    slope = half + gate * (1 - t.square()) * _K * (1 + 3 * _A * gate.square()) / 2
    return torch.cat((up(dy) * value * slope, up(dy) * gate * half), dim=1).to(gate_up.dtype)


def norm_add_rmsnorm(
    y: Tensor, residual: Tensor, post_w: Tensor, w: Tensor, *, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """add_rmsnorm(rmsnorm(y, post_w), residual, w)."""
    return add_rmsnorm(rmsnorm(y, post_w, eps=eps, offset=offset)[0], residual, w, eps=eps, offset=offset)


def norm_add_rmsnorm_bwd(
    dnorm: Tensor,
    total: Tensor,
    w: Tensor,
    rstd: Tensor,
    y: Tensor,
    post_w: Tensor,
    dtotal: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of residual, y, w and post_w: `rmsnorm_bwd` of both norms, the second of the first's dx."""
    dx, dw = rmsnorm_bwd(dnorm, total, w, rstd, dtotal, offset=offset)
    dy, dpost_w = rmsnorm_bwd(dx, y, post_w, rmsnorm(y, post_w, eps=eps)[1], offset=offset)
    return dx, dy, dw, dpost_w


def norm_add_rmsnorm_dgrad(
    dnorm: Tensor,
    total: Tensor,
    w: Tensor,
    rstd: Tensor,
    y: Tensor,
    post_w: Tensor,
    dtotal: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The first two outputs of `norm_add_rmsnorm_bwd`."""
    dx = rmsnorm_dgrad(dnorm, total, w, rstd, dtotal, offset=offset)
    return dx, rmsnorm_dgrad(dx, y, post_w, rmsnorm(y, post_w, eps=eps)[1], offset=offset)


def norm_add_rmsnorm_bwd_recompute(*ins: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, ...]:
    """The outputs of `norm_add_rmsnorm_bwd`, and the norm."""
    return *norm_add_rmsnorm_bwd(*ins, eps=eps, offset=offset), _norm_of(ins, offset)


def norm_add_rmsnorm_dgrad_recompute(*ins: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, ...]:
    """The outputs of `norm_add_rmsnorm_dgrad`, and the norm."""
    return *norm_add_rmsnorm_dgrad(*ins, eps=eps, offset=offset), _norm_of(ins, offset)


def _norm_of(ins: Sequence[Tensor], offset: float) -> Tensor:
    _, total, w, rstd, *_ = ins
    return (up(total) * rstd[:, None] * (up(w) + offset)).to(total.dtype)

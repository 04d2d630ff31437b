"""What the ops of `ops.py` mean, in plain torch. Computed in fp32 (fp64 for fp64 inputs) and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from surogate_core.reference.ops import up


def inverse_frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2i/D) [D/2] in fp32, by the operations of transformers: an angle is a position times one of these, so
    that at position 40,000 a difference in the last place is one of 0.002 rad."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D/2] of position * theta^(-2i/D), in fp32 whatever the inputs, as transformers has them."""
    angle = positions.to(torch.float32)[:, None, None] * inverse_frequencies(head_dim, theta)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of [T, heads, D]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _norm_weights(q_norm: Tensor, k_norm: Tensor, n_heads: int, n_kv_heads: int) -> Tensor:
    """One row of norm weights per query head, then per key head."""
    return torch.cat((up(q_norm).expand(n_heads, -1), up(k_norm).expand(n_kv_heads, -1)))


def qk_norm_rope(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    positions: Tensor,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    theta: float,
    eps: float,
) -> Tensor:
    """For every head of q and k: rope(x * rstd * w), rstd = 1 / sqrt(mean(x^2) + eps)."""
    x = qkv.view(qkv.shape[0], -1, head_dim)
    qk, v = up(x[:, : n_heads + n_kv_heads]), x[:, n_heads + n_kv_heads :]
    rstd = torch.rsqrt(qk.square().mean(-1, keepdim=True) + eps)
    normed = qk * rstd * _norm_weights(q_norm, k_norm, n_heads, n_kv_heads)
    turned = _rotate(normed, *angles(positions, head_dim, theta))
    return torch.cat((turned.to(qkv.dtype), v), dim=1).view_as(qkv)


def qk_norm_rope_bwd(
    dy: Tensor,
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    positions: Tensor,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    theta: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """d turned back, then the backward of the norm: dx = rstd * (g - n * mean(g * n)), n = x * rstd, g = d * w;
    dw = sum over tokens and heads of d * n."""
    shape = (qkv.shape[0], -1, head_dim)
    n_qk = n_heads + n_kv_heads
    x, dy = qkv.view(shape)[:, :n_qk], dy.view(shape)
    cos, sin = angles(positions, head_dim, theta)
    d = _rotate(up(dy[:, :n_qk]), cos, -sin)
    rstd = torch.rsqrt(up(x).square().mean(-1, keepdim=True) + eps)
    normed = up(x) * rstd
    g = d * _norm_weights(q_norm, k_norm, n_heads, n_kv_heads)
    dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd
    dqkv = torch.cat((dx.to(qkv.dtype), dy[:, n_qk:].to(qkv.dtype)), dim=1).view_as(qkv)
    dw = (d * normed).sum(0)
    return dqkv, dw[:n_heads].sum(0), dw[n_heads:].sum(0)

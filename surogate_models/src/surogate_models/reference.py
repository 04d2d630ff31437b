"""Torch references of the ops in `ops.py`. They compute in fp32 (fp64 for fp64 inputs) and round each output once."""

from __future__ import annotations

from math import pi
from typing import Any

import torch
from torch import Tensor

from surogate_core.reference.ops import up

from .rope import Divided, Linear, Llama3, QueryScaling, Scaling


def inverse_frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> Tensor:
    """Return the scaled inverse frequencies theta^(-2i/D), fp32 [D/2].

    They are computed by the same operations as in transformers, so that they have the same bits. An angle is a position
    times a frequency: at position 40,000 a difference of one unit in the last place is 0.002 rad.
    """
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / powers
    if scaling is None:
        return plain
    if isinstance(scaling, Linear):
        return plain / scaling.factor
    if isinstance(scaling, Divided):
        return 1.0 / (torch.tensor(scaling.factors) * powers)
    if isinstance(scaling, Llama3):
        return _llama3_frequencies(plain, scaling)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - scaling.first) / (scaling.last - scaling.first)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + plain * kept


def _llama3_frequencies(plain: Tensor, scaling: Llama3) -> Tensor:
    original, low, high = scaling.original_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * pi / plain
    kept = (original / wavelengths - low) / (high - low)
    between = (1 - kept) * plain / scaling.factor + kept * plain
    stretched = torch.where(wavelengths > original / low, plain / scaling.factor, between)
    return torch.where(wavelengths < original / high, plain, stretched)


def angles(
    positions: Tensor, head_dim: int, theta: float, scaling: Scaling | None, attention_factor: float
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, 1, D/2] for D rotated elements of a head: of position * inverse frequency,
    multiplied by `attention_factor`.

    As in transformers, both are fp32 for any dtype of the inputs.
    """
    angle = positions.to(torch.float32)[:, None, None] * inverse_frequencies(head_dim, theta, scaling)
    return angle.cos() * attention_factor, angle.sin() * attention_factor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of x [T, heads, D], for cos and sin of R/2 angles; copy the elements from R on."""
    a, b, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def query_factors(positions: Tensor, scaling: QueryScaling) -> Tensor:
    """Return the factors of query heads at `positions`, fp32 [T, 1, 1]: 1 + beta * ln(1 + floor(position / length))."""
    passed = positions.div(scaling.length, rounding_mode="floor")
    return (1 + scaling.beta * torch.log(1 + passed.to(torch.float32)))[:, None, None]


def rope(
    qkv: Tensor,
    positions: Tensor,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    theta: float,
    scaling: Scaling | None = None,
    attention_factor: float = 1.0,
    rotary_dim: int = 0,
    query_scaling: QueryScaling | None = None,
) -> Tensor:
    """Apply RoPE to every query and key head, and its factor by position to every query head; copy v."""
    cos_sin = angles(positions, rotary_dim or head_dim, theta, scaling, attention_factor)
    factors = query_factors(positions, query_scaling) if query_scaling else None
    return _rotate_qk(qkv, head_dim, n_heads, n_heads + n_kv_heads, cos_sin, factors)


def rope_bwd(
    dy: Tensor,
    positions: Tensor,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    theta: float,
    scaling: Scaling | None = None,
    attention_factor: float = 1.0,
    rotary_dim: int = 0,
    query_scaling: QueryScaling | None = None,
) -> Tensor:
    """Rotate dy by the opposite angles. Factors of queries are those of the forward pass."""
    cos, sin = angles(positions, rotary_dim or head_dim, theta, scaling, attention_factor)
    factors = query_factors(positions, query_scaling) if query_scaling else None
    return _rotate_qk(dy, head_dim, n_heads, n_heads + n_kv_heads, (cos, -sin), factors)


def _rotate_qk(
    qkv: Tensor, head_dim: int, n_q: int, n_qk: int, cos_sin: tuple[Tensor, Tensor], factors: Tensor | None
) -> Tensor:
    """`factors` [T, 1, 1] multiply the first `n_q` of the `n_qk` heads that are rotated."""
    cos, sin = cos_sin
    x = qkv.view(qkv.shape[0], -1, head_dim)
    rotated = _rotate(up(x[:, :n_qk]), cos, sin)
    if factors is not None:
        rotated = torch.cat((rotated[:, :n_q] * factors, rotated[:, n_q:]), dim=1)
    return torch.cat((rotated.to(qkv.dtype), x[:, n_qk:]), dim=1).view_as(qkv)


def _norm_weights(q_norm: Tensor, k_norm: Tensor, n_heads: int, n_kv_heads: int, offset: float) -> Tensor:
    """Return the norm weights plus `offset`, one row per query head followed by one row per key head."""
    return torch.cat((up(q_norm).expand(n_heads, -1), up(k_norm).expand(n_kv_heads, -1))) + offset


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
    scaling: Scaling | None = None,
    attention_factor: float = 1.0,
    rotary_dim: int = 0,
    offset: float = 0.0,
) -> Tensor:
    """rope(x * rstd * (w + offset)) of every query and key head, rstd = 1 / sqrt(mean(x^2) + eps)."""
    x = qkv.view(qkv.shape[0], -1, head_dim)
    qk, v = up(x[:, : n_heads + n_kv_heads]), x[:, n_heads + n_kv_heads :]
    rstd = torch.rsqrt(qk.square().mean(-1, keepdim=True) + eps)
    normed = qk * rstd * _norm_weights(q_norm, k_norm, n_heads, n_kv_heads, offset)
    rotated = _rotate(normed, *angles(positions, rotary_dim or head_dim, theta, scaling, attention_factor))
    return torch.cat((rotated.to(qkv.dtype), v), dim=1).view_as(qkv)


def qk_norm_rope_bwd(
    dy: Tensor, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, positions: Tensor, **attrs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """d_qkv of `qk_norm_rope_dgrad`; dw = sum over tokens and heads of d * n."""
    d, normed, _ = _rotated_back(dy, qkv, positions, **attrs)
    dw = (d * normed).sum(0)
    n_heads = attrs["n_heads"]
    dqkv = qk_norm_rope_dgrad(dy, qkv, q_norm, k_norm, positions, **attrs)
    return dqkv, dw[:n_heads].sum(0), dw[n_heads:].sum(0)


def qk_norm_rope_dgrad(
    dy: Tensor, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, positions: Tensor, **attrs: Any
) -> Tensor:
    """Rotate dy by the opposite angles (d), then differentiate the norm.

    dx = rstd * (g - n * mean(g * n)) with n = x * rstd, g = d * (w + offset).
    """
    d, normed, rstd = _rotated_back(dy, qkv, positions, **attrs)
    g = d * _norm_weights(q_norm, k_norm, attrs["n_heads"], attrs["n_kv_heads"], attrs.get("offset", 0.0))
    dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd
    v = dy.view(qkv.shape[0], -1, attrs["head_dim"])[:, d.shape[1] :]
    return torch.cat((dx.to(qkv.dtype), v.to(qkv.dtype)), dim=1).view_as(qkv)


def _rotated_back(
    dy: Tensor,
    qkv: Tensor,
    positions: Tensor,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    theta: float,
    eps: float,
    scaling: Scaling | None = None,
    attention_factor: float = 1.0,
    rotary_dim: int = 0,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d and n [T, H + G, D] and rstd [T, H + G, 1] of the query and key heads."""
    x, d = (up(t.view(t.shape[0], -1, head_dim)[:, : n_heads + n_kv_heads]) for t in (qkv, dy))
    cos, sin = angles(positions, rotary_dim or head_dim, theta, scaling, attention_factor)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return _rotate(d, cos, -sin), x * rstd, rstd


def join_qkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [q; k; v], side by side."""
    return torch.cat((q, k, v), dim=1)


def split_qkv(qkv: Tensor, *, widths: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Return the columns of q, k and v."""
    return tuple(part.contiguous() for part in qkv.split(list(widths), dim=1))

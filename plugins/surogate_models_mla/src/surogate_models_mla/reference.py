"""Torch references of the ops in `ops.py`. All but one move elements; sums over heads are in fp32, or in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.reference.ops import up


def latent_split(x: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
    """The first `rank` columns, and the others."""
    return x[:, :rank].clone(), x[:, rank:].clone()


def latent_split_bwd(d_latent: Tensor, d_rotated: Tensor) -> Tensor:
    """Both, side by side."""
    return torch.cat((d_latent, d_rotated), 1)


def latent_qkv(q: Tensor, kv: Tensor, rotated: Tensor, *, n_heads: int, nope: int, interleaved: bool) -> Tensor:
    """Queries, keys and values of all heads: elements with RoPE first, one rotated key for all heads, padded values."""
    tokens, rotary = rotated.shape
    straight, turned = q.view(tokens, n_heads, -1).split([nope, rotary], 2)
    queries = torch.cat((_halves(turned, interleaved), straight), 2)
    keys, values = kv.view(tokens, n_heads, -1).tensor_split([nope], 2)
    shared = _halves(rotated[:, None], interleaved).expand(-1, n_heads, -1)
    values = F.pad(values, (0, nope + rotary - values.shape[2]))
    return torch.cat((queries, torch.cat((shared, keys), 2), values), 1).reshape(tokens, -1)


def latent_qkv_bwd(
    dqkv: Tensor, *, n_heads: int, nope: int, rotary: int, v_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the rotated key is summed over the heads, in their order."""
    d_queries, d_keys, d_values = dqkv.view(len(dqkv), 3, n_heads, -1).unbind(1)
    dq = torch.cat((d_queries[..., rotary:], _pairs(d_queries[..., :rotary], interleaved)), 2)
    dkv = torch.cat((d_keys[..., rotary:], d_values[..., :v_dim]), 2)
    total = torch.zeros_like(up(d_keys[:, 0, :rotary]))
    for head in range(n_heads):
        total += up(d_keys[:, head, :rotary])
    return dq.flatten(1), dkv.flatten(1), _pairs(total.to(dqkv.dtype), interleaved)


def latent_values(y: Tensor, *, n_heads: int, v_dim: int) -> Tensor:
    """The first `v_dim` elements of each head."""
    return y.view(len(y), n_heads, -1)[..., :v_dim].flatten(1).clone()


def latent_values_bwd(dy: Tensor, *, n_heads: int, head_dim: int) -> Tensor:
    """Heads of `head_dim` elements, with zeros behind those given."""
    dy = dy.view(len(dy), n_heads, -1)
    return F.pad(dy, (0, head_dim - dy.shape[2])).flatten(1)


def _halves(x: Tensor, interleaved: bool) -> Tensor:
    """Return x [..., R] with the first elements of its pairs in front of the second ones."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1) if interleaved else x


def _pairs(x: Tensor, interleaved: bool) -> Tensor:
    """Undo `_halves`."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2) if interleaved else x

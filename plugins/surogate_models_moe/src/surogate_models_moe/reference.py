"""Torch references of the ops in `ops.py`. They compute in fp32 (fp64 for fp64 inputs) and round each output once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.reference.ops import add, linear_wgrad, up

# ------------------------------------------------------------------------------------------------------------- routes


def route(logits: Tensor, *, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The k experts of each token with the largest logits, and their shares of the softmax over all experts.

    Experts of a token are in the order of falling logits, of equal logits the lower number first. With `normalize`,
    the shares are divided by their sum, which makes them the softmax over these k.
    """
    experts = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :k]
    wide = up(logits)
    weights = F.softmax(wide.gather(1, experts), 1) if normalize else F.softmax(wide, 1).gather(1, experts)
    return weights, experts.int()


def route_bwd(d_weights: Tensor, logits: Tensor, experts: Tensor, *, normalize: bool) -> Tensor:
    """p (dp - sum(p dp)), p the shares of all experts or, with `normalize`, of the k. dp = 0 for the others."""
    experts, wide = experts.long(), up(logits)
    p = F.softmax(wide.gather(1, experts), 1) if normalize else F.softmax(wide, 1).gather(1, experts)
    mean = (p * d_weights).sum(1, keepdim=True)
    result = torch.zeros_like(wide) if normalize else -F.softmax(wide, 1) * mean
    return result.scatter(1, experts, p * (d_weights - mean)).to(logits.dtype)


def expert_order(experts: Tensor, *, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The slots in the order of their experts, of one expert in the order of slots; its inverse; ends of the groups."""
    flat = experts.flatten()
    order = torch.sort(flat, stable=True).indices
    return order.int(), torch.argsort(order).int(), torch.bincount(flat, minlength=n_experts).cumsum(0).int()


def router_load(
    logits: Tensor, experts: Tensor, targets: Tensor, before: Tensor | None = None, *, layer: int, layers: int
) -> Tensor:
    """In row `layer`, of the tokens with a label: the routes of each expert, and the sum of the entropies."""
    labelled, n_experts = targets >= 0, logits.shape[1]
    log_shares = F.log_softmax(up(logits)[labelled], 1)
    entropy = -torch.special.xlogy(log_shares.exp(), log_shares.exp()).sum()
    routes = torch.bincount(experts[labelled].flatten(), minlength=n_experts)
    load = entropy.new_zeros(layers, n_experts + 1) if before is None else before.clone()
    load[layer] = torch.cat((routes.to(load.dtype), entropy[None]))
    return load


# --------------------------------------------------------------------------------------------------------------- rows


def gather_rows(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Row r is that of the token of order[r]."""
    return x[order.long() // (order.numel() // x.shape[0])]


def sum_rows(y: Tensor, order: Tensor, place: Tensor, *, k: int) -> Tensor:
    """The sum of the k rows of each token, in the order of its slots."""
    total = torch.zeros(y.shape[0] // k, y.shape[1], dtype=up(y[:0]).dtype)
    for rows in place.long().view(-1, k).unbind(1):
        total += up(y[rows])
    return total.to(y.dtype)


# ----------------------------------------------------------------------------------------------------------- products


def _groups(ends: Tensor) -> Iterator[slice]:
    """Yield the rows of each expert."""
    start = 0
    for end in ends.tolist():
        yield slice(start, end)
        start = end


def grouped_linear(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x w^T of the rows of each expert with its weight."""
    of_experts = w.view(ends.numel(), -1, w.shape[1])
    y = [up(x[rows]) @ up(of_experts[e]).T for e, rows in enumerate(_groups(ends))]
    return torch.cat(y).to(x.dtype)


def grouped_linear_dgrad(dy: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """dy w of the rows of each expert with its weight."""
    of_experts = w.view(ends.numel(), -1, w.shape[1])
    dx = [up(dy[rows]) @ up(of_experts[e]) for e, rows in enumerate(_groups(ends))]
    return torch.cat(dx).to(dy.dtype)


def grouped_linear_add(x: Tensor, w: Tensor, ends: Tensor, base: Tensor) -> Tensor:
    """add(grouped_linear(x, w, ends), base). A kernel need not round the product before the sum."""
    return add(grouped_linear(x, w, ends), base)


def grouped_linear_dgrad_add(dy: Tensor, w: Tensor, ends: Tensor, base: Tensor) -> Tensor:
    """add(grouped_linear_dgrad(dy, w, ends), base). A kernel need not round the product before the sum."""
    return add(grouped_linear_dgrad(dy, w, ends), base)


def grouped_linear_pair(x: Tensor, w: Tensor, ends: Tensor, x2: Tensor, w2: Tensor) -> Tensor:
    """grouped_linear_add(x2, w2, ends, grouped_linear(x, w, ends)). A kernel rounds once."""
    return grouped_linear_add(x2, w2, ends, grouped_linear(x, w, ends))


def grouped_linear_dgrad_pair(dy: Tensor, w: Tensor, ends: Tensor, dy2: Tensor, w2: Tensor) -> Tensor:
    """grouped_linear_dgrad_add(dy2, w2, ends, grouped_linear_dgrad(dy, w, ends)). A kernel rounds once."""
    return grouped_linear_dgrad_add(dy2, w2, ends, grouped_linear_dgrad(dy, w, ends))


def grouped_linear_wgrad(dy: Tensor, x: Tensor, ends: Tensor, *, dtype: str | None = None) -> Tensor:
    """`linear_wgrad` of the rows of each expert, one above another; zeros for an expert without rows."""
    return torch.cat([linear_wgrad(dy[rows], x[rows], dtype=dtype) for rows in _groups(ends)])


# ------------------------------------------------------------------------------------------------------------- SwiGLU


def _of_rows(weights: Tensor, order: Tensor) -> Tensor:
    return weights.flatten()[order.long(), None]


def weighted_swiglu(gate_up: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """silu(gate) * up * the weight of the row."""
    gate, value = up(gate_up).chunk(2, dim=1)
    return (F.silu(gate) * value * _of_rows(weights, order)).to(gate_up.dtype)


def weighted_swiglu_bwd(dy: Tensor, gate_up: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, and of the weights: sum(dy * silu(gate) * up)."""
    gate, value = up(gate_up).chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    silu, g = gate * sigmoid, up(dy) * _of_rows(weights, order)
    d_gate_up = torch.cat((g * value * sigmoid * (1 + gate * (1 - sigmoid)), g * silu), dim=1).to(gate_up.dtype)
    d_weights = torch.empty_like(weights)
    d_weights.view(-1)[order.long()] = (up(dy) * silu * value).sum(1)
    return d_gate_up, d_weights

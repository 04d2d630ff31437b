"""Torch references of the ops in `ops.py`. They compute in fp32 (fp64 for fp64 inputs) and round each output once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.reference.gates import experts_gate, experts_gate_bwd
from surogate_core.reference.ops import add, linear_wgrad, up

# ------------------------------------------------------------------------------------------------------------- routes


def route(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    normalize: bool,
    scoring: str = "softmax",
    scale: float = 1.0,
    epsilon: float = 0.0,
    groups: int = 1,
    chosen_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token with the largest logits, and their shares of the softmax over all experts.

    Experts of a token are in the order of falling logits, of equal logits the lower number first. With `normalize`,
    the shares are divided by their sum, which makes them the softmax over these k.

    With a bias or groups, experts are compared by score + bias: first groups, by the sum of their two best, then the
    experts of the `chosen_groups` best. Of equal ones the lower number is first there too.
    """
    compared = logits
    if bias is not None or groups > 1:
        compared = _scores(logits, scoring)
        compared = compared if bias is None else compared + bias
    if groups > 1:
        compared = _in_best_groups(compared, groups, chosen_groups)
    experts = torch.sort(compared, dim=1, descending=True, stable=True).indices[:, :k]
    return _weights(logits, experts, normalize, scoring, epsilon) * scale, experts.int()


def _scores(logits: Tensor, scoring: str) -> Tensor:
    """The scores of all experts, of which the weights of the chosen ones are made."""
    return torch.sigmoid(up(logits)) if scoring == "sigmoid" else F.softmax(up(logits), 1)


def _in_best_groups(compared: Tensor, groups: int, chosen: int) -> Tensor:
    """-inf for all experts but those of the `chosen` groups with the largest sum of their two best."""
    by_group = compared.unflatten(1, (groups, -1))
    judged = by_group.topk(2, dim=2).values.sum(2)
    best = torch.sort(judged, dim=1, descending=True, stable=True).indices[:, :chosen]
    left_out = torch.ones_like(judged, dtype=torch.bool).scatter(1, best, False)
    return by_group.masked_fill(left_out[:, :, None], -torch.inf).flatten(1)


def _weights(logits: Tensor, experts: Tensor, normalize: bool, scoring: str, epsilon: float) -> Tensor:
    """The weights of `experts`, before `scale`."""
    if scoring == "softmax" and normalize and not epsilon:
        return F.softmax(up(logits).gather(1, experts), 1)  # the same without the logits of the others
    scores = _scores(logits, scoring).gather(1, experts)
    return scores / (scores.sum(1, keepdim=True) + epsilon) if normalize else scores


def route_bwd(
    d_weights: Tensor,
    logits: Tensor,
    experts: Tensor,
    *,
    normalize: bool,
    scoring: str = "softmax",
    scale: float = 1.0,
    epsilon: float = 0.0,
) -> Tensor:
    """p (dp - sum(p dp)), p the shares of all experts or, with `normalize`, of the k. dp = 0 for the others.

    In general ds = (dp - sum(p dp)) / sum of the k scores s, or dp without `normalize`, and the gradient of the scores:
    s (1 - s) ds of a sigmoid, s (ds - sum(s ds)) of a softmax.
    """
    experts, wide, g = experts.long(), up(logits), d_weights * scale
    if scoring == "softmax" and not epsilon:
        p = _weights(logits, experts, normalize, scoring, epsilon)
        mean = (p * g).sum(1, keepdim=True)
        result = torch.zeros_like(wide) if normalize else -F.softmax(wide, 1) * mean
        return result.scatter(1, experts, p * (g - mean)).to(logits.dtype)
    every = _scores(logits, scoring)
    scores = every.gather(1, experts)
    if normalize:
        total = scores.sum(1, keepdim=True) + epsilon
        g = (g - (g * scores).sum(1, keepdim=True) / total) / total
    if scoring == "sigmoid":
        return torch.zeros_like(wide).scatter(1, experts, g * scores * (1 - scores)).to(logits.dtype)
    mean = (scores * g).sum(1, keepdim=True)
    return (-every * mean).scatter(1, experts, scores * (g - mean)).to(logits.dtype)


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


def add_expert_bias(y: Tensor, weights: Tensor, experts: Tensor, bias: Tensor) -> Tensor:
    """y + the sum of the biases of each token's experts, multiplied by their weights."""
    total = up(y)
    for weight, expert in zip(weights.unbind(1), experts.long().unbind(1), strict=True):
        total = total + weight[:, None] * up(bias)[expert]
    return total.to(y.dtype)


def expert_bias_dgrad(dy: Tensor, experts: Tensor, bias: Tensor) -> Tensor:
    """The gradient of the weights of `add_expert_bias`: the product of dy and the bias of each expert of a token."""
    return torch.stack([(up(dy) * up(bias)[expert]).sum(1) for expert in experts.long().unbind(1)], dim=1)


def expert_bias_grad(dy: Tensor, weights: Tensor, experts: Tensor, *, n_experts: int) -> Tensor:
    """The gradient of the bias of `add_expert_bias`: of each expert, the weighted sum of the dy of its tokens."""
    shares = torch.zeros(dy.shape[0], n_experts, dtype=weights.dtype).scatter_add(1, experts.long(), weights)
    return shares.T @ up(dy)


# ----------------------------------------------------------------------------------------------------------- products


def _groups(ends: Tensor) -> Iterator[slice]:
    """Yield the rows of each expert."""
    start = 0
    for end in ends.tolist():
        yield slice(start, end)
        start = end


def grouped_linear(x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w^T of the rows of each expert with its weight, + its bias."""
    of_experts = w.view(ends.numel(), -1, w.shape[1])
    y = [up(x[rows]) @ up(of_experts[e]).T for e, rows in enumerate(_groups(ends))]
    if bias is not None:
        y = [product + up(own) for product, own in zip(y, bias, strict=True)]
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


def _part(w: Tensor, ends: Tensor, width: int, first: int) -> tuple[slice, slice, Tensor]:
    """The experts of w, their rows, and the ends of these."""
    experts = slice(first, first + w.shape[0] // width)
    start = int(ends[first - 1]) if first else 0
    return experts, slice(start, int(ends[experts.stop - 1])), ends[experts] - start


def _replaced(base: Tensor, rows: slice, part: Tensor) -> Tensor:
    return torch.cat([base[: rows.start], part, base[rows.stop :]])


def _matrices(w: Tensor, ends: Tensor, experts: slice) -> Tensor:
    return w.view(ends.numel(), -1, w.shape[1])[experts].flatten(0, 1)


def grouped_linear_part(
    base: Tensor, x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None = None, *, first: int
) -> Tensor:
    """base, with `grouped_linear` of the experts of w, from `first` on, in their rows."""
    experts, rows, own = _part(w, ends, base.shape[1], first)
    y = grouped_linear(x[rows], w, own, None if bias is None else bias[experts])
    return _replaced(base, rows, y)


def grouped_linear_dgrad_part(base: Tensor, dy: Tensor, w: Tensor, ends: Tensor, *, first: int) -> Tensor:
    """base, with `grouped_linear_dgrad` of the experts of w, from `first` on, in their rows."""
    _, rows, own = _part(w, ends, dy.shape[1], first)
    return _replaced(base, rows, grouped_linear_dgrad(dy[rows], w, own))


def grouped_linear_pair_part(
    base: Tensor, x: Tensor, w: Tensor, ends: Tensor, x2: Tensor, w2: Tensor, *, first: int
) -> Tensor:
    """base, with `grouped_linear_pair` of the experts of w, from `first` on, in their rows."""
    experts, rows, own = _part(w, ends, base.shape[1], first)
    y = grouped_linear_pair(x[rows], w, own, x2[rows], _matrices(w2, ends, experts))
    return _replaced(base, rows, y)


def grouped_linear_dgrad_pair_part(
    base: Tensor, dy: Tensor, w: Tensor, ends: Tensor, dy2: Tensor, w2: Tensor, *, first: int
) -> Tensor:
    """base, with `grouped_linear_dgrad_pair` of the experts of w, from `first` on, in their rows."""
    experts, rows, own = _part(w, ends, dy.shape[1], first)
    dx = grouped_linear_dgrad_pair(dy[rows], w, own, dy2[rows], _matrices(w2, ends, experts))
    return _replaced(base, rows, dx)


def grouped_linear_wgrad(dy: Tensor, x: Tensor, ends: Tensor, *, dtype: str | None = None) -> Tensor:
    """`linear_wgrad` of the rows of each expert, one above another; zeros for an expert without rows."""
    return torch.cat([linear_wgrad(dy[rows], x[rows], dtype=dtype) for rows in _groups(ends)])


def grouped_linear_bgrad(dy: Tensor, ends: Tensor) -> Tensor:
    """The sum of the rows of each expert; zeros for an expert without rows."""
    return torch.stack([up(dy[rows]).sum(0) for rows in _groups(ends)])


# ------------------------------------------------------------------------------------------------------------- SwiGLU


def _of_rows(weights: Tensor, order: Tensor) -> Tensor:
    return weights.flatten()[order.long(), None]


def weighted_swiglu(
    gate_up: Tensor,
    weights: Tensor,
    order: Tensor,
    *,
    alpha: float = 1.0,
    limit: float = 0.0,
    offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """silu(gate) * up * the weight of the row.

    In general gate * sigmoid(alpha * gate) * (up + offset) * the weight, of a gate of at most `limit` and up from
    -`limit` to `limit`; 0: without limit.
    """
    opened = experts_gate(gate_up, alpha=alpha, limit=limit, offset=offset, interleaved=interleaved)
    return (opened * _of_rows(weights, order)).to(gate_up.dtype)


def weighted_swiglu_bwd(
    dy: Tensor,
    gate_up: Tensor,
    weights: Tensor,
    order: Tensor,
    *,
    alpha: float = 1.0,
    limit: float = 0.0,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, and of the weights: sum(dy * silu(gate) * up). A clamped element has none."""
    d = up(dy) * _of_rows(weights, order)
    both, opened, value = experts_gate_bwd(d, gate_up, alpha=alpha, limit=limit, offset=offset, interleaved=interleaved)
    d_weights = torch.empty_like(weights)
    d_weights.view(-1)[order.long()] = (up(dy) * opened * value).sum(1)
    return both.to(gate_up.dtype), d_weights


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), of which each row has one."""
    return (up(x) * torch.sigmoid(up(gate))).to(x.dtype)


def gate_rows_bwd(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the gate: with s = sigmoid(gate), dy s and s (1 - s) sum(dy x)."""
    share = torch.sigmoid(up(gate))
    d_gate = share * (1 - share) * (up(dy) * up(x)).sum(1, keepdim=True)
    return (up(dy) * share).to(x.dtype), d_gate.to(gate.dtype)

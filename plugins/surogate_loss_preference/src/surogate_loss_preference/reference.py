"""Torch references of the ops of pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def document_sums(values: Tensor, targets: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return [G, n]: the sum of the values of each document, which are 0 without a label, and its number of labels."""
    labels = (targets >= 0).to(values.dtype)
    spans = groups.flatten(0, 1).tolist()
    sums, counts = (torch.stack([x[a:b].sum() for a, b in spans]).view(groups.shape[:2]) for x in (values, labels))
    return sums, counts


def document_sums_bwd(d_sums: Tensor, targets: Tensor, groups: Tensor) -> Tensor:
    """The gradient of the values: that of their document's sum."""
    d_values = torch.zeros(targets.shape, dtype=d_sums.dtype)
    for gradient, (start, stop) in zip(d_sums.flatten(), groups.flatten(0, 1).tolist(), strict=True):
        d_values[start:stop] = gradient
    return d_values


def pair_loss(
    sums: Tensor,
    labels: Tensor,
    scale: Tensor,
    reference: Tensor | None = None,
    *,
    form: str,
    beta: float,
    smoothing: float = 0.0,
    gamma: float = 0.0,
) -> tuple[Tensor, ...]:
    """Return scale times the sums over pairs of: the loss, both rewards, their margin, whether it is positive.

    sums, labels, reference: [G, 2], of the chosen and of the rejected answer: the sum of its log-probabilities, its
    number of labels, and the sum in the reference. Rows without labels are no pairs. With p and r of one answer in the
    policy and the reference, means over its labels in place of sums for ipo, orpo and simpo, and
    h = (p - r of the chosen) - (p - r of the rejected):

        sigmoid  -(1 - smoothing) log sigmoid(beta h) - smoothing log sigmoid(-beta h)
        hinge    max(0, 1 - beta h)
        ipo      (h - 1 / (2 beta))^2
        simpo    as sigmoid, of beta h - gamma
        orpo     -p of the chosen - beta log sigmoid(log odds of the chosen - log odds of the rejected)

    Rewards are beta (p - r).
    """
    is_pair = (labels > 0).all(-1)
    p, n = sums[is_pair], labels[is_pair]
    r = torch.zeros_like(p) if reference is None else reference[is_pair]
    if form in ("ipo", "orpo", "simpo"):
        p, r = p / n, r / n
    chosen, rejected = (p - r).unbind(-1)
    h = chosen - rejected
    if form == "orpo":
        chosen_odds, rejected_odds = (p - torch.log1p(-p.exp())).unbind(-1)
        loss = -p[:, 0] - beta * F.logsigmoid(chosen_odds - rejected_odds)
    elif form == "ipo":
        loss = (h - 1 / (2 * beta)).square()
    elif form == "hinge":
        loss = F.relu(1 - beta * h)
    else:
        z = beta * h - gamma
        loss = -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)
    figures = (loss, beta * chosen, beta * rejected, beta * h, (h > 0).to(h.dtype))
    return tuple(scale * figure.sum() for figure in figures)

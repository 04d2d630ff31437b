"""Torch references of the ops of pairs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.reference.ops import up
from surogate_core.reference.rounding import TORCH_DTYPES


def _documents(groups: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the document of each token, [T], and whether it is in one. Documents ascend; unused entries are empty."""
    starts, stops = groups.flatten(0, 1).unbind(-1)
    position = torch.arange(tokens)
    used = int((stops > starts).sum())
    document = torch.bucketize(position, starts[:used].contiguous(), right=True) - 1
    return document, (document >= 0) & (position < stops[document.clamp(min=0)])


def document_sums(values: Tensor, targets: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return [G, n]: the sum of the values of each document, which are 0 without a label, and its number of labels."""
    document, inside = _documents(groups, len(values))

    def total(addend: Tensor) -> Tensor:
        zeros = torch.zeros(groups.shape[0] * groups.shape[1], dtype=values.dtype)
        return zeros.index_add(0, document[inside], addend[inside]).view(groups.shape[:2])

    return total(values), total((targets >= 0).to(values.dtype))


def document_sums_bwd(d_sums: Tensor, targets: Tensor, groups: Tensor) -> Tensor:
    """The gradient of the values: that of their document's sum; 0 outside of documents."""
    document, inside = _documents(groups, len(targets))
    return torch.where(inside, d_sums.flatten()[document.clamp(min=0)], 0.0)


def _score_rows(tokens: Tensor, groups: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Return the row of each document whose score it has, [D], and whether it is used: the last token but `padding`."""
    starts, stops = groups.flatten(0, 1).long().unbind(-1)
    document, inside = _documents(groups, len(tokens))
    read = inside & (tokens != padding)
    rows = starts.scatter_reduce(0, document[read], torch.arange(len(tokens))[read], "amax")
    return rows, stops > starts


def document_scores(
    x: Tensor, weight: Tensor, tokens: Tensor, groups: Tensor, *, padding: int
) -> tuple[Tensor, Tensor]:
    """Return [G, n]: x weight^T at the last token of each document that is not `padding`, and 1 where it is used.

    A document of nothing but padding has the score of its first token. Unused entries of `groups` have 0.
    """
    rows, used = _score_rows(tokens, groups, padding)
    scores = torch.where(used, (up(x[rows]) * up(weight)).sum(-1), 0.0)
    return scores.view(groups.shape[:2]), used.to(scores.dtype).view(groups.shape[:2])


def document_scores_dgrad(
    d_scores: Tensor, weight: Tensor, tokens: Tensor, groups: Tensor, *, padding: int, dtype: str | None = None
) -> Tensor:
    """The gradient of x: that of its score times the weight in the row of each document, else 0."""
    rows, used = _score_rows(tokens, groups, padding)
    dx = torch.zeros(len(tokens), weight.shape[1], dtype=weight.dtype if dtype is None else TORCH_DTYPES[dtype])
    dx[rows[used]] = (d_scores.flatten()[used, None] * up(weight)).to(dx.dtype)
    return dx


def document_scores_wgrad(d_scores: Tensor, x: Tensor, tokens: Tensor, groups: Tensor, *, padding: int) -> Tensor:
    """The gradient of the weight: the sum over documents of the gradient of the score times its row of x."""
    rows, used = _score_rows(tokens, groups, padding)
    return d_scores.flatten()[used][None] @ up(x[rows[used]])


def kto_loss(
    sums: Tensor,
    labels: Tensor,
    scale: Tensor,
    reference: Tensor,
    desirable: Tensor,
    mean_log_ratio: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> tuple[Tensor, ...]:
    """Return scale times the sums over answers of: the loss, h, kl, the signed reward, whether it is > 0, and [2, 3].

    sums, labels, reference, desirable: [G, 1], of each answer: the sum of its log-probabilities, its number of labels,
    the sum in the reference, and 1 or 0. Rows without labels are no answers. mean_log_ratio: of mismatched answers.
    With h = sum - reference, kl = max(0, mean_log_ratio), and s = 1 for desirable answers, else -1:

        loss           weight (1 - sigmoid(s beta (h - kl)))
        signed reward  s beta (h - kl)
        [2, 3]         of desirable answers, then of the others: 1, the reward beta h, and sum
    """
    used = labels > 0
    p, h, wanted = sums[used], (sums - reference)[used], desirable[used] > 0
    kl = mean_log_ratio.clamp(min=0)
    signed = torch.where(wanted, beta * (h - kl), beta * (kl - h))
    weight = torch.where(wanted, desirable_weight, undesirable_weight)
    figures = (weight * torch.sigmoid(-signed), h, kl.expand_as(h), signed, (signed > 0).to(h.dtype))
    each = torch.stack((torch.ones_like(h), beta * h, p))
    by_label = torch.stack([each[:, wanted].sum(1), each[:, ~wanted].sum(1)])
    return (*(scale * figure.sum() for figure in figures), scale * by_label)


def kto_loss_bwd(
    d_loss: Tensor,
    sums: Tensor,
    labels: Tensor,
    scale: Tensor,
    reference: Tensor,
    desirable: Tensor,
    mean_log_ratio: Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """The gradient of sums: d_loss scale weight (-s beta) p (1 - p), with p the sigmoid in the loss."""
    wanted = desirable > 0
    sign = torch.where(wanted, beta, -beta)
    p = torch.sigmoid(sign * (sums - reference - mean_log_ratio.clamp(min=0)))
    weight = torch.where(wanted, desirable_weight, undesirable_weight)
    return torch.where(labels > 0, d_loss * scale * weight * -sign * p * (1 - p), 0.0)


def pair_loss(
    sums: Tensor,
    labels: Tensor,
    scale: Tensor,
    *others: Tensor,
    form: str,
    beta: float,
    smoothing: float = 0.0,
    gamma: float = 0.0,
    center: float = 0.0,
    nll: float = 0.0,
    margined: bool = False,
) -> tuple[Tensor, ...]:
    """Return scale times the sums over pairs of: the loss, both rewards, their margin, whether it is positive, and [5].

    sums, labels: [G, 2], of the chosen and of the rejected answer: the sum of its log-probabilities and its number of
    labels. others: the sums in the reference, [G, 2], if there is one; then, if `margined`, how much better the chosen
    answer is, [G, 2], of which the first column is read. Rows without labels are no pairs. With p and r of one answer
    in the policy and the reference, means over its labels in place of sums for ipo, orpo and simpo, and
    h = (p - r of the chosen) - (p - r of the rejected):

        sigmoid  -(1 - smoothing) log sigmoid(z) - smoothing log sigmoid(-z), with z = beta h - gamma - margin
        hinge    max(0, 1 - beta h)
        ipo      (h - 1 / (2 beta))^2
        simpo    as sigmoid
        orpo     -p of the chosen - beta log sigmoid(log odds of the chosen - log odds of the rejected)

    Every form adds center (p - r of the chosen + p - r of the rejected)^2, and nll times the mean of -log-probabilities
    of the chosen answer. Rewards are beta (p - r), of sums for ipo too. [5] are p of both answers, of sums for ipo too;
    that mean; and for orpo log sigmoid of the difference of the log odds, and this difference, else 0.
    """
    is_pair = (labels > 0).all(-1)
    margin = others[-1][is_pair][:, 0] if margined else 0.0
    reference = others[0] if len(others) > margined else None
    said, n = sums[is_pair], labels[is_pair]
    known = torch.zeros_like(said) if reference is None else reference[is_pair]
    p, r = (said / n, known / n) if form in ("ipo", "orpo", "simpo") else (said, known)
    chosen, rejected = (p - r).unbind(-1)
    h, zero = chosen - rejected, torch.zeros_like(said[:, 0])
    entropy, log_odds = -said[:, 0] / n[:, 0], zero
    if form == "orpo":
        uncertain = p.clamp(max=-torch.finfo(p.dtype).eps)  # the odds of probability 1 are infinite
        chosen_odds, rejected_odds = (uncertain - torch.log(-torch.expm1(uncertain))).unbind(-1)
        log_odds = chosen_odds - rejected_odds
        loss = entropy - beta * F.logsigmoid(log_odds)
    elif form == "ipo":
        loss = (h - 1 / (2 * beta)).square()
    elif form == "hinge":
        loss = F.relu(1 - beta * h)
    else:
        z = beta * h - gamma - margin
        loss = -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)
    loss = loss + center * (chosen + rejected).square() + nll * entropy
    shown, rewards = (said, said - known) if form == "ipo" else (p, p - r)
    gain = rewards[:, 0] - rewards[:, 1]
    figures = (loss, beta * rewards[:, 0], beta * rewards[:, 1], beta * gain, (gain > 0).to(h.dtype))
    ratio = F.logsigmoid(log_odds) if form == "orpo" else zero
    more = torch.stack((shown[:, 0], shown[:, 1], entropy, ratio, log_odds)).sum(1)
    return (*(scale * figure.sum() for figure in figures), scale * more)


def pair_loss_bwd(
    d_loss: Tensor, sums: Tensor, labels: Tensor, scale: Tensor, *others: Tensor, form: str, **attrs: Any
) -> Tensor:
    """Return the gradient of `sums`."""
    with torch.enable_grad():
        leaf = sums.detach().requires_grad_()
        loss, *_ = pair_loss(leaf, labels, scale, *others, form=form, **attrs)
        (gradient,) = torch.autograd.grad(loss, leaf, d_loss)
    return gradient

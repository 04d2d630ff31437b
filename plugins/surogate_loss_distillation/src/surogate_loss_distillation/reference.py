"""Torch references. Every function upcasts its operands and rounds each output once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from surogate_core.reference.ops import linear, up
from surogate_core.reference.rounding import accumulator


class _Chunk(NamedTuple):
    """Labelled rows of a chunk: their indices, logits, cross-entropies, divergences, and log-probabilities.

    of_labels: of the student, [rows, V]. softened: the same of logits / temperature. others: bool [rows, V], the tokens
    that are not among the teacher's. student, teacher: log-probabilities of the buckets, [rows, k + 1], or [rows, k].
    """

    rows: Tensor
    logits: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    of_labels: Tensor
    softened: Tensor
    others: Tensor
    student: Tensor
    teacher: Tensor


def _chunks(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    chunks: int,
    temperature: float,
    reverse: bool,
    softcap: float,
) -> Iterator[_Chunk]:
    k, vocabulary = ids.shape[1], w.shape[0]
    for rows in (targets >= 0).nonzero().flatten().split(targets.shape[0] // chunks):
        if not len(rows):
            continue
        logits = up(linear(x[rows], w))
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        of_labels = logits.log_softmax(-1)
        softened = (logits / temperature).log_softmax(-1)
        top = ids[rows].long()
        others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, top, False)
        student, teacher = softened.gather(1, top), log_probs[rows, :k].to(logits.dtype)
        if k < vocabulary:
            remainder = softened.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)
            student = torch.cat((student, remainder), 1)
            teacher = torch.cat((teacher, log_probs[rows, k:].to(logits.dtype)), 1)
        weights, difference = (student.exp(), student - teacher) if reverse else (teacher.exp(), teacher - student)
        cross_entropy = -of_labels.gather(1, targets[rows].long()[:, None])[:, 0]
        divergence = (weights * difference).sum(-1)
        yield _Chunk(rows, logits, cross_entropy, divergence, of_labels, softened, others, student, teacher)


def _sums(weight: float, temperature: float, cross_entropy: Tensor, divergence: Tensor) -> tuple[Tensor, ...]:
    return (1 - weight) * cross_entropy + weight * temperature**2 * divergence, cross_entropy, divergence


def lm_head_distill(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    loss_scale: Tensor,
    *,
    chunks: int,
    weight: float,
    temperature: float,
    reverse: bool,
    softcap: float = 0.0,
) -> tuple[Tensor, ...]:
    """Return loss_scale times the sums over labelled rows of: the loss, the cross-entropy, the divergence.

    ids [T, k], log_probs [T, k + 1]: tokens of the teacher's softmax(logits / temperature), the logarithms of their
    probabilities, and that of all other tokens together, which is not read if k is the whole vocabulary. q is the
    teacher, p the student, over these k + 1 buckets, both with the temperature:

        loss        (1 - weight) cross_entropy + weight temperature^2 divergence
        divergence  sum q (log q - log p); reverse: sum p (log p - log q)

    softcap: the logits are softcap * tanh(x w^T / softcap); 0: no cap.
    """
    cross_entropy, divergence = (torch.zeros((), dtype=accumulator(x.dtype)) for _ in range(2))
    for chunk in _chunks(x, w, targets, ids, log_probs, chunks, temperature, reverse, softcap):
        cross_entropy = cross_entropy + chunk.cross_entropy.sum()
        divergence = divergence + chunk.divergence.sum()
    return tuple(loss_scale * total for total in _sums(weight, temperature, cross_entropy, divergence))


def lm_head_distill_grads(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    loss_scale: Tensor,
    *,
    chunks: int,
    weight: float,
    temperature: float,
    reverse: bool,
    wrt: Sequence[int],
    softcap: float = 0.0,
) -> tuple[Tensor, ...]:
    """Return the outputs of `lm_head_distill`, and the gradients of the inputs in `wrt`: 0 is dx, 1 is dw.

    With y the capped logits and b(v) the bucket of token v, the gradient of y, rounded to the dtype of x, is loss_scale
    times (1 - weight) (softmax(y) - onehot) + weight temperature d, and with a cap times 1 - (y / softcap)^2, where

        d           p_v - q_b(v) p_v / p_b(v); reverse: p_v (log p_b(v) - log q_b(v) - divergence)
    """
    cross_entropy, divergence = (torch.zeros((), dtype=accumulator(x.dtype)) for _ in range(2))
    dx = torch.zeros_like(x) if 0 in wrt else None
    dw = torch.zeros(w.shape, dtype=accumulator(x.dtype)) if 1 in wrt else None
    k = ids.shape[1]
    for chunk in _chunks(x, w, targets, ids, log_probs, chunks, temperature, reverse, softcap):
        rows = chunk.rows
        cross_entropy = cross_entropy + chunk.cross_entropy.sum()
        divergence = divergence + chunk.divergence.sum()
        top, probabilities = ids[rows].long(), chunk.softened.exp()
        if reverse:
            factors = chunk.student - chunk.teacher - chunk.divergence[:, None]
            own = torch.zeros_like(chunk.logits).scatter_(1, top, factors[:, :k])
            own = torch.where(chunk.others, factors[:, k:], own) if factors.shape[1] > k else own
            d = probabilities * own
        else:
            q = chunk.teacher.exp()
            own = torch.zeros_like(chunk.logits).scatter_(1, top, q[:, :k])
            if q.shape[1] > k:  # the remainder of the teacher, spread as the student spreads its own
                own = torch.where(chunk.others, q[:, k:] * (chunk.softened - chunk.student[:, k:]).exp(), own)
            d = probabilities - own
        dlogits = chunk.of_labels.exp()
        dlogits[torch.arange(len(rows)), targets[rows].long()] -= 1
        dlogits = (1 - weight) * dlogits + weight * temperature * d
        if softcap:
            dlogits *= 1 - (chunk.logits / softcap).square()
        dlogits = up((dlogits * loss_scale).to(x.dtype))
        if dx is not None:
            dx[rows] = (dlogits @ up(w)).to(x.dtype)
        if dw is not None:
            dw.addmm_(dlogits.T, up(x[rows]))
    totals = tuple(loss_scale * total for total in _sums(weight, temperature, cross_entropy, divergence))
    return *totals, *(gradient for gradient in (dx, dw) if gradient is not None)

"""Torch references. Every function upcasts its operands and rounds each output once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from surogate_core.reference.ops import linear, up
from surogate_core.reference.rounding import accumulator


def _chunks(x: Tensor, w: Tensor, targets: Tensor, chunks: int, softcap: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (indices of labelled rows, their logits): softcap * tanh(y / softcap), with y rounded to the dtype of x."""
    for rows in (targets >= 0).nonzero().flatten().split(targets.shape[0] // chunks):
        if len(rows):
            logits = up(linear(x[rows], w))
            yield rows, softcap * torch.tanh(logits / softcap) if softcap else logits


def lm_head_tokens(
    x: Tensor, w: Tensor, targets: Tensor, *, chunks: int, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of the label, logsumexp and mean of the logits of each token; 0 without a label.

    softcap: the logits are softcap * tanh(x w^T / softcap); 0: no cap.
    """
    log_probs, logsumexp, mean = (torch.zeros(len(targets), dtype=accumulator(x.dtype)) for _ in range(3))
    for rows, logits in _chunks(x, w, targets, chunks, softcap):
        logsumexp[rows] = logits.logsumexp(-1)
        log_probs[rows] = logits.log_softmax(-1).gather(1, targets[rows].long()[:, None])[:, 0]
        mean[rows] = logits.mean(-1)
    return log_probs, logsumexp, mean


def lm_head_tokens_bwd(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    logsumexp: Tensor,
    d_log_probs: Tensor,
    d_logsumexp: Tensor,
    d_mean: Tensor,
    *,
    chunks: int,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return dx [T, C] and dw [V, C]. The gradient of the logits is rounded to the dtype of x."""
    dx, dw = torch.zeros_like(x), torch.zeros(w.shape, dtype=accumulator(x.dtype))
    for rows, logits in _chunks(x, w, targets, chunks, softcap):
        dlogits = (logits - logsumexp[rows, None]).exp() * (d_logsumexp - d_log_probs)[rows, None]
        dlogits += d_mean[rows, None] / w.shape[0]
        dlogits[torch.arange(len(rows)), targets[rows].long()] += d_log_probs[rows]
        if softcap:
            dlogits *= 1 - (logits / softcap).square()
        dlogits = up(dlogits.to(x.dtype))
        dx[rows] = (dlogits @ up(w)).to(x.dtype)
        dw.addmm_(dlogits.T, up(x[rows]))
    return dx, dw


def lm_head_tokens_dgrad(*args: Tensor, chunks: int, softcap: float = 0.0) -> Tensor:
    """dx of `lm_head_tokens_bwd`."""
    return lm_head_tokens_bwd(*args, chunks=chunks, softcap=softcap)[0]


def token_loss(
    log_probs: Tensor,
    logsumexp: Tensor,
    mean_logit: Tensor,
    scale: Tensor,
    weights: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale times the sums over labels of three losses. The inputs are 0 where there is no label.

    They are weight * ((1 - smoothing) * cross-entropy + smoothing * its mean over all labels), z * logsumexp^2, and the
    cross-entropy.
    """
    losses = smoothing * (logsumexp - mean_logit) - (1 - smoothing) * log_probs
    losses = losses if weights is None else weights * losses
    return scale * losses.sum(), scale * (z * logsumexp.square().sum()), scale * -log_probs.sum()


def token_loss_bwd(
    logsumexp: Tensor,
    scale: Tensor,
    d_loss: Tensor,
    d_z_loss: Tensor,
    d_cross_entropy: Tensor,
    weights: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of log_probs, logsumexp and mean_logit."""
    weighted = scale * d_loss * (torch.ones_like(logsumexp) if weights is None else weights)
    d_log_probs = (smoothing - 1) * weighted - scale * d_cross_entropy
    d_logsumexp = smoothing * weighted + 2 * z * scale * d_z_loss * logsumexp
    return d_log_probs, d_logsumexp, -smoothing * weighted

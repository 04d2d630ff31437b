"""Torch references of the LM head by FP8 products, exact to the bit in what they quantize."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import encode, fp8_linear, fp8_quantize

GRADIENT_ENCODE = 2.0**15
"""Encode factor of the gradient of a logit, whose magnitude is 1 at most without the scale of the loss."""


def _chunks(
    x: Tensor, w: Tensor, targets: Tensor, w_scale: Tensor, chunks: int, softcap: float
) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]]:
    """Yield (rows, labels, (x in E4M3, its scale), logits in fp32, with the cap) of the labelled rows, T / chunks at a
    time.

    x is scaled by the largest magnitude of these rows. Logits are rounded to bf16 before the cap.
    """
    labelled = (targets >= 0).nonzero().flatten()
    for rows in labelled.split(targets.shape[0] // chunks) if len(labelled) else ():
        codes, scale = fp8_quantize(x[rows], dtype="e4m3", scaling="current")
        logits = fp8_linear(codes, w, scale, w_scale, dtype="bf16").float()
        capped = softcap * torch.tanh(logits / softcap) if softcap else logits
        yield rows, targets[rows].long(), (codes, scale), capped


def fp8_lm_head_ce(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    loss_scale: Tensor,
    w_scale: Tensor,
    *,
    chunks: int,
    softcap: float = 0.0,
    fast: bool = False,
) -> Tensor:
    """`lm_head_ce` of x bf16 [T, C] and of w E4M3 [V, C] with its scale. `fast` as in `fp8_linear`."""
    loss = torch.zeros(())
    for _, labels, _, logits in _chunks(x, w, targets, w_scale, chunks, softcap):
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
    return loss * loss_scale


def fp8_lm_head_ce_grads(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    loss_scale: Tensor,
    w_scale: Tensor,
    w_t: Tensor | None = None,
    *,
    chunks: int,
    wrt: Sequence[int],
    softcap: float = 0.0,
    fast: bool = False,
    fast_dx: bool = False,
) -> tuple[Tensor, ...]:
    """Return the loss and the gradients of the inputs in `wrt`: 0 selects dx bf16 [T, C], 1 selects dw fp32 [V, C].

    The gradient of the logits, (softmax - onehot) times the slope of the cap, is quantized to E5M2 by 2^15. `w_t`: w
    transposed, which kernels read for dx. `fast_dx` is for dw too.
    """
    loss = torch.zeros(())
    dx = torch.zeros_like(x) if 0 in wrt else None
    dw = torch.zeros(w.shape) if 1 in wrt else None
    decode = torch.stack([loss_scale / GRADIENT_ENCODE, loss_scale])
    for rows, labels, (x_codes, x_scale), logits in _chunks(x, w, targets, w_scale, chunks, softcap):
        log_probs = logits.log_softmax(-1)
        loss = loss - log_probs.gather(1, labels[:, None]).sum()
        gradient = log_probs.exp_()
        gradient[torch.arange(len(rows)), labels] -= 1
        if softcap:
            gradient *= 1 - (logits / softcap).square()
        codes = encode(gradient, torch.tensor(GRADIENT_ENCODE), "e5m2")
        if dx is not None:
            dx[rows] = fp8_linear(codes, w, decode, w_scale, dtype="bf16", trans_b=True)
        if dw is not None:
            dw += fp8_linear(codes, x_codes, decode, x_scale, dtype="fp32", trans_a=True, trans_b=True)
    return loss * loss_scale, *(gradient for gradient in (dx, dw) if gradient is not None)

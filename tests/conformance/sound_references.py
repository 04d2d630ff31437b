"""References of `sound_plugin.py`, and wrong ones."""

from __future__ import annotations

import torch
from torch import Tensor

from surogate_core.reference.rounding import TORCH_DTYPES


def int8(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes around 128, and a scale for each row."""
    scale = w.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (w.float() / scale).round().add(128).to(torch.uint8), scale


def from_int8(codes: Tensor, scale: Tensor, *, dtype: str) -> Tensor:
    return ((codes.float() - 128) * scale).to(TORCH_DTYPES[dtype])


def off_by_one(codes: Tensor, scale: Tensor, *, dtype: str) -> Tensor:
    return ((codes.float() - 120) * scale).to(TORCH_DTYPES[dtype])


def table(x: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """The sum of the tokens with a label, and of their squares."""
    labelled = x.float()[targets >= 0]
    return scale * torch.stack([labelled.sum(), labelled.square().sum()])


def first_of_two(x: Tensor, bias: Tensor) -> Tensor:
    return x.clone()


def biased(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """An input that an op may lack."""
    return (x if bias is None else x + bias).float().relu().square().to(x.dtype)


def detached(x: Tensor) -> Tensor:
    return x + x.detach().float().relu().square().to(x.dtype)


def random(x: Tensor) -> Tensor:
    return x * torch.rand(())


def in_place(x: Tensor) -> Tensor:
    return x.data.mul_(2).clone()


def narrow(x: Tensor) -> Tensor:
    return x[:1]


def across_documents(x: Tensor) -> Tensor:
    return x + x.mean(0, keepdim=True)


def remembers(x: Tensor, a_log: Tensor) -> Tensor:
    """A state that keeps exp(-exp(a_log)) of itself from one token to the next, and that nothing resets."""
    rows, keeps = [torch.zeros_like(x[0])], (-a_log.exp()).exp()
    for row in x:
        rows.append(keeps * rows[-1] + row)
    return torch.stack(rows[1:])


def unclipped_lion(clip_coef: Tensor, grad: Tensor, master: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Lion whose first step is right, since it is a sign."""
    if not torch.isfinite(clip_coef):
        return master, v
    moved = (0.9 * v + 0.1 * grad).sign()
    return master - 0.01 * moved, 0.99 * v + 0.01 * grad


def labelled_total(x: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return scale * x.float()[targets >= 0].abs().sum()


def total(x: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return scale * x.float().abs().sum()

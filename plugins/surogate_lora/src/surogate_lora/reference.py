"""What LoRA's ops mean, in torch: sums in fp32 (fp64 of fp64), rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surogate_core.reference.ops import up
from surogate_core.reference.rounding import TORCH_DTYPES, random_16_bits

from .ops import dropped_draws, kept_scale


def lora_add(base: Tensor, *branches: Tensor, columns: Sequence[int], scale: float) -> Tensor:
    """base, with scale * branch added to the columns from each one's first on."""
    y = base.clone()
    for column, branch in zip(columns, branches, strict=True):
        part = slice(column, column + branch.shape[1])
        y[:, part] = (up(base[:, part]) + scale * up(branch)).to(base.dtype)
    return y


def lora_slice(x: Tensor, *, column: int, width: int, scale: float, dtype: str) -> Tensor:
    """scale * x[:, column : column + width]."""
    return (scale * up(x[:, column : column + width])).to(TORCH_DTYPES[dtype])


def lora_dropout(x: Tensor, micro_step: Tensor, seed: Tensor, *, rate: float, stream: int) -> Tensor:
    """x with elements set to zero where their 16 random bits are below `dropped_draws(rate)`, the others scaled."""
    bits = random_16_bits(x.numel(), seed=int(seed), stream=stream, step=int(micro_step)).reshape(x.shape)
    kept = kept_scale(rate) * up(x)
    return torch.where(bits >= dropped_draws(rate), kept, torch.zeros_like(kept)).to(x.dtype)

"""References of LoRA's ops in torch: sums in fp32 (fp64 of fp64), rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surogate_core.reference.ops import linear_wgrad, up
from surogate_core.reference.rounding import TORCH_DTYPES, random_16_bits

from .ops import Place, dropped_draws, kept_scale


def lora_pack(
    *parts: Tensor, shapes: Sequence[tuple[int, int]], places: Sequence[Place], dtype: str
) -> tuple[Tensor, ...]:
    """Matrices of `shapes`: scale * part at its place, zeros elsewhere."""
    wholes = tuple(torch.zeros(shape, dtype=TORCH_DTYPES[dtype]) for shape in shapes)
    for part, at in zip(parts, places, strict=True):
        _at(wholes[at.whole], at, part.shape).copy_(at.scale * up(part))
    return wholes


def lora_unpack(
    *wholes: Tensor, shapes: Sequence[tuple[int, int]], places: Sequence[Place], dtypes: Sequence[str]
) -> tuple[Tensor, ...]:
    """Matrices of `shapes`: scale * what the whole has at each place."""
    return tuple(
        (at.scale * up(_at(wholes[at.whole], at, shape))).to(TORCH_DTYPES[dtype])
        for shape, at, dtype in zip(shapes, places, dtypes, strict=True)
    )


def lora_wgrad(
    *operands: Tensor, shapes: Sequence[tuple[int, int]], places: Sequence[Place], dtypes: Sequence[str]
) -> tuple[Tensor, ...]:
    """`lora_unpack` of the products dy^T x of pairs (dy, x)."""
    wholes = [linear_wgrad(dy, x) for dy, x in zip(operands[::2], operands[1::2], strict=True)]
    return lora_unpack(*wholes, shapes=shapes, places=places, dtypes=dtypes)


def lora_join(*parts: Tensor) -> Tensor:
    """The columns of the parts, one after another."""
    return torch.cat(parts, 1)


def lora_split(whole: Tensor, *, columns: Sequence[int]) -> tuple[Tensor, ...]:
    """The columns of `whole`, divided into matrices of `columns` columns each, in order."""
    return tuple(part.clone() for part in whole.split(list(columns), 1))


def lora_scale(x: Tensor, *, scale: float) -> Tensor:
    """scale * x."""
    return (scale * up(x)).to(x.dtype)


def lora_principal(
    weight: Tensor, *, row: int, rows: int, rank: int, scale: float, dtype: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A and B, twice, with scale * B A the part of the rows with the largest singular values."""
    u, s, v = torch.linalg.svd(up(weight.narrow(0, row, rows)), full_matrices=False)
    root = torch.sqrt(s[:rank] / scale)
    a, b = (root[:, None] * v[:rank]).to(TORCH_DTYPES[dtype]), (u[:, :rank] * root).to(TORCH_DTYPES[dtype])
    return a, b, a, b


def _at(whole: Tensor, at: Place, shape: Sequence[int]) -> Tensor:
    return whole[at.row : at.row + shape[0], at.column : at.column + shape[1]]


def lora_dropout(x: Tensor, micro_step: Tensor, seed: Tensor, *, rate: float, stream: int, row: int = 0) -> Tensor:
    """x with elements set to zero where their 16 random bits are below `dropped_draws(rate)`, the others scaled. Its
    rows are those of a matrix from row `row` on."""
    first = row * x.shape[1:].numel()
    before = first % 8  # of the same block
    count = before + x.numel()
    bits = random_16_bits(count, seed=int(seed), stream=stream, step=int(micro_step), first=first - before)
    bits = bits[before:].reshape(x.shape)
    kept = kept_scale(rate) * up(x)
    return torch.where(bits >= dropped_draws(rate), kept, torch.zeros_like(kept)).to(x.dtype)

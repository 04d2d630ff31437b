"""Dtypes, casts and counter-based stochastic rounding, bit for bit as kernels do them."""

from __future__ import annotations

import torch
from torch import Tensor

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}

_MASK = 0xFFFFFFFF


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an op computes: fp32, or fp64 where the operands are."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011). Counter words are int64 tensors holding 32 bits; so are the results."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2**64, which keeps every bit that is used
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def random_16_bits(count: int, *, seed: int, stream: int, step: int) -> Tensor:
    """`count` uniform 16-bit integers (int64) for the elements of one value.

    Key (seed low, seed high), counter (block low, block high, stream, step); a call serves eight elements: element e
    of a block takes half e % 2 (low first) of word e // 2.
    """
    blocks = torch.arange(-(-count // 8), dtype=torch.int64)
    constant = torch.zeros_like(blocks)
    counter = (blocks & _MASK, blocks >> 32, constant + (stream & _MASK), constant + (step & _MASK))
    words = torch.stack(philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK)), dim=1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=2)
    return halves.reshape(-1)[:count]


def round_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 -> bf16: up with the probability that makes the mean exact. `bits`: 16 random bits an element.

    (bits of x + r) >> 16; infinities and NaN keep their own bf16.
    """
    x = x.contiguous()
    raw = x.view(torch.int32).to(torch.int64) & _MASK
    rounded = ((raw + bits.reshape(x.shape)) >> 16) & 0xFFFF
    signed = torch.where(rounded >= 0x8000, rounded - 0x10000, rounded).to(torch.int16)
    return torch.where(torch.isfinite(x), signed.view(torch.bfloat16), x.to(torch.bfloat16))


def store(x: Tensor, dtype: torch.dtype, *, seed: int, stream: int, step: int) -> Tensor:
    """`x` in `dtype`; narrowing to bf16 rounds stochastically. For what is accumulated: masters, moments, gradients."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    return round_stochastic(x.to(torch.float32), random_16_bits(x.numel(), seed=seed, stream=stream, step=step))

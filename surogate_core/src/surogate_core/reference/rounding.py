"""Dtypes, casts and counter-based stochastic rounding, bit-identical to those of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import DTYPES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items()}

_MASK = 0xFFFFFFFF


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an op on `dtype` operands computes: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011). Counter words and results are int64 tensors that hold 32-bit integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2**64; all used bits are exact
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def random_16_bits(count: int, *, seed: int, stream: int, step: int, first: int = 0) -> Tensor:
    """Return `count` uniform 16-bit integers (int64), one for each element of a value from `first` on, a multiple of 8.

    The Philox key is (seed low, seed high), the counter (block low, block high, stream, step). One Philox call yields
    the bits of a block of eight elements: element e uses half e % 2 (low first) of word e // 2.
    """
    blocks = torch.arange(first // 8, first // 8 - (-count // 8), dtype=torch.int64)
    constant = torch.zeros_like(blocks)
    counter = (blocks & _MASK, blocks >> 32, constant + (stream & _MASK), constant + (step & _MASK))
    words = torch.stack(philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK)), dim=1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=2)
    return halves.reshape(-1)[:count]


def round_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to bf16 stochastically: the expected value of the result is x.

    `bits` has 16 random bits per element. The result is (bit pattern of x + bits) >> 16. Infinities and NaN are cast.
    """
    x = x.contiguous()
    raw = x.view(torch.int32).to(torch.int64) & _MASK
    rounded = ((raw + bits.reshape(x.shape)) >> 16) & 0xFFFF
    signed = torch.where(rounded >= 0x8000, rounded - 0x10000, rounded).to(torch.int16)
    return torch.where(torch.isfinite(x), signed.view(torch.bfloat16), x.to(torch.bfloat16))


def store(x: Tensor, dtype: torch.dtype, *, seed: int, stream: int, step: int, first: int = 0) -> Tensor:
    """Cast `x` to `dtype`, with stochastic rounding to bf16. `first`: index of its first element in a whole value.

    Used for values that accumulate small updates: master weights, optimizer moments, gradients.
    """
    if dtype != torch.bfloat16:
        return x.to(dtype)
    bits = random_16_bits(x.numel(), seed=seed, stream=stream, step=step, first=first)
    return round_stochastic(x.to(torch.float32), bits)

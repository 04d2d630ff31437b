"""E2M1 by its definition: the nearest level, of two that are as near the one with the even code."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from surogate_core.reference import e2m1


def nearest(y: Tensor) -> Tensor:
    """Return codes by comparing with the bounds between levels. NaN has the code 7."""
    magnitude, code = y.abs().double(), y.signbit().to(torch.uint8) * 8
    for low, (below, above) in enumerate(pairwise(e2m1.LEVELS)):
        bound = (below + above) / 2
        code += magnitude >= bound if low % 2 else magnitude > bound
    return torch.where(y.isnan(), 7, code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_to_the_nearest_level(dtype: torch.dtype) -> None:
    """Bounds and levels, the numbers next to them, bits of all exponents, and random numbers; of either sign."""
    middle = [(below + above) / 2 for below, above in pairwise(e2m1.LEVELS)]
    exact = torch.tensor([*e2m1.LEVELS, *middle, 7.0, 8.0, 9.0, 3e38, torch.inf, torch.nan, 1e-45], dtype=dtype)
    near = [exact.nextafter(torch.tensor(end, dtype=dtype)) for end in (torch.inf, -torch.inf)]
    bits = torch.arange(0, 2**31, 10_007, dtype=torch.int64).int().view(torch.float32).to(dtype)
    gen = torch.Generator().manual_seed(0)
    y = torch.cat([exact, *near, bits, 3 * torch.randn(100_000, generator=gen).to(dtype)])
    for signed in (y, -y):
        assert torch.equal(e2m1.rounded(signed), nearest(signed))


def test_codes_are_packed_and_read_as_numbers() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 3)
    assert torch.equal(e2m1.unpacked(e2m1.packed(codes)), codes)
    numbers = e2m1.levels(codes.T)
    assert numbers.shape == (48, 2) and torch.equal(e2m1.rounded(numbers), codes.T)
    assert torch.equal(numbers[:8, 0], torch.tensor(e2m1.LEVELS))
    assert torch.equal(numbers[8:16, 0], -torch.tensor(e2m1.LEVELS))

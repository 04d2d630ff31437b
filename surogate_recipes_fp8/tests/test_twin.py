"""The references quantize as a slow twin does, which knows no conversion of torch. Needs no GPU."""

from __future__ import annotations

import pytest
import torch
from fp8_twin import LARGEST, NUMBERS, amax_of, cast, codes, numbers, scale_of, scaled

from surogate_core.testing.kernels import same_bits
from surogate_recipes_fp8 import reference


@pytest.mark.parametrize("factor", [1.0, 0.37, 3.0e5])
@pytest.mark.parametrize("dtype", LARGEST)
def test_every_bf16_has_the_same_code(dtype: str, factor: float) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    expected = cast(x.float() * torch.tensor(factor), dtype)
    assert same_bits(codes(reference.encode(x, torch.tensor(factor), dtype)), expected)


@pytest.mark.parametrize("scaling", ["delayed", "given", "current", "fallback"])
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("encode", [0.0, 37.5])
def test_numbers_of_every_kind_have_the_same_scale_amax_and_codes(kind: str, scaling: str, encode: float) -> None:
    x, amax = numbers(kind, 48, 32), torch.tensor([2.5, 0.0])
    scale = torch.tensor([1 / encode, encode]) if encode else torch.zeros(2)
    used, raised = scaled(scaling, x, "e4m3", scale, amax)
    given = {"delayed": (scale, amax), "given": (scale,), "current": (amax,), "fallback": (scale,)}[scaling]
    q, q_t, *rest = reference.fp8_quantize(x, *given, dtype="e4m3", scaling=scaling, transposed=True)
    expected = cast(x.float() * (used[1] if used[1] else torch.tensor(1.0)), "e4m3")
    assert same_bits(codes(q), expected) and same_bits(codes(q_t), expected.T.contiguous())
    outs = {"delayed": [raised], "given": [], "current": [used, raised], "fallback": [used]}[scaling]
    assert all(same_bits(ours, theirs) for ours, theirs in zip(rest, outs, strict=True))
    assert same_bits(reference.fp8_amax(x), amax_of(x))


@pytest.mark.parametrize("top", [0.0, 1e-44, 1e-36, 0.02, 3e38])
def test_scales_are_the_same(top: float) -> None:
    (scale,) = reference.fp8_scales(torch.tensor([top, 1.0]), maximum=448.0)
    assert same_bits(scale, scale_of(torch.tensor(top), "e4m3"))

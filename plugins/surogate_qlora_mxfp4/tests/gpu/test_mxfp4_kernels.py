"""The compiled ops of MXFP4 storage are bit-identical to the references, for any dtypes and fused matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stored_matrices import Shape, check_copying_kernels, check_kernel, uneven_weight
from torch import Tensor

from surogate_core.testing.cases import cases
from surogate_qlora_mxfp4.kernels import KERNELS
from surogate_qlora_mxfp4.ops import OPS
from surogate_qlora_mxfp4.reference import mxfp4_quantize

pytestmark = pytest.mark.gpu

QUANTIZE, DEQUANTIZE, AMAX, TO_E4M3, TO_E5M2 = OPS
COPYING = [(QUANTIZE, DEQUANTIZE, AMAX, to) for to in (TO_E4M3, TO_E5M2)]

# One block, chunks of 8,192 elements that are not full, several chunks, equal matrices.
SHAPES = cases(
    [((1,), 32), ((37, 5, 64), 1568)],
    more=[((16,), 512), ((17,), 512), ((300,), 4096), ((256, 256, 256), 512), ((1024, 8), 1024), ((520,), 2880)],
)

# Tiles that are not full, several tiles, matrices that share a tile, experts.
COPIES = cases(
    [((16,), 32), ((144, 16, 64), 1568)],
    more=[((256, 128), 512), ((16,) * 1024, 256), ((1024, 512, 512), 2048), ((48,), 2880)],
)


def random_stored(rows: Sequence[int], columns: int, dtype: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Return random codes and scales, and the attrs of an op that reads them."""
    gen = torch.Generator().manual_seed(columns)
    codes = torch.randint(256, (sum(rows), columns // 2), dtype=torch.uint8, generator=gen)
    scales = torch.randint(256, (sum(rows), columns // 32), dtype=torch.uint8, generator=gen)
    return [codes, scales], {"rows": rows, "dtype": dtype}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_is_bit_identical_to_the_reference(shape: Shape, dtype: str) -> None:
    rows, columns = shape
    check_kernel(KERNELS, QUANTIZE, [uneven_weight(rows, columns, dtype)], rows=rows)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_bit_identical_to_the_reference(shape: Shape, dtype: str) -> None:
    """Of random bytes, so that every code occurs with every scale, NaN too."""
    stored, attrs = random_stored(*shape, dtype)
    check_kernel(KERNELS, DEQUANTIZE, stored, **attrs)


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 1e-38, 1e-37, 3e38, 0.0])
def test_special_numbers_are_quantized_and_dequantized_as_by_the_reference(special: float) -> None:
    w = uneven_weight((5, 9), 512, "fp32")
    w[1, 3] = special
    w[5:] = special
    stored = check_kernel(KERNELS, QUANTIZE, [w], rows=(5, 9))
    check_kernel(KERNELS, DEQUANTIZE, stored, rows=(5, 9), dtype="bf16")


def test_ties_and_powers_of_two_are_rounded_as_by_the_reference() -> None:
    w = torch.arange(-256, 256).float().view(8, 64) / 8
    check_kernel(KERNELS, QUANTIZE, [w], rows=(8,))
    check_kernel(KERNELS, QUANTIZE, [w.bfloat16()], rows=(8,))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", COPIES)
def test_amax_and_copies_are_bit_identical_to_the_references(shape: Shape, dtype: str) -> None:
    """Of random bytes, so that every code occurs, NaN too."""
    for ops in COPYING:
        check_copying_kernels(KERNELS, ops, *random_stored(*shape, dtype), factors=(1.0, 0.1))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_copies_of_usual_weights_are_bit_identical_to_the_references(dtype: str) -> None:
    stored = mxfp4_quantize(uneven_weight((16, 32), 512, "fp32"), rows=(16, 32))
    for ops in COPYING:
        check_copying_kernels(KERNELS, ops, stored, {"rows": (16, 32), "dtype": dtype})


@pytest.mark.parametrize("transposed", [False, True])
def test_copies_of_some_matrices_have_the_scale_of_all(transposed: bool) -> None:
    rows, own = (48,) * 40, slice(48 * 7, 48 * 20)
    stored = mxfp4_quantize(uneven_weight(rows, 512, "bf16"), rows=rows)
    (amax,) = check_kernel(KERNELS, AMAX, stored, rows=rows, dtype="bf16")
    some = [*(state[own].contiguous() for state in stored), amax]
    for to in (TO_E4M3, TO_E5M2):
        check_kernel(KERNELS, to, some, rows=(48,) * 13, dtype="bf16", transposed=transposed)

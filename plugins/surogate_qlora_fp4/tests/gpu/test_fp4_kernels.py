"""The compiled ops of NVFP4 storage are bit-identical to the references, for any dtypes and fused matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stored_matrices import Shape, check_copying_kernels, check_kernel, uneven_weight
from torch import Tensor

from surogate_core.api.matrix_storage import MAX_RUNS
from surogate_core.testing.cases import cases
from surogate_qlora_fp4.kernels import KERNELS
from surogate_qlora_fp4.ops import OPS
from surogate_qlora_fp4.reference import fp4_block_quantize

pytestmark = pytest.mark.gpu

QUANTIZE, DEQUANTIZE, _, _ = OPS

# One block, chunks of 8,192 elements that are not full, several chunks, equal matrices.
SHAPES = cases(
    [((1,), 16), ((37, 5, 64), 1552)],
    more=[((16,), 512), ((17,), 512), ((300,), 4096), ((256, 256, 256), 512), ((1024, 8), 1024), ((520,), 4608)],
)

# Tiles that are not full, several tiles, matrices that share a tile, experts.
COPIES = cases(
    [((16,), 16), ((144, 16, 64), 1552)],
    more=[((256, 128), 512), ((16,) * 1024, 256), ((1024, 512, 512), 2048), ((48,), 4608)],
)


def random_stored(rows: Sequence[int], columns: int, dtype: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Return random codes and scales, and the attrs of an op that reads them."""
    gen = torch.Generator().manual_seed(columns)
    codes = torch.randint(256, (sum(rows), columns // 2), dtype=torch.uint8, generator=gen)
    scales = torch.randint(256, (sum(rows), columns // 16), dtype=torch.uint8, generator=gen)
    stored = [codes, scales.view(torch.float8_e4m3fn), torch.rand(len(rows), generator=gen)]
    return stored, {"rows": rows, "dtype": dtype}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_is_bit_identical_to_the_reference(shape: Shape, four_over_six: bool, dtype: str) -> None:
    rows, columns = shape
    check_kernel(KERNELS, QUANTIZE, [uneven_weight(rows, columns, dtype)], rows=rows, four_over_six=four_over_six)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_bit_identical_to_the_reference(shape: Shape, dtype: str) -> None:
    """Of random bytes, so that every code occurs with every scale, NaN too."""
    stored, attrs = random_stored(*shape, dtype)
    check_kernel(KERNELS, DEQUANTIZE, stored, **attrs)


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 1e-38, 3e38, 0.0])
@pytest.mark.parametrize("four_over_six", [False, True])
def test_special_numbers_are_quantized_and_dequantized_as_by_the_reference(four_over_six: bool, special: float) -> None:
    w = uneven_weight((5, 9), 512, "fp32")
    w[1, 3] = special
    w[5:] = special
    stored = check_kernel(KERNELS, QUANTIZE, [w], rows=(5, 9), four_over_six=four_over_six)
    check_kernel(KERNELS, DEQUANTIZE, stored, rows=(5, 9), dtype="bf16")


def test_as_many_runs_of_matrices_as_a_launch_can_have_are_bit_identical_to_the_reference() -> None:
    rows = (*(1 + i % 5 for i in range(MAX_RUNS - 1)), *(7,) * 1000)
    check_kernel(KERNELS, QUANTIZE, [uneven_weight(rows, 256, "bf16")], rows=rows, four_over_six=True)


# ---------------------------------------------------------------------------------------------------- copies in E4M3


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", COPIES)
def test_amax_and_copies_are_bit_identical_to_the_references(shape: Shape, dtype: str) -> None:
    """Of random bytes, so that every code occurs, NaN too."""
    check_copying_kernels(KERNELS, OPS, *random_stored(*shape, dtype), factors=(1.0, 0.1))


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 1e-38, 3e38, 0.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_special_numbers_are_copied_as_by_the_reference(dtype: str, special: float) -> None:
    w = uneven_weight((16, 32), 512, "fp32")
    w[1, 3] = special
    w[16:, 64:] = special
    stored = fp4_block_quantize(w, rows=(16, 32), four_over_six=False)
    check_copying_kernels(KERNELS, OPS, stored, {"rows": (16, 32), "dtype": dtype})

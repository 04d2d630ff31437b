"""The compiled ops of blockwise FP8 storage are bit-identical to the references, for any tiles, dtypes and matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stored_matrices import Shape, check_copying_kernels, check_kernel, uneven_weight
from torch import Tensor

from surogate_core.api.matrix_storage import MAX_RUNS
from surogate_core.testing.cases import cases
from surogate_qlora_fp8.kernels import KERNELS
from surogate_qlora_fp8.ops import OPS, TILES
from surogate_qlora_fp8.reference import fp8_tile_quantize

pytestmark = pytest.mark.gpu

QUANTIZE, DEQUANTIZE, _, _ = OPS

# Less than a tile, tiles that are not full, whole tiles, several thread blocks.
SHAPES = cases(
    [((1,), 8), ((137, 5, 64), 1544)],
    more=[((16,), 512), ((17,), 520), ((300,), 4096), ((256, 256, 256), 512), ((1024, 8), 1024), ((520,), 4608)],
)

# Tiles that are not full, several tiles, matrices that share a tile, experts.
COPIES = cases(
    [((16,), 16), ((144, 16, 64), 1552)],
    more=[((256, 128), 512), ((16,) * 1024, 256), ((1024, 512, 512), 2048), ((48,), 4608)],
)


def random_stored(rows: Sequence[int], columns: int, tile: int, dtype: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Return random codes and scales, and the attrs of an op that reads them."""
    gen = torch.Generator().manual_seed(columns)
    codes = torch.randint(256, (sum(rows), columns), dtype=torch.uint8, generator=gen).view(torch.float8_e4m3fn)
    scales = torch.rand(sum(-(-count // tile) for count in rows), -(-columns // tile), generator=gen)
    return [codes, scales], {"rows": rows, "tile": tile, "dtype": dtype}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_is_bit_identical_to_the_reference(shape: Shape, tile: int, dtype: str) -> None:
    rows, columns = shape
    check_kernel(KERNELS, QUANTIZE, [uneven_weight(rows, columns, dtype)], rows=rows, tile=tile)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_bit_identical_to_the_reference(shape: Shape, tile: int, dtype: str) -> None:
    """Of random bytes, so that every code occurs, NaN too."""
    stored, attrs = random_stored(*shape, tile, dtype)
    check_kernel(KERNELS, DEQUANTIZE, stored, **attrs)


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 1e-38, 3e38])
def test_special_numbers_are_quantized_and_dequantized_as_by_the_reference(special: float) -> None:
    w = uneven_weight((70, 130), 512, "fp32")
    w[1, 3] = special
    w[70:, 64:] = special
    attrs: dict[str, Any] = {"rows": (70, 130), "tile": 64}
    stored = check_kernel(KERNELS, QUANTIZE, [w], **attrs)
    check_kernel(KERNELS, DEQUANTIZE, stored, **attrs, dtype="bf16")


def test_as_many_runs_of_matrices_as_a_launch_can_have_are_bit_identical_to_the_reference() -> None:
    rows = (*(1 + i % 5 for i in range(MAX_RUNS - 1)), *(7,) * 1000)
    check_kernel(KERNELS, QUANTIZE, [uneven_weight(rows, 256, "bf16")], rows=rows, tile=64)


# ---------------------------------------------------------------------------------------------------- copies in E4M3


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", COPIES)
def test_amax_and_copies_are_bit_identical_to_the_references(shape: Shape, tile: int, dtype: str) -> None:
    """Of random bytes, so that every code occurs, NaN too."""
    check_copying_kernels(KERNELS, OPS, *random_stored(*shape, tile, dtype), factors=(1.0, 0.1))


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 1e-38, 3e38, 0.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_special_numbers_are_copied_as_by_the_reference(dtype: str, special: float) -> None:
    w = uneven_weight((16, 32), 512, "fp32")
    w[1, 3] = special
    w[16:, 64:] = special
    stored = fp8_tile_quantize(w, rows=(16, 32), tile=64)
    check_copying_kernels(KERNELS, OPS, stored, {"rows": (16, 32), "tile": 64, "dtype": dtype})

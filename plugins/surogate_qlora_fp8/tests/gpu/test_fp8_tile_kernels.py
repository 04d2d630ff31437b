"""The compiled ops of blockwise FP8 storage are bit-identical to the references, for any tiles, dtypes and matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api.matrix_storage import MAX_MATRICES
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import run_op
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_same_values
from surogate_qlora_fp8.kernels import KERNELS
from surogate_qlora_fp8.ops import OPS, TILES
from surogate_qlora_fp8.reference import fp8_tile_amax, fp8_tile_dequantize, fp8_tile_quantize, fp8_tile_to_e4m3

pytestmark = pytest.mark.gpu

Shape = tuple[tuple[int, ...], int]
"""Rows of each matrix, and columns."""

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
DEFINITIONS = {definition.kind: definition for definition in OPS}

# Less than a tile, tiles that are not full, whole tiles, several thread blocks.
SHAPES = cases(
    [((1,), 8), ((137, 5, 64), 1544)],
    more=[((16,), 512), ((17,), 520), ((300,), 4096), ((256, 256, 256), 512), ((1024, 8), 1024), ((520,), 4608)],
)


def run(kind: str, ins: Sequence[Tensor], attrs: Mapping[str, Any]) -> list[Tensor]:
    """Return the outputs of an op by its kernel."""
    return run_op(KERNELS, DEFINITIONS[kind], ins, attrs)


def weight(rows: Sequence[int], columns: int, dtype: str) -> Tensor:
    """Rows of different magnitudes, a row of zeros and one with an outlier."""
    gen = torch.Generator().manual_seed(sum(rows) * columns)
    w = torch.randn(sum(rows), columns, generator=gen) * torch.logspace(-3, 1, sum(rows))[:, None]
    w[len(w) // 2, 7] = 50
    if len(w) > 1:
        w[len(w) // 3] = 0
    return w.to(TORCH_DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_is_bit_identical_to_the_reference(shape: Shape, tile: int, dtype: str) -> None:
    rows, columns = shape
    w = weight(rows, columns, dtype)
    attrs = {"rows": rows, "tile": tile}
    assert_same_values(run("fp8_tile_quantize", [w], attrs), fp8_tile_quantize(w, **attrs))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_bit_identical_to_the_reference(shape: Shape, tile: int, dtype: str) -> None:
    """Of random bytes, so that every code occurs, NaN too."""
    rows, columns = shape
    gen = torch.Generator().manual_seed(columns)
    codes = torch.randint(256, (sum(rows), columns), dtype=torch.uint8, generator=gen).view(torch.float8_e4m3fn)
    high, wide = sum(-(-count // tile) for count in rows), -(-columns // tile)
    scales = torch.rand(high, wide, generator=gen)
    attrs = {"rows": rows, "tile": tile, "dtype": dtype}
    assert_same_values(
        run("fp8_tile_dequantize", [codes, scales], attrs), [fp8_tile_dequantize(codes, scales, **attrs)]
    )


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 1e-38, 3e38])
def test_special_numbers_are_quantized_and_dequantized_as_by_the_reference(special: float) -> None:
    w = weight((70, 130), 512, "fp32")
    w[1, 3] = special
    w[70:, 64:] = special
    attrs: dict[str, Any] = {"rows": (70, 130), "tile": 64}
    stored = fp8_tile_quantize(w, **attrs)
    assert_same_values(run("fp8_tile_quantize", [w], attrs), stored)
    back = {**attrs, "dtype": "bf16"}
    assert_same_values(run("fp8_tile_dequantize", stored, back), [fp8_tile_dequantize(*stored, **back)])


def test_as_many_matrices_as_a_launch_can_have_are_bit_identical_to_the_reference() -> None:
    rows = tuple(1 + i % 5 for i in range(MAX_MATRICES))
    w = weight(rows, 256, "bf16")
    attrs = {"rows": rows, "tile": 64}
    assert_same_values(run("fp8_tile_quantize", [w], attrs), fp8_tile_quantize(w, **attrs))


# ---------------------------------------------------------------------------------------------------- copies in E4M3

# Tiles that are not full, several tiles, matrices that share a tile, as many as a launch can have.
COPIES = cases(
    [((16,), 16), ((144, 16, 64), 1552)],
    more=[((256, 128), 512), ((16,) * MAX_MATRICES, 256), ((1024, 512, 512), 2048), ((48,), 4608)],
)


def random_stored(rows: Sequence[int], columns: int, tile: int, dtype: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Return random codes and scales, and the attrs of an op that reads them."""
    gen = torch.Generator().manual_seed(columns)
    codes = torch.randint(256, (sum(rows), columns), dtype=torch.uint8, generator=gen).view(torch.float8_e4m3fn)
    scales = torch.rand(sum(-(-count // tile) for count in rows), -(-columns // tile), generator=gen)
    return [codes, scales], {"rows": rows, "tile": tile, "dtype": dtype}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", COPIES)
def test_amax_and_copies_are_bit_identical_to_the_references(tile: int, shape: Shape, dtype: str) -> None:
    """Of random bytes, so that every code occurs, NaN too."""
    rows, columns = shape
    stored, attrs = random_stored(rows, columns, tile, dtype)
    amax = fp8_tile_amax(*stored, **attrs)
    assert_same_values(run("fp8_tile_amax", stored, attrs), [amax])
    for scale in (amax, amax * torch.tensor([0.1, 0.0])):  # by the second one, the largest codes are exceeded
        for transposed in (False, True):
            own = attrs | {"transposed": transposed}
            assert_same_values(run("fp8_tile_to_e4m3", [*stored, scale], own), fp8_tile_to_e4m3(*stored, scale, **own))


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 1e-38, 3e38, 0.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_special_numbers_are_copied_as_by_the_reference(dtype: str, special: float) -> None:
    w = weight((16, 32), 512, "fp32")
    w[1, 3] = special
    w[16:, 64:] = special
    stored = fp8_tile_quantize(w, rows=(16, 32), tile=64)
    attrs: dict[str, Any] = {"rows": (16, 32), "tile": 64, "dtype": dtype}
    amax = fp8_tile_amax(*stored, **attrs)
    assert_same_values(run("fp8_tile_amax", stored, attrs), [amax])
    for transposed in (False, True):
        own = attrs | {"transposed": transposed}
        assert_same_values(run("fp8_tile_to_e4m3", [*stored, amax], own), fp8_tile_to_e4m3(*stored, amax, **own))

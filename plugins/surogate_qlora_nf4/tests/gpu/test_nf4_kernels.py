"""The compiled ops of NF4 are bit-identical to the references, for any blocks, dtypes and fused matrices."""

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
from surogate_qlora_nf4.kernels import KERNELS
from surogate_qlora_nf4.ops import OPS
from surogate_qlora_nf4.reference import nf4_amax, nf4_dequantize, nf4_quantize, nf4_to_e4m3
from surogate_qlora_nf4.tables import BLOCKS

pytestmark = pytest.mark.gpu

Shape = tuple[tuple[int, ...], int]
"""Rows of each matrix, and columns."""

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
DEFINITIONS = {definition.kind: definition for definition in OPS}

# One row, chunks of 8,192 elements that are not full, several chunks, groups of 256
# blocks that are not full, equal matrices.
SHAPES = cases(
    [((1,), 512), ((37, 5, 64), 1536)],
    more=[((16,), 512), ((17,), 512), ((300,), 4096), ((256, 256, 256), 512), ((1024, 8), 1024), ((520,), 4608)],
)


def run(kind: str, ins: Sequence[Tensor], attrs: Mapping[str, Any]) -> list[Tensor]:
    """Return the outputs of an op by its kernel."""
    return run_op(KERNELS, DEFINITIONS[kind], ins, attrs)


def weight(rows: Sequence[int], columns: int, dtype: str) -> Tensor:
    """Rows of different magnitudes, a row of zeros and one with an outlier."""
    gen = torch.Generator().manual_seed(sum(rows) * columns)
    w = torch.randn(sum(rows), columns, generator=gen) * torch.logspace(-3, 1, sum(rows))[:, None]
    w[len(w) // 3] = 0
    w[len(w) // 2, 7] = 50
    return w.to(TORCH_DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_is_bit_identical_to_the_reference(shape: Shape, block: int, double: bool, dtype: str) -> None:
    rows, columns = shape
    w = weight(rows, columns, dtype)
    attrs = {"rows": rows, "block": block, "double": double}
    assert_same_values(run("nf4_quantize", [w], attrs), nf4_quantize(w, **attrs))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_bit_identical_to_the_reference(shape: Shape, block: int, double: bool, dtype: str) -> None:
    """Of random bytes, so that every code occurs with every code of the absmax."""
    rows, columns = shape
    gen = torch.Generator().manual_seed(columns)
    size = sum(rows) * columns
    codes = torch.randint(256, (size // 2,), dtype=torch.uint8, generator=gen)
    absmax = [torch.rand(size // block, generator=gen)]
    if double:
        groups = sum(-(-count * columns // block // 256) for count in rows)
        absmax = [torch.randint(256, (size // block,), dtype=torch.uint8, generator=gen)]
        absmax += [torch.rand(groups, generator=gen), torch.rand(len(rows), generator=gen)]
    attrs = {"rows": rows, "shape": (sum(rows), columns), "block": block, "dtype": dtype}
    assert_same_values(run("nf4_dequantize", [codes, *absmax], attrs), [nf4_dequantize(codes, *absmax, **attrs)])


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 3e38])
@pytest.mark.parametrize("double", [False, True])
def test_special_numbers_are_quantized_and_dequantized_as_by_the_reference(double: bool, special: float) -> None:
    w = weight((5, 9), 512, "fp32")
    w[1, 3] = special
    w[7, :128] = special
    attrs: dict[str, Any] = {"rows": (5, 9), "block": 64}
    stored = nf4_quantize(w, **attrs, double=double)
    assert_same_values(run("nf4_quantize", [w], attrs | {"double": double}), stored)
    back = {**attrs, "shape": (14, 512), "dtype": "bf16"}
    assert_same_values(run("nf4_dequantize", stored, back), [nf4_dequantize(*stored, **back)])


def test_as_many_matrices_as_a_launch_can_have_are_bit_identical_to_the_reference() -> None:
    rows = tuple(1 + i % 5 for i in range(MAX_MATRICES))
    w = weight(rows, 256, "bf16")
    attrs = {"rows": rows, "block": 64, "double": True}
    assert_same_values(run("nf4_quantize", [w], attrs), nf4_quantize(w, **attrs))


# ---------------------------------------------------------------------------------------------------- copies in E4M3

# Tiles that are not full, several tiles, matrices that share a tile, as many as a launch can have.
COPIES = cases(
    [((16,), 512), ((144, 16, 64), 1536)],
    more=[((256, 128), 512), ((16,) * MAX_MATRICES, 512), ((1024, 512, 512), 2048), ((48,), 4608)],
)


def random_stored(
    rows: Sequence[int], columns: int, block: int, double: bool, dtype: str
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return random codes and scales, and the attrs of an op that reads them."""
    gen = torch.Generator().manual_seed(columns)
    size = sum(rows) * columns
    codes = torch.randint(256, (size // 2,), dtype=torch.uint8, generator=gen)
    absmax = [torch.rand(size // block, generator=gen)]
    if double:
        groups = sum(-(-count * columns // block // 256) for count in rows)
        absmax = [torch.randint(256, (size // block,), dtype=torch.uint8, generator=gen)]
        absmax += [torch.rand(groups, generator=gen), torch.rand(len(rows), generator=gen)]
    return [codes, *absmax], {"rows": rows, "shape": (sum(rows), columns), "block": block, "dtype": dtype}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", COPIES)
def test_amax_and_copies_are_bit_identical_to_the_references(
    block: int, double: bool, shape: Shape, dtype: str
) -> None:
    """Of random bytes, so that every code occurs, NaN too."""
    rows, columns = shape
    stored, attrs = random_stored(rows, columns, block, double, dtype)
    amax = nf4_amax(*stored, **attrs)
    assert_same_values(run("nf4_amax", stored, attrs), [amax])
    for scale in (amax, amax * torch.tensor([0.1, 0.0])):  # by the second one, the largest codes are exceeded
        for transposed in (False, True):
            own = attrs | {"transposed": transposed}
            assert_same_values(run("nf4_to_e4m3", [*stored, scale], own), nf4_to_e4m3(*stored, scale, **own))


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 1e-38, 3e38, 0.0])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_special_numbers_are_copied_as_by_the_reference(dtype: str, double: bool, special: float) -> None:
    w = weight((16, 32), 192, "fp32")
    w[1, 3] = special
    w[16:, 64:] = special
    stored = nf4_quantize(w, rows=(16, 32), block=64, double=double)
    attrs: dict[str, Any] = {"rows": (16, 32), "block": 64, "shape": (48, 192), "dtype": dtype}
    amax = nf4_amax(*stored, **attrs)
    assert_same_values(run("nf4_amax", stored, attrs), [amax])
    for transposed in (False, True):
        own = attrs | {"transposed": transposed}
        assert_same_values(run("nf4_to_e4m3", [*stored, amax], own), nf4_to_e4m3(*stored, amax, **own))

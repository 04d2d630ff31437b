"""The compiled ops of NF4 are bit-identical to the references, for any blocks, dtypes and fused matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stored_matrices import Shape, check_copying_kernels, check_kernel, uneven_weight
from torch import Tensor

from surogate_core.api.matrix_storage import MAX_RUNS
from surogate_core.testing.cases import cases
from surogate_qlora_nf4.kernels import KERNELS
from surogate_qlora_nf4.ops import OPS
from surogate_qlora_nf4.reference import nf4_quantize
from surogate_qlora_nf4.tables import BLOCKS

pytestmark = pytest.mark.gpu

QUANTIZE, DEQUANTIZE, _, _ = OPS

# One row, chunks of 8,192 elements that are not full, several chunks, groups of 256
# blocks that are not full, equal matrices.
SHAPES = cases(
    [((1,), 512), ((37, 5, 64), 1536)],
    more=[((16,), 512), ((17,), 512), ((300,), 4096), ((256, 256, 256), 512), ((1024, 8), 1024), ((520,), 4608)],
)

# Tiles that are not full, several tiles, matrices that share a tile, experts.
COPIES = cases(
    [((16,), 512), ((144, 16, 64), 1536)],
    more=[((256, 128), 512), ((16,) * 1024, 512), ((1024, 512, 512), 2048), ((48,), 4608)],
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
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_is_bit_identical_to_the_reference(shape: Shape, block: int, double: bool, dtype: str) -> None:
    rows, columns = shape
    check_kernel(KERNELS, QUANTIZE, [uneven_weight(rows, columns, dtype)], rows=rows, block=block, double=double)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_bit_identical_to_the_reference(shape: Shape, block: int, double: bool, dtype: str) -> None:
    """Of random bytes, so that every code occurs with every code of the absmax."""
    stored, attrs = random_stored(*shape, block, double, dtype)
    check_kernel(KERNELS, DEQUANTIZE, stored, **attrs)


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 3e38])
@pytest.mark.parametrize("double", [False, True])
def test_special_numbers_are_quantized_and_dequantized_as_by_the_reference(double: bool, special: float) -> None:
    w = uneven_weight((5, 9), 512, "fp32")
    w[1, 3] = special
    w[7, :128] = special
    attrs: dict[str, Any] = {"rows": (5, 9), "block": 64}
    stored = check_kernel(KERNELS, QUANTIZE, [w], **attrs, double=double)
    check_kernel(KERNELS, DEQUANTIZE, stored, **attrs, shape=(14, 512), dtype="bf16")


def test_as_many_runs_of_matrices_as_a_launch_can_have_are_bit_identical_to_the_reference() -> None:
    rows = (*(1 + i % 5 for i in range(MAX_RUNS - 1)), *(7,) * 1000)
    check_kernel(KERNELS, QUANTIZE, [uneven_weight(rows, 256, "bf16")], rows=rows, block=64, double=True)


# ---------------------------------------------------------------------------------------------------- copies in E4M3


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", COPIES)
def test_amax_and_copies_are_bit_identical_to_the_references(
    shape: Shape, block: int, double: bool, dtype: str
) -> None:
    """Of random bytes, so that every code occurs, NaN too."""
    check_copying_kernels(KERNELS, OPS, *random_stored(*shape, block, double, dtype), factors=(1.0, 0.1))


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 1e-44, 1e-38, 3e38, 0.0])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_special_numbers_are_copied_as_by_the_reference(dtype: str, double: bool, special: float) -> None:
    w = uneven_weight((16, 32), 192, "fp32")
    w[1, 3] = special
    w[16:, 64:] = special
    stored = nf4_quantize(w, rows=(16, 32), block=64, double=double)
    attrs = {"rows": (16, 32), "block": 64, "shape": (48, 192), "dtype": dtype}
    check_copying_kernels(KERNELS, OPS, stored, attrs)

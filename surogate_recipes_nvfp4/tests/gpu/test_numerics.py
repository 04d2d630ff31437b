"""The compiled figures of numerics reports: sums in another order than the reference's, which are fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.testing.binding import run_op
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import Elements
from surogate_recipes_nvfp4.kernels import KERNELS
from surogate_recipes_nvfp4.ops import OPS
from surogate_recipes_nvfp4.reference import nvfp4_measure, nvfp4_quantize

pytestmark = pytest.mark.gpu

DEFINITIONS = {definition.kind: definition for definition in OPS}


def measured(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the figures of the kernel and of the reference."""
    codes, scales, amax = nvfp4_quantize(x, rows=True, columns=False)
    ins = [x, Elements(codes, "e2m1"), Elements(scales, "ue4m3"), amax]
    (found,) = run_op(KERNELS, DEFINITIONS["nvfp4_measure"], ins, {})
    return found, nvfp4_measure(x, codes, scales, amax)


@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (272, 400), (2048, 1040)], ids=str)
def test_figures_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    x = torch.randn(shape).bfloat16()
    x[::3] *= 2.0**-8
    x[:, 5] = 0
    found, expected = measured(x)
    assert found[0] == expected[0] and found[2] > 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_matrix_of_zeros_has_no_error_and_one_that_is_not_finite_has_nan() -> None:
    x = torch.zeros(32, 64).bfloat16()
    assert measured(x)[0].tolist() == [0.0, 0.0, 0.0]
    x[3, 4] = torch.nan
    assert measured(x)[0][:2].isnan().all()


def test_a_report_has_the_figures_of_each_tensor_in_a_row() -> None:
    figures = list(torch.randn(300, 3))
    (table,) = run_op(KERNELS, DEFINITIONS["nvfp4_report"], figures, {})
    assert same_bits(table, torch.stack(figures))

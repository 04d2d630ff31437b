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
from surogate_recipes_nvfp4.reference import nvfp4_measure, nvfp4_quantize, nvfp4_report

pytestmark = pytest.mark.gpu

DEFINITIONS = {definition.kind: definition for definition in OPS}


def measured(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the rows by the kernel and by the reference."""
    codes, scales, amax = nvfp4_quantize(x, rows=True, columns=False)
    ins = [x, Elements(codes, "e2m1"), Elements(scales, "ue4m3"), amax]
    (found,) = run_op(KERNELS, DEFINITIONS["nvfp4_measure"], ins, {})
    return found, nvfp4_measure(x, codes, scales, amax)


def reported(*rows: Tensor) -> Tensor:
    (table,) = run_op(KERNELS, DEFINITIONS["nvfp4_report"], list(rows), {})
    return table


@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (272, 400), (2048, 1040)], ids=str)
def test_sums_of_rows_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    """Of magnitudes and counts to the bit."""
    x = torch.randn(shape).bfloat16()
    x[::3] *= 2.0**-8
    x[:, 5] = 0
    found, expected = measured(x)
    assert torch.equal(found[:, [0, 3, 4]], expected[:, [0, 3, 4]]) and found[:, 4].sum() > 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(reported(found)[0], nvfp4_report(expected)[0], rtol=1e-5, atol=0)


def test_rows_of_zeros_have_no_error_and_those_that_are_not_finite_have_nan() -> None:
    x = torch.zeros(32, 64).bfloat16()
    assert not measured(x)[0].any() and not reported(measured(x)[0]).any()
    for special in (torch.nan, torch.inf):
        x[3, 4] = special
        rows = measured(x)[0]
        assert rows[:, 0].isnan().tolist() == [row == 3 for row in range(32)]
        assert reported(rows)[0, :2].isnan().all()


def test_a_report_has_the_figures_of_each_tensor_in_a_row() -> None:
    rows = [torch.rand(300, 5) for _ in range(200)]
    torch.testing.assert_close(reported(*rows), nvfp4_report(*rows), rtol=2.0**-22, atol=0)
    alone = torch.cat([reported(of) for of in rows])
    assert same_bits(reported(*rows), alone)

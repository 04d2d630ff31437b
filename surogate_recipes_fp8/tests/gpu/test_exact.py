"""The compiled count of elements that E5M2 does not hold has the value of the reference."""

from __future__ import annotations

import pytest
import torch

from surogate_core.reference import e2m1
from surogate_core.reference.stored_matrix import matrix_amax
from surogate_core.testing.binding import run_op
from surogate_recipes_fp8.kernels.scales import KERNELS
from surogate_recipes_fp8.ops import OPS
from surogate_recipes_fp8.reference import fp8_inexact

pytestmark = pytest.mark.gpu

INEXACT = next(definition for definition in OPS if definition.kind == "fp8_inexact")


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (37, 1568), (520, 2880)])
@pytest.mark.parametrize("spread", [0, 28, 29, 31, 40, 100])
def test_the_count_is_that_of_the_reference(rows: int, columns: int, spread: int) -> None:
    gen = torch.Generator().manual_seed(columns + spread)
    codes = torch.randint(256, (rows, columns // 2), generator=gen).to(torch.uint8)
    scales = torch.randint(150 - spread, 151, (rows, columns // 32), generator=gen).to(torch.uint8)
    blocks = e2m1.levels(e2m1.unpacked(codes)).view(rows, -1, 32) * 2.0 ** (scales.float() - 127)[..., None]
    w = blocks.view(rows, columns)
    amax = matrix_amax(w, (rows,) if rows == 1 else (1, rows - 1))
    (count,) = run_op(KERNELS, INEXACT, [codes, scales, amax], {})
    assert int(count) == int(fp8_inexact(codes, scales, amax))

"""Copies in E5M2 of weights that are E2M1 numbers times powers of two: what they hold exactly, and what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from surogate_core.api import ProgramError, Value
from surogate_core.reference import e2m1
from surogate_core.reference.stored_matrix import matrix_amax
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import check_op
from surogate_recipes_fp8.ops import OPS

KINDS = {definition.kind: definition for definition in OPS}
ROWS, COLUMNS = 32, 96


def stored(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return random codes, and the weight of them and of scale codes, and its amax as of two matrices."""
    codes = torch.randint(256, (ROWS, COLUMNS // 2), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    blocks = e2m1.levels(e2m1.unpacked(codes)).view(ROWS, -1, 32)
    w = (blocks.double() * 2.0 ** (scales.double() - 127)[..., None]).view(ROWS, COLUMNS).float()
    return codes, w, matrix_amax(w, (ROWS // 2, ROWS // 2))


def scales_from(largest: int, spread: int) -> Tensor:
    """Return scale codes of which the first block has the largest, and the others any down to `spread` below it."""
    gen = torch.Generator().manual_seed(spread)
    scales = torch.randint(largest - spread, largest + 1, (ROWS, COLUMNS // 32), generator=gen)
    scales[0, 0], scales[-1, -1] = largest, largest - spread
    return scales.to(torch.uint8)


@pytest.mark.parametrize("largest", [30, 120, 252])
def test_exponents_that_spread_by_28_are_held_exactly(largest: int) -> None:
    scales = scales_from(largest, 28)
    codes, w, amax = stored(scales)
    (count,) = check_op(KINDS["fp8_inexact"], codes, scales, amax)
    copy, transposed, scale = check_op(KINDS["fp8_quantize_exact"], w, transposed=True)
    assert int(count) == 0 and same_bits(transposed, copy.T.contiguous())
    assert torch.equal(copy.double() * scale[0].double(), w.double())
    assert 2.0**15 <= copy.float().abs().max() <= 57344.0 and scale[1].log2() == scale[1].log2().round()


@pytest.mark.parametrize("spread", [29, 30, 31, 32, 33, 60])
def test_elements_that_are_not_held_are_counted(spread: int) -> None:
    scales = scales_from(150, spread)
    codes, w, amax = stored(scales)
    (count,) = check_op(KINDS["fp8_inexact"], codes, scales, amax)
    copy, scale = check_op(KINDS["fp8_quantize_exact"], w, transposed=False)
    off = copy.double() * scale[0].double() != w.double()
    assert int(count) == int(off.sum()) > 0


def test_zeros_below_all_others_are_held() -> None:
    scales = scales_from(150, 20)
    codes, _, _ = stored(scales)
    codes[3, :16], scales[3, 0] = 0x80, 0
    blocks = e2m1.levels(e2m1.unpacked(codes)).view(ROWS, -1, 32) * 2.0 ** (scales.float() - 127)[..., None]
    amax = matrix_amax(blocks.view(ROWS, COLUMNS), (ROWS,))
    assert int(check_op(KINDS["fp8_inexact"], codes, scales, amax)[0]) == 0
    none = torch.zeros_like(codes)
    assert int(check_op(KINDS["fp8_inexact"], none, scales, torch.zeros(1, 2))[0]) == 0


def test_what_is_no_stored_weight_is_named() -> None:
    codes, scales = Value("codes", (8, 32), "uint8", "state"), Value("scales", (8, 2), "uint8", "state")
    amax = Value("amax", (1, 2), "fp32", "state")
    infer = KINDS["fp8_inexact"].infer
    for ins, message in (
        ((replace(codes, dtype="e4m3"), scales, amax), "reads uint8, uint8, fp32"),
        ((replace(codes, shape=(8, 48)), scales, amax), r"codes of 2 blocks a row are \[8, 32\]"),
        ((codes, scales, replace(amax, shape=(2,))), r"an amax of matrices is \[matrices, 2\]"),
    ):
        with pytest.raises(ProgramError, match=message):
            infer(ins, {})

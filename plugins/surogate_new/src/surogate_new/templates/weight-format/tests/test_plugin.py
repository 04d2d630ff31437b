from __future__ import annotations

import torch
from acme_plugin.plugin import DEQUANTIZE, QUANTIZE

from surogate_core.testing.ops import check_op


def test_a_matrix_survives_with_three_bits_behind_the_first() -> None:
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float32).bfloat16()
    codes, scales = check_op(QUANTIZE, w)
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (8,)
    (again,) = check_op(DEQUANTIZE, codes, scales, dtype="bf16")
    wrong = (again.float() - w.float()).abs() / w.float().abs().clamp(min=float(scales.max()) * 2**-6)
    assert float(wrong.max()) < 2**-4 + 2**-7


def test_a_row_of_zeros_stays_zero() -> None:
    codes, scales = check_op(QUANTIZE, torch.zeros(2, 4))
    (again,) = check_op(DEQUANTIZE, codes, scales, dtype="fp32")
    assert not again.any()

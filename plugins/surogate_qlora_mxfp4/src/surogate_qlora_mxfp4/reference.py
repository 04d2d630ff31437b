"""The torch references of MXFP4 storage. Kernels give the same bits.

Encoding follows the OCP Microscaling Formats specification 1.0, section 6.3: the scale of a block is the power of two
with the exponent floor(log2(largest magnitude)) - 2, where 2 is the exponent of the largest E2M1 number, 6. Elements
are divided by it and rounded to nearest, ties to the even code. What is above 6 then (up to 8) becomes 6.

Scales are kept to the codes 2 to 252, in which all products with E2M1 numbers are normal numbers of bf16. Smaller ones
would belong to blocks below 2^-122. A block of zeros has the code 0, and one that is not finite 255, which is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surogate_core.reference import e2m1
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.reference.stored_matrix import e4m3_copy, e5m2_copy, matrix_amax

from .ops import BLOCK

BIAS, LEAST, MOST, NAN = 127, 2, 252, 255
_MAX_EXPONENT = 2


def mxfp4_quantize(w: Tensor, *, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return (codes, scales)."""
    return quantized(w)


def quantized(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of rows of any matrix."""
    x = w.float().reshape(len(w), -1, BLOCK)
    top = x.abs().amax(dim=-1)
    exponent = torch.frexp(top).exponent - 1  # floor(log2(top)): exact where log2 rounds
    scales = (exponent - _MAX_EXPONENT + BIAS).clamp(LEAST, MOST).masked_fill(top == 0, 0)
    scales = scales.masked_fill(~top.isfinite(), NAN)
    codes = e2m1.rounded(x * power((2 * BIAS - scales).clamp(min=0))[..., None])
    return e2m1.packed(codes.view(w.shape)), scales.to(torch.uint8)


def mxfp4_dequantize(codes: Tensor, scales: Tensor, *, rows: Sequence[int], dtype: str) -> Tensor:
    """Return the weight: level * 2^(scale - 127), which fp32 and bf16 hold exactly."""
    return decoded(codes, scales).to(TORCH_DTYPES[dtype])


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of codes [R, K / 2] in fp32 [R, K]."""
    x = e2m1.levels(e2m1.unpacked(codes)).view(len(codes), -1, BLOCK) * power(scales)[..., None]
    return x.view(len(codes), -1)


def power(codes: Tensor) -> Tensor:
    """Return the numbers of E8M0 codes in fp32: 2^(code - 127), and NaN for 255. Functions of torch may round them."""
    exponents = codes.int()
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is no normal number
    return bits.masked_fill(exponents == NAN, 0x7FC00000).view(torch.float32)


def mxfp4_amax(*stored: Tensor, **attrs: Any) -> Tensor:
    """Return `matrix_amax` of the dequantized weight."""
    return matrix_amax(mxfp4_dequantize(*stored, **attrs), attrs["rows"])


def mxfp4_to_e4m3(*stored: Tensor, transposed: bool, **attrs: Any) -> tuple[Tensor, Tensor]:
    """Return `e4m3_copy` of the dequantized weight. The last input is its amax."""
    *weight, amax = stored
    return e4m3_copy(mxfp4_dequantize(*weight, **attrs), amax, transposed)


def mxfp4_to_e5m2(*stored: Tensor, transposed: bool, **attrs: Any) -> tuple[Tensor, Tensor]:
    """Return `e5m2_copy` of the dequantized weight. The last input is its amax."""
    *weight, amax = stored
    return e5m2_copy(mxfp4_dequantize(*weight, **attrs), amax, transposed)

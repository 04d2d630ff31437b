"""The torch references of NVFP4 storage. Kernels give the same bits.

Every operation is rounded to fp32 separately, in the order written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.reference.stored_matrix import E4M3_MAX, FLT_MAX, e4m3, e4m3_copy, matrix_amax

from .ops import BLOCK

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1 by code. Bit 3 is the sign."""


def fp4_block_quantize(w: Tensor, *, rows: Sequence[int], four_over_six: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, global scales)."""
    parts = [_quantized(part.float(), four_over_six) for part in w.split(list(rows))]
    codes, scales, global_scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales), torch.stack(global_scales)


def fp4_block_dequantize(
    codes: Tensor, scales: Tensor, global_scales: Tensor, *, rows: Sequence[int], dtype: str
) -> Tensor:
    """Return the weight: level * scale * global scale."""
    code = torch.stack((codes & 15, codes >> 4), dim=-1).view(len(codes), -1, BLOCK)
    x = _level(code) * scales.float()[..., None]  # exact
    return (x.view(len(codes), -1) * _per_row(global_scales, rows)).to(TORCH_DTYPES[dtype])


def fp4_block_amax(*stored: Tensor, **attrs: Any) -> Tensor:
    """Return `matrix_amax` of the dequantized weight."""
    return matrix_amax(fp4_block_dequantize(*stored, **attrs), attrs["rows"])


def fp4_block_to_e4m3(*stored: Tensor, transposed: bool, **attrs: Any) -> tuple[Tensor, Tensor]:
    """Return `e4m3_copy` of the dequantized weight. The last input is its amax."""
    *weight, amax = stored
    return e4m3_copy(fp4_block_dequantize(*weight, **attrs), amax, transposed)


def _per_row(values: Tensor, rows: Sequence[int]) -> Tensor:
    return values.repeat_interleave(torch.tensor(list(rows)))[:, None]


def _quantized(w: Tensor, four_over_six: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, global scale) of one matrix.

    Without `four_over_six` as ModelOpt does it, which divides by the step of a block and gives a block of zeros the
    scale 1; with it as TransformerEngine does it, which multiplies by the reciprocal.
    """
    x = w.view(len(w), -1, BLOCK)
    amax, top = w.abs().max(), x.abs().amax(dim=-1)
    limit = torch.tensor(6.0 * (256.0 if four_over_six else E4M3_MAX))
    if not four_over_six:
        scale = amax / limit
        scales = e4m3(torch.where(top == 0, 1.0, top / (6 * scale)))
        return _packed(_codes(torch.where(x == 0, x, x / (scales.float() * scale)[..., None]))), scales, scale
    encode = torch.clamp(limit / amax, max=FLT_MAX) if 0 < float(amax) < torch.inf else torch.tensor(1.0)
    base = top / 6 * encode
    candidates = []
    for factor in (1.0, 1.5):
        scales = e4m3(torch.clamp(base * factor, max=E4M3_MAX))
        codes = _codes(x * torch.clamp(1 / (scales.float() * (1 / encode)), max=FLT_MAX)[..., None])
        candidates.append((codes, scales, _squared_error(x, codes, scales, amax, limit)))
    (six, six_scales, six_error), (four, four_scales, four_error) = candidates
    smaller = four_error < six_error
    codes = torch.where(smaller[..., None], four, six)
    scales = torch.where(smaller, four_scales.view(torch.uint8), six_scales.view(torch.uint8))
    return _packed(codes), scales.view(torch.float8_e4m3fn), amax / limit


def _codes(y: Tensor) -> Tensor:
    """Return E2M1 codes of y, rounded to nearest; numbers above 6 become 6, and NaN has the code 7."""
    a = y.abs()
    # Ties go to the even code.
    steps = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5)
    code = torch.stack(steps).sum(dim=0, dtype=torch.uint8) | (y.signbit().to(torch.uint8) << 3)
    return code.masked_fill(y.isnan(), 7)


def _squared_error(x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor, limit: Tensor) -> Tensor:
    """Return the sum over each block, in order."""
    values = _level(codes) * scales.float()[..., None] * amax / limit
    error = torch.zeros_like(x[..., 0])
    for term in (values - x).square().unbind(dim=-1):
        error = error + term
    return error


def _level(codes: Tensor) -> Tensor:
    return torch.tensor([*LEVELS, *(-level for level in LEVELS)])[codes.long()]


def _packed(codes: Tensor) -> Tensor:
    """Return [rows, K / 2] bytes. The first element of a byte is in its lower half."""
    flat = codes.view(len(codes), -1)
    return flat[:, 0::2] | (flat[:, 1::2] << 4)

"""The torch references of NVFP4 storage. Kernels give the same bits.

Every operation is rounded to fp32 separately, in the order written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surogate_core.reference import e2m1
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.reference.stored_matrix import E4M3_MAX, FLT_MAX, e4m3, e4m3_copy, matrix_amax

from .ops import BLOCK


def fp4_block_quantize(w: Tensor, *, rows: Sequence[int], four_over_six: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, global scales)."""
    matrices = [part.float() for part in w.split(list(rows))]
    parts = [quantized(x, x.abs().max(), four_over_six) for x in matrices]
    codes, scales, global_scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales), torch.stack(global_scales)


def fp4_block_dequantize(
    codes: Tensor, scales: Tensor, global_scales: Tensor, *, rows: Sequence[int], dtype: str
) -> Tensor:
    """Return the weight: level * scale * global scale."""
    x = e2m1.levels(e2m1.unpacked(codes)).view(len(codes), -1, BLOCK) * scales.float()[..., None]  # exact
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


def quantized(w: Tensor, amax: Tensor, four_over_six: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, global scale) of rows of a matrix, or of several, whose largest magnitude is `amax`.

    Without `four_over_six` as ModelOpt does it, which divides by the step of a block and gives a block of zeros the
    scale 1; with it as TransformerEngine does it, which multiplies by the reciprocal.
    """
    x = w.view(len(w), -1, BLOCK)
    top = x.abs().amax(dim=-1)
    limit = torch.tensor(6.0 * (256.0 if four_over_six else E4M3_MAX))
    if not four_over_six:
        scale = amax / limit
        scales = e4m3(torch.where(top == 0, 1.0, top / (6 * scale)))
        codes = e2m1.rounded(torch.where(x == 0, x, x / (scales.float() * scale)[..., None]))
        return e2m1.packed(codes.view(w.shape)), scales, scale
    encode = torch.clamp(limit / amax, max=FLT_MAX) if 0 < float(amax) < torch.inf else torch.tensor(1.0)
    base = top / 6 * encode
    candidates = []
    for factor in (1.0, 1.5):
        scales = e4m3(torch.clamp(base * factor, max=E4M3_MAX))
        codes = e2m1.rounded(x * torch.clamp(1 / (scales.float() * (1 / encode)), max=FLT_MAX)[..., None])
        candidates.append((codes, scales, _squared_error(x, codes, scales, amax, limit)))
    (six, six_scales, six_error), (four, four_scales, four_error) = candidates
    smaller = four_error < six_error
    codes = torch.where(smaller[..., None], four, six)
    scales = torch.where(smaller, four_scales.view(torch.uint8), six_scales.view(torch.uint8))
    return e2m1.packed(codes.view(w.shape)), scales.view(torch.float8_e4m3fn), amax / limit


def _squared_error(x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor, limit: Tensor) -> Tensor:
    """Return the sum over each block, in order."""
    off = e2m1.levels(codes).mul_(scales.float()[..., None]).mul_(amax).div_(limit).sub_(x)
    error = torch.zeros_like(x[..., 0])
    for term in off.square_().unbind(dim=-1):
        error += term
    return error

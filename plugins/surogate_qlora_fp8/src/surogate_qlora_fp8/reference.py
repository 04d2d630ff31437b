"""The torch references of blockwise FP8 storage. Kernels give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.reference.rounding import TORCH_DTYPES

_MAX = 448.0
_FLT_MAX = torch.finfo(torch.float32).max
_NAN = 0x7F


def fp8_tile_quantize(w: Tensor, *, rows: Sequence[int], tile: int) -> tuple[Tensor, Tensor]:
    """Return (codes, scales). A scale is the largest magnitude of its tile / 448, or 1 if that is 0."""
    parts = [_quantized(part.float(), tile) for part in w.split(list(rows))]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def fp8_tile_dequantize(codes: Tensor, scales: Tensor, *, rows: Sequence[int], tile: int, dtype: str) -> Tensor:
    """Return the weight: code * scale."""
    per_matrix = scales.split([-(-count // tile) for count in rows])
    parts = [_spread(part, (count, codes.shape[1]), tile) for part, count in zip(per_matrix, rows, strict=True)]
    return (codes.float() * torch.cat(parts)).to(TORCH_DTYPES[dtype])


def fp8_tile_amax(codes: Tensor, scales: Tensor, *, rows: Sequence[int], tile: int, dtype: str) -> Tensor:
    """Return (largest finite magnitude, 1 if an element is not finite) of each matrix of the dequantized weight."""
    w = fp8_tile_dequantize(codes, scales, rows=rows, tile=tile, dtype=dtype)
    return torch.stack([_amax(part.float()) for part in w.split(list(rows))])


def fp8_tile_to_e4m3(
    codes: Tensor, scales: Tensor, amax: Tensor, *, rows: Sequence[int], tile: int, dtype: str, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return (copy, scale): the dequantized weight in E4M3, and (decode, encode).

    encode maps the largest magnitude to 448. decode is NaN if an element is not finite.
    """
    w = fp8_tile_dequantize(codes, scales, rows=rows, tile=tile, dtype=dtype)
    largest, not_finite = amax.amax(dim=0)
    encode = torch.where(largest > 0, (torch.tensor(_MAX) / largest).clamp(max=_FLT_MAX), 1.0)
    decode = torch.where(not_finite > 0, torch.nan, 1.0 / encode)
    copy = _e4m3(w.float() * encode)
    return copy.T.contiguous() if transposed else copy, torch.stack([decode, encode])


def _quantized(w: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of one matrix."""
    height, width = w.shape
    padded = pad(w, (0, -width % tile, 0, -height % tile))
    amax = padded.view(-(-height // tile), tile, -(-width // tile), tile).abs().amax(dim=(1, 3))
    scales = amax / _MAX
    scales = torch.where(scales == 0, 1.0, scales)
    return _e4m3(w / _spread(scales, (height, width), tile)), scales


def _amax(x: Tensor) -> Tensor:
    finite = x.isfinite()
    return torch.stack([x.abs().where(finite, 0).max(), (~finite).any().float()])


def _spread(scales: Tensor, shape: tuple[int, int], tile: int) -> Tensor:
    """Return the scale of every element."""
    return scales.repeat_interleave(tile, 0).repeat_interleave(tile, 1)[: shape[0], : shape[1]]


def _e4m3(x: Tensor) -> Tensor:
    """Round to nearest even; magnitudes above 448 become 448, NaN becomes 0x7F."""
    codes = x.clamp(-_MAX, _MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(x.isnan(), _NAN).view(torch.float8_e4m3fn)

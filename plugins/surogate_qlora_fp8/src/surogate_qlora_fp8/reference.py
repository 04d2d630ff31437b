"""The torch references of blockwise FP8 storage. Kernels give the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.reference.stored_matrix import E4M3_MAX, e4m3, e4m3_copy, matrix_amax


def fp8_tile_quantize(w: Tensor, *, rows: Sequence[int], tile: int) -> tuple[Tensor, Tensor]:
    """Return (codes, scales). A scale is the largest magnitude of its tile / 448, or 1 if that is 0."""
    parts = [_quantized(part.float(), tile) for part in w.split(list(rows))]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def fp8_tile_dequantize(codes: Tensor, scales: Tensor, *, rows: Sequence[int], tile: int, dtype: str) -> Tensor:
    """Return the weight: code * scale."""
    per_matrix = scales.split([-(-count // tile) for count in rows])
    parts = [spread(part, (count, codes.shape[1]), (tile, tile)) for part, count in zip(per_matrix, rows, strict=True)]
    return (codes.float() * torch.cat(parts)).to(TORCH_DTYPES[dtype])


def fp8_tile_amax(*stored: Tensor, **attrs: Any) -> Tensor:
    """Return `matrix_amax` of the dequantized weight."""
    return matrix_amax(fp8_tile_dequantize(*stored, **attrs), attrs["rows"])


def fp8_tile_to_e4m3(*stored: Tensor, transposed: bool, **attrs: Any) -> tuple[Tensor, Tensor]:
    """Return `e4m3_copy` of the dequantized weight. The last input is its amax."""
    *weight, amax = stored
    return e4m3_copy(fp8_tile_dequantize(*weight, **attrs), amax, transposed)


def fp8_channel_quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, scales [rows, 1]). A scale is the largest magnitude of its row / 448, or 1 if that is 0."""
    x = w.float()
    scales = x.abs().amax(dim=1, keepdim=True) / E4M3_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    return e4m3(x / scales), scales


def fp8_channel_dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weight in fp32: code * scale of its row."""
    return codes.float() * scales


def _quantized(w: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of one matrix."""
    height, width = w.shape
    padded = pad(w, (0, -width % tile, 0, -height % tile))
    amax = padded.view(-(-height // tile), tile, -(-width // tile), tile).abs().amax(dim=(1, 3))
    scales = amax / E4M3_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    return e4m3(w / spread(scales, (height, width), (tile, tile))), scales


def spread(scales: Tensor, shape: tuple[int, int], block: tuple[int, int], skipped: int = 0) -> Tensor:
    """Return the scale of every element of a matrix, whose first rows are `skipped`."""
    rows = scales.repeat_interleave(block[0], 0)[skipped : skipped + shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]

"""The torch references of NF4. Kernels give the same bits.

Codes and absmax have the bits of `quantize_4bit(quant_type="nf4")` of bitsandbytes 0.50 on a CPU, and dequantized
weights those of its `dequantize_4bit`. Its GPU kernels approximate the reciprocal, with an error of one unit in the
last place, and give a block of zeros the code of -1, which is multiplied by 0.

Double quantization follows its torch implementation, with two differences. The mean of the absmax is summed in fp64:
that of torch depends on the device, and on a CPU differs in the last bit for 4 of 10 matrices, and then in 3 of 100,000
codes. A group of fewer than 256 absmax is multiplied by a reciprocal, as on a GPU. The CPU library of bitsandbytes
looks midpoints up in a coarser table, so 0.2 % of its 8-bit codes are neighbours of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.reference.stored_matrix import e4m3_copy, matrix_amax

from .tables import GROUP, LEVELS, absmax_map

_SMALLEST = 1e-38
"""Reciprocals are of absmax that are at least this, so that those of zeros are finite."""

_LANES = 32

_FEW = 15
"""Most midpoints with which comparisons take less time than a search: with 15, a third."""


def nf4_quantize(w: Tensor, *, rows: Sequence[int], block: int, double: bool) -> tuple[Tensor, ...]:
    """Return (codes, absmax), or with `double` (codes, absmax codes, nested absmax, offset)."""
    x = w.float().reshape(-1, block)
    absmax = x.abs().amax(dim=1)
    code = _codes(x * _reciprocal(absmax)[:, None], _levels()).view(-1, 2)
    codes = (code[:, 0] << 4) | code[:, 1]
    if not double:
        return codes, absmax
    per_matrix = absmax.split([count * w.shape[1] // block for count in rows])
    parts = [compressed(part) for part in per_matrix]
    return codes, *(torch.cat(column) for column in zip(*parts, strict=True))


def nf4_dequantize(
    codes: Tensor,
    absmax: Tensor,
    nested: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    rows: Sequence[int],
    shape: Sequence[int],
    block: int,
    dtype: str,
) -> Tensor:
    """Return the weight of `shape`."""
    code = torch.stack((codes >> 4, codes & 15), dim=1).view(-1, block)
    if nested is not None and offset is not None:
        absmax = torch.cat(list(_expanded(absmax, nested, offset, [count * shape[1] // block for count in rows])))
    return (_levels()[code.long()] * absmax[:, None]).to(TORCH_DTYPES[dtype]).view(tuple(shape))


def nf4_amax(*stored: Tensor, **attrs: Any) -> Tensor:
    """Return `matrix_amax` of the dequantized weight."""
    return matrix_amax(nf4_dequantize(*stored, **attrs), attrs["rows"])


def nf4_to_e4m3(*stored: Tensor, transposed: bool, **attrs: Any) -> tuple[Tensor, Tensor]:
    """Return `e4m3_copy` of the dequantized weight. The last input is its amax."""
    *weight, amax = stored
    return e4m3_copy(nf4_dequantize(*weight, **attrs), amax, transposed)


def mean(absmax: Tensor) -> Tensor:
    """Return the mean in fp32, of a sum in fp64 in the order of the kernel: groups of 256, then every 256th group."""
    sums = _tree(_tree(_padded(absmax.double(), GROUP).view(-1, GROUP // _LANES, _LANES)))
    total = torch.zeros(GROUP, dtype=torch.float64)
    for row in _padded(sums, GROUP):
        total = total + row
    return (_tree(_tree(total.view(GROUP // _LANES, _LANES))) / len(absmax)).float()


def compressed(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, nested absmax, offset) of the absmax of one matrix."""
    offset = mean(absmax)
    d = _padded(absmax - offset, GROUP)
    nested = d.abs().amax(dim=1)
    codes = _codes(d * _reciprocal(nested)[:, None], _map())
    return codes.view(-1)[: len(absmax)], nested, offset[None]


def _expanded(codes: Tensor, nested: Tensor, offset: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """Yield the absmax of each matrix."""
    groups = nested.split([-(-count // GROUP) for count in counts])
    for part, own, mean_ in zip(codes.split(list(counts)), groups, offset, strict=True):
        yield _map()[part.long()] * own.repeat_interleave(GROUP)[: len(part)] + mean_


def _codes(x: Tensor, levels: Tensor) -> Tensor:
    """Return the number of midpoints below each x; of NaN that of all."""
    middle = (levels[:-1] + levels[1:]) / 2
    if len(middle) > _FEW:
        return torch.bucketize(x, middle, out_int32=True).to(torch.uint8)
    codes = torch.full(x.shape, len(middle), dtype=torch.uint8)
    for bound in middle.tolist():
        codes -= (x <= bound).view(torch.uint8)
    return codes


def _reciprocal(x: Tensor) -> Tensor:
    return 1.0 / x.clamp(min=_SMALLEST)


def _padded(x: Tensor, width: int) -> Tensor:
    """Return x as a matrix of this width, with zeros after the last element."""
    return torch.nn.functional.pad(x, (0, -len(x) % width)).view(-1, width)


def _tree(x: Tensor) -> Tensor:
    """Return the sums over the last dimension, a power of two, of which the halves are added to each other."""
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x[..., 0]


@cache
def _levels() -> Tensor:
    return torch.tensor(LEVELS)


@cache
def _map() -> Tensor:
    return torch.tensor(absmax_map())

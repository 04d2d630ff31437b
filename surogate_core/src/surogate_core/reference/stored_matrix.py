"""Parts of the references of weight formats: rounding to FP8, and measuring and copying a dequantized matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
_E5M2_TOP = 15
FLT_MAX = torch.finfo(torch.float32).max


def e4m3(x: Tensor) -> Tensor:
    """Round to nearest even; magnitudes above 448 become 448, NaN becomes 0x7F."""
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(x.isnan(), 0x7F).view(torch.float8_e4m3fn)


def matrix_amax(w: Tensor, rows: Sequence[int]) -> Tensor:
    """Return fp32 [matrices, 2]: of each the largest finite magnitude, and 1 if an element is not finite, else 0."""
    parts = [(part, part.isfinite()) for part in w.float().split(list(rows))]
    return torch.stack([torch.stack([x.abs().where(ok, 0).max(), (~ok).any().float()]) for x, ok in parts])


def e4m3_copy(w: Tensor, amax: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the weight in E4M3 with one scale, and (decode, encode), by the `matrix_amax` of the weight.

    encode maps the largest magnitude to 448. decode is NaN if an element is not finite.
    """
    largest, not_finite = amax.amax(dim=0)
    encode = torch.where(largest > 0, (torch.tensor(E4M3_MAX) / largest).clamp(max=FLT_MAX), 1.0)
    decode = torch.where(not_finite > 0, torch.nan, 1.0 / encode)
    copy = e4m3(w.float() * encode)
    return copy.T.contiguous() if transposed else copy, torch.stack([decode, encode])


def e5m2_copy(w: Tensor, amax: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the weight in E5M2, scaled by a power of two, and (decode, encode), by the `matrix_amax` of the weight.

    encode maps the largest magnitude to at least 2^15 and less than 2^16. What is above 57344, the largest number of
    E5M2, becomes that. So numbers of two significant bits stay what they are, down to 2^-30 of the largest. decode is
    NaN if an element is not finite.
    """
    largest, not_finite = amax.amax(dim=0)
    exponent = torch.frexp(largest).exponent - 1
    power = (127 + (_E5M2_TOP - exponent).clamp(max=127)) << 23  # by bits: functions of torch may round powers of two
    encode = torch.where(largest > 0, power.int().view(torch.float32), 1.0)
    decode = torch.where(not_finite > 0, torch.nan, 1.0 / encode)
    wide = w.float() * encode
    codes = wide.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2).view(torch.uint8)
    copy = codes.masked_fill(wide.isnan(), 0x7F).view(torch.float8_e5m2)
    return copy.T.contiguous() if transposed else copy, torch.stack([decode, encode])

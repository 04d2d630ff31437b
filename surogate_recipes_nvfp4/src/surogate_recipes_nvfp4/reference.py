"""Torch references of the NVFP4 ops. Every operation is rounded to fp32 separately, in the order written."""

from __future__ import annotations

import torch
from torch import Tensor

from surogate_core.reference import ops as standard
from surogate_core.reference.rounding import TORCH_DTYPES, philox4x32

from .formats import ATOM_ROWS, ATOM_SCALES, BLOCK, LARGEST, LEVELS, SCALE_LARGEST, SIGNS, scale_range, scale_shape

Form = tuple[Tensor, Tensor, Tensor]
"""Codes (two to a byte), scales, amax."""

_FP32_MAX = torch.finfo(torch.float32).max
_MASK = 0xFFFFFFFF
_E4M3 = torch.float8_e4m3fn


# ------------------------------------------------------------------------------------------------------------ quantize


def nvfp4_quantize(
    x: Tensor,
    *random: Tensor,
    rows: bool,
    columns: bool,
    square: bool = False,
    hadamard: bool = False,
    four_over_six: bool = False,
    stochastic: bool = False,
    stream: int = 0,
) -> tuple[Tensor, ...]:
    """Return the form of x if `rows`, then that of x^T if `columns`.

    square         a scale for 16 x 16 elements, so that both forms hold the same values
    hadamard       the form of the columns is that of `hadamard_columns(x)`
    four_over_six  the scale of a block maps its largest magnitude to 6 or to 4, whichever has the smaller squared error
    stochastic     round by random numbers of `random` = (micro_step, seed) and `stream`, for the columns `stream` + 1
    """
    bits = [_random_bytes(x, random[0], random[1], stream + i) if stochastic else None for i in range(2)]
    row_form = _form(x.float(), square, four_over_six, bits[0]) if rows or square else None
    outs = row_form if row_form is not None and rows else ()
    if not columns:
        return outs
    if square and row_form is not None:
        return *outs, *_transposed(row_form)
    turned = hadamard_columns(x) if hadamard else x.T
    return *outs, *_form(turned.float().contiguous(), False, four_over_six, bits[1])


def hadamard_columns(x: Tensor) -> Tensor:
    """Return x^T in bf16, each 16 elements of a row times `SIGNS` and the orthogonal Hadamard matrix of order 16."""
    y = x.T.float().reshape(x.shape[1], -1, BLOCK) * torch.tensor(SIGNS)
    for stride in (1, 2, 4, 8):
        low, high = y.view(*y.shape[:2], -1, 2, stride).unbind(dim=-2)
        y = torch.stack((low + high, low - high), dim=-2)
        y = y.view(x.shape[1], -1, BLOCK)
    return (y * 0.25).bfloat16().view(x.shape[1], x.shape[0])


def _form(x: Tensor, square: bool, four_over_six: bool, bits: Tensor | None) -> Form:
    """Return the form of an fp32 matrix. `bits` are random bytes of each element, for stochastic rounding."""
    amax, limit = x.abs().max(), torch.tensor(scale_range(four_over_six))
    encode = torch.where(amax.isfinite() & (amax > 0), (LARGEST * limit / amax).clamp(max=_FP32_MAX), 1.0)
    decode = 1 / encode
    blocks = x.view(len(x), -1, BLOCK)
    top = blocks.abs().amax(dim=-1)
    if square:
        top = top.view(-1, BLOCK, top.shape[1]).amax(dim=1).repeat_interleave(BLOCK, dim=0)
    if four_over_six:
        base = top / LARGEST * encode
        scales = [_e4m3((base * k).clamp(max=SCALE_LARGEST)) for k in (1.0, 1.5)]
        errors = [_error(blocks, scale, decode, amax, LARGEST * limit) for scale in scales]
        if square:
            errors = [_over_rows(error) for error in errors]
        scale = torch.where(errors[1] < errors[0], scales[1].view(torch.uint8), scales[0].view(torch.uint8)).view(_E4M3)
    else:
        scale = _e4m3(top * (encode * (torch.tensor(1.0) / LARGEST)))
    codes = codes_of(_scaled(blocks, scale, decode), bits)
    amax = torch.where(amax.isfinite(), amax, torch.nan)
    return _packed(codes.view(x.shape)), swizzled(scale), torch.stack([amax, limit])


def _scaled(blocks: Tensor, scale: Tensor, decode: Tensor) -> Tensor:
    """Return the elements over their scales, which were rounded before."""
    factor = (1 / (scale.float() * decode)).clamp(max=_FP32_MAX)
    return (blocks * factor[..., None]).clamp(-LARGEST, LARGEST)


def _error(blocks: Tensor, scale: Tensor, decode: Tensor, amax: Tensor, largest: Tensor) -> Tensor:
    """Return the squared error of each block, summed in order, if it is rounded to nearest with this scale."""
    level = _levels()[codes_of(_scaled(blocks, scale, decode), None).int()]
    difference = level * scale.float()[..., None] * amax / largest - blocks
    error = torch.zeros_like(blocks[..., 0])
    for term in (difference * difference).unbind(dim=-1):
        error = error + term
    return error


def _over_rows(error: Tensor) -> Tensor:
    """Return the sum over the 16 rows of a square block, for each of its rows."""
    parts = error.view(-1, BLOCK, error.shape[1])
    for half in (8, 4, 2, 1):
        parts = parts[:, :half] + parts[:, half : 2 * half]
    return parts.repeat_interleave(BLOCK, dim=1).view(error.shape)


def codes_of(y: Tensor, bits: Tensor | None) -> Tensor:
    """Return E2M1 codes of magnitudes up to 6, rounded to nearest, ties to even, or by random bytes; 7 for NaN.

    By 8 random bits r the magnitude is raised by r / 256 of the distance of levels there, and then rounded down.
    Numbers up to 2, 4 and 6 have the codes 2 |y|, |y| + 2 and |y| / 2 + 4, exact in fp64.
    """
    a = y.abs()
    if bits is not None:
        step = torch.where(a >= 4, 2.0, torch.where(a >= 2, 1.0, 0.5))
        a = bits.view(a.shape).float() * (1 / 256) * step + a
    a = a.double()
    code = torch.minimum(torch.minimum(2 * a, a + 2), a / 2 + 4)
    code = (code.round() if bits is None else code.floor()).clamp(max=7).nan_to_num(nan=7).to(torch.uint8)
    return code | (y.signbit() & ~y.isnan()).to(torch.uint8) << 3


def _random_bytes(x: Tensor, micro_step: Tensor, seed: Tensor, stream: int) -> Tensor:
    """Return a random byte for each element of a quantized matrix, row by row: byte e of a block belongs to element e.

    The Philox key is (seed low, seed high), the counter (block low, block high, stream, micro_step).
    """
    blocks = torch.arange(x.numel() // BLOCK, dtype=torch.int64)
    constant, key = torch.zeros_like(blocks), int(seed)
    counter = (blocks & _MASK, blocks >> 32, constant + (stream & _MASK), constant + (int(micro_step) & _MASK))
    words = torch.stack(philox4x32(counter, (key & _MASK, (key >> 32) & _MASK)), dim=1)
    return torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=2).view(-1, BLOCK)


def _transposed(form: Form) -> Form:
    """Return the form of the transposed matrix, of a form with square blocks."""
    packed, scales, amax = form
    codes = unpacked(packed)
    scale = deswizzled(scales, *codes.shape).view(torch.uint8)[::BLOCK].T.repeat_interleave(BLOCK, dim=0)
    return _packed(codes.T), swizzled(scale.view(_E4M3)), amax.clone()


def _e4m3(x: Tensor) -> Tensor:
    """Round magnitudes to nearest even; those above 448 become 448."""
    return x.clamp(max=SCALE_LARGEST).to(_E4M3)


def _packed(codes: Tensor) -> Tensor:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpacked(packed: Tensor) -> Tensor:
    """Return the codes, one to a byte. The first one of a byte is in its lower half."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).view(len(packed), -1)


def _levels() -> Tensor:
    return torch.tensor([*LEVELS, *(-level for level in LEVELS)])


def swizzled(scale: Tensor) -> Tensor:
    """Return the scales [R, C / 16] of a matrix in the layout of `scale_offset`, with zeros beyond the matrix."""
    rows, columns = scale_shape(scale.shape[0], scale.shape[1] * BLOCK)
    padded = torch.zeros(rows, columns, dtype=torch.uint8)
    padded[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    atoms = padded.view(rows // ATOM_ROWS, 4, 32, columns // ATOM_SCALES, ATOM_SCALES)
    return atoms.permute(0, 3, 2, 1, 4).reshape(rows, columns).view(_E4M3)


def deswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales [rows, columns / 16] of a matrix [rows, columns]."""
    high, wide = scales.shape
    atoms = scales.view(torch.uint8).view(high // ATOM_ROWS, wide // ATOM_SCALES, 32, 4, ATOM_SCALES)
    return atoms.permute(0, 3, 2, 1, 4).reshape(high, wide)[:rows, : columns // BLOCK].contiguous().view(_E4M3)


# ------------------------------------------------------------------------------------------------------------ products


def dequantized(packed: Tensor, scales: Tensor) -> Tensor:
    """Return level * scale in fp32, without the factor of the matrix. It is exact, and so in bf16."""
    codes = unpacked(packed)
    scale = deswizzled(scales, *codes.shape).float()
    return (_levels()[codes.int()].view(len(codes), -1, BLOCK) * scale[..., None]).view(codes.shape)


def alpha(amax_a: Tensor, amax_b: Tensor) -> Tensor:
    """Return the factor of a product of two forms, fp32."""
    return amax_a[0] * amax_b[0] * (1 / (LARGEST * LARGEST * amax_a[1] * amax_b[1]))


def _product(a: tuple[Tensor, ...], b: tuple[Tensor, ...], trans_b: bool) -> Tensor:
    right = dequantized(*b[:2])
    return dequantized(*a[:2]) @ (right if trans_b else right.T) * alpha(a[2], b[2])


def nvfp4_linear(*ins: Tensor, dtype: str, backend: str, trans_b: bool = False) -> Tensor:
    """Return a b^T of two forms, plus a bias if there is a seventh input. With `trans_b`, b is stored as [k, n].

    `backend` says by which kernels.
    """
    product = _product(ins[:3], ins[3:6], trans_b)
    return (product + ins[6].float() if len(ins) > 6 else product).to(TORCH_DTYPES[dtype])


def nvfp4_linear_add(*ins: Tensor, dtype: str, backend: str, trans_b: bool = False) -> Tensor:
    """Return add(nvfp4_linear(a, b), base). A kernel need not round the product before the sum."""
    base = ins[6]
    return standard.add(_product(ins[:3], ins[3:6], trans_b).to(base.dtype), base)

"""Torch references of the NVFP4 ops. What they quantize is exact to the bit.

Every operation is rounded to fp32 separately, in the order written, as TransformerEngine's reference does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surogate_core.reference import e2m1
from surogate_core.reference import ops as standard
from surogate_core.reference.rounding import TORCH_DTYPES, random_16_bits
from surogate_core.reference.stored_matrix import FLT_MAX, e4m3

from .formats import ATOM_COLUMNS, ATOM_ROWS, BLOCK, LARGEST, LARGEST_SCALE, largest_scale, scales_shape

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Of the random Hadamard transform, the same for all groups of 16 and for the whole run."""


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
    measured: bool = False,
    row: int = 0,
) -> tuple[Tensor, ...]:
    """Forms of x and of its transpose. Magnitudes that are given are those of x, so they change nothing."""
    if measured:
        random = random[1:]
    wide, first = x.float(), row * x.shape[1] // BLOCK
    outs: tuple[Tensor, ...] = ()
    for i, wanted in enumerate((rows, columns)):
        if not wanted:
            continue
        matrix = wide.T.contiguous() if i and not square else wide
        if i and hadamard:
            matrix = hadamard_transform(matrix).bfloat16().float()
        bits = random_bytes(matrix.shape, int(random[1]), stream + i, int(random[0]), first) if stochastic else None
        codes, scales, recorded = _quantized(matrix, square, four_over_six, bits)
        if i and square:  # errors of 4/6 are summed along rows of x, so that both forms hold the same numbers
            codes, scales = codes.T, scales[::BLOCK].T.repeat_interleave(BLOCK, dim=0)
        outs += e2m1.packed(codes), ordered(scales), recorded
    return outs


def _quantized(x: Tensor, square: bool, four_over_six: bool, bits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and amax of an fp32 matrix. `bits` are random bytes, one for each element."""
    blocks, finite = x.view(len(x), -1, BLOCK), x.isfinite()
    amax, largest = x.abs().where(finite, 0).max(), torch.tensor(largest_scale(four_over_six))
    encode = torch.where(amax > 0, (largest * LARGEST / amax).clamp(max=FLT_MAX), 1.0)
    top = _per_block(blocks.abs().amax(dim=-1), square, torch.amax)
    if four_over_six:
        codes, scales = _four_or_six(blocks, top, amax, encode, largest, square, bits)
    else:
        scales = e4m3((top * (encode * (torch.tensor(1.0) / LARGEST))).clamp(max=FLT_MAX))
        codes = _codes(_scaled(blocks, scales, encode), bits)
    recorded = torch.where(finite.all(), amax, torch.nan)
    return codes.view(x.shape), scales, torch.stack([recorded, largest])


def _four_or_six(
    blocks: Tensor, top: Tensor, amax: Tensor, encode: Tensor, largest: Tensor, square: bool, bits: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of the better candidate, judged by rounding to nearest."""
    base = top / LARGEST * encode
    candidates = []
    for factor in (1.0, 1.5):
        scales = e4m3((base * factor).clamp(max=LARGEST_SCALE))
        codes = _codes(_scaled(blocks, scales, encode), None)
        values = e2m1.levels(codes) * scales.float()[..., None]
        error = torch.zeros_like(top)
        for term in (values * amax / (LARGEST * largest) - blocks).square().unbind(dim=-1):
            error = error + term
        candidates.append((codes, scales.view(torch.uint8), _per_block(error, square, _tree_sum)))
    (codes_of_six, six, six_error), (codes_of_four, four, four_error) = candidates
    better = four_error < six_error
    scales = torch.where(better, four, six).view(torch.float8_e4m3fn)
    if bits is None:
        return torch.where(better[..., None], codes_of_four, codes_of_six), scales
    return _codes(_scaled(blocks, scales, encode), bits), scales


def _per_block(rows: Tensor, square: bool, reduce: object) -> Tensor:
    """Reduce what blocks of one row have over 16 rows, and repeat it for each of them, if blocks are square."""
    if not square:
        return rows
    reduced: Tensor = reduce(rows.view(-1, BLOCK, rows.shape[1]), dim=1)  # type: ignore[operator]
    return reduced.repeat_interleave(BLOCK, dim=0)


def _tree_sum(rows: Tensor, dim: int) -> Tensor:
    """The sum over 16: of halves, of their halves, and so on."""
    while rows.shape[dim] > 1:
        low, high = rows.chunk(2, dim=dim)
        rows = low + high
    return rows.squeeze(dim)


def _scaled(blocks: Tensor, scales: Tensor, encode: Tensor) -> Tensor:
    """Elements relative to the scale of their block as it is stored: at most 6."""
    factor = (1 / (scales.float() * (1 / encode))).clamp(max=FLT_MAX)
    return (blocks * factor[..., None]).clamp(-LARGEST, LARGEST)


def _codes(y: Tensor, bits: Tensor | None) -> Tensor:
    """Return E2M1 codes of -6 <= y <= 6, rounded to nearest or with random bytes."""
    return e2m1.rounded(y if bits is None else _stochastic(y.abs(), bits.view(y.shape)).copysign(y))


def _stochastic(magnitude: Tensor, bits: Tensor) -> Tensor:
    """Add a random part of the step at `magnitude`, then round down."""
    raised = bits.float() * (1 / 256) * _step(magnitude) + magnitude
    step = _step(raised)
    return ((raised / step).floor() * step).clamp(max=LARGEST)


def _step(magnitude: Tensor) -> Tensor:
    """The distance to the next level."""
    return torch.where(magnitude >= 4, 2.0, torch.where(magnitude >= 2, 1.0, 0.5))


def random_bytes(shape: torch.Size, seed: int, stream: int, step: int, first: int = 0) -> Tensor:
    """Return a random byte for each element of a matrix, 16 for each call of Philox, from block `first` on."""
    pairs = random_16_bits(shape.numel() // 2, seed=seed, stream=stream, step=step, first=first * BLOCK // 2)
    return torch.stack((pairs & 255, pairs >> 8), dim=1).view(shape)


def hadamard_transform(x: Tensor) -> Tensor:
    """The random Hadamard transform of each 16 adjacent elements of a row: (x * signs) H / 4."""
    y = x.view(len(x), -1, BLOCK) * torch.tensor(SIGNS, dtype=torch.float32)
    for stride in (1, 2, 4, 8):
        low, high = y.view(len(x), -1, BLOCK // (2 * stride), 2, stride).unbind(dim=3)
        y = torch.stack((low + high, low - high), dim=3).view(len(x), -1, BLOCK)
    return (y * 0.25).view(x.shape)


# ------------------------------------------------------------------------------------------------- ops that measure too


def magnitudes(x: Tensor) -> Tensor:
    """Return the largest finite magnitude, and 1 if an element is not finite, of x and of its columns' transform."""
    transformed = hadamard_transform(x.float().T.contiguous()).bfloat16()
    found = [(m.float().abs(), m.isfinite()) for m in (x, transformed)]
    return torch.stack([f for m, ok in found for f in (m.where(ok, 0).max(), (~ok).any().float())])


def nvfp4_swiglu(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu`, and the magnitudes of what it writes."""
    out = standard.swiglu(gate_up)
    return out, magnitudes(out)


def nvfp4_swiglu_bwd(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu_bwd`, and the magnitudes of what it writes."""
    out = standard.swiglu_bwd(dy, gate_up)
    return out, magnitudes(out)


# --------------------------------------------------------------------------------------------------------------- bytes


def ordered(scales: Tensor) -> Tensor:
    """Return scales [R, C / 16] with padding, in atoms: (row, column) is at byte 16 * (row % 32) + 4 * (row / 32) +
    column of the atom of 128 rows and 4 columns that it is in.
    """
    rows, columns = scales.shape
    padded = torch.zeros(scales_shape(rows, columns * BLOCK), dtype=torch.uint8)
    padded[:rows, :columns] = scales.view(torch.uint8)
    atoms = padded.view(len(padded) // ATOM_ROWS, 4, 32, -1, ATOM_COLUMNS).permute(0, 3, 2, 1, 4)
    return atoms.reshape(padded.shape).view(torch.float8_e4m3fn)


def in_rows(ordered_scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales [rows, columns / 16] that `ordered` has put in atoms."""
    shape = ordered_scales.shape
    atoms = ordered_scales.view(torch.uint8).view(shape[0] // ATOM_ROWS, shape[1] // ATOM_COLUMNS, 32, 4, ATOM_COLUMNS)
    plain = atoms.permute(0, 3, 2, 1, 4).reshape(shape)
    return plain[:rows, : columns // BLOCK].contiguous().view(torch.float8_e4m3fn)


# ------------------------------------------------------------------------------------------------------------ products


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return code * scale in fp32, which is exact."""
    return stored_values(codes, in_rows(scales, len(codes), 2 * codes.shape[1]))


def stored_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return code * scale of scales that are stored row by row."""
    blocks = e2m1.levels(e2m1.unpacked(codes)).view(len(codes), -1, BLOCK)
    return (blocks * scales.float()[..., None]).view(len(codes), -1)


def alpha(amax_a: Tensor, amax_b: Tensor) -> Tensor:
    """Return what a product of two forms is multiplied by."""
    inverse = 1 / (torch.tensor(LARGEST * LARGEST) * amax_a[1] * amax_b[1])
    return amax_a[0] * amax_b[0] * inverse


def stored_alpha(amax_a: Tensor, factors: Tensor) -> Tensor:
    """Return what the product of a form and each matrix of a stored weight is multiplied by."""
    return amax_a[0] * factors * (1 / (torch.tensor(LARGEST) * amax_a[1]))


def _product(a: Tensor, scales_a: Tensor, amax_a: Tensor, *b: Tensor, trans_b: bool, stored: Sequence[int]) -> Tensor:
    codes_b, scales_b, amax_b = b
    if stored:
        of_columns = stored_alpha(amax_a, amax_b).repeat_interleave(torch.tensor(stored))
        return values(a, scales_a) @ stored_values(codes_b, scales_b).T * of_columns
    right = values(codes_b, scales_b)
    return values(a, scales_a) @ (right if trans_b else right.T) * alpha(amax_a, amax_b)


def nvfp4_linear(
    a: Tensor,
    scales_a: Tensor,
    amax_a: Tensor,
    b: Tensor,
    scales_b: Tensor,
    amax_b: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str,
    backend: str,
    trans_b: bool = False,
    stored: Sequence[int] = (),
) -> Tensor:
    """a b^T of two forms. All backends compute this; they may sum in another order."""
    product = _product(a, scales_a, amax_a, b, scales_b, amax_b, trans_b=trans_b, stored=stored)
    return (product if bias is None else product + bias.float()).to(TORCH_DTYPES[dtype])


def nvfp4_linear_add(
    a: Tensor,
    scales_a: Tensor,
    amax_a: Tensor,
    b: Tensor,
    scales_b: Tensor,
    amax_b: Tensor,
    base: Tensor,
    *,
    dtype: str,
    backend: str,
    trans_b: bool = False,
    stored: Sequence[int] = (),
) -> Tensor:
    """add(nvfp4_linear(a, b), base). A kernel need not round the product before the sum."""
    product = _product(a, scales_a, amax_a, b, scales_b, amax_b, trans_b=trans_b, stored=stored)
    return standard.add(product.to(base.dtype), base)


# ------------------------------------------------------------------------------------------------------------- numerics


def nvfp4_measure(x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    """(largest magnitude, squares of errors, squares, elements other than 0, lost ones) of each row of x and a form."""
    wide, rounded = x.double(), values(codes, scales).double() * amax[0] / (LARGEST * amax[1])
    largest = wide.abs().amax(dim=1).where(wide.isfinite().all(dim=1), torch.nan)
    present = x != 0
    lost = (rounded == 0) & present
    sums = ((rounded - wide).square(), wide.square(), present, lost)
    return torch.stack([largest, *(s.sum(dim=1).double() for s in sums)], dim=1).float()


def nvfp4_report(*rows: Tensor) -> Tensor:
    """(amax, error, lost) of tensors, one after another. Error and lost are 0 for a tensor of zeros, amax and error NaN
    for one that is not finite.
    """
    return torch.stack([_figures(of.double()) for of in rows])


def _figures(rows: Tensor) -> Tensor:
    error, power, present, lost = rows[:, 1:].sum(dim=0)
    relative = torch.where(power == 0, 0.0, (error / power).sqrt())
    return torch.stack([rows[:, 0].max(), relative, lost / present.clamp(min=1)]).float()

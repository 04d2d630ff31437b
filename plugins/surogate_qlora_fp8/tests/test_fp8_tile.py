"""Blockwise FP8 storage: codes and scales of tiles, fused matrices, special numbers, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stored_matrices import check_copies, decibels, normal_weight, param
from torch import Tensor

from surogate_core.api import ProgramError
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import check_op
from surogate_qlora_fp8.ops import OPS, TILES
from surogate_qlora_fp8.reference import fp8_tile_dequantize, fp8_tile_quantize

QUANTIZE, DEQUANTIZE, AMAX, TO_E4M3 = OPS


def stored(w: Tensor, tile: int) -> tuple[Tensor, ...]:
    return check_op(QUANTIZE, w, rows=(len(w),), tile=tile)


def nearest(x: float) -> float:
    """The nearest number of E4M3, the even one of two, from the definition: 3 bits of mantissa down to 2^-9."""
    if x == 0:
        return 0.0
    unit = 2.0 ** max(torch.frexp(torch.tensor(abs(x)))[1].item() - 4, -9)
    return min(max(round(x / unit) * unit, -448.0), 448.0)


# --------------------------------------------------------------------------------------------------- codes and scales


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tile", TILES)
def test_a_scale_is_the_largest_magnitude_of_its_tile_over_448(tile: int, dtype: str) -> None:
    """Tiles at the edges are smaller: 300 rows and 136 columns."""
    w = normal_weight(300, 136, tile, dtype)
    codes, scales = stored(w, tile)
    assert scales.shape == (-(-300 // tile), -(-136 // tile))
    for i, row in enumerate(w.float().split(tile)):
        for k, part in enumerate(row.split(tile, dim=1)):
            assert scales[i, k] == part.abs().max() / 448
            own = codes[i * tile :, k * tile :][: part.shape[0], : part.shape[1]]
            assert own.float().abs().max() == 448


def test_codes_are_rounded_to_nearest_even_from_the_definition() -> None:
    """The scale is 1, because the largest magnitude is 448."""
    gen = torch.Generator().manual_seed(1)
    w = torch.rand(8, 64, generator=gen) * torch.logspace(-4, 2.6, 64) * torch.tensor([1.0, -1.0]).repeat(32)
    w[0, :12] = torch.tensor([448.0, 17, 19, 2.0**-10, 1.5 * 2**-9, -17, -19, -(2.0**-10), 1e-9, 0.0, 240, 248])
    codes, scales = stored(w, 64)
    assert scales.item() == 1
    assert codes.float().flatten().tolist() == [nearest(x) for x in w.flatten().tolist()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_weight_is_its_code_times_its_scale(dtype: str) -> None:
    codes, scales = stored(normal_weight(200, 136), 128)
    (back,) = check_op(DEQUANTIZE, codes, scales, rows=(200,), tile=128, dtype=dtype)
    for i, k in ((0, 0), (0, 130), (199, 5), (130, 135)):
        expected = codes[i, k].float() * scales[i // 128, k // 128]
        assert torch.equal(back[i, k], expected.to(TORCH_DTYPES[dtype]))


# ----------------------------------------------------------------------------------------------------- fused matrices


@pytest.mark.parametrize("tile", TILES)
def test_fused_matrices_are_quantized_as_if_each_were_alone(tile: int) -> None:
    rows, columns = (140, 3, 256), 144
    w = normal_weight(sum(rows), columns, dtype="bf16") * torch.linspace(0.5, 3, sum(rows))[:, None].bfloat16()
    fused = check_op(QUANTIZE, w, rows=rows, tile=tile)
    alone = [stored(part, tile) for part in w.split(rows)]
    for ours, parts in zip(fused, zip(*alone, strict=True), strict=True):
        assert same_bits(ours, torch.cat(parts))
    (back,) = check_op(DEQUANTIZE, *fused, rows=rows, tile=tile, dtype="bf16")
    each = [
        fp8_tile_dequantize(*part, rows=(count,), tile=tile, dtype="bf16")
        for part, count in zip(alone, rows, strict=True)
    ]
    assert same_bits(back, torch.cat(each))


# ---------------------------------------------------------------------------------------------------- special numbers


def test_a_tile_of_zeros_has_the_scale_1() -> None:
    codes, scales = stored(torch.zeros(64, 64), 64)
    assert scales.item() == 1 and not codes.float().any()


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_not_finite_makes_its_tile_nan(special: float) -> None:
    w = normal_weight(64, 128)
    w[1, 3] = special
    back = fp8_tile_dequantize(*fp8_tile_quantize(w, rows=(64,), tile=64), rows=(64,), tile=64, dtype="fp32")
    assert back[:, :64].isnan().all() and back[:, 64:].isfinite().all()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e30, 3e38])
def test_extreme_weights_have_finite_results(scale: float) -> None:
    w = torch.linspace(-1, 1, 64 * 64).view(64, 64) * scale
    back = fp8_tile_dequantize(*stored(w, 64), rows=(64,), tile=64, dtype="fp32")
    assert back.isfinite().all() and (back.abs() <= w.abs().max() * (1 + 2.0**-20) + 2.0**-149 * 448).all()


@pytest.mark.parametrize("tile", TILES)
def test_the_error_of_normally_distributed_weights_is_that_of_three_bits_of_mantissa(tile: int) -> None:
    """31.6 dB with one scale per tensor (2.6 % of the rms)."""
    w = normal_weight(512, 1024)
    back = fp8_tile_dequantize(*stored(w, tile), rows=(512,), tile=tile, dtype="fp32")
    assert abs(decibels(w, back) - 31.55) < 0.1


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("shape", "attrs", "message"),
    [
        (
            (8, 32),
            {"rows": (4, 3)},
            r"blocks.0.qkv is \[8, 32\], but the rows of its matrices are \(4, 3\), together 7",
        ),
        ((8, 32), {"tile": 32}, r"tile is 32: it must be one of \(64, 128, 256\)"),
        ((8,), {}, r"blocks.0.qkv is \[8\]: only matrices are stored in FP8"),
    ],
)
def test_a_shape_that_cannot_be_quantized_is_refused(
    shape: tuple[int, ...], attrs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        QUANTIZE.infer([param(*shape)], {"rows": (8,), "tile": 128, **attrs})


def test_a_stored_weight_of_other_shapes_is_refused() -> None:
    ins = [param(200, 128, dtype="e4m3"), param(1, 1, dtype="fp32")]
    with pytest.raises(ProgramError, match=r"scales of a weight \[200, 128\] must be fp32 \[2, 1\]"):
        DEQUANTIZE.infer(ins, {"rows": (200,), "tile": 128, "dtype": "bf16"})


def test_a_dequantized_weight_is_recomputed_in_the_backward_pass() -> None:
    assert DEQUANTIZE.always_recomputed and not QUANTIZE.always_recomputed
    ins = [param(200, 128, dtype="e4m3"), param(2, 1, dtype="fp32")]
    (spec,) = DEQUANTIZE.infer(ins, {"rows": (200,), "tile": 128, "dtype": "bf16"})
    assert (spec.label, spec.shape, spec.dtype) == ("weight", (200, 128), "bf16")


# ---------------------------------------------------------------------------------------------------- copies in E4M3


def test_a_copy_in_e4m3_has_one_scale_that_maps_the_largest_magnitude_of_all_matrices_to_448() -> None:
    check_copies(OPS, {"tile": 64}, {"tile": 64})


def test_a_number_that_is_not_finite_makes_the_scale_of_the_copy_nan() -> None:
    attrs: dict[str, Any] = {"rows": (64,), "tile": 64, "dtype": "bf16"}
    w = normal_weight(64, 128)
    w[1, 3] = torch.inf
    codes, scales = fp8_tile_quantize(w, rows=(64,), tile=64)
    (amax,) = check_op(AMAX, codes, scales, **attrs)
    copy, scale = check_op(TO_E4M3, codes, scales, amax, **attrs, transposed=False)
    assert scale[0].isnan() and copy[:, :64].view(torch.uint8).eq(0x7F).all() and copy[:, 64:].float().isfinite().all()


@pytest.mark.parametrize(("rows", "columns"), [((8, 24), 64), ((32,), 72)])
def test_a_weight_whose_sizes_are_no_multiples_of_16_is_not_copied(rows: tuple[int, ...], columns: int) -> None:
    attrs = {"rows": rows, "tile": 64, "dtype": "bf16", "transposed": False}
    high, wide = len(rows), -(-columns // 64)
    ins = [param(32, columns, dtype="e4m3"), param(high, wide, dtype="fp32"), param(len(rows), 2, dtype="fp32")]
    with pytest.raises(ProgramError, match=r"rows of matrices and columns must be multiples of 16, got (8|72)"):
        TO_E4M3.infer(ins, attrs)

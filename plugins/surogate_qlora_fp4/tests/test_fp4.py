"""NVFP4 storage: the bytes of the vectors, fused matrices, special numbers, and refusals.

vectors.json was computed by an independent implementation of NVFP4 in NumPy, with one rounding to fp32 per operation.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_matrices import check_copies, decibels, normal_weight, param
from torch import Tensor

from surogate_core.api import ProgramError
from surogate_core.reference.e2m1 import LEVELS
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import check_op
from surogate_qlora_fp4.ops import OPS
from surogate_qlora_fp4.reference import fp4_block_dequantize, fp4_block_quantize

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
QUANTIZE, DEQUANTIZE, AMAX, TO_E4M3 = OPS
RANGE = {False: 6 * 448, True: 6 * 256}


def lcg(count: int, seed: int) -> Tensor:
    """The numbers of the vectors: from -4 to 4 with a heavy tail, exact in bf16."""
    numbers, state = [], seed
    for _ in range(count):
        state = (1664525 * state + 1013904223) & 0xFFFFFFFF
        u = ((state >> 8) / 2**24) * 2 - 1
        numbers.append(u * u * u * 4)
    return torch.tensor(numbers).bfloat16().float()


def floats(words: list[str]) -> Tensor:
    return torch.tensor([struct.unpack(">f", bytes.fromhex(word))[0] for word in words])


def hexadecimal(x: Tensor) -> str:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


def stored(w: Tensor, four_over_six: bool) -> tuple[Tensor, ...]:
    return check_op(QUANTIZE, w, rows=(len(w),), four_over_six=four_over_six)


# -------------------------------------------------------------------------------------------------------------- vectors


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("name", ["two_blocks", "a_row"])
def test_codes_and_scales_are_those_of_the_vectors(name: str, four_over_six: bool, dtype: str) -> None:
    vector = VECTORS[f"{name}_{'mse256' if four_over_six else 'std'}"]
    w = floats(vector["x"])[None] if name == "two_blocks" else lcg(32 * 64, 1).view(32, 64)
    codes, scales, global_scales = stored(w.to(TORCH_DTYPES[dtype]), four_over_six)
    assert hexadecimal(codes) == vector["packed"]
    assert hexadecimal(scales) == vector["sf"]
    assert torch.equal(global_scales, w.abs().max()[None] / RANGE[four_over_six])


def test_four_is_chosen_where_the_vectors_choose_it() -> None:
    """The largest code of such a block is 4, or its negative, 12 + 2."""
    codes = stored(lcg(32 * 64, 1).view(32, 64), True)[0]
    magnitudes = torch.stack((codes & 7, codes >> 4 & 7), dim=-1).view(-1, 16)
    assert int((magnitudes.amax(dim=1) <= 6).sum()) == VECTORS["a_row_mse256"]["n_pick4"]


def test_ties_go_to_the_even_code() -> None:
    """A block with amax 6 has the factor 1, so that its numbers are rounded as they are."""
    vector = VECTORS["hand_block_amax6"]
    assert hexadecimal(stored(torch.tensor([vector["x"]]), False)[0]) == vector["packed"]
    for x, code, level in VECTORS["e2m1_rn"]:
        if abs(x) <= 6:
            codes, *scales = stored(torch.tensor([[6.0, x, *[0.0] * 14]]), False)
            assert int(codes[0, 0]) >> 4 == code
            assert float(fp4_block_dequantize(codes, *scales, rows=(1,), dtype="fp32")[0, 1]) == pytest.approx(level)


def test_the_scale_of_a_tiny_block_is_zero() -> None:
    vector = VECTORS["tiny_block_beside_big"]
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 16:] = 1.0, 1e-6
    codes, *scales = stored(w, False)
    assert (hexadecimal(codes), hexadecimal(scales[0])) == (vector["packed"], vector["sf"])
    back = fp4_block_dequantize(codes, *scales, rows=(1,), dtype="fp32")
    assert back[0, 0] == 1 and not back[0, 1:].any()


def test_codes_without_four_over_six_are_quotients_as_in_modelopt() -> None:
    """Weights in bf16 lie on ties between levels often enough that a product with the reciprocal differs."""
    w = normal_weight(256, 512, dtype="bf16").float()
    codes, scales, scale = stored(w, False)
    step = (scales.float() * scale).repeat_interleave(16, dim=1)
    levels = torch.tensor(LEVELS[::2] + LEVELS[1::2])  # even codes first: argmin takes the first of two equal ones

    def magnitudes(scaled: torch.Tensor) -> torch.Tensor:
        return levels[(scaled.abs()[..., None].double() - levels.double()).abs().argmin(dim=-1)]

    ours = torch.tensor(LEVELS)[torch.stack((codes & 7, codes >> 4 & 7), dim=-1).view(256, 512).long()]
    assert torch.equal(ours, magnitudes(w / step))
    assert not torch.equal(ours, magnitudes(w * (1 / step)))


# ----------------------------------------------------------------------------------------------------- fused matrices


@pytest.mark.parametrize("four_over_six", [False, True])
def test_fused_matrices_are_quantized_as_if_each_were_alone(four_over_six: bool) -> None:
    rows, columns = (40, 3, 70), 144
    w = normal_weight(sum(rows), columns, dtype="bf16") * torch.linspace(0.5, 3, sum(rows))[:, None].bfloat16()
    fused = check_op(QUANTIZE, w, rows=rows, four_over_six=four_over_six)
    alone = [stored(part, four_over_six) for part in w.split(rows)]
    for ours, parts in zip(fused, zip(*alone, strict=True), strict=True):
        assert same_bits(ours, torch.cat(parts))
    (back,) = check_op(DEQUANTIZE, *fused, rows=rows, dtype="bf16")
    each = [fp4_block_dequantize(*part, rows=(count,), dtype="bf16") for part, count in zip(alone, rows, strict=True)]
    assert same_bits(back, torch.cat(each))


# ---------------------------------------------------------------------------------------------------- special numbers


@pytest.mark.parametrize("four_over_six", [False, True])
def test_zeros_stay_zeros(four_over_six: bool) -> None:
    codes, *scales = stored(torch.zeros(2, 32), four_over_six)
    assert not codes.any() and bool((scales[0].float() == (0 if four_over_six else 1)).all())
    assert not fp4_block_dequantize(codes, *scales, rows=(2,), dtype="fp32").any()


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("four_over_six", [False, True])
def test_a_number_that_is_not_finite_makes_its_matrix_so(four_over_six: bool, special: float) -> None:
    w = normal_weight(6, 32)
    w[1, 3] = special
    parts = fp4_block_quantize(w, rows=(4, 2), four_over_six=four_over_six)
    back = fp4_block_dequantize(*parts, rows=(4, 2), dtype="fp32")
    assert not back[:4].isfinite().any() and back[4:].isfinite().all()


@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e30, 3e38])
def test_extreme_weights_have_finite_results(scale: float, four_over_six: bool) -> None:
    w = torch.linspace(-1, 1, 256).view(2, 128) * scale
    back = fp4_block_dequantize(*stored(w, four_over_six), rows=(2,), dtype="fp32")
    assert back.isfinite().all()


@pytest.mark.parametrize(("four_over_six", "published"), [(False, 20.43), (True, 21.21)])
def test_the_error_of_normally_distributed_weights_is_the_published_one(four_over_six: bool, published: float) -> None:
    w = normal_weight(512, 1024)
    back = fp4_block_dequantize(*stored(w, four_over_six), rows=(512,), dtype="fp32")
    assert abs(decibels(w, back) - published) < 0.03


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("shape", "attrs", "message"),
    [
        (
            (8, 40),
            {},
            r"blocks.0.qkv is \[8, 40\]: 40 columns are no multiple of the NVFP4 block of 16. Do not quantize",
        ),
        (
            (8, 32),
            {"rows": (4, 3)},
            r"blocks.0.qkv is \[8, 32\], but the rows of its matrices are \(4, 3\), together 7",
        ),
        ((8,), {}, r"blocks.0.qkv is \[8\]: only matrices are stored in NVFP4"),
    ],
)
def test_a_shape_that_cannot_be_quantized_is_refused(
    shape: tuple[int, ...], attrs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        QUANTIZE.infer([param(*shape)], {"rows": (8,), "four_over_six": True, **attrs})


def test_a_stored_weight_of_other_shapes_is_refused() -> None:
    ins = [param(8, 64, dtype="uint8"), param(8, 4, dtype="e4m3"), param(1, dtype="fp32")]
    with pytest.raises(ProgramError, match=r"scales of a weight \[8, 128\] must be e4m3 \[8, 8\]"):
        DEQUANTIZE.infer(ins, {"rows": (8,), "dtype": "bf16"})


def test_a_dequantized_weight_is_recomputed_in_the_backward_pass() -> None:
    assert DEQUANTIZE.always_recomputed and not QUANTIZE.always_recomputed
    ins = [param(8, 64, dtype="uint8"), param(8, 8, dtype="e4m3"), param(1, dtype="fp32")]
    (spec,) = DEQUANTIZE.infer(ins, {"rows": (8,), "dtype": "bf16"})
    assert (spec.label, spec.shape, spec.dtype) == ("weight", (8, 128), "bf16")


# ---------------------------------------------------------------------------------------------------- copies in E4M3


def test_a_copy_in_e4m3_has_one_scale_that_maps_the_largest_magnitude_of_all_matrices_to_448() -> None:
    check_copies(OPS, {"four_over_six": True}, {})

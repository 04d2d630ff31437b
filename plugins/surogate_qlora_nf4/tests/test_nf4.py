"""NF4: the bytes of bitsandbytes, matrices that are fused, blocks that are not finite, and refusals.

vectors.json was written by bitsandbytes 0.50.2 on a CPU: by `create_dynamic_map`, and for the weights of `weight` below
by `quantize_4bit` and `dequantize_4bit` with quant_type="nf4", with and without compress_statistics. The test of fresh
weights needs an installed bitsandbytes and is skipped without it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_matrices import check_copies, decibels, normal_weight, param
from torch import Tensor

from surogate_core.api import ProgramError
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import check_op
from surogate_qlora_nf4.ops import OPS
from surogate_qlora_nf4.reference import mean, nf4_dequantize, nf4_quantize
from surogate_qlora_nf4.tables import BLOCKS, GROUP, LEVELS, absmax_map

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
CASES = [pytest.param(case, id=f"{case['dtype']}-{case['block']}") for case in VECTORS["cases"]]
QUANTIZE, DEQUANTIZE, AMAX, TO_E4M3 = OPS


def lcg(count: int, seed: int) -> Tensor:
    """Numbers from -4 to 4 with a heavy tail."""
    numbers, state = [], seed
    for _ in range(count):
        state = (1664525 * state + 1013904223) & 0xFFFFFFFF
        u = ((state >> 8) / 2**24) * 2 - 1
        numbers.append(u * u * u * 4)
    return torch.tensor(numbers)


def weight(case: dict[str, Any]) -> Tensor:
    """The weight of a case: row 1 begins with a block of zeros."""
    rows, columns = case["shape"]
    w = lcg(rows * columns, case["seed"]).view(rows, columns).to(TORCH_DTYPES[case["dtype"]])
    w[1, : case["block"]] = 0
    return w


def hexadecimal(x: Tensor) -> str:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


def floats(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.float32)


# ------------------------------------------------------------------------------------------------------- bitsandbytes


def test_tables_are_those_of_bitsandbytes() -> None:
    assert hexadecimal(torch.tensor(LEVELS)) == VECTORS["levels"]
    assert hexadecimal(torch.tensor(absmax_map())) == VECTORS["map"]


@pytest.mark.parametrize("case", CASES)
def test_codes_and_absmax_are_those_of_bitsandbytes(case: dict[str, Any]) -> None:
    w = weight(case)
    codes, absmax = check_op(QUANTIZE, w, rows=(len(w),), block=case["block"], double=False)
    assert hexadecimal(codes) == case["codes"]
    assert hexadecimal(absmax) == case["absmax"]


@pytest.mark.parametrize("case", CASES)
def test_double_quantization_is_that_of_bitsandbytes_up_to_its_mean(case: dict[str, Any]) -> None:
    """The mean is within one unit in the last place, a code is the same or a neighbour."""
    w = weight(case)
    codes, absmax, nested, offset = check_op(QUANTIZE, w, rows=(len(w),), block=case["block"], double=True)
    assert hexadecimal(codes) == case["codes"]
    theirs = torch.tensor(list(bytes.fromhex(case["absmax_codes"])))
    assert (absmax.int() - theirs).abs().max() <= 1
    torch.testing.assert_close(offset, floats(case["offset"]), rtol=2.0**-23, atol=0)
    torch.testing.assert_close(nested, floats(case["nested"]), rtol=0, atol=float(offset.abs()) * 2.0**-22)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_stored_weight_of_bitsandbytes_is_dequantized_to_its_bits(case: dict[str, Any], dtype: str) -> None:
    stored = (
        torch.tensor(list(bytes.fromhex(case["codes"])), dtype=torch.uint8),
        torch.tensor(list(bytes.fromhex(case["absmax_codes"])), dtype=torch.uint8),
        floats(case["nested"]),
        floats(case["offset"]),
    )
    shape = tuple(case["shape"])
    (w,) = check_op(DEQUANTIZE, *stored, rows=shape[:1], shape=shape, block=case["block"], dtype=dtype)
    assert hashlib.sha256(bytes.fromhex(hexadecimal(w))).hexdigest() == case[f"{dtype}_sha256"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("block", BLOCKS)
def test_fresh_weights_are_quantized_and_dequantized_as_by_bitsandbytes(block: int, dtype: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    w = normal_weight(96, 1024, block, dtype)
    codes, absmax = nf4_quantize(w, rows=(96,), block=block, double=False)
    theirs, state = functional.quantize_4bit(w, quant_type="nf4", blocksize=block)
    assert same_bits(codes, theirs.view(-1)) and same_bits(absmax, state.absmax)
    ours = nf4_dequantize(codes, absmax, rows=(96,), shape=(96, 1024), block=block, dtype=dtype)
    assert same_bits(ours, functional.dequantize_4bit(theirs, state))


# ----------------------------------------------------------------------------------------------------- fused matrices


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_fused_matrices_are_quantized_as_if_each_were_alone(block: int, double: bool) -> None:
    rows, columns = (40, 3, 70), 512
    w = normal_weight(sum(rows), columns, dtype="bf16") * torch.linspace(0.5, 3, sum(rows))[:, None].bfloat16()
    fused = check_op(QUANTIZE, w, rows=rows, block=block, double=double)
    alone = [nf4_quantize(part, rows=part.shape[:1], block=block, double=double) for part in w.split(rows)]
    for ours, parts in zip(fused, zip(*alone, strict=True), strict=True):
        assert same_bits(ours, torch.cat(parts))
    attrs = {"block": block, "dtype": "bf16"}
    (back,) = check_op(DEQUANTIZE, *fused, rows=rows, shape=tuple(w.shape), **attrs)
    each = [
        nf4_dequantize(*part, rows=(count,), shape=(count, columns), **attrs)
        for part, count in zip(alone, rows, strict=True)
    ]
    assert same_bits(back, torch.cat(each))


def test_the_mean_is_rounded_once() -> None:
    """fp64 sums of fp32 numbers are exact enough that only their rounding to fp32 counts."""
    for count in (1, 255, 256, 257, 70000):
        absmax = normal_weight(1, count, count)[0].abs()
        assert torch.equal(mean(absmax), absmax.double().mean().float())


# ----------------------------------------------------------------------------------------------------- special blocks


@pytest.mark.parametrize("double", [False, True])
def test_zeros_stay_zeros(double: bool) -> None:
    stored = nf4_quantize(torch.zeros(4, 128), rows=(4,), block=64, double=double)
    assert (stored[0] == 0x77).all()
    assert not nf4_dequantize(*stored, rows=(4,), shape=(4, 128), block=64, dtype="fp32").any()


def test_the_code_of_a_number_counts_the_midpoints_below_it() -> None:
    """Of midpoints and the numbers next to them: one that lies on a midpoint has the lower code."""
    levels = torch.tensor(LEVELS)
    middle = (levels[:-1] + levels[1:]) / 2
    near = [
        middle,
        *(middle.nextafter(torch.tensor(end)) for end in (2.0, -2.0)),
        levels,
        torch.tensor([1.0, -0.0, 0.0]),
    ]
    x = torch.cat(near)
    blocks = torch.cat([x, torch.zeros(-len(x) % 63)]).view(-1, 63)
    ones = torch.ones(len(blocks), 1)  # of each block the largest, so that it is not scaled
    w = torch.cat([blocks, ones], 1).view(1, -1)
    codes, absmax = nf4_quantize(w, rows=(1,), block=64, double=False)
    assert (absmax == 1).all()
    found = torch.stack((codes >> 4, codes & 15), -1).flatten()
    assert torch.equal(found.long(), torch.bucketize(w.flatten(), middle))


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_a_block_with_a_number_that_is_not_finite_decodes_to_such_numbers(special: float) -> None:
    w = normal_weight(4, 128)
    w[1, 3] = special
    for double, wrong in ((False, w[1:2, :64]), (True, w)):
        stored = nf4_quantize(w, rows=(4,), block=64, double=double)
        back = nf4_dequantize(*stored, rows=(4,), shape=(4, 128), block=64, dtype="fp32")
        assert int((~back.isfinite()).sum()) == wrong.numel()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e30, 3e38])
def test_extreme_weights_have_finite_results(scale: float) -> None:
    w = torch.linspace(-1, 1, 256).view(2, 128) * scale
    for double in (False, True):
        stored = nf4_quantize(w, rows=(2,), block=64, double=double)
        back = nf4_dequantize(*stored, rows=(2,), shape=(2, 128), block=64, dtype="fp32")
        assert back.isfinite().all() and (back.abs() <= w.abs().max() * 1.01 + 2.0**-149).all()


@pytest.mark.parametrize(("double", "published"), [(False, 20.73), (True, 20.73)])
def test_the_error_of_normally_distributed_weights_is_the_published_one(double: bool, published: float) -> None:
    """20.72 dB by the specification; 0.5 million numbers give it within 0.02."""
    w = normal_weight(512, 1024)
    back = nf4_dequantize(
        *nf4_quantize(w, rows=(512,), block=64, double=double), rows=(512,), shape=(512, 1024), block=64, dtype="fp32"
    )
    assert abs(decibels(w, back) - published) < 0.03


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("shape", "attrs", "message"),
    [
        ((8, 96), {}, r"blocks.0.qkv is \[8, 96\]: 96 columns are no multiple of the NF4 block of 64. Choose a block"),
        (
            (8, 128),
            {"rows": (4, 3)},
            r"blocks.0.qkv is \[8, 128\], but the rows of its matrices are \(4, 3\), together 7",
        ),
        ((8, 128), {"block": 100}, r"block is 100: it must be one of \(64, 128, 256, 512\)"),
        ((8,), {}, r"blocks.0.qkv is \[8\]: only matrices are stored in NF4"),
    ],
)
def test_a_shape_that_cannot_be_quantized_is_refused(
    shape: tuple[int, ...], attrs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        QUANTIZE.infer([param(*shape)], {"rows": (8,), "block": 64, "double": True, **attrs})


def test_the_stored_bytes_of_a_param_are_those_of_the_documentation() -> None:
    specs = QUANTIZE.infer([param(4096, 12288)], {"rows": (4096,), "block": 64, "double": True})
    sizes = [spec.shape[0] * {"uint8": 1, "fp32": 4}[spec.dtype] for spec in specs]
    assert sizes == [4096 * 6144, 4096 * 192, 4 * 4096 * 192 // GROUP, 4]
    assert round(sum(sizes) / (4096 * 12288), 3) == 0.516


def test_a_stored_weight_of_other_shapes_is_refused() -> None:
    attrs = {"rows": (8,), "shape": (8, 128), "block": 64, "dtype": "bf16"}
    codes, absmax = param(512, dtype="uint8"), param(15, dtype="fp32")
    with pytest.raises(ProgramError, match=r"absmax of a weight \[8, 128\] must be fp32 \[16\]"):
        DEQUANTIZE.infer([codes, absmax], attrs)


def test_a_dequantized_weight_is_recomputed_in_the_backward_pass_and_has_no_gradient() -> None:
    assert DEQUANTIZE.always_recomputed and not QUANTIZE.always_recomputed
    (spec,) = DEQUANTIZE.infer(
        [param(512, dtype="uint8"), param(16, dtype="fp32")],
        {"rows": (8,), "shape": (8, 128), "block": 64, "dtype": "bf16"},
    )
    assert (spec.label, spec.shape, spec.dtype) == ("weight", (8, 128), "bf16")


# ---------------------------------------------------------------------------------------------------- copies in E4M3


@pytest.mark.parametrize("double", [False, True])
def test_a_copy_in_e4m3_has_one_scale_that_maps_the_largest_magnitude_of_all_matrices_to_448(double: bool) -> None:
    check_copies(OPS, {"block": 64, "double": double}, {"block": 64, "shape": (48, 128)})

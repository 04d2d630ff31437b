"""MXFP4 storage: the rule of OCP MX, the decoders of transformers and gguf, special numbers, refusals."""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from stored_matrices import check_copies, decibels, normal_weight, param
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from surogate_core.api import ConfigError, OpDef, ParamInfo, ProgramError, Value
from surogate_core.reference.e2m1 import LEVELS
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import check_op
from surogate_qlora_mxfp4.files import refuse_inexact
from surogate_qlora_mxfp4.format import stores
from surogate_qlora_mxfp4.ops import OPS, STORAGE
from surogate_qlora_mxfp4.options import Mxfp4WeightOptions
from surogate_qlora_mxfp4.reference import decoded, mxfp4_quantize, power, quantized

QUANTIZE, DEQUANTIZE, AMAX, TO_E4M3, TO_E5M2 = OPS


def random_stored(rows: int, columns: int, scales: range) -> tuple[Tensor, Tensor]:
    """Return random codes, and random scales of a range."""
    gen = torch.Generator().manual_seed(rows)
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, generator=gen)
    held = torch.randint(scales.start, scales.stop, (rows, columns // 32), generator=gen)
    return codes, held.to(torch.uint8)


# ------------------------------------------------------------------------------------------------------------ encoding


def by_hand(block: list[float]) -> tuple[int, list[float]]:
    """Return the scale code of a block and its numbers, by the text of the specification, in fp64."""
    top = max(map(abs, block))
    shared = math.frexp(top)[1] - 1 - 2
    even = sorted(range(8), key=lambda code: (code % 2, code))  # of two that are as near, the even code

    def nearest(x: float) -> float:
        y = abs(x) / 2.0**shared
        return math.copysign(LEVELS[min(even, key=lambda code: abs(LEVELS[code] - y))] * 2.0**shared, x)

    return shared + 127, [nearest(x) for x in block]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_block_is_encoded_by_the_rule_of_the_specification(dtype: str) -> None:
    """Weights in bf16 lie on ties often, and amax just below a power of two tells floor(log2) from rounding."""
    w = normal_weight(16, 96, dtype=dtype) * torch.logspace(-6, 6, 16)[:, None].to(TORCH_DTYPES[dtype])
    w[3, 5] = 4 * float(w[3, :32].abs().max())
    w[4, 40] = torch.tensor(2.0).nextafter(torch.tensor(0.0)).to(w.dtype)
    codes, scales = check_op(QUANTIZE, w, rows=(16,))
    back = decoded(codes, scales)
    for row in range(16):
        for block in range(3):
            here = slice(32 * block, 32 * block + 32)
            code, numbers = by_hand(w[row, here].tolist())
            assert int(scales[row, block]) == code and back[row, here].tolist() == numbers


def test_what_is_above_six_becomes_six_and_ties_go_to_the_even_code() -> None:
    given = [7.9, 6.5, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.26, -5.0]
    w = torch.tensor([given + [0.0] * (32 - len(given))])
    codes, scales = quantized(w)
    assert scales.tolist() == [[127]]
    assert decoded(codes, scales)[0, : len(given)].tolist() == [6, 6, 4, 4, 2, 2, 1, 1, 0, -0.5, -4]


def test_codes_are_those_of_gguf_but_for_ties() -> None:
    w = normal_weight(64, 128) * torch.logspace(-8, 8, 64)[:, None]
    theirs = gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType.MXFP4).reshape(64, 4, 17)
    codes, scales = quantized(w)
    assert np.array_equal(theirs[..., 0], scales.numpy())
    low, high = theirs[..., 1:] & 15, theirs[..., 1:] >> 4  # gguf has the two halves of a block in a byte
    ours = torch.stack((codes & 15, codes >> 4), -1).view(64, 4, 32).numpy()
    given = np.concatenate((low, high), -1)
    assert np.array_equal(np.where(given == 8, 0, given), np.where(ours == 8, 0, ours))  # -0 is 0 there


# ------------------------------------------------------------------------------------------------------------ decoding


def test_every_code_and_scale_has_the_number_of_the_specification() -> None:
    assert power(torch.arange(255)).tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert power(torch.tensor([255])).isnan().all()
    codes = torch.arange(16, dtype=torch.uint8).repeat(255, 1)
    both = decoded(codes, torch.arange(255, dtype=torch.uint8)[:, None])
    assert both[127, 0::2].tolist() == [*LEVELS, *(-level for level in LEVELS)]
    assert torch.equal(both[252], both[2] * 2.0**125 * 2.0**125)
    kept = both[2:253]
    assert torch.equal(kept.bfloat16().float(), kept), "exact in bf16"
    assert both[253].isinf().any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_numbers_are_those_of_transformers_and_gguf(dtype: str) -> None:
    codes, scales = random_stored(24, 256, range(2, 253))
    (back,) = check_op(DEQUANTIZE, codes, scales, rows=(24,), dtype=dtype)
    theirs = convert_moe_packed_tensors(codes.view(2, 12, 8, 16), scales.view(2, 12, 8), dtype=TORCH_DTYPES[dtype])
    assert torch.equal(back, theirs.transpose(1, 2).reshape(24, 256))
    ours = torch.stack((codes & 15, codes >> 4), -1).view(24, 8, 32).numpy()
    packed = np.concatenate((scales.numpy()[..., None], ours[..., :16] | ours[..., 16:] << 4), -1)
    decoded_by_gguf = gguf.quants.dequantize(packed.reshape(24, -1), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(back.float(), torch.from_numpy(decoded_by_gguf))


def test_what_was_decoded_is_encoded_to_the_same_numbers() -> None:
    codes, scales = quantized(normal_weight(32, 128))
    back = decoded(codes, scales)
    assert torch.equal(decoded(*quantized(back)), back)


# ----------------------------------------------------------------------------------------------------- fused matrices


def test_fused_matrices_are_stored_as_if_each_were_alone() -> None:
    rows = (40, 3, 70)
    w = normal_weight(sum(rows), 160, dtype="bf16") * torch.linspace(0.5, 3, sum(rows))[:, None].bfloat16()
    fused = check_op(QUANTIZE, w, rows=rows)
    alone = [mxfp4_quantize(part, rows=(len(part),)) for part in w.split(rows)]
    for ours, parts in zip(fused, zip(*alone, strict=True), strict=True):
        assert same_bits(ours, torch.cat(parts))


def test_a_copy_in_e4m3_has_one_scale_that_maps_the_largest_magnitude_of_all_matrices_to_448() -> None:
    check_copies(OPS[:4], {}, {})


def test_a_copy_in_e5m2_holds_every_weight() -> None:
    """With one scale for all matrices, a power of two; a copy in E4M3 rounds most of them."""
    w = normal_weight(48, 128, dtype="bf16") * torch.logspace(-6, 0, 48)[:, None].bfloat16()
    rows, stored = (16, 32), mxfp4_quantize(w, rows=(16, 32))
    attrs = {"rows": rows, "dtype": "bf16"}
    (back,), (amax,) = (check_op(op, *stored, **attrs) for op in (DEQUANTIZE, AMAX))
    copy, scale = check_op(TO_E5M2, *stored, amax, **attrs, transposed=False)
    assert copy.dtype == torch.float8_e5m2 and torch.equal(copy.float() * scale[0], back.float())
    transposed, again = check_op(TO_E5M2, *stored, amax, **attrs, transposed=True)
    assert same_bits(transposed, copy.T.contiguous()) and same_bits(again, scale)
    rounded, scale = check_op(TO_E4M3, *stored, amax, **attrs, transposed=False)
    assert (rounded.float() * scale[0] != back.float()).float().mean() > 0.5


@pytest.mark.parametrize("to", [TO_E4M3, TO_E5M2], ids=lambda op: op.kind)
def test_copies_of_some_matrices_are_those_of_all(to: OpDef) -> None:
    """With the amax of all. A smaller one than that of the weight is refused."""
    w = normal_weight(80, 64, dtype="bf16") * torch.logspace(0, 1, 80)[:, None].bfloat16()
    rows, some, own = (16,) * 5, (16,) * 2, slice(16, 48)
    codes, scales = mxfp4_quantize(w, rows=rows)
    (amax,) = check_op(AMAX, codes, scales, rows=rows, dtype="bf16")
    for transposed in (False, True):
        whole, scale = check_op(to, codes, scales, amax, rows=rows, dtype="bf16", transposed=transposed)
        part, same = check_op(to, codes[own], scales[own], amax, rows=some, dtype="bf16", transposed=transposed)
        assert same_bits(part, (whole[:, own] if transposed else whole[own]).contiguous()) and same_bits(scale, same)
    ins = [
        Value(n, s, d, "act") for n, s, d in (("c", (80, 32), "uint8"), ("s", (80, 2), "uint8"), ("a", (4, 2), "fp32"))
    ]
    with pytest.raises(ProgramError, match=r"amax of a weight of 5 matrices must be fp32 \[5, 2\]"):
        to.infer(ins, {"rows": rows, "dtype": "bf16", "transposed": False})


@pytest.mark.parametrize("special", [torch.inf, torch.nan])
def test_a_copy_of_a_weight_that_is_not_finite_cannot_be_used(special: float) -> None:
    w = normal_weight(16, 32)
    w[3, 5] = special
    stored, attrs = mxfp4_quantize(w, rows=(16,)), {"rows": (16,), "dtype": "bf16"}
    (amax,) = check_op(AMAX, *stored, **attrs)
    _, scale = check_op(TO_E5M2, *stored, amax, **attrs, transposed=False)
    assert scale[0].isnan()


def test_experts_alone_are_stored_if_there_are_any() -> None:
    def info(parameter: str) -> ParamInfo:
        return ParamInfo(param=param(8, 64), of_model=True, kind="matrix", matrices=(), parameter=parameter)

    dense, experts = [info(""), info("")], [info("mlp.experts.down_proj")]
    assert stores([*dense, *experts]) == experts and stores(dense) == dense


# ---------------------------------------------------------------------------------------------------- special numbers


def test_zeros_stay_zeros_and_numbers_that_are_not_finite_make_their_block_so() -> None:
    w = normal_weight(4, 96)
    w[0], w[1, 3], w[2, 40], w[3, 70] = 0, torch.inf, -torch.inf, torch.nan
    codes, scales = mxfp4_quantize(w, rows=(4,))
    back = decoded(codes, scales)
    assert not scales[0].any() and not back[0].any()
    wrong = back.view(4, 3, 32).isfinite().logical_not().all(-1)
    assert wrong.tolist() == [[False] * 3, [True, False, False], [False, True, False], [False, False, True]]
    assert back.view(4, 3, 32)[~wrong].isfinite().all()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-37, 1e30, 3.3e38])
def test_extreme_weights_have_scales_that_are_read_again(scale: float) -> None:
    w = torch.linspace(-1, 1, 256).view(2, 128) * scale
    codes, scales = quantized(w)
    refuse_inexact("x_scales", codes.view(2, 4, 16), scales)
    assert ((scales >= 2) & (scales <= 252)).all() and decoded(codes, scales).isfinite().all()


def test_the_error_of_normally_distributed_weights_is_what_the_rule_gives() -> None:
    """1.6 dB less than NVFP4, whose scales are no powers of two."""
    w = normal_weight(512, 1024)
    assert abs(decibels(w, decoded(*quantized(w))) - 18.85) < 0.03


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("scale", [0, 1, 253, 254, 255])
def test_a_scale_whose_numbers_bf16_does_not_hold_is_refused_by_name(scale: int) -> None:
    codes, scales = random_stored(6, 64, range(100, 130))
    scales[4, 1] = scale
    with pytest.raises(ConfigError, match=rf"x_scales has the scale code {scale} at \[4, 1\] \(1 such blocks\): bf16"):
        refuse_inexact("x_scales", codes.view(6, 2, 16), scales)


def test_a_block_of_zeros_may_have_any_scale_that_is_a_number() -> None:
    codes, scales = random_stored(6, 64, range(100, 130))
    codes.view(6, 2, 16)[4, 1] = torch.tensor([0, 8, 128, 136] * 4)  # 0 and -0
    for scale in (0, 1, 253, 254):
        scales[4, 1] = scale
        refuse_inexact("x_scales", codes.view(6, 2, 16), scales)
        assert not decoded(codes, scales).view(6, 2, 32)[4, 1].any()
    scales[4, 1] = 255
    with pytest.raises(ConfigError, match="the scale code 255"):
        refuse_inexact("x_scales", codes.view(6, 2, 16), scales)


@pytest.mark.parametrize(
    ("shape", "attrs", "message"),
    [
        (
            (8, 48),
            {},
            r"blocks.0.qkv is \[8, 48\]: 48 columns are no multiple of the MXFP4 block of 32. Do not quantize",
        ),
        (
            (8, 32),
            {"rows": (4, 3)},
            r"blocks.0.qkv is \[8, 32\], but the rows of its matrices are \(4, 3\), together 7",
        ),
        ((8,), {}, r"blocks.0.qkv is \[8\]: only matrices are stored in MXFP4"),
    ],
)
def test_a_shape_that_cannot_be_stored_is_refused(shape: tuple[int, ...], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        QUANTIZE.infer([param(*shape)], {"rows": (8,), **attrs})


def test_a_param_of_other_columns_is_refused_by_name() -> None:
    info = ParamInfo(param=param(8, 48), of_model=True, kind="matrix", matrices=())
    with pytest.raises(ConfigError, match=r"qlora_mxfp4: blocks.0.qkv has 48 columns, which is no multiple of 32"):
        STORAGE.attrs(info, Mxfp4WeightOptions(qlora_mxfp4=True))


def test_a_stored_weight_of_other_shapes_is_refused() -> None:
    ins = [param(8, 64, dtype="uint8"), param(8, 2, dtype="uint8")]
    with pytest.raises(ProgramError, match=r"scales of a weight \[8, 128\] must be uint8 \[8, 4\]"):
        DEQUANTIZE.infer(ins, {"rows": (8,), "dtype": "bf16"})

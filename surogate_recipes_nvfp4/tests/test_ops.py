"""NVFP4 forms: the bytes of the vectors, rounding, the transform, products, recomputation, refusals.

vectors.json was computed by an independent implementation of NVFP4 in NumPy, with one rounding to fp32 per operation,
which equals TransformerEngine's reference byte for byte.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Builder, ProgramError, Value
from surogate_core.reference.e2m1 import levels, packed
from surogate_core.reference.ops import swiglu, swiglu_bwd
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import Elements, check_op
from surogate_core.testing.programs import dead_code
from surogate_qlora_fp4.reference import fp4_block_dequantize, fp4_block_quantize
from surogate_recipes_nvfp4.ops import OPS
from surogate_recipes_nvfp4.reference import (
    _codes,
    _quantized,
    alpha,
    hadamard_transform,
    in_rows,
    nvfp4_quantize,
    ordered,
    random_bytes,
    values,
)

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
QUANTIZE, LINEAR, LINEAR_ADD, MEASURE, REPORT, SWIGLU, SWIGLU_BWD = OPS
BF16_EPS = 2.0**-8


def lcg(rows: int, columns: int, seed: int) -> Tensor:
    """The numbers of the vectors: from -4 to 4 with a heavy tail, exact in bf16."""
    numbers, state = [], seed
    for _ in range(rows * columns):
        state = (1664525 * state + 1013904223) & 0xFFFFFFFF
        u = ((state >> 8) / 2**24) * 2 - 1
        numbers.append(u * u * u * 4)
    return torch.tensor(numbers).bfloat16().view(rows, columns)


A, W = lcg(32, 64, 1), lcg(48, 64, 2)


def floats(words: list[str]) -> Tensor:
    return torch.tensor([struct.unpack(">f", bytes.fromhex(word))[0] for word in words])


def hexadecimal(x: Tensor) -> str:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


def quantized(x: Tensor, *random: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    return check_op(QUANTIZE, x, *random, **({"rows": True, "columns": False} | attrs))


def bytes_of(codes: Tensor, scales: Tensor, amax: Tensor) -> dict[str, str]:
    plain = in_rows(scales, len(codes), 2 * codes.shape[1])
    amax_bytes = struct.pack(">f", float(amax[0])).hex()
    return {"packed": hexadecimal(codes), "sf": hexadecimal(plain), "amax": amax_bytes}


def dequantized(codes: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    return values(codes, scales) * amax[0] / (6 * amax[1])


def random_matrix(rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))).bfloat16()


SCALARS = torch.tensor(7, dtype=torch.int32), torch.tensor(42, dtype=torch.int64)

# -------------------------------------------------------------------------------------------------------------- vectors


@pytest.mark.parametrize(
    ("name", "x", "attrs"),
    [
        ("a_row_std", A, {}),
        ("a_row_mse256", A, {"four_over_six": True}),
        ("w_2d_std", W, {"square": True}),
        ("w_2d_mse256", W, {"square": True, "four_over_six": True}),
        ("w_t_2d_std", W, {"rows": False, "columns": True, "square": True}),
        ("a_col_rht_std", A, {"rows": False, "columns": True, "hadamard": True}),
    ],
)
def test_forms_have_the_bytes_of_the_vectors(name: str, x: Tensor, attrs: dict[str, Any]) -> None:
    found, expected = bytes_of(*quantized(x, **attrs)), VECTORS[name]
    assert found == {key: expected[key] for key in found}


def test_stochastic_rounding_has_the_bytes_of_the_vectors() -> None:
    expected = VECTORS["a_row_sr"]
    found = bytes_of(*quantized(A, *SCALARS, stochastic=True, stream=expected["tensor_id"]))
    assert (found["packed"], found["sf"]) == (expected["packed"], expected["sf"])


@pytest.mark.parametrize(("name", "four_over_six"), [("two_blocks_std", False), ("two_blocks_mse256", True)])
def test_two_blocks_by_hand(name: str, four_over_six: bool) -> None:
    expected = VECTORS[name]
    found = bytes_of(
        *nvfp4_quantize(floats(expected["x"])[None], rows=True, columns=False, four_over_six=four_over_six)
    )
    assert found["packed"] == "".join(expected["packed"]) and found["sf"] == expected["sf"]


def test_a_block_by_hand() -> None:
    expected = VECTORS["hand_block_amax6"]
    found = bytes_of(*nvfp4_quantize(torch.tensor([expected["x"]]), rows=True, columns=False))
    assert found == {"packed": expected["packed"], "sf": f"{expected['sf_code']:02x}", "amax": "40c00000"}


def test_a_tiny_block_beside_a_big_one_has_the_scale_0() -> None:
    expected = VECTORS["tiny_block_beside_big"]
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:] = 4.0, 1e-6
    found = nvfp4_quantize(x, rows=True, columns=False)
    assert bytes_of(*found)["sf"] == expected["sf"] and not dequantized(*found)[0, 16:].any()


def test_a_matrix_of_zeros_has_scales_of_0() -> None:
    for found in (quantized(torch.zeros(16, 32).bfloat16()), quantized(torch.zeros(16, 32).bfloat16(), square=True)):
        assert all(not part.view(torch.uint8).any() for part in found[:2]) and found[2].tolist() == [0.0, 448.0]


def test_scales_are_ordered_as_tensor_cores_read_them() -> None:
    for row, column, columns, offset in VECTORS["swizzle_offsets"]:
        scales = torch.zeros(256, columns, dtype=torch.uint8)
        scales[row, column] = 1
        assert int(ordered(scales.view(torch.float8_e4m3fn)).view(torch.uint8).flatten().argmax()) == offset
    assert hexadecimal(quantized(A)[1]).startswith(VECTORS["a_row_std_swizzled"][:512])


def test_a_product_has_the_factor_of_the_vectors_and_their_sums() -> None:
    expected = VECTORS["gemm_fprop_std"]
    a, w = quantized(A), quantized(W, square=True)
    assert struct.pack(">f", float(alpha(a[2], w[2]))).hex() == expected["alpha"]
    (y,) = product(a, w, dtype="fp32")
    torch.testing.assert_close(y[0], floats(expected["y_row0"]), rtol=1e-6, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ rounding


def test_codes_are_rounded_to_the_nearest_level_and_ties_to_the_even_code() -> None:
    for x, code, level in VECTORS["e2m1_rn"]:
        number = torch.tensor([max(min(float(x), 6.0), -6.0)])
        assert int(_codes(number, None)) == code and float(levels(_codes(number, None))) == level


def test_negative_zero_and_nan_have_codes_of_their_own() -> None:
    assert _codes(torch.tensor([-0.0, -0.2, torch.nan]), None).tolist() == [8, 8, 7]


def test_stochastic_rounding_is_that_of_the_vectors() -> None:
    for case in VECTORS["sr"]:
        x = floats(case["x"]).clamp(-6, 6)
        assert _codes(x, torch.full((16,), case["r"])).tolist() == case["codes"]


def test_a_number_is_rounded_up_with_the_probability_of_its_fraction_of_the_step() -> None:
    every = torch.arange(256)
    for fraction, up in VECTORS["sr_p_up_between_2_and_3"]:
        x = torch.full((256,), 2.0 + fraction)
        assert int((levels(_codes(x, every)) == 3).sum()) == up
    for low, step in ((0.0, 0.5), (1.5, 0.5), (3.0, 1.0), (4.0, 2.0)):
        for fraction in torch.rand(20, generator=torch.Generator().manual_seed(1)).tolist():
            x = torch.full((256,), low + fraction * step)
            exact = float((x[0] - low) / step)
            assert int((levels(_codes(x, every)) > low).sum()) == int(256 * exact)


def test_random_bytes_are_those_of_philox() -> None:
    expected = VECTORS["philox"]["block_rbits_seed42_tensor3_step7_block5"]
    found = random_bytes(torch.Size((6, 16)), 42, 3, 7)[5]
    assert bytes(found.tolist()).hex() == expected


def test_forms_differ_by_micro_step_stream_and_form_and_by_nothing_else() -> None:
    x = random_matrix(32, 32)

    def codes(step: int, stream: int, **attrs: Any) -> list[Tensor]:
        scalars = torch.tensor(step, dtype=torch.int32), SCALARS[1]
        return list(quantized(x, *scalars, columns=True, stochastic=True, stream=stream, **attrs)[::3])

    rows, columns = codes(1, 4)
    assert [same_bits(a, b) for a, b in zip(codes(1, 4), (rows, columns), strict=True)] == [True, True]
    for other in (codes(2, 4), codes(1, 6)):
        assert not same_bits(other[0], rows) and not same_bits(other[1], columns)
    symmetric = (x + x.T).bfloat16()
    both = quantized(symmetric, *SCALARS, columns=True, stochastic=True)
    assert not same_bits(both[0], both[3])
    alone = quantized(
        x, *(torch.tensor(1, dtype=torch.int32), SCALARS[1]), rows=False, columns=True, stochastic=True, stream=4
    )
    assert same_bits(alone[0], columns)


@pytest.mark.parametrize("hadamard", [False, True])
def test_random_bits_of_parts_are_those_of_the_rows_they_have(hadamard: bool) -> None:
    """In both forms the blocks of a part follow those of the rows before: as many are in front of them in each."""
    x = random_matrix(64, 32)
    attrs = {"columns": True, "stochastic": True, "stream": 4, "hadamard": hadamard}
    for row in (0, 16, 48):
        part = quantized(x[row : row + 16], *SCALARS, row=row, **attrs)
        before = row * 32 // 16
        for form, stream in ((0, 4), (3, 5)):
            bits = random_bytes(torch.Size((128, 16)), 42, stream, 7)[before : before + 32]
            matrix = x[row : row + 16].T if form else x[row : row + 16]
            wide = hadamard_transform(matrix.float()).bfloat16().float() if hadamard and form else matrix.float()
            codes, scales, _ = _quantized(wide.contiguous(), False, False, bits.view(wide.shape))
            assert same_bits(part[form], packed(codes)) and same_bits(part[form + 1], ordered(scales))


@pytest.mark.parametrize(
    ("attrs", "low", "high"),
    [
        ({}, 20.2, 20.7),
        ({"four_over_six": True}, 21.0, 21.5),
        ({"square": True}, 18.8, 19.4),
        ({"stochastic": True}, 17.0, 17.6),
    ],
)
def test_the_error_of_gaussian_numbers_is_in_the_band_of_the_format(
    attrs: dict[str, Any], low: float, high: float
) -> None:
    x = random_matrix(512, 1024)
    random = SCALARS if attrs.get("stochastic") else ()
    error = dequantized(*quantized(x, *random, **attrs)) - x.float()
    assert low < 10 * float((x.float().square().mean() / error.square().mean()).log10()) < high


def test_square_blocks_of_4_over_6_hold_the_same_numbers_in_both_forms() -> None:
    """Both candidates of one of these blocks have errors whose sums along rows and columns compare differently."""
    generator = torch.Generator().manual_seed(9)
    normal, uniform = (draw(2048, 2048, generator=generator) for draw in (torch.randn, torch.rand))
    numbers = normal / uniform.clamp(min=1e-4) ** 2
    x = numbers[1008:1024]
    x[-1, -1] = numbers.abs().max()
    codes, scales, _, *transposed = quantized(x.bfloat16(), columns=True, square=True, four_over_six=True)
    assert torch.equal(values(codes, scales), values(*transposed[:2]).T)


# ------------------------------------------------------------------------------------------------------------ transform


def test_the_transform_is_the_matrix_product_of_the_specification() -> None:
    numbers = torch.arange(1.0, 17.0)[None]
    assert hadamard_transform(numbers)[0].tolist() == VECTORS["rht_of_1_to_16"]


def test_the_transform_is_orthogonal_so_it_cancels_in_a_product() -> None:
    matrix = hadamard_transform(torch.eye(16))
    assert torch.equal(matrix @ matrix.T, torch.eye(16))


# ---------------------------------------------------------------------------------------------------------------- forms


def test_square_blocks_have_the_same_numbers_in_both_forms() -> None:
    codes, scales, amax, codes_t, scales_t, amax_t = quantized(W, columns=True, square=True)
    assert torch.equal(values(codes, scales).T, values(codes_t, scales_t)) and torch.equal(amax, amax_t)


def test_padding_of_scales_is_0() -> None:
    _, scales, _ = quantized(random_matrix(48, 80))
    assert scales.shape == (128, 8)
    plain = in_rows(scales, 48, 80)
    assert plain.view(torch.uint8).all() and int(scales.view(torch.uint8).count_nonzero()) == plain.numel()
    assert same_bits(ordered(plain), scales)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("attrs", [{}, {"square": True}, {"columns": True, "rows": False, "hadamard": True}])
def test_a_matrix_that_is_not_finite_has_an_amax_of_nan(bad: float, attrs: dict[str, Any]) -> None:
    x = random_matrix(32, 32)
    x[3, 5] = bad
    form_of_x = quantized(x, **attrs)
    assert form_of_x[2].isnan().tolist() == [True, False]
    (y,) = product(quantized(random_matrix(16, 32)), form_of_x)
    assert y.isnan().all()


# ------------------------------------------------------------------------------------------------------------- products


def typed(parts: tuple[Tensor, ...]) -> list[Tensor | Elements]:
    codes, scales, amax = parts
    return [Elements(codes, "e2m1"), Elements(scales, "ue4m3"), amax]


def product(
    a: tuple[Tensor, ...], b: tuple[Tensor, ...], *more: Tensor, op: Any = LINEAR, **attrs: Any
) -> tuple[Tensor, ...]:
    return check_op(op, *typed(a), *typed(b), *more, **({"dtype": "bf16", "backend": "emulate"} | attrs))


def test_a_product_is_that_of_the_numbers_of_both_forms() -> None:
    a, b = quantized(random_matrix(48, 64)), quantized(random_matrix(32, 64, 1), four_over_six=True)
    exact = dequantized(*a).double() @ dequantized(*b).double().T
    (y,) = product(a, b, dtype="fp32")
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    (with_bias,) = product(a, b, torch.ones(32).bfloat16(), dtype="fp32")
    torch.testing.assert_close(with_bias.double(), exact + 1, rtol=1e-5, atol=1e-5)


def test_a_transposed_operand_has_its_own_blocks() -> None:
    a, b = quantized(random_matrix(48, 64)), quantized(random_matrix(64, 32, 1))
    (y,) = product(a, b, dtype="fp32", trans_b=True)
    torch.testing.assert_close(y, dequantized(*a) @ dequantized(*b), rtol=1e-5, atol=1e-5)


def test_a_stored_weight_is_multiplied_by_the_factor_of_each_of_its_matrices() -> None:
    a, rows = quantized(random_matrix(48, 64), four_over_six=True), (128, 32, 64)
    weight = random_matrix(224, 64, 1) * torch.tensor([1.0, 30.0, 0.02]).repeat_interleave(torch.tensor(rows))[:, None]
    stored = fp4_block_quantize(weight, rows=rows, four_over_six=True)
    exact = dequantized(*a).double() @ fp4_block_dequantize(*stored, rows=rows, dtype="fp32").double().T
    (y,) = check_op(LINEAR, *typed(a), *stored, dtype="fp32", backend="emulate", stored=rows)
    error = (y - exact).norm(dim=0) / exact.norm(dim=0)
    assert float(error.max()) < 1e-6


def test_a_base_is_added_to_the_rounded_product() -> None:
    a, b = quantized(random_matrix(48, 64)), quantized(random_matrix(32, 64, 1))
    base = random_matrix(48, 32, 2)
    (y,), (sum_,) = product(a, b), product(a, b, base, op=LINEAR_ADD)
    assert torch.equal(sum_, (y.float() + base.float()).bfloat16())


def test_the_error_of_a_product_of_gaussian_matrices_is_about_14_percent() -> None:
    """Each operand is off by about 10 % (20.4 and 19.1 dB)."""
    x, w = random_matrix(256, 512), random_matrix(256, 512, 1)
    exact = x.float() @ w.float().T
    (y,) = product(quantized(x), quantized(w, square=True), dtype="fp32")
    assert 0.12 < float((y - exact).square().mean().sqrt() / exact.square().mean().sqrt()) < 0.16


# ------------------------------------------------------------------------------------------------------------- numerics


def test_the_figures_of_a_tensor_are_its_amax_its_error_and_what_is_lost() -> None:
    x = random_matrix(64, 64)
    x[:, ::4] = 0
    x[0, 1], x[0, 2] = 100.0, 0.01
    parts = quantized(x)
    (rows,) = check_op(MEASURE, x, *typed(parts))
    assert rows[:, 0].tolist() == x.float().abs().amax(dim=1).tolist()
    rounded = dequantized(*parts)
    error = float((rounded - x.float()).square().sum().sqrt() / x.float().square().sum().sqrt())
    lost = float(((rounded == 0) & (x != 0)).sum() / (x != 0).sum())
    (none,) = check_op(MEASURE, 0 * x, *typed(quantized(0 * x)))
    assert not none.any()
    (table,) = check_op(REPORT, rows, none)
    assert table[0].tolist() == pytest.approx([100.0, error, lost]) and 0 < lost < 0.2
    assert table[1].tolist() == [0.0, 0.0, 0.0]
    x[3, 4] = torch.inf
    (wrong,) = check_op(MEASURE, x, *typed(quantized(x)))
    assert wrong[:, 0].isnan().tolist() == [row == 3 for row in range(len(x))]
    assert check_op(REPORT, wrong)[0][0, :2].isnan().all()


@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_swiglu_and_its_gradient_measure_their_outputs_and_the_transform_of_these(bad: float | None) -> None:
    gate_up, dy = random_matrix(64, 192), random_matrix(64, 96, 1)
    if bad is not None:
        gate_up[5, 100] = bad
    out, of_out = check_op(SWIGLU, gate_up)
    gradient, of_gradient = check_op(SWIGLU_BWD, dy, gate_up)
    assert same_bits(out, swiglu(gate_up)) and same_bits(gradient, swiglu_bwd(dy, gate_up))
    for x, found in ((out, of_out), (gradient, of_gradient)):
        forms = quantized(x, columns=True, hadamard=True)
        recorded = [torch.nan if not_finite else amax for amax, not_finite in found.view(2, 2).tolist()]
        assert same_bits(torch.tensor(recorded).nan_to_num(-1), torch.stack([forms[2][0], forms[5][0]]).nan_to_num(-1))
        given = quantized(x, found, columns=True, hadamard=True, measured=True)
        assert all(same_bits(a, b) for a, b in zip(given, forms, strict=True))


# -------------------------------------------------------------------------------------------------------- recomputation


@pytest.mark.parametrize(("rows", "columns"), [(True, False), (False, True), (True, True)])
def test_only_forms_that_are_read_are_made(rows: bool, columns: bool) -> None:
    b = Builder({op.kind: op for op in OPS}, "bf16")
    with b.record("forward"):
        outs = b.emit("nvfp4_quantize", b.input("x", (32, 64), "bf16"), rows=True, columns=True, hadamard=True)
        read = [*outs[:1] * rows, *outs[3:4] * columns]
        program = b.program("read", read)
    (op,) = dead_code(program, b.ops).ops
    assert (op.attrs["rows"], op.attrs["columns"], op.attrs["hadamard"]) == (rows, columns, columns)
    assert op.outs == (*outs[:3] * rows, *outs[3:] * columns)


# ------------------------------------------------------------------------------------------------------------- refusals


def value(*shape: int, dtype: str = "bf16") -> Value:
    return Value("x", shape, dtype, "act")


@pytest.mark.parametrize(
    ("ins", "attrs", "message"),
    [
        ([value(24, 32)], {}, "multiples of 16"),
        ([value(32, 24)], {}, "multiples of 16"),
        ([value(32, 32, dtype="fp32")], {}, "a bf16 matrix"),
        ([value(32)], {}, "a bf16 matrix"),
        ([value(32, 32)], {"rows": False}, "at least one form"),
        ([value(32, 32)], {"hadamard": True}, "hadamard needs columns"),
        ([value(32, 32)], {"columns": True, "hadamard": True, "square": True}, "without square"),
        ([value(32, 32)], {"stochastic": True}, "micro_step int32"),
        ([value(32, 32)], {"row": 24}, "row is a multiple of 16, got 24"),
        ([value(32, 32), value(dtype="int32")], {}, "no further inputs"),
    ],
)
def test_what_cannot_be_quantized_is_refused(ins: list[Value], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        QUANTIZE.infer(ins, {"rows": True, "columns": False} | attrs)


@pytest.mark.parametrize(
    ("change", "attrs", "message"),
    [
        ({0: value(32, 64, dtype="uint8")}, {}, "an e2m1 matrix"),
        ({1: value(32, 4, dtype="ue4m3")}, {}, r"ue4m3 \[128, 4\]"),
        ({2: value(dtype="fp32")}, {}, r"amax is fp32 \[2\]"),
        ({3: value(32, 32, dtype="e2m1"), 4: value(128, 4, dtype="ue4m3")}, {}, "sums over 64"),
        ({}, {"backend": "cutlass"}, "emulate or cublaslt"),
        ({3: value(64, 64, dtype="e2m1")}, {"backend": "cublaslt", "trans_b": True}, "along the summed dimension"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[int, Value], attrs: dict[str, Any], message: str) -> None:
    ins = [value(32, 64, dtype="e2m1"), value(128, 4, dtype="ue4m3"), value(2, dtype="fp32")] * 2
    for index, other in change.items():
        ins[index] = other
    with pytest.raises(ProgramError, match=message):
        LINEAR.infer(ins, {"dtype": "bf16", "backend": "emulate"} | attrs)

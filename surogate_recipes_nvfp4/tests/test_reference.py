"""The references of the NVFP4 ops: bytes of vectors, a slow twin on random numbers, special numbers, refusals.

vectors.json is a part of those of an independent implementation of NVFP4 in NumPy, with one rounding to fp32 per
operation. The twin below is another one, block by block: it searches in tables of all codes, and rounds after each
operation, because NumPy's numbers of 32 bits do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from surogate_core.api import Value
from surogate_core.errors import ProgramError
from surogate_core.program.builder import Builder
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import Elements, check_op
from surogate_recipes_nvfp4.formats import LEVELS, SIGNS, scale_offset, scale_shape
from surogate_recipes_nvfp4.ops import OPS
from surogate_recipes_nvfp4.reference import (
    alpha,
    codes_of,
    dequantized,
    deswizzled,
    hadamard_columns,
    swizzled,
    unpacked,
)

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
DEFINITIONS = {definition.kind: definition for definition in OPS}
QUANTIZE, LINEAR, LINEAR_ADD = OPS
SEED, MICRO_STEP = (42 << 33) - 7, 5

f32 = np.float32
Form = tuple[Tensor, ...]
"""Codes, scales, amax."""


def quantize(x: Tensor, *random: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    return check_op(QUANTIZE, x, *random, **{"rows": True, "columns": False, **attrs})


def hexadecimal(x: Tensor) -> str:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


def floats(words: list[str]) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex("".join(words)), ">f4").astype(np.float32))


def lcg(rows: int, columns: int, seed: int) -> Tensor:
    """The numbers of the vectors: from -4 to 4 with a heavy tail."""
    numbers, state = [], seed
    for _ in range(rows * columns):
        state = (1664525 * state + 1013904223) & 0xFFFFFFFF
        u = ((state >> 8) / 2**24) * 2 - 1
        numbers.append(u * u * u * 4)
    return torch.tensor(numbers).bfloat16().view(rows, columns)


A, W = lcg(32, 64, 1), lcg(48, 64, 2)


def over_zeros(row: Tensor) -> Tensor:
    """Return a matrix of 16 rows, of which the others are zeros."""
    return torch.cat([row.view(1, -1), torch.zeros(15, row.numel())]).bfloat16()


def check_vector(name: str, form: Form) -> None:
    packed, scales, amax = form
    vector = VECTORS[name]
    rows = len(bytes.fromhex(vector["packed"])) // packed.shape[1]
    assert hexadecimal(packed[:rows]) == vector["packed"]
    assert hexadecimal(deswizzled(scales, rows, 2 * packed.shape[1])) == vector["sf"]
    if "amax" in vector:
        expected = vector["amax"] if isinstance(vector["amax"], float) else float(floats([vector["amax"]]))
        assert float(amax[0]) == expected


# -------------------------------------------------------------------------------------------------------------- vectors


@pytest.mark.parametrize(
    ("name", "x", "attrs"),
    [
        ("a_row_std", A, {}),
        ("a_row_mse256", A, {"four_over_six": True}),
        ("w_2d_std", W, {"square": True}),
        ("w_2d_mse256", W, {"square": True, "four_over_six": True}),
        ("w_t_2d_std", W, {"square": True, "rows": False, "columns": True}),
        ("a_col_rht_std", A, {"hadamard": True, "rows": False, "columns": True}),
        ("two_blocks_std", over_zeros(floats(VECTORS["two_blocks_std"]["x"])), {}),
        ("two_blocks_mse256", over_zeros(floats(VECTORS["two_blocks_mse256"]["x"])), {"four_over_six": True}),
        ("all_zero", torch.zeros(16, 16).bfloat16(), {}),
    ],
)
def test_forms_are_those_of_the_vectors(name: str, x: Tensor, attrs: Mapping[str, Any]) -> None:
    check_vector(name, quantize(x, **attrs))


def test_the_hand_made_block_is_rounded_to_nearest_with_ties_to_even() -> None:
    """Its amax is 6, so that its numbers are rounded as they are."""
    vector = VECTORS["hand_block_amax6"]
    packed, scales, _ = quantize(over_zeros(torch.tensor(vector["x"])))
    assert hexadecimal(packed[:1]) == vector["packed"]
    assert int(scales.view(torch.uint8)[0, 0]) == vector["sf_code"]


def test_a_tiny_block_beside_a_large_number_has_the_scale_zero() -> None:
    x = torch.zeros(32)
    x[0], x[16:] = 1, 1e-6
    packed, scales, _ = quantize(over_zeros(x))
    check_vector("tiny_block_beside_big", (packed, scales, torch.zeros(2)))
    assert not dequantized(packed, scales)[0, 16:].any()


def test_stochastic_codes_are_those_of_the_vectors() -> None:
    vector = VECTORS["a_row_sr"]
    random = torch.tensor(vector["step"], dtype=torch.int32), torch.tensor(vector["seed"])
    check_vector("a_row_sr", quantize(A, *random, stochastic=True, stream=vector["tensor_id"]))


def test_codes_of_single_numbers_are_those_of_the_vectors() -> None:
    for x, code, level in VECTORS["e2m1_rn"]:
        assert int(codes_of(torch.tensor(x).clamp(-6, 6), None)) == code
        assert LEVELS[code & 7] * (-1) ** (code >> 3) == level
    for case in VECTORS["sr"]:
        numbers = floats(case["x"])
        assert codes_of(numbers, torch.full(numbers.shape, case["r"])).tolist() == case["codes"]


def test_the_probability_to_round_up_is_the_fraction_in_units_of_256() -> None:
    for fraction, ups in VECTORS["sr_p_up_between_2_and_3"]:
        codes = codes_of(torch.full((256,), 2 + fraction), torch.arange(256))
        assert int((codes == LEVELS.index(3)).sum()) == ups
        assert abs(ups - 256 * fraction) <= 1


def test_scales_lie_where_the_vectors_have_them() -> None:
    for row, block, blocks, offset in VECTORS["swizzle_offsets"]:
        assert scale_offset(row, block, 16 * blocks) == offset
    assert hexadecimal(quantize(A)[1]) == VECTORS["a_row_std_swizzled"]


def test_the_product_of_the_vectors() -> None:
    a, w = quantize(A), quantize(W, square=True)
    vector = VECTORS["gemm_fprop_std"]
    assert same_bits(alpha(a[2], w[2]).view(1), floats([vector["alpha"]]))
    (y,) = check_op(LINEAR, *as_operands(a), *as_operands(w), dtype="fp32", backend="emulate")
    torch.testing.assert_close(y[0], floats(vector["y_row0"]), rtol=1e-6, atol=0)


# ----------------------------------------------------------------------------------------------------------------- twin

E4M3 = [(m if e == 0 else 8 + m) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8) if (e, m) != (15, 7)]


def nearest(x: float, table: list[float] | tuple[float, ...]) -> int:
    """Return the code of the nearest number, the even code of two."""
    return min(range(len(table)), key=lambda code: (abs(table[code] - x), code % 2))


def philox(counter: list[int], key: list[int]) -> bytes:
    for _ in range(10):
        p, q = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [q >> 32 ^ counter[1] ^ key[0], q & 0xFFFFFFFF, p >> 32 ^ counter[3] ^ key[1], p & 0xFFFFFFFF]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return b"".join(word.to_bytes(4, "little") for word in counter)


def twin_code(x: np.float32, factor: np.float32, byte: int | None) -> int:
    magnitude = min(abs(x * factor), f32(6))
    if byte is not None:
        step = f32(0.5) if magnitude < 2 else f32(1) if magnitude < 4 else f32(2)
        raised = f32(f32(byte / 256) * step + magnitude)
        code = max(code for code, level in enumerate(LEVELS) if level <= raised)
    else:
        code = nearest(float(magnitude), LEVELS)
    return code | 8 * bool(np.signbit(x))


class Twin:
    """The form of a matrix, slowly: `codes`, `scales` (E4M3 codes), `amax`."""

    def __init__(
        self, x: np.ndarray, stream: int | None = None, square: bool = False, four_over_six: bool = False
    ) -> None:
        self.x, self.stream, self.high, self.four_over_six = x, stream, 16 if square else 1, four_over_six
        self.amax, self.limit = f32(np.abs(x).max()), f32(256 if four_over_six else 448)
        largest = np.finfo(f32).max
        self.encode = min(self.limit * f32(6) / self.amax, largest) if self.amax > 0 else f32(1)
        self.decode = f32(1) / self.encode
        rows, columns = x.shape
        self.codes = np.zeros((rows, columns), np.uint8)
        self.scales = np.zeros((rows, columns // 16), np.uint8)
        for row in range(0, rows, self.high):
            for block in range(columns // 16):
                self._write(row, block)

    def _write(self, row: int, block: int) -> None:
        part = self.x[row : row + self.high, 16 * block : 16 * block + 16]
        top = np.abs(part).max()
        if self.four_over_six:
            base = top / f32(6) * self.encode
            six, four = (nearest(float(min(base * f32(k), f32(448))), E4M3) for k in (1, 1.5))
            scale = four if self._error(part, four) < self._error(part, six) else six
        else:
            scale = nearest(float(top * (self.encode * (f32(1) / f32(6)))), E4M3)
        for i, numbers in enumerate(part):
            random = self._random((row + i) * self.x.shape[1] // 16 + block)
            self.scales[row + i, block] = scale
            for e, x in enumerate(numbers):
                self.codes[row + i, 16 * block + e] = twin_code(x, self._factor(scale), random[e])

    def _random(self, index: int) -> list[int] | list[None]:
        if self.stream is None:
            return [None] * 16
        counter = [index & 0xFFFFFFFF, index >> 32, self.stream, MICRO_STEP]
        return list(philox(counter, [SEED & 0xFFFFFFFF, SEED >> 32]))

    def _factor(self, scale: int) -> np.float32:
        return min(f32(1) / (f32(E4M3[scale]) * self.decode), np.finfo(f32).max)

    def _error(self, part: np.ndarray, scale: int) -> np.float32:
        rows = []
        for numbers in part:
            error = f32(0)
            for x in numbers:
                level = f32(LEVELS[twin_code(x, self._factor(scale), None) & 7]) * f32(-1 if np.signbit(x) else 1)
                d = level * f32(E4M3[scale]) * self.amax / (f32(6) * self.limit) - x
                error = error + d * d
            rows.append(error)
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [a + b for a, b in zip(rows[:half], rows[half:], strict=True)]
        return rows[0]

    def check(self, form: Form) -> None:
        packed, scales, amax = form
        assert np.array_equal(unpacked(packed).numpy(), self.codes)
        expected = np.zeros(scales.numel(), np.uint8)
        for row, codes in enumerate(self.scales):
            for block, code in enumerate(codes):
                expected[scale_offset(row, block, self.x.shape[1])] = code
        assert np.array_equal(scales.view(torch.uint8).numpy().ravel(), expected)
        assert amax.tolist() == [float(self.amax), float(self.limit)]


def twin_hadamard(x: np.ndarray) -> np.ndarray:
    """Return RHT(x^T), by additions in the order of strides 1, 2, 4 and 8."""
    y = np.ascontiguousarray(x.T).reshape(-1, 16) * np.array(SIGNS, f32)
    for stride in (1, 2, 4, 8):
        y = np.stack([y[:, i ^ stride] - y[:, i] if i & stride else y[:, i] + y[:, i ^ stride] for i in range(16)], 1)
    return torch.from_numpy(y * f32(0.25)).bfloat16().float().numpy().reshape(x.shape[::-1])


def numbers(kind: str, rows: int, columns: int) -> Tensor:
    """Both zeros are among them."""
    gen = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=gen)
    x = {
        "normal": lambda: x,
        "heavy tails": lambda: x / torch.rand(rows, columns, generator=gen).clamp(min=1e-3) ** 2,
        "rows": lambda: x * torch.logspace(-6, 2, rows)[:, None],
        "subnormal": lambda: x * 2.0**-128,
        "huge": lambda: x * 2.0**122,
    }[kind]()
    x[0, :2], x[16:32, :16] = torch.tensor([0.0, -0.0]), 0.0
    return x.bfloat16()


KINDS = ("normal", "heavy tails", "rows", "subnormal", "huge")
ATTRS: dict[str, dict[str, Any]] = {
    "plain": {},
    "4/6": {"four_over_six": True},
    "square": {"square": True},
    "square 4/6": {"square": True, "four_over_six": True},
    "hadamard": {"hadamard": True},
    "hadamard 4/6": {"hadamard": True, "four_over_six": True},
    "stochastic": {"stochastic": True},
    "hadamard stochastic 4/6": {"hadamard": True, "stochastic": True, "four_over_six": True},
}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("attrs", ATTRS.values(), ids=ATTRS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_are_those_of_the_twin(kind: str, attrs: dict[str, Any]) -> None:
    """48 x 80: neither the rows nor the scales of a row are whole atoms."""
    x = numbers(kind, 48, 80)
    random = (torch.tensor(MICRO_STEP, dtype=torch.int32), torch.tensor(SEED)) if attrs.get("stochastic") else ()
    forms = quantize(x, *random, columns=True, stream=3, **attrs)
    wide = x.float().numpy()
    turned = twin_hadamard(wide) if attrs.get("hadamard") else np.ascontiguousarray(wide.T)
    own = {name: attrs[name] for name in ("square", "four_over_six") if name in attrs}
    Twin(wide, 3 if random else None, **own).check(forms[:3])
    Twin(turned, 4 if random else None, **own).check(forms[3:])
    for name, form in (("rows", forms[:3]), ("columns", forms[3:])):
        alone = quantize(x, *random, stream=3, **{**attrs, "rows": False, "columns": False, name: True})
        assert all(map(same_bits, alone, form))


def test_division_by_three_corrected_by_its_remainder_is_exact_for_all_mantissas() -> None:
    """Kernels divide by 1536 so. In fp64 the products are exact, and the last sum never lies between two fp32 numbers.

    So rounding it to fp64 before does not matter.
    """
    v = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)
    third = f32(1) / f32(3)
    quotient = v * third
    remainder = (v.astype(np.float64) - 3 * quotient.astype(np.float64)).astype(np.float32)
    total = remainder.astype(np.float64) * float(third) + quotient
    assert not ((total.view(np.uint64) & 0x1FFFFFFF) == 0x10000000).any()
    assert np.array_equal(total.astype(np.float32), v / f32(3))


# ----------------------------------------------------------------------------------------------------------- properties


def test_square_blocks_hold_the_same_numbers_in_both_forms() -> None:
    codes, scales, amax, column_codes, column_scales, column_amax = quantize(W, square=True, columns=True)
    assert same_bits(dequantized(codes, scales).T, dequantized(column_codes, column_scales))
    assert same_bits(amax, column_amax)


def test_the_hadamard_transform_cancels_in_a_product() -> None:
    """It is orthogonal: of small integers, whose transforms are exact in bf16."""
    x = torch.randint(-3, 4, (32, 48), generator=torch.Generator().manual_seed(0)).bfloat16()
    y = hadamard_columns(x).float()
    assert torch.equal(y @ y.T, x.T.float() @ x.float())
    row = hadamard_columns(torch.arange(1.0, 17)[:, None].bfloat16()).view(-1)
    assert row.tolist() == VECTORS["rht_of_1_to_16"]


def test_scales_are_read_where_they_were_written() -> None:
    scale = torch.randint(0, 0x7F, (300, 9), dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert same_bits(deswizzled(swizzled(scale), 300, 144), scale)
    assert scale_shape(300, 144) == (384, 12)


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("attrs", ATTRS.values(), ids=ATTRS)
def test_a_matrix_that_is_not_finite_has_the_amax_nan(attrs: dict[str, Any], special: float) -> None:
    x = numbers("normal", 48, 80)
    x[5, 7] = special
    random = (torch.tensor(1, dtype=torch.int32), torch.tensor(2)) if attrs.get("stochastic") else ()
    outs = quantize(x, *random, columns=True, **attrs)
    assert outs[2][0].isnan() and outs[5][0].isnan()
    (y,) = check_op(LINEAR, *as_operands(outs[:3]), *as_operands(outs[:3]), dtype="bf16", backend="emulate")
    assert y.isnan().all()


# ------------------------------------------------------------------------------------------------------------- products


def as_operands(form: Form) -> tuple[Elements, ...]:
    dtypes = ("e2m1", "ue4m3", "fp32")
    return tuple(Elements(tensor, dtype) for tensor, dtype in zip(form, dtypes, strict=True))


def test_a_product_is_that_of_the_numbers_that_the_forms_stand_for() -> None:
    a, b = numbers("normal", 48, 80), numbers("heavy tails", 32, 80)
    first, second = quantize(a, four_over_six=True), quantize(b)
    x, y = (dequantized(f[0], f[1]).double() * (f[2][0] / (6 * f[2][1])).double() for f in (first, second))
    operands = (*as_operands(first), *as_operands(second))
    attrs = {"dtype": "fp32", "backend": "emulate"}
    (out,) = check_op(LINEAR, *operands, **attrs)
    torch.testing.assert_close(out.double(), x @ y.T, rtol=1e-5, atol=1e-5 * float((x @ y.T).abs().max()))
    bias = torch.randn(32).bfloat16()
    (biased,) = check_op(LINEAR, *operands, bias, **attrs)
    assert same_bits(biased, out + bias.float())
    base = torch.randn(48, 32).bfloat16()
    (added,) = check_op(LINEAR_ADD, *operands, base, **{**attrs, "dtype": "bf16"})
    assert same_bits(added, (out.bfloat16().float() + base.float()).bfloat16())


def test_a_factor_may_be_stored_along_the_other_dimension() -> None:
    a, b = quantize(A), quantize(W.T.contiguous(), square=True)
    attrs = {"dtype": "bf16", "backend": "emulate"}
    (out,) = check_op(LINEAR, *as_operands(a), *as_operands(b), trans_b=True, **attrs)
    (same,) = check_op(LINEAR, *as_operands(a), *as_operands(quantize(W, square=True)), **attrs)
    assert same_bits(out, same)


# --------------------------------------------------------------------------------------------------- rules and refusals


def value(shape: tuple[int, ...], dtype: str = "bf16", label: str = "x") -> Value:
    return Value(name=label, shape=shape, dtype=dtype, role="act", label=label)


def test_outputs_have_the_label_of_what_they_are_made_of() -> None:
    specs = QUANTIZE.infer([value((48, 80), label="norm")], {"rows": True, "columns": True})
    assert {spec.label for spec in specs} == {"norm"}
    assert [spec.shape for spec in specs] == [(48, 80), (128, 8), (2,), (80, 48), (128, 4), (2,)]


@pytest.mark.parametrize(
    ("x", "attrs", "message"),
    [
        (value((48, 40)), {"rows": True, "columns": True}, "multiples of 16"),
        (value((8, 48)), {"rows": True, "columns": True}, "multiples of 16"),
        (value((48, 48), "fp32"), {"rows": True, "columns": True}, "a bf16 matrix is quantized"),
        (value((48, 48)), {"rows": False, "columns": False}, "neither"),
        (value((48, 48)), {"rows": True, "columns": True, "square": True, "hadamard": True}, "square with hadamard"),
        (
            value((48, 48)),
            {"rows": True, "columns": True, "square": True, "stochastic": True},
            "square with stochastic",
        ),
        (value((48, 48)), {"rows": True, "columns": True, "stochastic": True}, "micro_step and seed"),
    ],
)
def test_what_cannot_be_quantized_is_refused(x: Value, attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        QUANTIZE.infer([x], attrs)


def operand(rows: int, columns: int) -> list[Value]:
    return [value((rows, columns), "e2m1"), value(scale_shape(rows, columns), "ue4m3"), value((2,), "fp32")]


@pytest.mark.parametrize(
    ("ins", "attrs", "message"),
    [
        ([*operand(32, 48), *operand(16, 64)], {}, "a sums over 48 elements, b over 64"),
        ([*operand(32, 48), *operand(48, 48)[:1], *operand(256, 48)[1:]], {}, "b has scales ue4m3"),
        ([*operand(32, 48), *operand(48, 16)], {"trans_b": True, "backend": "cublaslt"}, "along the summed dimension"),
        ([*operand(32, 48), *operand(48, 48)], {"backend": "other"}, "emulate or cublaslt"),
        ([*operand(32, 48), *operand(16, 48), value((32,))], {}, "a bias is bf16"),
    ],
)
def test_factors_that_do_not_match_are_refused(ins: list[Value], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        LINEAR.infer(ins, {"dtype": "bf16", "backend": "emulate", **attrs})


@pytest.mark.parametrize(
    ("kept", "again"),
    [((), (True, True)), ((0, 1, 2), (False, True)), ((3, 4, 5), (True, False)), ((0, 1, 3, 4, 5), (True, False))],
)
def test_only_dropped_forms_are_made_again(kept: tuple[int, ...], again: tuple[bool, bool]) -> None:
    b = Builder(DEFINITIONS, "bf16")
    with b.record("forward") as emitted:
        outs = b.emit("nvfp4_quantize", value((48, 80), label="norm"), rows=True, columns=True, hadamard=True)
    assert QUANTIZE.rematerialise is not None
    with b.record("recompute") as repeated:
        fresh = QUANTIZE.rematerialise(b, emitted[0], frozenset(outs[i] for i in kept))
    assert [v is None for v in fresh] == [i in kept for i in range(6)]
    (op,) = repeated
    assert ((op.attrs["rows"], op.attrs["columns"]), op.attrs["hadamard"]) == (again, True)
    assert {v.label for v in op.outs} == {"norm"}

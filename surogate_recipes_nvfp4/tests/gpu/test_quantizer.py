"""The compiled quantizer is bit-identical to the reference, and so are the magnitudes that other ops measure for it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import bind_kernel, run_kernel, run_op
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import plain_nan, same_bits
from surogate_core.testing.ops import as_inputs
from surogate_core.testing.programs import STANDARD_OPS as STANDARD
from surogate_recipes_bf16.kernels import KERNELS as BF16_KERNELS
from surogate_recipes_nvfp4.kernels import KERNELS
from surogate_recipes_nvfp4.ops import OPS
from surogate_recipes_nvfp4.reference import magnitudes, nvfp4_quantize

pytestmark = pytest.mark.gpu

DEFINITIONS = {definition.kind: definition for definition in (*OPS, *STANDARD)}
QUANTIZE, SWIGLU, SWIGLU_BWD = (DEFINITIONS[f"nvfp4_{name}"] for name in ("quantize", "swiglu", "swiglu_bwd"))
NUMBERS = ("normal", "heavy tails", "rows", "zeros", "subnormal", "huge")
# Tiles of 128 x 128 that are whole, cut off, and of one block; an odd number of blocks in both directions.
SHAPES = cases([(48, 80), (272, 400), (256, 384)], more=[(16, 16), (16, 2064), (4112, 144), (1024, 2048)])
ATTRS = [
    {"square": square, "hadamard": hadamard, "four_over_six": four_over_six, "stochastic": stochastic}
    for square, hadamard, four_over_six, stochastic in product((False, True), repeat=4)
    if not square or not (hadamard or stochastic)
]


def name(attrs: dict[str, Any]) -> str:
    return " ".join(key for key, value in attrs.items() if value) or "plain"


def numbers(kind: str, rows: int, columns: int) -> Tensor:
    """Both zeros are among them."""
    x = torch.randn(rows, columns)
    if kind == "heavy tails":
        x = x / torch.rand(rows, columns).clamp(min=1e-4) ** 2
    elif kind == "rows":
        x = x * 10 ** torch.empty(rows, 1).uniform_(-7, 3)
    elif kind == "zeros":
        x = x * 0
    elif kind == "subnormal":
        x = x * 2.0**-128
    elif kind == "huge":
        x = x * 2.0**122
    x[-1, :2] = torch.tensor([0.0, -0.0])
    return x.bfloat16()


def random_states() -> list[Tensor]:
    """Micro-step and seed, of which all bytes count."""
    return [torch.randint(1 << 31, (), dtype=torch.int32), torch.randint(-(1 << 63), (1 << 63) - 1, ())]


def check(x: Tensor, *, rows: bool, columns: bool, **attrs: Any) -> None:
    ins = [x, *(random_states() if attrs.get("stochastic") else ())]
    attrs |= {"rows": rows, "columns": columns}
    ours, expected = run_op(KERNELS, QUANTIZE, ins, attrs), nvfp4_quantize(*ins, **attrs)
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        part = ("codes", "scales", "amax")[i % 3]
        assert same_bits(a, b), f"{part} of form {i // 3}: {int((bytes_of(a) != bytes_of(b)).sum())} bytes differ"


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("attrs", ATTRS, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_forms_are_bit_identical_to_the_reference(shape: tuple[int, int], attrs: dict[str, Any]) -> None:
    check(numbers("heavy tails", *shape), rows=True, columns=True, stream=3, **attrs)


@pytest.mark.parametrize("attrs", ATTRS, ids=name)
@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_every_kind_are_bit_identical_to_the_reference(kind: str, attrs: dict[str, Any]) -> None:
    """The magnitude of numbers decides how errors of 4/6 are divided."""
    check(numbers(kind, 144, 208), rows=True, columns=True, stream=2**31 - 2, **attrs)


@pytest.mark.parametrize("attrs", ATTRS, ids=name)
@pytest.mark.parametrize("form", ["rows", "columns"])
def test_a_form_alone_is_bit_identical_to_the_reference(form: str, attrs: dict[str, Any]) -> None:
    columns = form == "columns"
    one = {**attrs, "hadamard": attrs["hadamard"] and columns}
    check(numbers("normal", 160, 272), rows=not columns, columns=columns, stream=7, **one)


@pytest.mark.parametrize("four_over_six", [False, True])
def test_every_bf16_is_quantized_as_by_the_reference(four_over_six: bool) -> None:
    """All up to 448, and zeros in place of the others."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    x = torch.where(x.float().abs() <= 448, x, torch.tensor(0.0).bfloat16())
    check(x, rows=True, columns=True, four_over_six=four_over_six)


@pytest.mark.parametrize("attrs", ATTRS, ids=name)
@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_a_matrix_that_is_not_finite_has_the_amax_nan(special: float, attrs: dict[str, Any]) -> None:
    x = numbers("normal", 144, 208)
    x[130, 17] = special
    ins = [x, *(random_states() if attrs["stochastic"] else ())]
    attrs = {**attrs, "rows": True, "columns": True}
    ours, expected = run_op(KERNELS, QUANTIZE, ins, attrs), nvfp4_quantize(*ins, **attrs)
    for i in (2, 5):
        assert ours[i][0].isnan()
        assert same_bits(plain_nan(ours[i]), plain_nan(expected[i]))


def test_a_transform_that_overflows_has_the_amax_nan() -> None:
    x = torch.full((32, 32), 3e38).bfloat16() * torch.tensor([1, -1] * 16)[:, None].bfloat16()
    outs = run_op(KERNELS, QUANTIZE, [x], {"rows": True, "columns": True, "hadamard": True})
    expected = nvfp4_quantize(x, rows=True, columns=True, hadamard=True)
    assert [bool(outs[i][0].isnan()) for i in (2, 5)] == [bool(expected[i][0].isnan()) for i in (2, 5)]


def test_seed_and_micro_step_are_read_when_the_kernel_runs() -> None:
    """A graph that was captured once rounds differently in every micro-step."""
    x, (micro_step, seed) = numbers("normal", 64, 64), random_states()
    attrs = {"rows": True, "columns": True, "stochastic": True, "stream": 1}
    inputs = as_inputs([x, micro_step, seed])
    specs = QUANTIZE.infer(tuple(inputs), attrs)
    outs = tuple(Value(f"{spec.label}{i}", spec.shape, spec.dtype, "act") for i, spec in enumerate(specs))
    binding = bind_kernel(KERNELS, Op(QUANTIZE.kind, tuple(inputs), outs, attrs), inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        binding.launch(torch.cuda.current_stream().cuda_stream)
    for step in (3, 4):
        binding.buffers[tuple(inputs)[1]].tensor.fill_(step)
        graph.replay()
        expected = nvfp4_quantize(x, torch.tensor(step, dtype=torch.int32), seed, **attrs)
        assert all(same_bits(binding.buffers[out].tensor.cpu(), e) for out, e in zip(outs, expected, strict=True))


def test_errors_name_the_invalid_argument() -> None:
    from surogate_recipes_nvfp4 import _C

    def launch(x: int = 256, columns: int = 16, codes: int = 256, scales: int = 256, **how: Any) -> None:
        row = how.pop("row", 0)
        flags = {"square": False, "hadamard": False, "four_over_six": False, "stochastic": False, **how}
        _C.nvfp4_quantize(x, codes, scales, 256, 0, 0, 0, 256, 16, columns, *flags.values(), 0, 0, 0, False, row, 0)

    for arguments, message in (
        ({"x": 0}, "nvfp4_quantize: x is a null pointer"),
        ({"x": 8}, "nvfp4_quantize: x must be aligned to 16 bytes"),
        ({"columns": 24}, "nvfp4_quantize: columns must be a multiple of 16, got 24"),
        ({"codes": 0}, "nvfp4_quantize: no form is written"),
        ({"scales": 0}, "nvfp4_quantize: scales of the rows is a null pointer"),
        ({"stochastic": True}, "nvfp4_quantize: micro_step is a null pointer"),
        ({"row": 8}, "nvfp4_quantize: the first row must be a multiple of 16, got 8"),
        ({"square": True, "hadamard": True}, "nvfp4_quantize: square blocks are neither transformed nor"),
    ):
        with pytest.raises(ValueError, match=message):
            launch(**arguments)


@pytest.mark.parametrize("attrs", [attrs for attrs in ATTRS if attrs["stochastic"]], ids=name)
@pytest.mark.parametrize("row", [16, 272, 1 << 20])
def test_random_bits_of_rows_are_those_of_the_whole_tensor(row: int, attrs: dict[str, Any]) -> None:
    """From block row * columns / 16 on, of which the last one needs more than 32 bits with 65,536 columns."""
    check(numbers("normal", 144, 208), rows=True, columns=True, stream=5, row=row, **attrs)
    if row == 1 << 20:
        check(numbers("normal", 16, 65_536), rows=True, columns=True, stream=5, row=row, **attrs)


# ------------------------------------------------------------------------------------------------- ops that measure too


def gated(rows: int, width: int, kind: str) -> tuple[Tensor, Tensor]:
    """dy [T, F] and gate_up [T, 2F]."""
    return numbers("normal", rows, width), numbers(kind, rows, 2 * width)


@pytest.mark.parametrize("special", [0.0, torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "zeros"])
@pytest.mark.parametrize("shape", cases([(48, 80), (272, 400)], more=[(16, 2), (2048, 4096), (4112, 1040)]), ids=str)
def test_swiglu_has_the_bits_of_bf16_and_measures_them(shape: tuple[int, int], kind: str, special: float) -> None:
    dy, gate_up = gated(*shape, kind)
    gate_up[5, 1] = special
    for measuring, plain, ins in ((SWIGLU, "swiglu", [gate_up]), (SWIGLU_BWD, "swiglu_bwd", [dy, gate_up])):
        out, found = run_op(KERNELS, measuring, ins, {})
        (expected,) = run_op(BF16_KERNELS, DEFINITIONS[plain], ins, {})
        assert same_bits(plain_nan(out), plain_nan(expected))
        assert same_bits(found.cpu(), magnitudes(out.cpu()))


@pytest.mark.parametrize("attrs", [attrs for attrs in ATTRS if not attrs["square"]], ids=name)
@pytest.mark.parametrize("special", [0.0, torch.inf])
def test_a_matrix_that_is_measured_already_has_the_same_forms(special: float, attrs: dict[str, Any]) -> None:
    x = numbers("heavy tails", 272, 400)
    x[130, 17] = special
    random = random_states() if attrs["stochastic"] else []
    attrs = {**attrs, "rows": True, "columns": True}
    plain = run_op(KERNELS, QUANTIZE, [x, *random], attrs)
    given = run_op(KERNELS, QUANTIZE, [x, magnitudes(x), *random], {**attrs, "measured": True})
    assert all(same_bits(plain_nan(a), plain_nan(b)) for a, b in zip(given, plain, strict=True))


def test_the_gradient_of_swiglu_may_take_the_place_of_its_input() -> None:
    dy, gate_up = gated(272, 400, "normal")
    apart = run_op(KERNELS, SWIGLU_BWD, [dy, gate_up], {})
    inputs = as_inputs([dy, gate_up])
    op = Op(SWIGLU_BWD.kind, tuple(inputs), (tuple(inputs)[1], Value("measured", (4,), "fp32", "act")), {})
    assert all(same_bits(a, b) for a, b in zip(run_kernel(KERNELS, op, inputs), apart, strict=True))

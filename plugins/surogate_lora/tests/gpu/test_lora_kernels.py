"""The compiled lora_add and lora_slice against their references: the same bits for any dtype, shape, alignment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import guarded, same_bits
from surogate_lora.kernels import KERNELS
from surogate_lora.reference import lora_add, lora_slice

pytestmark = pytest.mark.gpu

FLOATS = ("fp32", "bf16")
SCALES = [2.0, 0.3]
"""Exact, and one whose products are rounded: a fused multiply-add would differ."""

LAYOUTS = {
    # rows, width, (column, width) of each branch
    "q, k, v": (33, 64, [(0, 32), (32, 16), (48, 16)]),
    "with gaps": (19, 96, [(8, 16), (64, 24)]),
    "one row": (1, 24, [(0, 24)]),
    "odd": (7, 301, [(0, 3), (3, 1), (5, 130), (290, 11)]),
    "narrow": (5, 3, [(1, 1)]),
    "even columns of an odd width": (6, 43, [(8, 16), (32, 11)]),
    "odd columns of an even width": (6, 48, [(1, 8), (12, 20), (40, 8)]),
    "several blocks a row": (3, 6152, [(0, 3072), (3080, 3072)]),
    "many branches": (4, 700, [(7 * i, 5) for i in range(100)]),
}
MORE = {
    "large": (4099, 4096, [(0, 2048), (2048, 1024), (3072, 1024)]),
    "more rows than a grid is high": (70_001, 40, [(0, 16), (24, 8)]),
}


def value(name: str, rows: int, width: int, dtype: str) -> Value:
    return Value(name=name, shape=(rows, width), dtype=dtype, role="act")


def drawn(v: Value, generator: torch.Generator) -> Tensor:
    """Sizes from 2^-12 to 2^12, so that sums round at every place; a negative zero."""
    exponents = torch.randint(-12, 12, v.shape, generator=generator)
    x = torch.ldexp(torch.randn(v.shape, generator=generator), exponents)
    x.view(-1)[0] = -0.0
    return x.to(TORCH_DTYPES[v.dtype])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())))


def check_add(
    layout: tuple[int, int, Sequence[tuple[int, int]]], dtype: str, of_branches: Sequence[str], scale: float, skew: int
) -> None:
    rows, width, places = layout
    base, y = value("base", rows, width, dtype), value("y", rows, width, dtype)
    dtypes = [of_branches[i % len(of_branches)] for i in range(len(places))]
    branches = [value(f"u{i}", rows, n, d) for i, ((_, n), d) in enumerate(zip(places, dtypes, strict=True))]
    attrs = {"columns": tuple(column for column, _ in places), "scale": scale}
    gen = generator()
    contents = {v: drawn(v, gen) for v in (base, *branches)}
    (out,) = run_kernel(KERNELS, Op("lora_add", (base, *branches), (y,), attrs), contents, skew=skew)
    expected = lora_add(*contents.values(), **attrs)
    wrong = (out.float() != expected.float()).nonzero()
    assert same_bits(out, expected), f"{len(wrong)} elements differ, the first at {wrong[:1].tolist()}"


@pytest.mark.parametrize("name", cases(list(LAYOUTS), more=list(MORE)))
@pytest.mark.parametrize(("dtype", "of_branch"), list(product(FLOATS, FLOATS)))
@pytest.mark.parametrize("skew", [0, 1])
def test_branches_are_added_to_the_bit(name: str, dtype: str, of_branch: str, skew: int) -> None:
    for scale in SCALES:
        check_add((LAYOUTS | MORE)[name], dtype, [of_branch], scale, skew)


@pytest.mark.parametrize("dtype", FLOATS)
def test_branches_may_have_a_dtype_each(dtype: str) -> None:
    check_add(LAYOUTS["q, k, v"], dtype, ["fp32", "bf16"], 0.3, 0)
    check_add(LAYOUTS["odd"], dtype, ["bf16", "fp32"], 0.3, 1)


def slices(name: str) -> tuple[int, int, Sequence[tuple[int, int]]]:
    rows, width, places = (LAYOUTS | MORE)[name]
    return rows, width, [*places[:3], (0, width)]


@pytest.mark.parametrize("name", cases(list(LAYOUTS), more=list(MORE)))
@pytest.mark.parametrize(("dtype", "out_dtype"), list(product(FLOATS, FLOATS)))
@pytest.mark.parametrize("skew", [0, 1])
def test_columns_are_taken_to_the_bit(name: str, dtype: str, out_dtype: str, skew: int) -> None:
    rows, width, places = slices(name)
    x = value("x", rows, width, dtype)
    contents = {x: drawn(x, generator())}
    for (column, n), scale in product(places, SCALES):
        attrs = {"column": column, "width": n, "scale": scale, "dtype": out_dtype}
        op = Op("lora_slice", (x,), (value("out", rows, n, out_dtype),), attrs)
        (out,) = run_kernel(KERNELS, op, contents, skew=skew)
        assert same_bits(out, lora_slice(contents[x], **attrs)), (column, n, scale)


def test_random_layouts() -> None:
    for _ in range(20):
        rows, width = int(torch.randint(1, 60, ())), int(torch.randint(1, 600, ()))
        cuts = sorted({int(torch.randint(0, width + 1, ())) for _ in range(6)} | {0, width})
        places = [(a, b - a) for a, b in pairwise(cuts)]
        kept = [place for place in places if int(torch.randint(0, 3, ()))] or places
        dtype, of_branch = (FLOATS[int(torch.randint(0, 2, ()))] for _ in range(2))
        check_add((rows, width, kept), dtype, [of_branch], 0.7, int(torch.randint(0, 2, ())))


def test_infinities_and_nan_stay_where_they_are() -> None:
    """A NaN of a branch reaches its own element and no other; columns without a branch keep what they have."""
    base, branch, y = value("base", 2, 24, "bf16"), value("u", 2, 8, "bf16"), value("y", 2, 24, "bf16")
    x, u = torch.ones(2, 24).bfloat16(), torch.ones(2, 8).bfloat16()
    x[0, 3], x[1, 20], u[0, 5], u[1, 0] = torch.inf, torch.nan, torch.nan, -torch.inf
    op = Op("lora_add", (base, branch), (y,), {"columns": (8,), "scale": 0.5})
    (out,) = run_kernel(KERNELS, op, {base: x, branch: u})
    assert out.isnan().nonzero().tolist() == [[0, 13], [1, 20]]
    assert out.isinf().nonzero().tolist() == [[0, 3], [1, 8]]


def test_the_sum_may_take_the_place_of_its_base() -> None:
    for dtype, layout in product(FLOATS, ("q, k, v", "odd")):
        rows, width, places = LAYOUTS[layout]
        base = value("base", rows, width, dtype)
        branches = [value(f"u{i}", rows, n, "bf16") for i, (_, n) in enumerate(places)]
        attrs = {"columns": tuple(column for column, _ in places), "scale": 0.3}
        contents = {v: drawn(v, generator()) for v in (base, *branches)}
        binding = bind_kernel(KERNELS, Op("lora_add", (base, *branches), (base,), attrs), contents)
        binding.launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert same_bits(binding.buffers[base].tensor.cpu(), lora_add(*contents.values(), **attrs))


def test_wrong_arguments_are_named() -> None:
    from surogate_lora import _C

    p = guarded((64,), torch.float32).pointer
    for call, message in (
        (lambda: _C.lora_add(0, p, p, 1, 8, 1, 1.0, 0, 0), "lora_add: base is a null pointer"),
        (lambda: _C.lora_add(p, p, p + 2, 1, 8, 1, 1.0, 0, 0), "lora_add: y must be aligned to 4 bytes"),
        (lambda: _C.lora_add(p, p + 4, p, 1, 8, 1, 1.0, 0, 0), "lora_add: table must be aligned to 8 bytes"),
        (lambda: _C.lora_add(p, p, p, 1, 8, 0, 1.0, 0, 0), "lora_add: branches must be positive"),
        (lambda: _C.lora_add(p, p, p, 1, 8, 1, 1.0, 2, 0), "lora_add: base must be fp32 or bf16, not fp64"),
        (lambda: _C.lora_slice(p, p, 0, 8, 0, 8, 1.0, 0, 0, 0), "lora_slice: rows must be positive"),
        (lambda: _C.lora_slice(p, p, 1, 8, 4, 8, 1.0, 0, 0, 0), "lora_slice: columns 4 to 12 are not all in the 8"),
        (lambda: _C.lora_slice(p, p, 1, 8, 0, 8, 1.0, 0, 3, 0), "lora_slice: out must be fp32 or bf16, not int32"),
    ):
        with pytest.raises(ValueError, match=message):
            call()

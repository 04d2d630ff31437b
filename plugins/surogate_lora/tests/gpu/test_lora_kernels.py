"""The compiled kernels that pack, unpack, join and split have the bits of their references, for any dtype and shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import guarded, same_bits
from surogate_lora.kernels import KERNELS
from surogate_lora.ops import Place
from surogate_lora.reference import lora_join, lora_pack, lora_scale, lora_split, lora_unpack

pytestmark = pytest.mark.gpu

FLOATS = ("fp32", "bf16")
Shape = tuple[int, int]

LAYOUTS: dict[str, tuple[list[Shape], list[tuple[Shape, Place]]]] = {
    # shapes of the wholes; shape and place of each part
    "one matrix": ([(16, 64)], [((16, 64), Place(0, 0, 0, 1.0))]),
    "q, k, v": (
        [(48, 256), (96, 48)],
        [
            *(((16, 256), Place(0, 16 * i, 0, 1.0)) for i in range(3)),
            ((64, 16), Place(1, 0, 0, 2.0)),
            ((16, 16), Place(1, 64, 16, 2.0)),
            ((16, 16), Place(1, 80, 32, 0.3)),
        ],
    ),
    "side by side": ([(37, 40)], [((37, 16), Place(0, 0, 0, 1.0)), ((37, 24), Place(0, 0, 16, 0.7))]),
    "odd ranks": (
        [(7, 33), (21, 7)],
        [
            ((3, 33), Place(0, 0, 0, 1.0)),
            ((4, 33), Place(0, 3, 0, 1.0)),
            ((9, 3), Place(1, 1, 0, 0.3)),
            ((5, 4), Place(1, 12, 3, 1.7)),
        ],
    ),
    "gaps all around": ([(9, 20)], [((2, 3), Place(0, 1, 2, 0.5)), ((1, 8), Place(0, 5, 8, 2.0))]),
    "one element": ([(1, 1)], [((1, 1), Place(0, 0, 0, 0.3))]),
}
MORE = {
    "8B, gate and up": (
        [(32, 4096), (24576, 32)],
        [
            *(((16, 4096), Place(0, 16 * i, 0, 1.0)) for i in range(2)),
            *(((12288, 16), Place(1, 12288 * i, 16 * i, 2.0)) for i in range(2)),
        ],
    ),
    "more rows than blocks take at once": ([(70_001, 24)], [((70_001, 16), Place(0, 0, 8, 0.3))]),
}


def values(prefix: str, shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[Value]:
    return [
        Value(name=f"{prefix}{i}", shape=shape, dtype=dtypes[i % len(dtypes)], role="act")
        for i, shape in enumerate(shapes)
    ]


def drawn(v: Value) -> Tensor:
    """Sizes from 2^-12 to 2^12, so that products and sums round at every place; a negative zero."""
    x = torch.ldexp(torch.randn(v.shape), torch.randint(-12, 12, v.shape))
    x.view(-1)[0] = -0.0
    return x.to(TORCH_DTYPES[v.dtype])


def check_pack(name: str, of_parts: Sequence[str], dtype: str, skew: int) -> None:
    shapes, placed = (LAYOUTS | MORE)[name]
    parts = values("part", [shape for shape, _ in placed], of_parts)
    wholes = values("whole", shapes, [dtype])
    attrs = {"shapes": tuple(shapes), "places": tuple(at for _, at in placed), "dtype": dtype}
    contents = {v: drawn(v) for v in parts}
    found = run_kernel(KERNELS, Op("lora_pack", tuple(parts), tuple(wholes), attrs), contents, skew=skew)
    for out, expected in zip(found, lora_pack(*contents.values(), **attrs), strict=True):
        assert same_bits(out, expected), f"{name}: {(out.float() != expected.float()).nonzero()[:1].tolist()}"


def check_unpack(name: str, dtype: str, of_parts: Sequence[str], skew: int, accumulates: frozenset[int]) -> None:
    shapes, placed = (LAYOUTS | MORE)[name]
    wholes = values("whole", shapes, [dtype])
    parts = values("part", [shape for shape, _ in placed], of_parts)
    attrs = {
        "shapes": tuple(shape for shape, _ in placed),
        "places": tuple(at for _, at in placed),
        "dtypes": tuple(v.dtype for v in parts),
    }
    contents = {v: drawn(v) for v in wholes}
    expected = list(lora_unpack(*contents.values(), **attrs))
    before = {i: drawn(parts[i]) for i in accumulates}
    for i, content in before.items():
        expected[i] = content + expected[i]
    op = Op("lora_unpack", tuple(wholes), tuple(parts), attrs, accumulate=accumulates)
    # Eager and captured runs begin with the same contents, so that each adds once.
    given = {parts[i]: content for i, content in before.items()}
    for out, wanted in zip(run_kernel(KERNELS, op, contents | given, skew=skew), expected, strict=True):
        assert same_bits(out, wanted), f"{name}: {(out.float() != wanted.float()).nonzero()[:1].tolist()}"


@pytest.mark.parametrize("name", cases(list(LAYOUTS), more=list(MORE)))
@pytest.mark.parametrize(("of_part", "dtype"), list(product(FLOATS, FLOATS)))
@pytest.mark.parametrize("skew", [0, 1])
def test_parts_are_packed_to_the_bit_with_zeros_around_them(name: str, of_part: str, dtype: str, skew: int) -> None:
    check_pack(name, [of_part], dtype, skew)


@pytest.mark.parametrize("name", cases(list(LAYOUTS), more=list(MORE)))
@pytest.mark.parametrize(("dtype", "of_part"), list(product(FLOATS, FLOATS)))
@pytest.mark.parametrize("skew", [0, 1])
def test_parts_are_unpacked_to_the_bit(name: str, dtype: str, of_part: str, skew: int) -> None:
    check_unpack(name, dtype, [of_part], skew, frozenset())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("skew", [0, 1])
def test_unpacking_adds_to_what_accumulates_and_to_nothing_else(dtype: str, skew: int) -> None:
    for name, accumulates in (("q, k, v", {0, 1, 2, 3, 4, 5}), ("q, k, v", {1, 4}), ("odd ranks", {0, 3})):
        check_unpack(name, dtype, ["fp32"], skew, frozenset(accumulates))


def test_parts_may_have_a_dtype_each() -> None:
    check_pack("q, k, v", ["fp32", "bf16"], "bf16", 0)
    check_unpack("q, k, v", "fp32", ["fp32", "bf16"], 0, frozenset({0, 2}))


def test_wrong_arguments_are_named() -> None:
    from surogate_lora import _C

    p = guarded((64,), torch.float32).pointer
    for call, message in (
        (lambda: _C.lora_move(0, 1, 8, 0), "lora_move: table is a null pointer"),
        (lambda: _C.lora_move(p + 4, 1, 8, 0), "lora_move: table must be aligned to 8 bytes"),
        (lambda: _C.lora_move(p, 0, 8, 0), "lora_move: moves must be positive"),
        (lambda: _C.lora_move(p, 1, 0, 0), "lora_move: largest must be positive"),
        (lambda: _C.lora_move(p, 65536, 8, 0), "lora_move: at most 65535 moves, got 65536"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("skew", [0, 4])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", cases([(1, (1,)), (37, (16, 24)), (256, (3, 4, 9))], more=[(70_001, (16, 16, 16))]))
def test_joined_split_and_scaled_columns_have_the_bits_of_the_references(
    shape: tuple[int, tuple[int, ...]], dtype: str, skew: int
) -> None:
    rows, columns = shape
    parts = values("part", [(rows, count) for count in columns], [dtype])
    (whole,) = values("whole", [(rows, sum(columns))], [dtype])
    contents = {v: drawn(v) for v in parts}
    (joined,) = run_kernel(KERNELS, Op("lora_join", tuple(parts), (whole,)), contents, skew=skew)
    assert same_bits(joined, lora_join(*contents.values()))
    content = drawn(whole)
    split = Op("lora_split", (whole,), tuple(parts), {"columns": columns})
    for out, expected in zip(
        run_kernel(KERNELS, split, {whole: content}, skew=skew), lora_split(content, columns=columns), strict=True
    ):
        assert same_bits(out, expected)
    (other,) = values("scaled", [whole.shape], [dtype])
    (scaled,) = run_kernel(KERNELS, Op("lora_scale", (whole,), (other,), {"scale": 0.3}), {whole: content}, skew=skew)
    assert same_bits(scaled, lora_scale(content, scale=0.3))

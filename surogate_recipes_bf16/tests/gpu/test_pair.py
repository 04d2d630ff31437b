"""Sums of two products, bound through their KernelDefs and compared with fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from surogate_core.api import KernelDef, Op, Value
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import UNIT, assert_close, same_bits
from surogate_recipes_bf16.kernels import pair

pytestmark = pytest.mark.gpu

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}
ONE_KERNEL, TWO_PRODUCTS = pair.ONE_KERNEL, pair.TWO_PRODUCTS
KINDS = ("linear_pair", "linear_dgrad_pair")
SHAPES = [(1, 8, 8, 8), (129, 264, 72, 16), (1000, 520, 1032, 48), (64, 128, 64, 200), (4096, 1024, 1024, 32)]
"""Rows, columns, terms, terms of the second product."""


def pair_op(kind: str, shape: tuple[int, int, int, int], dtypes: tuple[str, str] = ("bf16", "bf16")) -> Op:
    rows, columns, k, k2 = shape
    weights = [(columns, k), (columns, k2)] if kind == "linear_pair" else [(k, columns), (k2, columns)]
    shapes = [(rows, k), weights[0], (rows, k2), weights[1]]
    ins = tuple(Value(name=f"in{i}", shape=s, dtype=dtypes[0], role="act") for i, s in enumerate(shapes))
    return Op(kind, ins, (Value(name="out", shape=(rows, columns), dtype=dtypes[1], role="act"),), {})


def check(kernels: Sequence[KernelDef], op: Op) -> torch.Tensor:
    """Run `op` and compare it with fp64. The first product may be rounded before the sum."""
    contents = {v: torch.randn(v.shape, device="cuda").to(TORCH[v.dtype]) for v in op.ins}
    (out,) = run_kernel(kernels, op, contents)
    a, b, a2, b2 = (x.double() for x in contents.values())
    if op.kind == "linear_pair":
        b, b2 = b.T, b2.T
    magnitude, length = a.abs() @ b.abs() + a2.abs() @ b2.abs(), a.shape[1] + a2.shape[1]
    if kernels is TWO_PRODUCTS:  # in units of what assert_close allows for a magnitude
        rounding = UNIT[out.dtype] * ((a @ b).abs() + (a2 @ b2).abs())
        magnitude = magnitude + rounding / (4 * (1 + length**0.5) * 2.0**-24)
    assert_close(out.cuda(), a @ b + a2 @ b2, out.dtype, length, magnitude)
    return out


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel needs an SM90"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_kernel_matches_fp64(kind: str, shape: tuple[int, int, int, int]) -> None:
    check(ONE_KERNEL, pair_op(kind, shape))


@pytest.mark.parametrize(
    ("kind", "dtypes"), [(kernel.op, (kernel.dtypes[0], kernel.dtypes[-1])) for kernel in TWO_PRODUCTS], ids=str
)
@pytest.mark.parametrize("shape", cases(SHAPES[:2], more=SHAPES[2:]), ids=str)
def test_two_products_match_fp64(kind: str, dtypes: tuple[str, str], shape: tuple[int, int, int, int]) -> None:
    check(TWO_PRODUCTS, pair_op(kind, shape, dtypes))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel needs an SM90"
)
@pytest.mark.parametrize("kind", KINDS)
def test_undefined_terms_reach_their_rows_only(kind: str) -> None:
    op = pair_op(kind, (300, 264, 72, 16))
    contents = {v: torch.randn(v.shape, device="cuda").bfloat16() for v in op.ins}
    contents[op.ins[0]][3, 5] = contents[op.ins[2]][200, 1] = float("nan")
    (out,) = run_kernel(ONE_KERNEL, op, contents)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [3, 200]
    assert same_bits(out, run_kernel(ONE_KERNEL, op, contents)[0])


def test_a_pair_with_an_odd_number_of_terms_is_two_products() -> None:
    op = pair_op("linear_pair", (64, 96, 33, 7))
    check(TWO_PRODUCTS, op)
    with pytest.raises(AssertionError, match=r"multiple of 8, got 33|for SM90 alone"):
        run_kernel(ONE_KERNEL, op, {})

"""Which FP8 products the kernels support on which GPU, and the reasons why not. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from surogate_core.api import KernelDef, Op, Support, Target, Value
from surogate_core.testing.binding import refusal
from surogate_core.testing.devices import DEVICES
from surogate_recipes_fp8.kernels import KERNELS
from surogate_recipes_fp8.kernels.products import product
from surogate_recipes_fp8.ops import OPS

ADA, HOPPER, BLACKWELL, BLACKWELL_RTX = 89, 90, 100, 120


def target(sm: int | None) -> Target:
    return Target(replace(DEVICES["h200"], sm=sm, title=f"a GPU of SM{sm}"))


def linear(
    m: int, n: int, k: int, out: str = "bf16", *, trans_a: bool = False, trans_b: bool = False, accumulate: bool = False
) -> Op:
    shapes: Sequence[Sequence[int]] = ((k, m) if trans_a else (m, k), (k, n) if trans_b else (n, k), (2,), (2,), (m, n))
    dtypes = ("e4m3", "e5m2", "fp32", "fp32", out)
    *ins, d = (
        Value(name=name, shape=tuple(shape), dtype=dtype, role="act")
        for name, shape, dtype in zip(("a", "b", "scale_a", "scale_b", "d"), shapes, dtypes, strict=True)
    )
    attrs = {"dtype": out, "fast": False, "trans_a": trans_a, "trans_b": trans_b}
    return Op("fp8_linear", tuple(ins), (d,), attrs, accumulate=frozenset({0} if accumulate else ()))


def kernel_of(op: Op) -> KernelDef:
    dtypes = tuple(v.dtype for v in (*op.ins, *op.outs))
    (kernel,) = [k for k in KERNELS if k.op == op.kind and k.dtypes == dtypes]
    return kernel


def supported(op: Op, sm: int | None = HOPPER) -> Support:
    return kernel_of(op).supports(op, target(sm))


@pytest.mark.parametrize("sm", [ADA, HOPPER, BLACKWELL, BLACKWELL_RTX])
def test_fp8_products_run_on_ada_and_later(sm: int) -> None:
    assert supported(linear(7, 48, 32), sm).ok
    assert supported(linear(7, 48, 32, "fp32", accumulate=True), sm).ok


@pytest.mark.parametrize("sm", [None, 80, 86])
def test_older_gpus_are_refused(sm: int | None) -> None:
    op = linear(16, 16, 16)
    (definition,) = (definition for definition in OPS if definition.kind == op.kind)
    assert refusal(kernel_of(op), definition, op, target(sm)) == f"needs a GPU of SM89 or newer, not a GPU of SM{sm}"


@pytest.mark.parametrize("layout", [{"trans_a": True}, {"trans_b": True}, {"trans_a": True, "trans_b": True}], ids=str)
def test_only_data_center_blackwell_reads_operands_whose_summed_dimension_is_not_contiguous(
    layout: dict[str, bool],
) -> None:
    op = linear(16, 32, 48, **layout)
    assert [sm for sm in (ADA, HOPPER, 100, 103, 120, 121) if supported(op, sm).ok] == [100, 103]
    assert "needs FP8 operands with the summed dimension contiguous" in supported(op).reason
    shape = product(op)
    assert (shape.m, shape.n, shape.k) == (16, 32, 48)


@pytest.mark.parametrize(
    ("sizes", "out", "reason"),
    [
        ((16, 16, 24), "bf16", "a multiple of 16 as summed dimension, got 24"),
        ((16, 20, 16), "bf16", "a multiple of 8 as columns of the result, got 20"),
        ((16, 18, 16), "fp32", "a multiple of 4 as columns of the result, got 18"),
        ((1, 8, 16), "bf16", ""),
        ((13, 20, 16), "fp32", ""),
    ],
)
def test_rows_must_be_multiples_of_16_bytes(sizes: tuple[int, int, int], out: str, reason: str) -> None:
    support = supported(linear(*sizes, out))
    assert support.ok == (not reason)
    assert support.reason.endswith(reason)


def test_rows_of_transposed_operands_must_be_multiples_of_16_too() -> None:
    assert "rows of the result, got 8" in supported(linear(8, 16, 16, trans_a=True), BLACKWELL).reason
    assert "columns of the result, got 8" in supported(linear(16, 8, 16, trans_b=True), BLACKWELL).reason


def test_a_bf16_output_is_not_accumulated_into() -> None:
    assert "accumulates only into fp32 outputs" in supported(linear(16, 16, 16, accumulate=True)).reason

"""Sums of two products of experts, bound through their KernelDefs and compared with fp64 for groups of any size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from surogate_core.api import KernelDef, Op, Value
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import guarded, same_bits
from surogate_models_moe import reference
from surogate_models_moe.kernels import grouped

pytestmark = pytest.mark.gpu

is_sm90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NEEDS_SM90 = pytest.mark.skipif(not is_sm90, reason="the kernel needs an SM90")
ONE = pytest.param(grouped.ONE_KERNEL, id="one", marks=NEEDS_SM90)
KERNELS = pytest.mark.parametrize("kernels", [ONE, pytest.param(grouped.TWO_KERNELS, id="two")])
KINDS = pytest.mark.parametrize("kind", ["grouped_linear", "grouped_linear_dgrad"])

SHAPES: dict[str, tuple[Sequence[int], int, int, int]] = {
    # rows of each expert; columns of the result; terms of both products
    "one row": ([1], 8, 8, 8),
    "uneven": ([0, 5, 130, 0, 128, 1, 0, 61, 0], 136, 72, 16),
    "one has all": ([0, 0, 300, 0], 264, 40, 24),
    "more experts than lanes": ([3, 0, 1, 2] * 18, 48, 136, 40),
    "most terms": ([130, 0, 5], 512, 64, 64),
}
MORE: dict[str, tuple[Sequence[int], int, int, int]] = {
    "widths of Qwen3-30B-A3B, up": ([i * 7 % 509 for i in range(32)], 1536, 2048, 16),
    "widths of Qwen3-30B-A3B, gradient of rows": ([i * 7 % 509 for i in range(32)], 768, 2048, 32),
}
COUNTS = "uneven"


def pair(kind: str, name: str) -> tuple[Op, dict[Value, Tensor]]:
    """Return an op and what its inputs hold."""
    counts, width, terms, others = (SHAPES | MORE)[name]
    rows, experts = sum(counts), len(counts)

    def weight(k: int) -> tuple[int, int]:
        return (experts * k, width) if kind.endswith("dgrad") else (experts * width, k)

    shapes = {"x": (rows, terms), "w": weight(terms), "x2": (rows, others), "w2": weight(others)}
    x, w, x2, w2 = (Value(label, shape, "bf16", "act") for label, shape in shapes.items())
    ends, out = Value("ends", (experts,), "int32", "act"), Value("y", (rows, width), "bf16", "act")
    contents = {v: torch.randn(v.shape).bfloat16() for v in (x, w, x2, w2)}
    contents[ends] = torch.tensor(counts).cumsum(0).int()
    return Op(f"{kind}_pair", (x, w, ends, x2, w2), (out,), {}), contents


@KERNELS
@KINDS
@pytest.mark.parametrize("name", cases([*SHAPES], more=[*MORE]))
def test_sums_match_fp64(kernels: Sequence[KernelDef], kind: str, name: str) -> None:
    """Two kernels round the first product, the second one and the sum; one kernel rounds the sum alone."""
    op, contents = pair(kind, name)
    (ours,) = run_kernel(kernels, op, contents)
    x, w, ends, x2, w2 = (contents[v] for v in op.ins)
    multiply = getattr(reference, kind)

    def product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = a.double(), b.double()
        return multiply(a, b, ends), multiply(a.abs(), b.abs(), ends)

    (first, first_size), (second, second_size) = product(x, w), product(x2, w2)
    truth, terms = first + second, x.shape[1] + x2.shape[1]
    rounded = truth.abs() + (first.abs() + second.abs() if kernels is grouped.TWO_KERNELS else 0)
    allowed = 2.0**-8 * rounded + 4 * (1 + terms**0.5) * 2.0**-24 * (first_size + second_size)
    assert float(((ours.cpu().double() - truth).abs() - allowed).max()) <= 0


@NEEDS_SM90
@KINDS
def test_a_second_product_of_zeros_changes_no_bit(kind: str) -> None:
    op, contents = pair(kind, COUNTS)
    contents[op.ins[3]].zero_()
    (ours,) = run_kernel(grouped.ONE_KERNEL, op, contents)
    single = Op(kind, op.ins[:3], op.outs, {})
    (alone,) = run_kernel(grouped.CUTLASS, single, contents)
    assert same_bits(ours, alone)


@KERNELS
@KINDS
@pytest.mark.parametrize("operand", [0, 3])
def test_undefined_rows_reach_no_other_row(kernels: Sequence[KernelDef], kind: str, operand: int) -> None:
    """Tiles end within experts: what lies behind their rows is that of the next one."""
    op, contents = pair(kind, COUNTS)
    contents[op.ins[operand]][5 + 130] = float("nan")  # the first row of the expert after the one with 130
    (ours,) = run_kernel(kernels, op, contents)
    assert ours.isnan().any(1).nonzero().flatten().tolist() == [135]


@NEEDS_SM90
def test_the_workspace_is_what_the_module_needs() -> None:
    from surogate_models_moe import _C

    op, contents = pair("grouped_linear", COUNTS)
    (scratch,) = bind_kernel(grouped.ONE_KERNEL, op, contents).workspaces
    assert scratch.tensor.numel() == _C.grouped_gemm_workspace(len(SHAPES[COUNTS][0]))


@NEEDS_SM90
def test_wrong_arguments_are_named() -> None:
    from surogate_models_moe import _C

    p = guarded((64,), torch.float32).pointer
    for arguments, message in (
        (
            (p, p, p, p, p, p, p, 8, 8, 8, 1, 0, 1, False, 12, 0, 0, 0),
            "terms2 must be a multiple of 8, and 0 in wgrad, got 12",
        ),
        (
            (p, p, p, p, p, p, p, 8, 8, 8, 1, 2, 1, False, 8, 0, 0, 0),
            "terms2 must be a multiple of 8, and 0 in wgrad, got 8",
        ),
        ((p, p, p, p + 8, p, p, p, 8, 8, 8, 1, 0, 1, False, 8, 0, 0, 0), "a2 must be aligned to 16 bytes"),
        ((p, p, p, 0, 0, p, p, 8, 8, 8, 1, 1, 1, False, 0, p, 0, 0), "only a forward product of one pair adds a bias"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.GroupedGemm(*arguments)

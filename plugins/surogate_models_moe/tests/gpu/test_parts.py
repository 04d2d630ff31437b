"""Products of some experts in the place of a base: their rows have the bits of the whole, others are untouched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import KernelDef, Op, Value
from surogate_core.testing.binding import run_kernel, run_op
from surogate_core.testing.kernels import same_bits
from surogate_models_moe.kernels import grouped
from surogate_models_moe.ops import OPS

pytestmark = pytest.mark.gpu

DEFINITIONS = {definition.kind: definition for definition in OPS}
BF16 = torch.bfloat16
GROUPS: dict[str, tuple[Sequence[int], int, int]] = {
    "uneven": ([0, 5, 130, 0, 128, 1, 0, 61, 0], 136, 72),
    "one has all": ([0, 0, 300, 0], 264, 40),
    "wide": ([70, 3, 259, 128, 0, 90], 1024, 512),
    "more experts than lanes": ([3, 0, 1, 2] * 18, 48, 136),
}
"""Rows of the experts, n, k."""
is_sm90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CUTLASS = (*grouped.CUTLASS, grouped.BIASED_CUTLASS, *grouped.ONE_KERNEL)
PORTABLE = (*grouped.PORTABLE, grouped.BIASED_PORTABLE, *grouped.TWO_KERNELS)
BY = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(CUTLASS, id="cutlass", marks=pytest.mark.skipif(not is_sm90, reason="SM90")),
        pytest.param(PORTABLE, id="portable"),
    ],
)


def operands(kind: str, counts: Sequence[int], n: int, k: int) -> tuple[Tensor, ...]:
    """Return the inputs of a product; of `grouped_linear` with a bias."""
    rows, experts, ends = sum(counts), len(counts), torch.tensor(counts).cumsum(0).int()
    inner, outer = (n, k) if "dgrad" in kind else (k, n)
    x, w = torch.randn(rows, inner).to(BF16), torch.randn(experts * n, k).to(BF16)
    if "pair" not in kind:
        return (x, w, ends, torch.randn(experts, n).to(BF16)) if kind == "grouped_linear" else (x, w, ends)
    second = (experts * 16, outer) if "dgrad" in kind else (experts * outer, 16)
    return x, w, ends, torch.randn(rows, 16).to(BF16), torch.randn(second).to(BF16)


def part(kernels: Sequence[KernelDef], kind: str, ins: Sequence[Tensor], y: Tensor, first: int, count: int) -> Tensor:
    """Return what the kernel of a part writes to a buffer of NaN."""
    names = {BF16: "bf16", torch.int32: "int32"}
    x, w, ends, *others = ins
    n = w.shape[0] // len(ends)
    given = (y, x, w[first * n : (first + count) * n], ends, *others)
    values = tuple(Value(f"in{i}", tuple(v.shape), names[v.dtype], "act") for i, v in enumerate(given))
    out = Value("y", tuple(y.shape), "bf16", "act")
    op = Op(f"{kind}_part", values, (out,), {"first": first}, in_place={0: 0})
    parts = [grouped.part_of(kernel) for kernel in kernels if kernel.op == kind]
    (found,) = run_kernel(parts, op, dict(zip(values, given, strict=True)))
    return found


@BY
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    "kind", ["grouped_linear", "grouped_linear_dgrad", "grouped_linear_pair", "grouped_linear_dgrad_pair"]
)
def test_rows_of_the_experts_have_the_bits_of_the_whole(kind: str, name: str, kernels: Any) -> None:
    counts, n, k = GROUPS[name]
    ins = operands(kind, counts, n, k)
    (whole,) = run_op(kernels, DEFINITIONS[kind], ins, {})
    ends = [0, *ins[2].tolist()]
    for first, count in ((0, 2), (1, 3), (len(counts) - 2, 2)):
        found = part(kernels, kind, ins, torch.zeros_like(whole), first, count)
        own = slice(ends[first], ends[first + count])
        assert same_bits(found[own], whole[own])
        assert found[: own.start].isnan().all() and found[own.stop :].isnan().all()

"""FP8 products of groups of rows: the reference against products of whole matrices, and what the kernel supports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, ProgramError, Support, Target, Value
from surogate_core.testing.devices import DEVICES
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import check_op
from surogate_recipes_fp8.kernels.groups import KERNELS
from surogate_recipes_fp8.ops import OPS
from surogate_recipes_fp8.reference import fp8_linear, fp8_quantize

KINDS = {definition.kind: definition for definition in OPS}
COUNTS, WIDTH, TERMS = (5, 0, 130, 1, 0), 48, 32
GROUPS, ROWS = len(COUNTS), sum(COUNTS)


def quantized(*shape: int, dtype: str, transposed: bool = False) -> tuple[Tensor, ...]:
    """Return the copies of a random matrix and their scale."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()
    return fp8_quantize(x, dtype=dtype, scaling="current", transposed=transposed)


@pytest.mark.parametrize("beside", [False, True])
def test_each_group_meets_its_own_matrix(beside: bool) -> None:
    """Of a stack, or of the transposed copy of one: dgrad has the bits of products with the transposed matrices."""
    ends = torch.tensor(COUNTS).cumsum(0).int()
    a, scale_a = quantized(ROWS, TERMS, dtype="e5m2" if beside else "e4m3")
    shape = (GROUPS * TERMS, WIDTH) if beside else (GROUPS * WIDTH, TERMS)
    stack, transposed, scale_b = quantized(*shape, dtype="e4m3", transposed=True)
    b = transposed if beside else stack
    (found,) = check_op(KINDS["fp8_grouped_linear"], a, b, scale_a, scale_b, ends, beside=beside)
    assert found.shape == (ROWS, WIDTH) and found.dtype == torch.bfloat16
    start = 0
    for end, matrix in zip(ends.tolist(), stack.chunk(GROUPS), strict=True):
        alone = matrix.T.contiguous() if beside else matrix
        expected = fp8_linear(a[start:end], alone, scale_a, scale_b, dtype="bf16")
        assert same_bits(found[start:end], expected)
        start = end


def test_a_tensor_that_is_not_finite_makes_every_row_nan() -> None:
    """Its scale has a decode factor of NaN, although the codes look finite."""
    ends = torch.tensor(COUNTS).cumsum(0).int()
    b, scale_b = quantized(GROUPS * WIDTH, TERMS, dtype="e4m3")
    x = torch.randn(ROWS, TERMS).bfloat16()
    x[3, 3] = torch.inf
    a, scale_a = fp8_quantize(x, dtype="e4m3", scaling="current")
    (found,) = check_op(KINDS["fp8_grouped_linear"], a, b, scale_a, scale_b, ends)
    assert found.isnan().all()


@pytest.mark.parametrize("beside", [False, True])
def test_the_product_of_a_branch_is_added_before_the_sum_is_rounded(beside: bool) -> None:
    """Its matrices are those of the stack that `b` is, or is the transposed copy of."""
    ends = torch.tensor(COUNTS).cumsum(0).int()
    a, scale_a = quantized(ROWS, TERMS, dtype="e5m2" if beside else "e4m3")
    shape = (WIDTH, GROUPS * TERMS) if beside else (GROUPS * WIDTH, TERMS)
    b, scale_b = quantized(*shape, dtype="e4m3")
    gen = torch.Generator().manual_seed(5)
    a2 = torch.randn(ROWS, 8, generator=gen).bfloat16()
    b2 = torch.randn(GROUPS, *((8, WIDTH) if beside else (WIDTH, 8)), generator=gen).bfloat16()
    (found,) = check_op(KINDS["fp8_grouped_linear"], a, b, scale_a, scale_b, ends, a2, b2.flatten(0, 1), beside=beside)
    left, right = a.double() * scale_a[0].double(), b.double() * scale_b[0].double()
    start = 0
    for end, first, second in zip(ends.tolist(), right.chunk(GROUPS, dim=1 if beside else 0), b2.double(), strict=True):
        expected = left[start:end] @ first.T + a2[start:end].double() @ (second if beside else second.T)
        assert torch.allclose(found[start:end].double(), expected, rtol=2.0**-8, atol=1e-4)
        start = end


def test_the_bias_of_a_group_is_added_before_the_sum_is_rounded() -> None:
    ends = torch.tensor(COUNTS).cumsum(0).int()
    a, scale_a = quantized(ROWS, TERMS, dtype="e4m3")
    b, scale_b = quantized(GROUPS * WIDTH, TERMS, dtype="e4m3")
    bias = 100 * torch.randn(GROUPS, WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16()
    (found,) = check_op(KINDS["fp8_grouped_linear"], a, b, scale_a, scale_b, ends, bias)
    left, right = a.double() * scale_a[0].double(), b.double() * scale_b[0].double()
    expected = torch.cat(
        [
            left[end - count : end] @ matrix.T + row.double()
            for end, count, matrix, row in zip(ends.tolist(), COUNTS, right.chunk(GROUPS), bias, strict=True)
        ]
    )
    assert torch.allclose(found.double(), expected, rtol=2.0**-8, atol=1e-4)


@pytest.mark.parametrize("added", ["nothing", "bias", "branch"])
@pytest.mark.parametrize("beside", [False, True])
def test_parts_write_the_rows_of_their_groups_and_together_the_whole(beside: bool, added: str) -> None:
    ends = torch.tensor(COUNTS).cumsum(0).int()
    a, scale_a = quantized(ROWS, TERMS, dtype="e5m2" if beside else "e4m3")
    b, scale_b = quantized(*((WIDTH, GROUPS * TERMS) if beside else (GROUPS * WIDTH, TERMS)), dtype="e5m2")
    gen = torch.Generator().manual_seed(5)
    stack = (GROUPS * 8, WIDTH) if beside else (GROUPS * WIDTH, 8)
    more = {
        "nothing": [],
        "bias": [torch.randn(GROUPS, WIDTH, generator=gen).bfloat16()],
        "branch": [torch.randn(shape, generator=gen).bfloat16() for shape in ((ROWS, 8), stack)],
    }[added]
    (whole,) = check_op(KINDS["fp8_grouped_linear"], a, b, scale_a, scale_b, ends, *more, beside=beside)
    base = found = torch.randn(ROWS, WIDTH, generator=gen).bfloat16()
    for first, count in ((0, 2), (2, 1), (3, 2)):
        one = TERMS if beside else WIDTH
        some = b.narrow(1 if beside else 0, first * one, count * one).contiguous()
        ins, bounds = (a, some, scale_a, scale_b, ends, *more), [0, *ends.tolist()]
        own, before = slice(bounds[first], bounds[first + count]), found
        (found,) = check_op(KINDS["fp8_grouped_linear_part"], before, *ins, first=first, beside=beside)
        assert same_bits(found[own], whole[own])
        assert same_bits(found[: own.start], before[: own.start]) and same_bits(found[own.stop :], base[own.stop :])
    assert same_bits(found, whole)


def op(
    width: int = WIDTH,
    terms: int = TERMS,
    *,
    a: str = "e4m3",
    b: str = "e4m3",
    ranks: int = 0,
    biased: bool = False,
    **attrs: bool,
) -> Op:
    shape = (width, GROUPS * terms) if attrs.get("beside") else (GROUPS * width, terms)
    ins = (
        Value("a", (ROWS, terms), a, "act"),
        Value("b", shape, b, "state"),
        *(Value(name, (2,), "fp32", "state") for name in ("scale_a", "scale_b")),
        Value("ends", (GROUPS,), "int32", "act"),
    )
    if ranks:
        second = (GROUPS * ranks, width) if attrs.get("beside") else (GROUPS * width, ranks)
        ins = (*ins, Value("a2", (ROWS, ranks), "bf16", "act"), Value("b2", second, "bf16", "act"))
    if biased:
        ins = (*ins, Value("bias", (GROUPS, width), "bf16", "param"))
    (spec,) = KINDS["fp8_grouped_linear"].infer(ins, attrs)
    return Op("fp8_grouped_linear", ins, (Value("d", spec.shape, spec.dtype, "act"),), attrs)


def supported(product: Op, device: str = "h100") -> Support:
    dtypes = tuple(v.dtype for v in (*product.ins, *product.outs))
    (kernel,) = [k for k in KERNELS if k.dtypes == dtypes]
    return kernel.supports(product, Target(DEVICES[device]))


def test_the_kernel_is_for_sm90_and_names_what_it_does_not_serve() -> None:
    served: list[dict[str, Any]] = [{}, {"ranks": 8}, {"a": "e5m2", "beside": True}]
    served += [{"ranks": 8, "a": "e5m2", "beside": True}, {"biased": True}]
    for product in (op(b=weight, **how) for how in served for weight in ("e4m3", "e5m2")):
        assert [name for name in ("l40s", "h100", "h200", "b200", "rtx5090") if supported(product, name).ok] == [
            "h100",
            "h200",
        ]
    assert "for SM90 alone, not" in supported(op(), "b200").reason
    assert supported(op(terms=24)).reason == "FP8 products need a multiple of 16 as summed dimension, got 24"
    assert supported(op(width=20)).reason == "FP8 products need a multiple of 8 as columns of the result, got 20"
    assert supported(op(ranks=4)).reason == "FP8 products need a multiple of 8 as ranks, got 4"
    assert "to dx of e5m2" in supported(op(ranks=8, beside=True)).reason
    assert "cannot accumulate" in supported(replace(op(), accumulate=frozenset({0}))).reason


def part(first: int, count: int, **attrs: bool) -> Op:
    whole = op(**attrs)
    a, b, *rest = whole.ins
    base = Value("base", (ROWS, WIDTH), "bf16", "act")
    shape = (WIDTH, count * TERMS) if attrs.get("beside") else (count * WIDTH, TERMS)
    given, ins = {**whole.attrs, "first": first}, (base, a, replace(b, shape=shape), *rest)
    (spec,) = KINDS["fp8_grouped_linear_part"].infer(ins, given)
    return Op("fp8_grouped_linear_part", ins, (Value("d", spec.shape, spec.dtype, "act"),), given, in_place={0: 0})


def test_a_part_has_its_share_of_the_work_and_is_written_in_place() -> None:
    definition, whole = KINDS["fp8_grouped_linear_part"], KINDS["fp8_grouped_linear"]
    for attrs in ({}, {"beside": True}):
        some = part(1, 2, **attrs)
        assert supported(some).ok and definition.flops(some) == whole.flops(op(**attrs)) * 2 // GROUPS
        assert definition.traffic(some) < sum(v.nbytes for v in (*some.ins[1:], *some.outs))
        assert supported(replace(some, in_place={})).reason == "writes some rows, in the place of a base alone"
    with pytest.raises(ProgramError, match="b has groups 4 to 6 of 5"):
        part(4, 2)


def test_shapes_that_do_not_fit_are_named() -> None:
    a, b, *rest = op().ins
    infer = KINDS["fp8_grouped_linear"].infer
    with pytest.raises(ProgramError, match="5 groups do not divide b"):
        infer((a, replace(b, shape=(12, TERMS)), *rest), {})
    with pytest.raises(ProgramError, match="a sums over 32 elements, b over 16"):
        infer((a, replace(b, shape=(10, 16)), *rest), {})
    with pytest.raises(ProgramError, match=r"the second product is of \[136, 8\] and \[48, 8\]"):
        infer((a, b, *rest, replace(a, shape=(ROWS, 8)), replace(b, shape=(48, 8))), {})
    with pytest.raises(ProgramError, match=r"bias must have shape \[5, 48\], got \[48\]"):
        infer((a, b, *rest, replace(a, shape=(48,))), {})
    with pytest.raises(ProgramError, match="int32"):
        infer((a, b, *rest[:2], replace(rest[2], dtype="fp32")), {})

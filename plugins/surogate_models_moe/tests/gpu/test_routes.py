"""Routes, the order of rows, and rows on their way to experts and back, against their references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import as_inputs, run_kernel, run_op
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_close, guarded, same_bits
from surogate_models_moe import reference
from surogate_models_moe.kernels import KERNELS
from surogate_models_moe.ops import OPS

pytestmark = pytest.mark.gpu

DEFINITIONS = {definition.kind: definition for definition in OPS}
ROUTES = [(1, 1, 1), (5, 3, 3), (67, 60, 4), (33, 128, 8), (9, 256, 16)]
"""Tokens, experts, experts a token."""


def run(kind: str, *ins: Tensor, **attrs: Any) -> list[Tensor]:
    return run_op(KERNELS, DEFINITIONS[kind], ins, attrs)


def drawn_logits(tokens: int, experts: int, dtype: str) -> Tensor:
    """Return logits of which some are equal, and zeros of both signs."""
    logits = torch.randn(tokens, experts)
    logits[::2] = (logits[::2] * 2).round() / 2
    return logits.to(TORCH_DTYPES[dtype])


def drawn_experts(tokens: int, experts: int, k: int) -> Tensor:
    return torch.rand(tokens, experts).argsort(1)[:, :k].int()


@pytest.mark.parametrize("shape", cases(ROUTES, more=[(4096, 128, 8)]), ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("normalize", [False, True])
def test_routes_and_their_gradients(shape: tuple[int, int, int], dtype: str, normalize: bool) -> None:
    tokens, n_experts, k = shape
    logits = drawn_logits(tokens, n_experts, dtype)
    weights, experts = run("route", logits, k=k, normalize=normalize)
    expected, chosen = reference.route(logits.double(), k=k, normalize=normalize)
    assert torch.equal(experts, chosen)
    assert_close(weights, expected, torch.float32, n_experts, 1.0)

    d_weights = torch.randn(tokens, k)
    (d_logits,) = run("route_bwd", d_weights, logits, experts, normalize=normalize)
    gradient = reference.route_bwd(d_weights.double(), logits.double(), chosen, normalize=normalize)
    assert_close(d_logits, gradient, TORCH_DTYPES[dtype], n_experts, 2 * float(d_weights.abs().max()))
    if normalize:
        others = torch.ones(tokens, n_experts, dtype=torch.bool).scatter(1, experts.long(), False)
        assert not d_logits[others].any()


def test_experts_are_valid_whatever_the_logits_are() -> None:
    """Undefined logits count as the largest: their tokens have undefined weights, and others are not touched."""
    logits = torch.randn(6, 40)
    logits[1], logits[2, 7], logits[3], logits[4, 5:] = float("nan"), float("nan"), -float("inf"), float("-inf")
    weights, experts = run("route", logits, k=8, normalize=True)
    assert torch.equal(experts, reference.route(logits, k=8, normalize=True)[1])
    assert weights.isnan().any(1).tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("shape", cases([*ROUTES, (700, 40, 3)], more=[(40000, 128, 8)]), ids=str)
@pytest.mark.parametrize("used", ["all", "few"])
def test_slots_are_sorted_by_expert(shape: tuple[int, int, int], used: str) -> None:
    tokens, n_experts, k = shape
    experts = drawn_experts(tokens, n_experts, k)
    if used == "few":  # the same for all tokens, others have no rows
        experts = experts[:1].expand(tokens, k).contiguous()
    for ours, theirs in zip(
        run("expert_order", experts, n_experts=n_experts),
        reference.expert_order(experts, n_experts=n_experts),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", cases([*ROUTES, (2100, 40, 3)], more=[(40000, 128, 8)]), ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("which", ["first", "next", "in place", "added"])
def test_loads_of_routers(shape: tuple[int, int, int], dtype: str, which: str) -> None:
    """Numbers of routes are exact, rows of other layers are those before, and an output may be added to."""
    tokens, n_experts, k = shape
    logits, experts = drawn_logits(tokens, n_experts, dtype), drawn_experts(tokens, n_experts, k)
    targets = torch.randint(50, (tokens,), dtype=torch.int32).where(torch.rand(tokens) < 0.8, -100)
    attrs, before = {"layer": 1, "layers": 3}, torch.randint(9, (3, n_experts + 1)).float()
    ins = as_inputs([logits, experts, targets, *([before] if which != "first" else [])])
    values = tuple(ins)
    out = values[3] if which == "in place" else Value("load", tuple(before.shape), "fp32", "act")
    held = {out: torch.randint(9, (3, n_experts + 1)).float()} if which == "added" else {}
    op = Op("router_load", values, (out,), attrs, accumulate=frozenset({0} if held else ()))
    (load,) = run_kernel(KERNELS, op, {**ins, **held})
    floats = [before.double()] if which != "first" else []
    expected = reference.router_load(logits.double(), experts, targets, *floats, **attrs)
    expected = expected + held[out] if held else expected
    exact = torch.ones(expected.shape, dtype=torch.bool)
    exact[1, -1] = False
    assert torch.equal(load[exact].double(), expected[exact])
    assert_close(load[1, -1:], expected[1, -1:], torch.float32, tokens + n_experts, 9 + tokens * math.log(n_experts))


def order_of(tokens: int, n_experts: int, k: int) -> Sequence[Tensor]:
    return reference.expert_order(drawn_experts(tokens, n_experts, k), n_experts=n_experts)[:2]


@pytest.mark.parametrize("shape", cases([*ROUTES, (13, 20, 11)], more=[(4096, 128, 8)]), ids=str)
@pytest.mark.parametrize("width", cases([8, 264], more=[2048]))
def test_rows_are_gathered_and_summed_to_the_bit(shape: tuple[int, int, int], width: int) -> None:
    tokens, _, k = shape
    order, place = order_of(*shape)
    x, y = torch.randn(tokens, width).bfloat16(), torch.randn(tokens * k, width).bfloat16()
    (rows,) = run("gather_rows", x, order, place)
    assert same_bits(rows, reference.gather_rows(x, order, place))
    (total,) = run("sum_rows", y, order, place, k=k)
    assert same_bits(total, reference.sum_rows(y, order, place, k=k))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("width", [16, 272])
def test_codes_of_rows_are_gathered_to_the_bit(dtype: str, width: int) -> None:
    order, place = order_of(67, 60, 4)
    codes = torch.randint(256, (67, width), dtype=torch.uint8).view(TORCH_DTYPES[dtype])
    (rows,) = run("gather_rows", codes, order, place)
    assert same_bits(rows, reference.gather_rows(codes, order, place))


@pytest.mark.parametrize("shape", cases([*ROUTES], more=[(4096, 128, 8)]), ids=str)
@pytest.mark.parametrize("width", cases([8, 264], more=[768]))
def test_weighted_swiglu_and_its_gradients(shape: tuple[int, int, int], width: int) -> None:
    tokens, _, k = shape
    order, _ = order_of(*shape)
    gate_up, weights = (2 * torch.randn(tokens * k, 2 * width)).bfloat16(), torch.rand(tokens, k)
    dy = torch.randn(tokens * k, width).bfloat16()
    wide = gate_up.double(), weights.double(), order
    (out,) = run("weighted_swiglu", gate_up, weights, order)
    assert_close(out, reference.weighted_swiglu(*wide), torch.bfloat16, 1)
    d_gate_up, d_weights = run("weighted_swiglu_bwd", dy, gate_up, weights, order)
    gradient, sums = reference.weighted_swiglu_bwd(dy.double(), *wide)
    _, magnitude = reference.weighted_swiglu_bwd(dy.double().abs(), gate_up.double().abs(), *wide[1:])
    assert_close(d_gate_up, gradient, torch.bfloat16, 1)
    assert_close(d_weights, sums, torch.float32, width, magnitude)


@pytest.mark.parametrize("shape", cases([(1, 8), (5, 264), (67, 1000)], more=[(8192, 2048)]), ids=str)
def test_the_gate_of_rows_and_its_gradients(shape: tuple[int, int]) -> None:
    """Gates are up to 8 from 0, where 1 - sigmoid is small. The sum over a row may cancel."""
    x, dy = (torch.randn(shape).bfloat16() for _ in range(2))
    gate = (4 * torch.randn(shape[0], 1)).clamp(-8, 8).bfloat16()
    wide = x.double(), gate.double()
    (y,) = run("gate_rows", x, gate)
    assert_close(y, reference.gate_rows(*wide), torch.bfloat16, 1)
    dx, d_gate = run("gate_rows_bwd", dy, x, gate)
    gradient, sums = reference.gate_rows_bwd(dy.double(), *wide)
    _, magnitude = reference.gate_rows_bwd(dy.double().abs(), x.double().abs(), gate.double())
    assert_close(dx, gradient, torch.bfloat16, 1)
    assert d_gate.shape == (shape[0], 1)
    # rounded to bf16 once; the sum in fp32 is off by its terms' sizes
    bound = 2.0**-8 * sums.abs() + shape[1] * 2.0**-24 * magnitude
    assert ((d_gate.double() - sums).abs() <= bound).all()


def test_wrong_arguments_are_named() -> None:
    from surogate_models_moe import _C

    p = guarded((64,), torch.float32).pointer
    for call, message in (
        (lambda: _C.route(p, p, p, 1, 257, 1, False, 0, 0), "experts must be 1 to 256, got 257"),
        (lambda: _C.route(p, p, p, 1, 4, 5, False, 0, 0), "k must be 1 to 16 and at most the number of experts, got 5"),
        (lambda: _C.route_bwd(p, p, p, p, 1, 4, 2, False, 2, 0), "logits must be fp32 or bf16, not fp64"),
        (lambda: _C.expert_order(p, p, p, p, 0, 1, 4, 0), "workspace is a null pointer"),
        (lambda: _C.router_load(p, p, p, 0, p, p, 1, 4, 2, 3, 3, False, 0, 0), "layer must be below layers, got 3"),
        (lambda: _C.router_load(p, p, p, p, p, p, 1, 4, 2, 0, 3, True, 0, 0), "cannot add to before"),
        (lambda: _C.gather_rows(p, p, p, 1, 1, 12, 0), "the width must be a multiple of 8, got 12"),
        (lambda: _C.gate_rows(p, p, p, 1, 12, 0), "the width must be a multiple of 8, got 12"),
        (lambda: _C.gate_rows_bwd(p, p + 4, p, p, p, 1, 8, 0), "x must be aligned to 16 bytes"),
        (lambda: _C.sum_rows(p + 4, p, p, 1, 1, 8, 0), "y must be aligned to 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            call()

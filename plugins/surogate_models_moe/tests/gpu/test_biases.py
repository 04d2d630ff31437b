"""Biases of experts and gates of other forms, compared with the references in fp64 on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gate_forms import FORMS
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import run_kernel, run_op
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_close, same_bits
from surogate_models_moe import reference
from surogate_models_moe.kernels import KERNELS, grouped
from surogate_models_moe.ops import OPS

pytestmark = pytest.mark.gpu

DEFINITIONS = {definition.kind: definition for definition in OPS}
BF16 = torch.bfloat16
ROUTES = cases([(1, 1, 1, 8), (67, 60, 4, 264), (33, 128, 8, 520), (9, 256, 16, 40)], more=[(2048, 32, 4, 2880)])
"""Tokens, experts, experts a token, width."""


def run(kind: str, *ins: Tensor, **attrs: Any) -> list[Tensor]:
    return run_op(KERNELS, DEFINITIONS[kind], ins, attrs)


def truth(kind: str, *ins: Tensor, **attrs: Any) -> Any:
    """Evaluate the reference in fp64."""
    return getattr(reference, kind)(*(x.double() if x.is_floating_point() else x for x in ins), **attrs)


def gradient(kind: str, ins: Sequence[Tensor], dtype: str, before: Tensor | None = None, **attrs: Any) -> Tensor:
    """Run an op that writes the gradient of a bias, [experts, width], in `dtype`, or adds to what was before."""
    names = {BF16: "bf16", torch.float32: "fp32", torch.int32: "int32"}
    values = [Value(f"in{i}", tuple(x.shape), names[x.dtype], "act") for i, x in enumerate(ins)]
    (spec,) = DEFINITIONS[kind].infer(values, attrs)
    grad = Value("d", spec.shape, dtype, "grad")
    op = Op(kind, tuple(values), (grad,), attrs, accumulate=frozenset() if before is None else frozenset({0}))
    (found,) = run_kernel(KERNELS, op, dict(zip(values, ins, strict=True)) | ({} if before is None else {grad: before}))
    return found


def drawn(tokens: int, experts: int, k: int, width: int) -> tuple[Tensor, ...]:
    chosen = torch.rand(tokens, experts).argsort(1)[:, :k].int()
    return torch.randn(tokens, width).to(BF16), torch.rand(tokens, k), chosen, torch.randn(experts, width).to(BF16)


@pytest.mark.parametrize("sizes", ROUTES, ids=str)
def test_biases_behind_the_sum_and_their_gradients_match_fp64(sizes: tuple[int, int, int, int]) -> None:
    tokens, experts, k, width = sizes
    y, weights, chosen, bias = drawn(tokens, experts, k, width)
    (out,) = run("add_expert_bias", y, weights, chosen, bias)
    magnitude = truth("add_expert_bias", y.abs(), weights, chosen, bias.abs())
    assert_close(out, truth("add_expert_bias", y, weights, chosen, bias), BF16, k, magnitude)
    (d_weights,) = run("expert_bias_dgrad", y, chosen, bias)
    magnitude = truth("expert_bias_dgrad", y.abs(), chosen, bias.abs())
    assert_close(d_weights, truth("expert_bias_dgrad", y, chosen, bias), torch.float32, width, magnitude)
    attrs = {"n_experts": experts}
    (d_bias,) = run("expert_bias_grad", y, weights, chosen, **attrs)
    magnitude = truth("expert_bias_grad", y.abs(), weights, chosen, **attrs)
    assert_close(d_bias, truth("expert_bias_grad", y, weights, chosen, **attrs), torch.float32, tokens, magnitude)
    before = torch.randn(experts, width)
    ins = y, weights, chosen
    assert same_bits(gradient("expert_bias_grad", ins, "fp32", before, **attrs), before + d_bias)
    assert same_bits(gradient("expert_bias_grad", ins, "bf16", **attrs), d_bias.to(BF16))


GROUPS: dict[str, tuple[Sequence[int], int, int]] = {
    "one row": ([1], 8, 8),
    "uneven": ([0, 5, 130, 0, 128, 1, 0, 61, 0], 136, 72),
    "one has all": ([0, 0, 300, 0], 264, 40),
    "more experts than lanes": ([3, 0, 1, 2] * 18, 48, 136),
}
is_sm90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
PRODUCTS = pytest.mark.parametrize(
    ("plain", "biased"),
    [
        pytest.param(
            grouped.CUTLASS, grouped.BIASED_CUTLASS, id="cutlass", marks=pytest.mark.skipif(not is_sm90, reason="SM90")
        ),
        pytest.param(grouped.PORTABLE, grouped.BIASED_PORTABLE, id="portable"),
    ],
)


@PRODUCTS
@pytest.mark.parametrize("name", GROUPS)
def test_a_product_has_the_bias_of_the_expert_of_each_row(name: str, plain: Any, biased: Any) -> None:
    """It is added in fp32 to the sums, which are rounded once. Without a bias the bits are those without one."""
    counts, n, k = GROUPS[name]
    ends = torch.tensor(counts).cumsum(0).int()
    x, w = torch.randn(sum(counts), k).to(BF16), torch.randn(len(counts) * n, k).to(BF16)
    bias = torch.randn(len(counts), n).to(BF16)
    definition = DEFINITIONS["grouped_linear"]
    (found,) = run_op([biased], definition, (x, w, ends, bias), {})
    magnitude = truth("grouped_linear", x.abs(), w.abs(), ends, bias.abs())
    assert_close(found, truth("grouped_linear", x, w, ends, bias), BF16, k + 1, magnitude)
    (zeros,), (product,) = (
        run_op([biased], definition, (x, w, ends, torch.zeros_like(bias)), {}),
        run_op(plain, definition, (x, w, ends), {}),
    )
    assert torch.equal(zeros, product)  # but for the sign of zeros


@pytest.mark.parametrize("name", GROUPS)
def test_gradients_of_biases_of_products_match_fp64_and_are_added_or_rounded_once(name: str) -> None:
    counts, n, _ = GROUPS[name]
    ends, dy = torch.tensor(counts).cumsum(0).int(), torch.randn(sum(counts), n).to(BF16)
    (found,) = run("grouped_linear_bgrad", dy, ends)
    magnitude = truth("grouped_linear_bgrad", dy.abs(), ends)
    assert_close(found, truth("grouped_linear_bgrad", dy, ends), torch.float32, max(counts), magnitude)
    before = torch.randn(len(counts), n)
    assert same_bits(gradient("grouped_linear_bgrad", (dy, ends), "fp32", before), before + found)
    assert same_bits(gradient("grouped_linear_bgrad", (dy, ends), "bf16"), found.to(BF16))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("width", cases([8, 264], more=[2880]))
def test_gates_and_their_gradients_match_fp64(width: int, form: dict[str, Any]) -> None:
    tokens, k = 67, 4
    order = torch.randperm(tokens * k).int()
    gate_up, weights = (2 * torch.randn(tokens * k, 2 * width)).to(BF16), torch.rand(tokens, k)
    dy = torch.randn(tokens * k, width).to(BF16)
    (out,) = run("weighted_swiglu", gate_up, weights, order, **form)
    assert_close(out, truth("weighted_swiglu", gate_up, weights, order, **form), BF16, 1)
    d_gate_up, d_weights = run("weighted_swiglu_bwd", dy, gate_up, weights, order, **form)
    gradient, sums = truth("weighted_swiglu_bwd", dy, gate_up, weights, order, **form)
    assert_close(d_gate_up, gradient, BF16, 1)
    terms = truth("weighted_swiglu", gate_up, torch.ones_like(weights), order, **form).abs() * dy.double().abs()
    magnitude = torch.empty(tokens * k, dtype=torch.float64).index_copy(0, order.long(), terms.sum(1)).view(tokens, k)
    assert_close(d_weights, sums, torch.float32, width, magnitude)

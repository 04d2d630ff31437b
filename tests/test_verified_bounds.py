"""The bounds of `surogate verify`: from several draws of transformers' rounding, and zeros compared as zeros."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest
import torch
from torch import Tensor

from surogate_verify import yardstick
from surogate_verify.observed import LOGITS, Observed
from surogate_verify.transformers_side import OtherRounding
from surogate_verify.verdict import Row, Verdict, compare
from surogate_verify.yardstick import Yardstick

LAYERS = {"q": 0, "v": 0}


def observed(q: Tensor, v: Tensor | None = None) -> Observed:
    return Observed(
        loss=1.0, states={LOGITS: torch.ones(200)}, gradients={"q": q, "v": torch.ones(4) if v is None else v}
    )


def compared(ours: Tensor, truth: Tensor, *theirs: Tensor) -> Verdict:
    rule = yardstick.fp32([observed(one) for one in theirs], terms=16, tokens=16)
    return compare(observed(ours), observed(truth), rule, LAYERS)


def test_a_gradient_that_is_zero_in_truth_is_compared_with_the_largest_of_its_layer() -> None:
    """As those of queries and keys with a window of one token, where anything computed is rounding."""
    for truth in (torch.zeros(4), torch.full((4,), 1e-17)):
        right = compared(torch.full((4,), 1e-8), truth, torch.zeros(4))
        row = next(row for row in right.rows if row.name == "q")
        assert right.passed and row.error == pytest.approx(1e-8, rel=1e-6) and row.cosine is None
        wrong = compared(torch.full((4,), 1e-3), truth, torch.zeros(4)).first_wrong
        assert wrong is not None and wrong.name == "q"
    missing = compared(torch.zeros(4), torch.full((4,), 1e-3), torch.full((4,), 1e-3)).first_wrong
    assert missing is not None and missing.name == "q" and missing.error == 1.0


def test_the_error_of_several_draws_is_wider_only_where_they_differ() -> None:
    def of(*errors: float) -> float:
        draws = [Observed(loss=error) for error in errors]
        return Yardstick("fp32", draws, 0.0, 0.0, 2.0, 4.0).error(lambda draw: draw.loss)

    assert of(0.3) == 0.3 and of(0.3, 0.3, 0.3) == pytest.approx(0.3) and of(0.0, 0.0) == 0
    assert of(1.0, 2.0, 4.0) == 8.0
    assert isnan(of(1.0, float("nan")))


def test_a_right_model_with_an_error_of_one_number_is_called_wrong_as_seldom_as_the_bounds_say() -> None:
    random = torch.Generator().manual_seed(0)
    errors, draws = (torch.randn(20_000, n, generator=random).abs() for n in (1, yardstick.DRAWS))
    wrong = torch.ones(len(errors), dtype=torch.bool)
    for n in range(1, yardstick.DRAWS + 1):
        allowed = yardstick.FARTHER_IN_FP32 * draws[:, :n].amax(1) ** 2 / draws[:, :n].quantile(0.5, 1)
        wrong &= errors[:, 0] > allowed
    assert wrong.float().mean() < 2e-3


# ---------------------------------------------------------------------------------------------------------------- bf16


def of_numbers(count: int, error: float) -> Observed:
    """Return a gradient of `count` numbers that is off by `error` relative to ones."""
    return observed(torch.full((count,), 1.0 + error), torch.full((count,), 1.0 + error))


@pytest.mark.parametrize(("count", "passes"), [(1, True), (yardstick.FEW, True), (yardstick.FEW + 1, False)])
def test_further_draws_in_bf16_count_for_gradients_of_few_numbers(count: int, passes: bool) -> None:
    truth, draws = of_numbers(count, 0.0), [of_numbers(count, error) for error in (0.01, 0.05, 0.04)]
    first = compare(of_numbers(count, 0.2), truth, yardstick.bf16(draws[:1], 0.0), LAYERS)
    assert not first.passed and all(row.drawn == passes for row in first.rows if row.kind == "gradient")
    assert not any(row.drawn for row in first.rows if row.kind in ("output", "loss"))
    verdict = compare(of_numbers(count, 0.2), truth, yardstick.bf16(draws, 0.0), LAYERS)
    assert all(row.ok == passes for row in verdict.rows if row.kind == "gradient")


def test_choices_of_experts_that_are_nearly_alike_are_drawn_and_others_are_wrong() -> None:
    """Experts 0 and 1 of the first token differ by 0.8 %, 0 and 2 by a half."""
    values = torch.tensor([[1.0, 0.992, 0.5], [0.1, 0.2, 1.0]])

    def choosing(first: int) -> Observed:
        chosen = [torch.tensor([[first], [2]])]
        return replace(of_numbers(4, 0.0), choices=chosen, taken=chosen, values=[values])

    def row(ours: int, *theirs: int) -> Row:
        draws = [choosing(first) for first in theirs]
        verdict = compare(choosing(ours), choosing(ours), yardstick.bf16(draws, 0.0), LAYERS)
        return next(row for row in verdict.rows if row.name == "choices")

    assert not row(1, 0).ok and row(1, 0).drawn and row(1, 0, 1).ok
    assert not row(2, 0, 1, 0, 1).ok


def test_a_gradient_of_few_numbers_that_is_missing_or_turned_is_found_however_far_draws_are() -> None:
    truth, draws = of_numbers(4, 0.0), [of_numbers(4, error) for error in (0.01, 0.4, 0.3)]
    for error in (-1.0, -2.0, 1.0):
        verdict = compare(of_numbers(4, error), truth, yardstick.bf16(draws, 0.0), LAYERS)
        assert not any(row.ok for row in verdict.rows if row.kind == "gradient")


def test_draws_in_bf16_add_the_variance_of_a_rounding_to_products_and_their_gradients() -> None:
    random = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=random).bfloat16() for shape in ((512, 64), (48, 64)))
    exact = x.double() @ w.double().T
    plain = torch.nn.functional.linear(x, w)
    found = []
    for seed in (1, 2):
        leaf = x.clone().requires_grad_()
        with OtherRounding("cpu", seed):
            product = torch.nn.functional.linear(leaf, w)
        product.backward(plain)
        assert leaf.grad is not None
        found.append((product.detach(), leaf.grad))
    (one, d_one), (other, d_other) = found
    assert not torch.equal(one, other) and not torch.equal(d_one, d_other)
    added, rounding = ((one.double() - plain.double()).square().mean(), (plain.double() - exact).square().mean())
    assert 0.8 < float(added / rounding) < 1.25
    assert float((one != plain).float().mean()) == pytest.approx(OtherRounding.SHARE, rel=0.1)
    zeros = torch.zeros(4, 64).bfloat16()
    with OtherRounding("cpu", 1):
        assert not torch.nn.functional.linear(zeros, w).any()
        adapted = torch.nn.functional.linear(x.float(), w.float())
    assert adapted.equal(torch.nn.functional.linear(x.float(), w.float()))

"""The bounds of `surogate verify`: from several draws of transformers' rounding, and zeros compared as zeros."""

from __future__ import annotations

from math import isnan

import pytest
import torch
from torch import Tensor

from surogate_verify import yardstick
from surogate_verify.observed import LOGITS, Observed
from surogate_verify.verdict import Verdict, compare
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

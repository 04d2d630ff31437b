"""`surogate verify` compares models with routers for equal choices, and the choices by what they lose."""

from __future__ import annotations

from math import isnan

import pytest
import torch

from surogate_core.api import ConfigError
from surogate_verify.transformers_side import SameChoices
from surogate_verify.verdict import lost

SHARES = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.3, 0.4], [0.1, 0.8, 0.1]])
BEST = torch.tensor([[0, 1], [2, 0], [1, 0]], dtype=torch.int32)
OTHER = torch.tensor([[0, 2], [2, 0], [1, 0]], dtype=torch.int32)


def test_what_is_chosen_is_taken_document_by_document_and_layer_by_layer() -> None:
    leaf = SHARES.clone().requires_grad_()
    with SameChoices([BEST, OTHER], [3, 3]) as same:
        for start, stop in ((0, 2), (2, 3)):
            with same.document(stop - start):
                for choices in (BEST, OTHER):
                    values, indices = torch.topk(leaf[start:stop], 2, dim=-1)
                    assert indices.tolist() == choices[start:stop].tolist()
                    assert torch.equal(values, SHARES[start:stop].gather(1, indices))
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
            assert gradient[start:stop].sum() == values.numel()
    own, values = (list(map(torch.cat, found)) for found in (same.own, same.values))
    assert all(torch.equal(found.int(), BEST) for found in own) and all(torch.equal(found, SHARES) for found in values)
    assert lost(own, values) == 0
    best = torch.tensor([0.8, 0.7, 0.9])
    assert lost([BEST, OTHER], values) == pytest.approx(0.1 / float(best.norm()), rel=1e-6)  # by the second layer


def test_one_wrong_choice_among_many_tokens_is_more_than_the_rounding_of_bf16() -> None:
    """Of 512 tokens, of which one takes its worst expert. As a mean it would be 5e-4."""
    values = SHARES[1:2].expand(512, 3)
    choices = torch.tensor([[2]]).repeat(512, 1)
    choices[7] = 0
    assert lost([choices], [values]) > 5 * 2.0**-9


def test_equal_values_lose_nothing_and_other_uses_are_left_alone() -> None:
    with SameChoices([torch.tensor([[2, 1], [2, 1]], dtype=torch.int32)], [3]) as same, same.document(2):
        assert torch.topk(SHARES, 1).indices.tolist() == [[0], [2], [1]]
        torch.topk(SHARES[1].expand(2, 3), 2)
    assert lost([torch.tensor([[2, 1], [2, 1]])], [SHARES[1].expand(2, 3)]) == 0.0


@pytest.mark.parametrize("broken", [0, 1])
def test_a_router_that_is_not_finite_is_not_hidden_by_another(broken: int) -> None:
    values = [SHARES.clone(), SHARES.clone()]
    values[broken][1, 2] = float("nan")
    assert isnan(lost([BEST, BEST], values))


def test_choices_that_are_not_taken_are_no_comparison() -> None:
    with SameChoices([BEST], [3]) as same:
        refused = pytest.raises(ConfigError, match=r"calls of topk: transformers has 0 for the 1 routers")
        with refused, same.document(3):
            torch.sort(SHARES, descending=True)


def test_a_choice_of_groups_is_that_of_our_experts() -> None:
    """DeepSeek-V3 takes the best groups by topk, then the best experts in them."""
    scores = torch.tensor([[0.9, 0.1, 0.2, 0.3, 0.8, 0.7]])
    with SameChoices([torch.tensor([[4, 5]], dtype=torch.int32)], [6]) as same, same.document(1):
        assert torch.topk(torch.tensor([[3.0, 1.0, 2.0]]), 2).indices.tolist() == [[0, 2]]
        assert torch.topk(scores, 2).indices.tolist() == [[4, 5]]
    assert [found[0].tolist() for found in same.own] == [[[0, 2]], [[0, 4]]]


def test_groups_that_are_alike_may_have_experts_that_are_not() -> None:
    """Groups are compared by their two best. Ours takes the second one, which has 0.001 less; its third expert 0.3."""
    scores = torch.tensor([[0.9, 0.7, 0.6, 0.899, 0.7, 0.3]])
    groups = torch.tensor([[1.6, 1.599]])
    masked = scores.masked_fill(torch.tensor([[True, True, True, False, False, False]]), -torch.inf)
    with SameChoices([torch.tensor([[3, 4, 5]], dtype=torch.int32)], [6]) as same, same.document(1):
        assert torch.topk(groups, 1).indices.tolist() == [[1]]
        torch.topk(masked, 3)
    taken, values = (list(map(torch.cat, found)) for found in (same.taken, same.values))
    assert lost(taken, values) == pytest.approx(0.001 / 1.6, rel=1e-3)


def test_experts_of_more_groups_than_a_router_chooses_are_no_choice_of_it() -> None:
    """By the values of experts alone they would lose nothing: what is masked counts as the lowest."""
    with SameChoices([torch.tensor([[0, 2]], dtype=torch.int32)], [4]) as same, same.document(1):
        torch.topk(torch.tensor([[1.0, 0.7]]), 1)
        torch.topk(torch.tensor([[0.9, 0.1, -torch.inf, -torch.inf]]), 2)
    taken, values = (list(map(torch.cat, found)) for found in (same.taken, same.values))
    assert lost(taken, values) == pytest.approx(0.3, rel=1e-6) and lost(taken[1:], values[1:]) == 0


def test_what_a_router_has_masked_loses_what_its_lowest_value_would() -> None:
    values = torch.tensor([[0.5, -torch.inf, 0.2, 0.3], [0.5, 0.4, -torch.inf, -torch.inf]])
    assert lost([torch.tensor([[0, 3], [0, 1]])], [values]) == 0
    best = torch.tensor([0.8, 0.9])
    assert lost([torch.tensor([[0, 1], [0, 1]])], [values]) == pytest.approx(0.1 / float(best.norm()), rel=1e-6)

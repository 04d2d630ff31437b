"""`surogate verify` compares models with routers for equal choices, and the choices by what they lose."""

from __future__ import annotations

import pytest
import torch

from surogate_core.api import ConfigError
from surogate_core.verification.transformers_side import SameChoices

SHARES = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.3, 0.4], [0.1, 0.8, 0.1]])
BEST = torch.tensor([[0, 1], [2, 0], [1, 0]], dtype=torch.int32)
OTHER = torch.tensor([[0, 2], [2, 0], [1, 0]], dtype=torch.int32)


def test_what_is_chosen_is_taken_document_by_document_and_layer_by_layer() -> None:
    leaf = SHARES.clone().requires_grad_()
    with SameChoices([BEST, OTHER]) as same:
        for start, stop in ((0, 2), (2, 3)):
            same.begin(stop - start)
            for choices in (BEST, OTHER):
                values, indices = torch.topk(leaf[start:stop], 2, dim=-1)
                assert indices.tolist() == choices[start:stop].tolist()
                assert torch.equal(values, SHARES[start:stop].gather(1, indices))
            same.end()
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
            assert gradient[start:stop].sum() == values.numel()
    assert same.lost == pytest.approx(0.1 / 1.5, rel=1e-6)  # of the first document, by the second layer


def test_equal_values_lose_nothing_and_other_uses_are_left_alone() -> None:
    with SameChoices([torch.tensor([[2, 1], [2, 1]], dtype=torch.int32)]) as same:
        same.begin(2)
        assert torch.topk(SHARES, 1).indices.tolist() == [[0], [2], [1]]
        torch.topk(SHARES[1].expand(2, 3), 2)
    assert same.lost == 0.0


def test_choices_that_are_not_taken_are_no_comparison() -> None:
    with SameChoices([BEST]) as same:
        same.begin(3)
        torch.sort(SHARES, descending=True)
        with pytest.raises(ConfigError, match=r"calls of topk: transformers has 0 for the 1 routers"):
            same.end()

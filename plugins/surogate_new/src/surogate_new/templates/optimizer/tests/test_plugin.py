from __future__ import annotations

import torch
from acme_plugin.plugin import UPDATE
from torch import Tensor

from surogate_core.testing.ops import check_op

GRAD, MASTER, MEAN = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, -8.0])


def updated(clip_coef: float) -> tuple[Tensor, ...]:
    scalars = torch.tensor(clip_coef), torch.tensor(0.125), torch.tensor(1, dtype=torch.int32), torch.tensor(7)
    attrs = {"momentum": 0.5, "weight_decay": 0.0, "stream": 1, "copy_dtype": "bf16"}
    return check_op(UPDATE, *scalars, GRAD, MASTER, MEAN, **attrs)


def test_an_element_moves_by_the_learning_rate_against_the_sign_of_its_momentum() -> None:
    master, mean, copy = updated(0.5)
    assert mean.tolist() == [0.25, -0.5, -3.875]
    assert master.tolist() == [0.875, 2.125, 3.125]
    assert copy.dtype == torch.bfloat16 and torch.equal(copy.float(), master)


def test_a_step_whose_gradient_is_not_finite_changes_nothing() -> None:
    for clip_coef in (float("nan"), float("inf")):
        master, mean, _ = updated(clip_coef)
        assert torch.equal(master, MASTER) and torch.equal(mean, MEAN)

from __future__ import annotations

import pytest
import torch
from acme_plugin.plugin import OP

from surogate_core.testing.ops import check_op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positive_elements_are_squared_and_the_others_are_zero(dtype: torch.dtype) -> None:
    (y,) = check_op(OP, torch.tensor([[-2.0, -0.5, 0.0], [0.5, 3.0, 1.5]], dtype=dtype))
    assert y.tolist() == [[0.0, 0.0, 0.0], [0.25, 9.0, 2.25]]

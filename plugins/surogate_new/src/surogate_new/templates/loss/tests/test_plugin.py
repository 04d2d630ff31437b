from __future__ import annotations

import torch
from acme_plugin.plugin import SUM

from surogate_core.testing.ops import check_op


def test_the_sum_is_scaled_after_the_power() -> None:
    (total,) = check_op(SUM, torch.tensor([1.0, -2.0, 3.0]), torch.tensor(0.5), factor=2.0, power=2)
    assert float(total) == 14.0

"""`surogate plugins test` on a GPU measures kernels in the captured steps of runs."""

from __future__ import annotations

import pytest

from surogate_conformance import bench_of
from surogate_conformance.bandwidth import VisibleCard, shares, unmeasured

from .alone import ALONE

pytestmark = [pytest.mark.gpu, ALONE]


def test_a_kernel_that_moves_bytes_reaches_most_of_the_copy_rate_and_no_more() -> None:
    with bench_of("surogate-optim-adamw", "h200") as bench:
        found = shares(bench, VisibleCard())
        assert [share.kernel for share in found] == ["adamw"] and not unmeasured(bench, found)
    assert 0.3 < found[0].share < 1.2

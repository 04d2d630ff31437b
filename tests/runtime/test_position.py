"""Positions of ranks: written around each collective and micro-step, by the host or by the device."""

from __future__ import annotations

from itertools import pairwise

import pytest

from surogate_core.api.world import Position
from surogate_core.runtime.position import DevicePosition


@pytest.mark.parametrize("make", [Position, lambda: DevicePosition(0)], ids=["host", "device"])
def test_a_position_tells_the_micro_step_and_the_last_collective(make: type[Position]) -> None:
    position = make()
    seen = [position.read()]
    position.micro_step(1, 0)
    seen.append(position.read())
    for name in ("the sum of loss", "the sum of gradients of block 0", "the sum of loss"):
        with position.collective(name, 0):
            seen.append(position.read())
            assert seen[-1][1:] == (1, name, True)
        seen.append(position.read())
        assert seen[-1][1:] == (1, name, False)
    position.micro_step(1, 0)  # that of the next optimizer step
    seen.append(position.read())
    assert all(before[0] != after[0] for before, after in pairwise(seen))

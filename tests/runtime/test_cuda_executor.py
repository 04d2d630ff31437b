"""How a program's launches fall into graphs: what needs no GPU to be checked."""

from __future__ import annotations

from surogate_core.api import Launch
from surogate_core.runtime.bind import as_parts
from surogate_core.runtime.cuda import graph_segments


def test_launches_that_every_batch_needs_run_together() -> None:
    log: list[int] = []
    parts = [Launch((log.append, (i,)), above) for i, above in enumerate([-1, -1, -1, 16, 32, -1, -1])]
    assert [(s.above, len(s.calls)) for s in graph_segments(parts)] == [(-1, 3), (16, 1), (32, 1), (-1, 2)]
    for segment in graph_segments(parts):
        segment.run()
    assert log == list(range(7))


def test_a_launch_is_a_part_that_is_always_needed() -> None:
    launch = (print, (1, 2))
    (part,) = as_parts(launch)
    assert part == Launch(launch, -1)
    assert as_parts((part, Launch(launch, 5))) == (part, Launch(launch, 5))

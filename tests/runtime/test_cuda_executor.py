"""How the launches of a program are grouped into graphs. Needs no GPU."""

from __future__ import annotations

from surogate_core.api import Launch
from surogate_core.runtime.bind import as_launches
from surogate_core.runtime.cuda import graph_segments


def test_consecutive_launches_that_the_same_batches_need_are_one_segment() -> None:
    log: list[int] = []
    launches = [Launch((log.append, (i,)), above) for i, above in enumerate([-1, -1, -1, 16, 32, -1, -1])]
    assert [(s.labels_above, len(s.calls)) for s in graph_segments(launches)] == [(-1, 3), (16, 1), (32, 1), (-1, 2)]
    for segment in graph_segments(launches):
        segment.run()
    assert log == list(range(7))


def test_a_call_becomes_a_launch_that_every_batch_needs() -> None:
    call = (print, (1, 2))
    (launch,) = as_launches(call)
    assert launch == Launch(call, -1)
    assert as_launches((launch, Launch(call, 5))) == (launch, Launch(call, 5))

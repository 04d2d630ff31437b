"""How a program's launches fall into graphs: what needs no GPU to be checked."""

from __future__ import annotations

from surogate_core.api import Part
from surogate_core.runtime.bind import as_parts
from surogate_core.runtime.cuda import stretches


def test_launches_that_every_batch_needs_run_together() -> None:
    log: list[int] = []
    parts = [Part((log.append, (i,)), above) for i, above in enumerate([-1, -1, -1, 16, 32, -1, -1])]
    assert [(s.above, len(s.calls)) for s in stretches(parts)] == [(-1, 3), (16, 1), (32, 1), (-1, 2)]
    for stretch in stretches(parts):
        stretch.run()
    assert log == list(range(7))


def test_a_launch_is_a_part_that_is_always_needed() -> None:
    launch = (print, (1, 2))
    (part,) = as_parts(launch)
    assert part == Part(launch, -1)
    assert as_parts((part, Part(launch, 5))) == (part, Part(launch, 5))

"""How the launches of a program are grouped into graphs. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core.api import Launch, Op, Value
from surogate_core.runtime.bind import BoundProgram, as_launches
from surogate_core.runtime.collectives import call
from surogate_core.runtime.comms.single import SingleComm
from surogate_core.runtime.cuda import CudaExecutor, graph_segments


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


class TwoRanks(SingleComm):
    """Records the spans of its sums."""

    def __init__(self) -> None:
        super().__init__(world_size=2)
        self.summed: list[Any] = []

    def all_reduce(self, spans: Any, how: Any, stream: int) -> None:
        self.summed.append(spans)


def test_collectives_that_differ_in_addresses_alone_are_connected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of two values are one span where these lie side by side, and NCCL connects for the bytes of a call."""
    comm, other = TwoRanks(), (print, ())
    a, b = (Value(name, (64,), "fp32", "grad") for name in "ab")

    def summed(*places: int) -> tuple[Op, tuple[Launch, ...]]:
        values = (a, b)[: len(places)]
        op = Op("all_reduce", values, values, {"world_size": 2, "how": "sum"}, lane="comm")
        at = dict(zip(values, places, strict=True))
        return op, (Launch(call(op, comm, at.__getitem__, 0)),)  # type: ignore[arg-type]

    programs = [[summed(0), summed(512), summed(0, 256), summed(0, 1024)], [summed(2048), summed(4096, 8192)]]
    programs[0].append((Op("add", (a, b), (a,), {}), (Launch(other),)))
    executor = CudaExecutor.__new__(CudaExecutor)
    bound = {str(i): BoundProgram(*map(tuple, zip(*ops, strict=True)), (), True) for i, ops in enumerate(programs)}  # type: ignore[arg-type]
    executor._bound = bound
    monkeypatch.setattr(CudaExecutor, "synchronize", lambda self: None)
    executor.connect()
    assert comm.summed == [((0, 64, "fp32"),), ((0, 128, "fp32"),), ((0, 64, "fp32"), (1024, 64, "fp32"))]

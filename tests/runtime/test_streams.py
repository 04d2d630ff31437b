"""What runs when: events make a side stream begin late enough and be waited for in time, and no more than that."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core.api import Launch, Op, Value
from surogate_core.runtime.streams import order_streams


class Stream:
    """Remembers for what each launch has waited, through events, on whatever stream."""

    def __init__(self) -> None:
        self.done: frozenset[str] = frozenset()

    def launch(self, name: str, seen: dict[str, frozenset[str]]) -> None:
        seen[name] = self.done
        self.done |= {name}

    def wait_event(self, event: Event) -> None:
        self.done |= event.after


class Event:
    after: frozenset[str] = frozenset()

    def record(self, stream: Stream) -> None:
        self.after = stream.done


def run(*ops: Op, **above_of: int) -> tuple[dict[str, frozenset[str]], Stream]:
    """What each op waited for, by name, and the main stream afterwards. Runs twice: events are used again.

    above_of: ops that only batches with more labels need.
    """
    compute, comm = Stream(), Stream()
    streams = {"compute": compute, "comm": comm}
    seen: dict[str, frozenset[str]] = {}
    parts = [(Launch((streams[op.lane].launch, (op.kind, seen)), above_of.get(op.kind, -1)),) for op in ops]
    ordered = order_streams(ops, parts, compute, comm, Event)
    assert len(ordered) == len(ops)
    for _ in range(2):
        compute.done = comm.done = frozenset()
        for function, arguments in (part.call for its in ordered for part in its):
            function(*arguments)
    return seen, compute


a, b, c = (Value(name, (4,), "fp32", "grad") for name in "abc")


def op(kind: str, *values: Value, lane: Any = "compute") -> Op:
    return Op(kind, values, values, lane=lane)


def test_a_collective_waits_for_what_is_before_it_and_for_nothing_after() -> None:
    seen, _ = run(op("write a", a), op("sum a", a, lane="comm"), op("write b", b), op("sum b", b, lane="comm"))
    assert seen["sum a"] == {"write a"}
    assert seen["write b"] == {"write a"}, "the compute stream goes on"
    assert seen["sum b"] == {"write a", "sum a", "write b"}


def test_what_touches_the_values_of_a_collective_waits_for_it() -> None:
    seen, _ = run(op("write a", a), op("sum a", a, lane="comm"), op("write b", b), op("read a", a), op("read c", c))
    assert "sum a" not in seen["write b"]
    assert "sum a" in seen["read a"]


def test_where_a_graph_ends_nothing_is_under_way() -> None:
    seen, compute = run(op("write a", a), op("sum a", a, lane="comm"), op("chunk", b), op("write b", b), chunk=16)
    assert seen["chunk"] == {"write a", "sum a"}
    assert compute.done == {"write a", "sum a", "chunk", "write b"}


def test_what_comes_after_a_program_waits_for_all_of_it() -> None:
    for ops in (
        (
            op("write a", a),
            op("sum a", a, lane="comm"),
            op("write b", b),
            op("sum b", b, lane="comm"),
            op("write c", c),
        ),
        (op("write a", a), op("sum a", a, lane="comm")),
    ):
        _, compute = run(*ops)
        assert compute.done == {other.kind for other in ops}


@pytest.mark.parametrize("count", [0, 3])
def test_a_program_of_one_lane_is_left_as_it_is(count: int) -> None:
    ops = tuple(op(f"op {i}", a) for i in range(count))
    calls = tuple((print, (i,)) for i in range(count))
    assert order_streams(ops, calls, None, None, Event) == calls

"""Events start the side stream late enough, and are waited for in time, but no earlier than necessary."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from surogate_core.api import Launch, Op, Value
from surogate_core.program.op import Lane
from surogate_core.runtime.cuda import order_streams


class Stream:
    """Records what each launch has waited for, directly or through events on any stream."""

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
    """Return what each op waited for, by name, and the main stream at the end. Runs twice, because events are reused.

    `above_of` gives the ops that only batches with more labels need.
    """
    streams = {lane: Stream() for lane in get_args(Lane)}
    compute = streams["compute"]
    seen: dict[str, frozenset[str]] = {}
    launches = [(Launch((streams[op.lane].launch, (op.kind, seen)), above_of.get(op.kind, -1)),) for op in ops]
    ordered = order_streams(ops, launches, streams, Event)
    assert len(ordered) == len(ops)
    for _ in range(2):
        for stream in streams.values():
            stream.done = frozenset()
        for function, arguments in (launch.call for of_op in ordered for launch in of_op):
            function(*arguments)
    return seen, compute


a, b, c = (Value(name, (4,), "fp32", "grad") for name in "abc")


def op(kind: str, *values: Value, lane: Any = "compute") -> Op:
    return Op(kind, values, values, lane=lane)


def test_a_collective_waits_for_all_ops_before_it_and_for_none_after_it() -> None:
    seen, _ = run(op("write a", a), op("sum a", a, lane="comm"), op("write b", b), op("sum b", b, lane="comm"))
    assert seen["sum a"] == {"write a"}
    assert seen["write b"] == {"write a"}, "the compute stream does not wait for the collective"
    assert seen["sum b"] == {"write a", "sum a", "write b"}


def test_an_op_that_uses_values_of_a_collective_waits_for_it() -> None:
    seen, _ = run(op("write a", a), op("sum a", a, lane="comm"), op("write b", b), op("read a", a), op("read c", c))
    assert "sum a" not in seen["write b"]
    assert "sum a" in seen["read a"]


def test_collectives_are_done_where_a_graph_ends() -> None:
    seen, compute = run(op("write a", a), op("sum a", a, lane="comm"), op("chunk", b), op("write b", b), chunk=16)
    assert seen["chunk"] == {"write a", "sum a"}
    assert compute.done == {"write a", "sum a", "chunk", "write b"}


def test_collectives_are_done_at_the_end_of_a_program() -> None:
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
def test_a_program_without_collectives_is_unchanged(count: int) -> None:
    ops = tuple(op(f"op {i}", a) for i in range(count))
    calls = tuple((print, (i,)) for i in range(count))
    assert order_streams(ops, calls, {"compute": None}, Event) == calls

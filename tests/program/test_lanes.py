"""Ops of side lanes: what waits for what, and that no memory is reused while a lane may still use it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, get_args

import pytest
from random_programs import Family, Run, family, random_labels

from surogate_core.api import Op, Program, Value
from surogate_core.errors import ProgramError
from surogate_core.program.lanes import lane_order
from surogate_core.program.op import Lane
from surogate_core.program.verify import verify

LANES = get_args(Lane)


def random_ops(seed: int) -> list[Op]:
    """Return ops of random lanes that read and write a few states."""
    rng = Random(seed)
    states = [Value(name, (4,), "fp32", "state") for name in "abcdef"]
    ops = []
    for index in range(rng.randint(1, 40)):
        used = rng.sample(states, rng.randint(1, 3))
        written = used[: rng.randint(0, 1)]
        lane: Any = rng.choice(LANES if rng.random() < 0.6 else ("compute",))
        ops.append(Op(f"op {index}", tuple(used), tuple(written), lane=lane))
    return ops


def known_done(ops: Sequence[Op]) -> list[set[int]]:
    """Return by brute force, for each op, the ops that are done when it starts."""
    waits = lane_order(ops).waits
    before: list[set[int]] = []
    for index, op in enumerate(ops):
        done: set[int] = set()
        for i in range(index):  # its own lane, and for a side lane everything before it on "compute"
            if ops[i].lane == op.lane or (op.lane != "compute" and ops[i].lane == "compute"):
                done |= before[i] | {i}
        for i in waits.get(index, ()):
            done |= before[i] | {i}
        before.append(done)
    return before


@pytest.mark.parametrize("seed", range(200))
def test_conflicting_ops_are_ordered_and_nothing_else_is(seed: int) -> None:
    ops = random_ops(seed)
    before, order = known_done(ops), lane_order(ops)
    for index, op in enumerate(ops):
        for i, earlier in enumerate(ops[:index]):
            shared = {*op.ins, *op.outs} & {*earlier.ins, *earlier.outs}
            if shared & {*op.outs, *earlier.outs}:
                assert i in before[index], (i, index)
        for i in order.waits.get(index, ()):
            shared = {*op.ins, *op.outs} & {*ops[i].ins, *ops[i].outs}
            assert ops[i].lane not in (op.lane, "compute") and shared & {*op.outs, *ops[i].outs}
    side = [i for i, op in enumerate(ops) if op.lane != "compute"]
    first = {
        i: next((j for j, op in enumerate(ops) if op.lane == "compute" and i in before[j]), len(ops)) for i in side
    }
    assert order.done == first


def test_no_op_waits_for_what_is_known_to_be_done() -> None:
    a, b = (Value(name, (4,), "fp32", "state") for name in "ab")
    ops = [
        Op("out", (a,), (b,), lane="to_host"),
        Op("wait", (b,), ()),
        Op("read", (b,), ()),
        Op("back", (b,), (a,), lane="to_device"),
        Op("use", (a,), ()),
    ]
    assert lane_order(ops).waits == {1: (0,), 4: (3,)}
    assert lane_order(ops).done == {0: 1, 3: 4}


class LateRun(Run):
    """Runs the ops of side lanes as late as their order allows: before an op that waits for them, or at the end."""

    def micro_step(self, program: str, batch: int = 0, *, micro_step: int = 1, seed: int = 1234) -> None:
        ops = self.family.programs[program].ops
        calls = [run for run, _ in self.executor._calls[program] if run is not None]
        waits = lane_order(ops).waits
        waiting: dict[Lane, list[int]] = {}

        def finish(index: int) -> None:
            queue = waiting.get(ops[index].lane, [])
            while queue and queue[0] <= index:
                own = queue.pop(0)
                for i in waits.get(own, ()):
                    finish(i)
                calls[own]()

        def run(name: str) -> None:
            for index, op in enumerate(ops):
                if op.lane != "compute":
                    waiting.setdefault(op.lane, []).append(index)
                    continue
                for i in waits.get(index, ()):
                    finish(i)
                calls[index]()
            for queue in waiting.values():
                while queue:
                    finish(queue[-1])

        self.executor.run = run  # type: ignore[assignment,method-assign]
        super().micro_step(program, batch, micro_step=micro_step, seed=seed)


def results(given: Family, kind: type[Run]) -> dict[str, Any]:
    run = kind(given, poison=kind is Run)
    run.micro_step("micro_first", 0)
    run.micro_step("micro_next", 1, micro_step=2)
    return run.results()


@pytest.mark.parametrize("seed", range(40))
def test_holding_activations_and_params_on_the_host_changes_no_bit(seed: int) -> None:
    """Neither if copies are done at once nor if they are done as late as possible."""
    settings: dict[str, Any] = {"dtype": ("fp32", "bf16")[seed % 2], "labels": random_labels(seed)}
    held = ({"moves": True}, {"streams": True}, {"moves": True, "streams": True})[seed % 3]
    plain, copying = family(seed, **settings), family(seed, **settings, **held)
    expected = results(plain, Run)
    for kind in (Run, LateRun):
        found = results(copying, kind)
        assert all(found[name].equal(value) for name, value in expected.items()), kind


def test_random_programs_move_values_and_the_planner_reuses_their_memory() -> None:
    moves, waits, smaller = 0, 0, 0
    for seed in range(20):
        plain, with_moves = (family(seed, moves=moves, reuse=False) for moves in (False, True))
        ops = with_moves.programs["micro_first"].ops
        moves += sum(op.lane == "to_host" for op in ops)
        waits += len(lane_order(ops).waits)
        memory = [f.memory.arenas["micro_first"].lower_bound for f in (plain, with_moves)]
        smaller += memory[1] < memory[0]
        assert with_moves.memory.host is not None and with_moves.memory.host.arena_bytes > 0
    assert moves > 100 and waits > 100 and smaller > 0


def test_an_op_that_may_not_use_the_host_is_refused() -> None:
    given = family(1, moves=True)
    program = given.trained
    host = next(op.outs[0] for op in program.ops if op.lane == "to_host")
    b = given.source.builder
    with b.record("forward") as ops:
        b.emit("copy", host)
    with pytest.raises(ProgramError, match="is placed on the host; copy it to the device first"):
        verify(Program("wrong", (*program.ops, *ops)), b.ops)

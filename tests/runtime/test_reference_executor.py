"""The reference executor runs in the planned memory, which reveals errors of the plan. Its errors name the op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from random_programs import (
    VOCABULARY,
    RandomForward,
    Run,
    family,
    placed,
    random_batch,
    random_labels,
    without_sharing,
)
from small_programs import INIT
from torch import Tensor

from surogate_core.api import OpDef, OutSpec, Program, Value
from surogate_core.errors import ProgramError
from surogate_core.memory.plan import MemoryPlan, plan_programs
from surogate_core.program.builder import Builder
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.reference import ReferenceExecutor

T, C = 4, 6


@pytest.mark.parametrize("seed", range(30))
def test_sharing_memory_is_bit_identical(seed: int) -> None:
    """Compares a poisoned run with one whose plan shares no memory."""
    given = family(seed, dtype=("fp32", "bf16")[seed % 2], labels=random_labels(seed))
    shared, apart = Run(given), Run(given, memory=without_sharing(given.memory), poison=False)
    assert given.memory.arena_bytes < without_sharing(given.memory).arena_bytes
    for run in (shared, apart):
        run.micro_step("micro_first")
        run.micro_step("micro_next", 1)
    for name, value in shared.results().items():
        assert torch.equal(value, apart.results()[name]), f"seed {seed}: {name}"
        assert value.isfinite().all(), f"seed {seed}: {name}"


def labelled_batch(source: RandomForward, batch: int = 0) -> dict[Value, Tensor]:
    values = random_batch(source, batch)
    return {**values, source.targets: values[source.targets].clamp(min=0)}


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_plan_changes_results(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: moving one value onto another that is live changes results or makes them NaN.

    Every token has a label, since the last rows without one change nothing.
    """
    monkeypatch.setattr("random_programs.random_batch", labelled_batch)
    given = family(seed)
    good = Run(given)
    good.micro_step("micro_first")
    arena = given.memory.arenas["micro_first"]
    lives = [
        life for life in arena.lives if life.last > life.first and life.value.dtype == "fp32" and not life.overwritten
    ]
    pairs = [(a, b) for a in lives for b in lives if b.first < a.first < b.last and b.value.nbytes >= a.value.nbytes]
    chosen = Random(seed).sample(pairs, min(6, len(pairs)))
    detected = 0
    for life, victim in chosen:
        wrong = placed(arena, {**arena.offsets, life.value: arena.offsets[victim.value]}, arena.arena_bytes)
        bad = Run(given, memory=replace(given.memory, arenas={**given.memory.arenas, "micro_first": wrong}))
        bad.micro_step("micro_first")
        detected += any(not torch.equal(v, good.results()[n]) for n, v in bad.results().items())
    assert chosen
    assert detected == len(chosen), f"seed {seed}: {len(chosen) - detected} of {len(chosen)} were not detected"


@pytest.mark.parametrize("seed", range(5))
def test_two_runs_are_bit_identical(seed: int) -> None:
    given = family(seed, dtype="bf16")
    runs = [Run(given), Run(given)]
    for run in runs:
        run.micro_step("micro_first")
        run.micro_step("micro_next", 1)
    runs[0].micro_step("micro_first")  # contents left by a run do not affect the next one
    runs[0].micro_step("micro_next", 1)
    for name, value in runs[0].results().items():
        assert torch.equal(value, runs[1].results()[name]), f"seed {seed}: {name}"


# ------------------------------------------------------------------------------------------------- a single op


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x + 2


def wide(x: Tensor) -> Tensor:
    return x.double()


def truncated(x: Tensor) -> Tensor:
    return x[1:]


def untouched(x: Tensor) -> Tensor:
    return x


def _same(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return [OutSpec("y", ins[0].shape, ins[0].dtype)]


def _prepared(reference: str, monkeypatch: pytest.MonkeyPatch, **attrs: Any) -> tuple[ReferenceExecutor, Tensor]:
    """Return an executor of y = op(x) and the view of y. The op is the function `reference` of this file."""
    from surogate_core.runtime import reference as module

    monkeypatch.setattr(module, "load", lambda name: globals()[name])
    b = Builder({"odd": OpDef(kind="odd", infer=_same, reference=reference)}, "fp32")
    with b.record("forward"), b.block(7):
        y = b.apply("odd", b.input("x", (T, C), "fp32"))
        program = b.program("odd program", (y,))
    memory = plan_programs((program,), b.declared, lambda op: 0)
    buffers = Buffers(memory, poison=True)
    buffers.persistent(b.declared[0]).fill_(1)
    return ReferenceExecutor({program.name: program}, b.ops, buffers, poison=True), buffers.view(y, program.name)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("truncated", r"returned shape \[3, 6\] for output 0, the program says \[4, 6\]"),
        ("two", "returned 2 results for 1 outputs"),
        ("wide", "fp64|float64"),
    ],
)
def test_the_error_for_a_wrong_result_names_the_op(
    reference: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, _ = _prepared(reference, monkeypatch)
    with pytest.raises(ProgramError, match=rf"odd \(block 7, forward, emitted at .*\.py:\d+\).*({message})"):
        executor.run("odd program")


def test_outputs_remain_valid_after_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, y = _prepared("untouched", monkeypatch)
    assert y.isnan().all()  # poison
    executor.run("odd program")
    assert torch.equal(y, torch.ones(T, C))


def test_poison_overwrites_a_value_when_its_life_ends() -> None:
    b = Builder(VOCABULARY, "fp32")
    with b.record("forward"):
        x = b.input("x", (T, C), "fp32")
        y = b.apply("add", x, x)
        unread = b.apply("add", y, x)
        z = b.apply("add", y, y)
        program = b.program("m", (z,))
    memory = plan_programs((program,), b.declared, lambda op: 0)
    buffers = Buffers(memory, poison=True)
    buffers.persistent(x).fill_(1)
    executor = ReferenceExecutor({"m": program}, VOCABULARY, buffers, poison=True)
    executor.run("m")
    assert buffers.view(y, "m").isnan().all()
    assert unread in memory.arenas["m"].offsets
    assert torch.equal(buffers.view(z, "m"), torch.full((T, C), 4.0))


def test_the_error_for_a_value_that_is_not_planned_names_it() -> None:
    b = Builder(VOCABULARY, "fp32")
    stranger = Value("stranger", (T,), "fp32", "act")
    buffers = Buffers(MemoryPlan({}, plan_programs((Program("m", ()),), (), lambda op: 0).arenas))
    with pytest.raises(ProgramError, match=r"m: stranger:fp32\[4\] is not in the arena plan"):
        buffers.view(stranger, "m")
    with pytest.raises(ProgramError, match=r"w:fp32\[4\] is not in the memory plan"):
        buffers.persistent(b.param("w", (T,), INIT))


def test_an_op_changes_the_states_that_its_definition_names() -> None:
    b = Builder(VOCABULARY, "fp32")
    with b.record("update"):
        largest = b.state("largest", (), "fp32", INIT)
        x = b.input("x", (3,), "fp32")
        b.emit("toy_watch", x, largest, outs=[b.activation("watched", (3,), "fp32")])
        program = b.program("m")
    buffers = Buffers(plan_programs((program,), b.declared, lambda op: 0))
    executor = ReferenceExecutor({"m": program}, VOCABULARY, buffers)
    for content, expected in ((1.0, 1.0), (5.0, 5.0), (2.0, 5.0)):
        buffers.persistent(x).fill_(content)
        executor.run("m")
        assert buffers.persistent(largest) == expected

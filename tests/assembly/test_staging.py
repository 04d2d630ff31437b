"""Staged params: those that only `derive` reads have no memory, and are derived from block by block."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from random_programs import VOCABULARY

from surogate_core.api import Init, Value
from surogate_core.assembly.staging import split_staged, staged_params
from surogate_core.errors import ProgramError
from surogate_core.memory.plan import plan_programs
from surogate_core.program.builder import Builder
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.reference import ReferenceExecutor

INIT = Init(kind="ones")


class Blocks:
    """Two blocks with a param each, of which `derive` makes a bf16 copy, and a program that reads other params."""

    def __init__(self, reads: Sequence[int] = ()) -> None:
        b = self.builder = Builder(VOCABULARY, "fp32")
        self.params: list[Value] = []
        self.copies: list[Value] = []
        with b.record("derive"):
            for index in range(2):
                with b.block(index):
                    self.params.append(b.param(f"layers.{index}.w", (8, 8), INIT))
                    self.copies.append(b.state(f"copy.{index}", (8, 8), "bf16", None, derived=True))
                    b.emit("cast", b.apply("swiglu", self.params[-1]), dtype="bf16")
                    b.emit("cast", self.params[-1], outs=[self.copies[-1]], dtype="bf16")
            self.derive = b.program("derive", stage="derive")
        with b.record("forward"):
            for index in reads:
                b.apply("swiglu", self.params[index])
            self.micro = b.program("micro")

    def staged(self, trained: Sequence[Value] = ()) -> frozenset[Value]:
        return staged_params(self.derive, [self.micro], self.builder.declared, trained)


def test_a_frozen_param_that_only_derive_reads_is_staged() -> None:
    made = Blocks()
    assert made.staged() == set(made.params)
    assert made.staged(trained=[made.params[0]]) == {made.params[1]}
    made = Blocks(reads=[1])
    assert made.staged() == {made.params[0]}


def test_each_block_is_derived_in_the_memory_of_the_one_before() -> None:
    made = Blocks()
    rest, parts = split_staged(made.derive, made.staged())
    assert rest.ops == () and [part.program.name for part in parts] == ["derive.0", "derive.1"]
    resident = [v for v in made.builder.declared if v not in made.params]
    memory = plan_programs([part.program for part in parts], resident, lambda op: 0)
    assert memory.segments["param"].nbytes == 0
    places = [memory.arenas[part.program.name].offsets[place] for part in parts for place in part.places.values()]
    assert len(set(places)) == 1
    buffers = Buffers(memory, poison=True)
    executor = ReferenceExecutor({p.program.name: p.program for p in parts}, VOCABULARY, buffers, poison=True)
    for content, part in enumerate(parts):
        (place,) = part.places.values()
        buffers.view(place, part.program.name).fill_(content + 1)
        executor.run(part.program.name)
    assert [float(buffers.persistent(copy).float().mean()) for copy in made.copies] == [1.0, 2.0]


def test_an_op_may_not_read_staged_params_of_two_blocks() -> None:
    made = Blocks()
    with made.builder.record("derive"):
        made.builder.emit("add", *made.params)
        both = made.builder.program("derive", stage="derive")
    with pytest.raises(ProgramError, match=r"add .* reads params of several blocks"):
        split_staged(both, frozenset(made.params))

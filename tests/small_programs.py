"""Small programs written in a test, differentiated and run, for claims about one op or one rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from zlib import crc32

import torch
from random_programs import VOCABULARY
from torch import Tensor

from surogate_core.api import Init, OpDef, Program, Scalars, Value
from surogate_core.memory.plan import plan_programs
from surogate_core.program.builder import Builder
from surogate_core.program.differentiate import differentiate
from surogate_core.program.passes.accumulate import accumulate
from surogate_core.program.passes.dead_code import dead_code
from surogate_core.program.passes.recompute import recompute
from surogate_core.program.verify import verify
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.reference import ReferenceExecutor

INIT = Init(kind="ones")
Build = Callable[[Builder], Value | tuple[Value, ...]]


def everything(param: Value) -> bool:
    """A `trainable` predicate that selects every param."""
    return True


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A differentiated program with its buffers and executor."""

    programs: Mapping[str, Program]
    gradients: Mapping[Value, Value]
    loss: Value
    buffers: Buffers
    executor: ReferenceExecutor

    def run(self, program: str = "micro_first") -> dict[str, Tensor]:
        """Run a program and return every gradient by the name of its param."""
        self.executor.run(program)
        return self.results()

    def results(self) -> dict[str, Tensor]:
        """Return every gradient by the name of its param."""
        return {p.name: self.buffers.persistent(g).clone() for p, g in self.gradients.items()}

    def value_of_loss(self) -> float:
        """Run the forward program and return its loss."""
        self.executor.run("forward")
        return float(self.buffers.view(self.loss, "forward"))

    def param(self, name: str) -> Tensor:
        """Return the buffer of a trained param as a tensor view."""
        return self.buffers.persistent(next(p for p in self.gradients if p.name == name))


def train(
    build: Build,
    *,
    dtype: str = "fp64",
    grad_dtype: str | None = None,
    ops: Mapping[str, OpDef] = VOCABULARY,
    contents: Mapping[str, Tensor] | None = None,
    trainable: Callable[[Value], bool] = everything,
    dropped: Collection[str] = (),
) -> Trained:
    """Record `build`, differentiate it, verify, plan, and fill the inputs and params.

    `contents` gives values by name; all others are random (see `draw`). `dropped`: labels of values of blocks that the
    backward pass recomputes.
    """
    b = Builder(ops, dtype)
    scalars = Scalars(
        b.input("lr", (), "fp32"),
        b.input("step", (), "int32"),
        b.input("micro_step", (), "int32"),
        b.input("seed", (), "int64"),
    )
    with b.record("forward"):
        built = build(b)
        losses = built if isinstance(built, tuple) else (built,)
        forward = b.program("forward", losses)
    loss = losses[0]
    verify(forward, ops)
    program, gradients = differentiate(forward, losses, b, trainable, grad_dtype or "fp32")
    verify(program, ops, "differentiate")
    if dropped:
        program = recompute(program, lambda value: value.label in dropped, b)
        verify(program, ops, "recompute")
    program = dead_code(program, ops)
    first, following = accumulate(program, b, scalars)
    verify(first, ops, "accumulate")
    verify(following, ops, "accumulate")
    programs = {p.name: p for p in (forward, first, following)}
    memory = plan_programs(programs.values(), b.declared, lambda op: ops[op.kind].workspace(op))
    buffers = Buffers(memory, poison=True)
    for value in b.declared:
        if value.role in ("param", "input"):
            given = (contents or {}).get(value.name)
            buffers.persistent(value).copy_(draw(value) if given is None else given)
    executor = ReferenceExecutor(programs, ops, buffers, poison=True)
    return Trained(programs=programs, gradients=gradients, loss=loss, buffers=buffers, executor=executor)


def draw(value: Value) -> Tensor:
    """Return standard normal contents, seeded by the value's name; ones for integer dtypes."""
    if not value.dtype.startswith(("fp", "bf")):
        return torch.ones(value.shape)
    generator = torch.Generator().manual_seed(crc32(value.name.encode()))
    return torch.randn(value.shape, generator=generator, dtype=torch.float64)

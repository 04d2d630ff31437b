"""Sums gradients over the workers of a run, each as soon as it is complete and beside what is still computed.

Only the last micro-step of an optimizer step is rewritten: what the ones before it leave is still added to. There the
gradients of a block are summed after the last of them is written; what lies outside of blocks (embedding, head, final
norm, the loss) after its own last write. In the other direction nothing is needed: all workers apply the same sums.

A sum is taken in the dtype of the values: of bf16 gradients it is rounded to nearest where accumulation is stochastic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import ProgramError
from ..builder import Builder
from ..op import Op, Program
from ..value import Value


@dataclass(frozen=True)
class MicroStep:
    """A kind of micro-step. first: it writes gradients, the others add. last: it sums them over the workers."""

    first: bool
    last: bool


def micro_step_counts(grad_accum_steps: int, world_size: int) -> dict[MicroStep, int]:
    """How often an optimizer step runs each kind of micro-step, in order of their first run.

    One worker has nothing to sum, so none of its micro-steps is `last`.
    """
    final = grad_accum_steps - 1
    kinds = (MicroStep(first=i == 0, last=world_size > 1 and i == final) for i in range(grad_accum_steps))
    return dict(Counter(kinds))


def reduce(
    program: Program,
    gradients: Mapping[Value, Value],
    sums: Sequence[Value],
    builder: Builder,
    world_size: int,
) -> Program:
    """`program` as the last micro-step: with an all_reduce on lane "comm" for all `gradients` (of params) and `sums`.

    Values of one all_reduce are in the order of `gradients`, which is that of their memory. Raises ProgramError for a
    value that no op writes.
    """
    block_of = {gradient: param.block for param, gradient in gradients.items()} | dict.fromkeys(sums, -1)
    last = {value: index for index, op in enumerate(program.ops) for value in op.outs}
    missing = [value.name for value in block_of if value not in last]
    if missing:
        raise ProgramError(f"{program.name}: never written, so there is nothing to sum: {', '.join(missing)}")
    groups: dict[tuple[int, int], list[Value]] = {}
    for value, block in block_of.items():
        groups.setdefault((block, last[value] if block < 0 else -1), []).append(value)
    complete: dict[int, list[tuple[int, list[Value]]]] = {}
    for (block, _), values in groups.items():
        complete.setdefault(max(last[v] for v in values), []).append((block, values))
    ops: list[Op] = []
    for index, op in enumerate(program.ops):
        ops.append(op)
        for block, values in complete.get(index, ()):
            with builder.record("backward", block) as emitted:
                builder.emit("all_reduce", *values, outs=values, lane="comm", world_size=world_size)
            ops += emitted
    return replace(program, name="micro_only" if program.first else "micro_last", ops=tuple(ops), last=True)

"""Sums gradients over the workers of a run, each as soon as it is complete and beside what is still computed.

Only the last micro-step of an optimizer step is rewritten: what the ones before it leave is still added to. There the
gradients of a block are summed after the last of them is written; what lies outside of blocks (embedding, head, final
norm, the loss) after its own last write. In the other direction nothing is needed: all workers apply the same sums.

A sum is taken in the dtype of the values: of bf16 gradients it is rounded to nearest where accumulation is stochastic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...errors import ProgramError
from ..builder import Builder
from ..op import Op, Program
from ..value import Value


def micro_step_name(*, first: bool, last: bool, world_size: int) -> str:
    """The program of a micro-step. first: it writes gradients, others add. last: it sums them over the workers."""
    if world_size == 1 or not last:
        return "micro_first" if first else "micro_next"
    return "micro_only" if first else "micro_last"


def micro_step_counts(grad_accum_steps: int, world_size: int) -> dict[str, int]:
    """How often an optimizer step runs each of its micro-step programs, in order of their first run."""
    steps = range(grad_accum_steps)
    edges = [i for i in (0, 1, grad_accum_steps - 1) if i in steps]
    names = [micro_step_name(first=i == 0, last=i == steps[-1], world_size=world_size) for i in dict.fromkeys(edges)]
    counts = {name: names.count(name) for name in names}
    counts[names[1 % len(names)]] += grad_accum_steps - len(names)  # those in the middle are like the second
    return counts


def reduce(
    program: Program,
    gradients: Mapping[Value, Value],
    sums: Sequence[Value],
    builder: Builder,
    world_size: int,
    name: str,
) -> Program:
    """`program` under another name, with an all_reduce on the lane "comm" for all `gradients` (of params) and `sums`.

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
    return replace(program, name=name, ops=tuple(ops))

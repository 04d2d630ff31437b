"""Data parallelism: sums what a step collects over the ranks of a run, overlapped with the backward pass.

Only the program of the last micro-step is rewritten, because earlier micro-steps leave partial sums. The gradients of a
block are summed together once the last of them is written. Values outside of blocks (embedding, head, final norm, the
loss) are summed after their own last write. States that collect a sum or a maximum (`Value.collects`) are treated like
gradients. Of a gradient that ranks hold parts of, each receives the sum of its own part, which is all that it updates.

Sums are computed in the dtype of the values. Sums of bf16 gradients over ranks are therefore rounded to nearest,
whereas accumulation over micro-steps rounds stochastically.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import ProgramError
from ..builder import Builder
from ..op import Op, Program
from ..value import Value


@dataclass(frozen=True)
class MicroStep:
    """A kind of micro-step. The first one writes gradients, the others add. The last one sums them over the workers."""

    first: bool
    last: bool


def micro_step_counts(grad_accum_steps: int, world_size: int) -> dict[MicroStep, int]:
    """Return how often an optimizer step runs each kind of micro-step, in order of their first run.

    With one worker there is nothing to sum, and no micro-step is `last`.
    """
    final = grad_accum_steps - 1
    kinds = (MicroStep(first=i == 0, last=world_size > 1 and i == final) for i in range(grad_accum_steps))
    return dict(Counter(kinds))


def reduce(
    program: Program,
    gradients: Mapping[Value, Value],
    parts: Mapping[Value, Value],
    builder: Builder,
    world_size: int,
) -> Program:
    """Return `program` as the last micro-step, with sums of its gradients and collecting states on "comm".

    `gradients` maps params to their gradients, in the order of the gradients in memory; the values of one collective
    keep that order. `parts` maps gradients to this rank's part of them. Raises ProgramError if no op writes a gradient.
    """
    block_of = {gradient: param.block for param, gradient in gradients.items()}
    block_of |= {value: value.block for op in program.ops for value in op.written if value.collects}
    complete = completed(program, block_of, parts)
    ops: list[Op] = []
    for index, op in enumerate(program.ops):
        ops.append(op)
        for block, how, values in complete.get(index, ()):
            outs = [parts.get(value, value) for value in values]
            kind = collective(outs[0])
            with builder.record("backward", block) as emitted:
                builder.emit(kind, *values, outs=outs, lane="comm", world_size=world_size, how=how)
            ops += emitted
    name = f"{program.base_name}_{'only' if program.first else 'last'}"
    return replace(program, name=name, ops=tuple(ops), last=True)


Group = tuple[int, str, list[Value]]
"""The block of values, how they are combined over ranks, and the values, which are complete together."""


def collective(out: Value) -> str:
    """Return the op that writes a sum over ranks: all of it on all of them, their parts, or all of it on its owner."""
    if out.shard is None:
        return "all_reduce"
    return "reduce_scatter" if out.owner is None else "reduce"


def completed(program: Program, block_of: Mapping[Value, int], parts: Mapping[Value, Value]) -> dict[int, list[Group]]:
    """Return {index of an op: what is complete once it has run}: values of one block, or one outside of blocks.

    Those that different collectives sum are apart. Raises ProgramError if no op writes a value.
    """
    last = {value: index for index, op in enumerate(program.ops) for value in op.written}
    if missing := [value.name for value in block_of if value not in last]:
        raise ProgramError(f"{program.name}: cannot sum values that no op writes: {', '.join(missing)}")
    groups: dict[tuple[int, str, str, int], list[Value]] = {}
    for value, block in block_of.items():
        key = (block, value.collects or "sum", collective(parts.get(value, value)), last[value] if block < 0 else -1)
        groups.setdefault(key, []).append(value)
    found: dict[int, list[Group]] = {}
    for (block, how, *_), values in groups.items():
        found.setdefault(max(last[v] for v in values), []).append((block, how, values))
    return found

"""Variants of a program for batches with few documents.

A program is built for the maximum number of documents in a micro-batch, which is many times the usual number.
Attention takes time for empty documents too: on an H200, a thousand of them cost 0.2 ms forward and 0.6 ms backward per
layer. Each variant reads a shorter `cu_seqlens`, and the worker runs the shortest variant that holds the batch. In the
shortest of all, every document fills its row, because none is longer: attention then needs no offsets and no mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ...errors import ProgramError
from ...origin import blaming
from ..op import Program
from ..opdef import OpDef
from ..value import Value

STEP = 8
"""Ratio of consecutive bounds. In the worst case, 7 of 8 document slots of the chosen variant are empty."""

FEWEST_PER_ROW = 4
"""Smallest bound above one, in documents per row. A lower one would save no measurable time."""


def smaller_bounds(max_documents: int, rows: int) -> tuple[int, ...]:
    """Return the document counts below `max_documents` that get a variant, ascending, for micro-batches of `rows`."""
    bounds: list[int] = []
    while max_documents // STEP >= FEWEST_PER_ROW * rows:
        max_documents //= STEP
        bounds.insert(0, max_documents)
    return (rows, *bounds) if rows < max_documents else ()


def for_fewer(program: Program, cu_seqlens: Value, shorter: Iterable[Value]) -> Iterator[Program]:
    """Yield the variants that read a shorter input instead of `cu_seqlens`. They share the ops that read neither."""
    reading = [index for index, op in enumerate(program.ops) if cu_seqlens in op.ins]
    for fewer in shorter if reading else ():
        ops, documents = list(program.ops), fewer.shape[0] - 1
        for index in reading:
            ops[index] = ops[index].on({cu_seqlens: fewer})
        yield replace(program, ops=tuple(ops), name=f"{program.name}@{documents}", documents=documents)


def refuse_sizes_by_documents(program: Program, fewer: Value, ops: Mapping[str, OpDef]) -> None:
    """Raise ProgramError for an op of a variant whose outputs would have another shape in it."""
    for op in program.ops:
        if fewer not in op.ins:
            continue
        for out, spec in zip(op.outs, ops[op.kind].specs(op.ins, op.attrs, op.where), strict=False):
            if tuple(spec.shape) != out.shape:
                with blaming(ops[op.kind].origin, "infer"):
                    raise ProgramError(
                        f"{op.where}: {op.kind}: {out.name} is {list(out.shape)}, and {list(spec.shape)} where "
                        f"{fewer.name} is {list(fewer.shape)}. Batches of few documents run with a shorter cu_seqlens, "
                        "so no output may depend on its length: take a size that follows from the tokens."
                    )

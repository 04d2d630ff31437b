"""Splits a differentiated program into the first micro-step, which writes, and the next ones, which add.

The contract, once for all ops: gradients and sums over micro-steps `+=`, everything else `=`. Gradients stored in
fp32 are added to by the op that computes them. A bf16 gradient cannot take a small addend by rounding to nearest, so
there the op writes its contribution (fp32 from a product) and `accumulate_rounded` adds it, rounding stochastically.
"""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from ...api import Scalars
from ..builder import Builder
from ..op import Op, Program
from ..value import Value


def accumulate(program: Program, sums: frozenset[Value], builder: Builder, scalars: Scalars) -> tuple[Program, Program]:
    """Return (micro_first, micro_next). `sums` are states that add up over the micro-steps (the loss)."""

    def added(value: Value) -> bool:
        return value.role == "grad" or value in sums

    first: list[Op] = []
    later: list[Op] = []
    written: dict[Value, int] = {}
    for op in program.ops:
        targets = [i for i, v in enumerate(op.outs) if added(v)]
        again = [i for i in targets if op.outs[i] in written]
        for i in targets:
            written[op.outs[i]] = written.get(op.outs[i], 0) + 1
        order = {v: written[v] - 1 for v in op.outs if v in written}
        first += _adding(op, again, builder, scalars, order)
        later += _adding(op, targets, builder, scalars, order)
    return (
        replace(program, name="micro_first", ops=tuple(first)),
        replace(program, name="micro_next", ops=tuple(later)),
    )


def _adding(op: Op, indices: list[int], builder: Builder, scalars: Scalars, order: dict[Value, int]) -> list[Op]:
    """`op`, adding to its outputs at `indices`, and what must follow it for those that are rounded stochastically."""
    direct = frozenset(i for i in indices if op.outs[i].dtype != "bf16")
    rounded = [i for i in indices if i not in direct]
    if not rounded:
        return [op if op.accumulate == direct else replace(op, accumulate=direct)]
    outs = list(op.outs)
    specs = builder.ops[op.kind].infer(op.ins, op.attrs)
    with builder.record(op.phase, op.block) as emitted:
        for i in rounded:
            target = outs[i]
            outs[i] = builder.activation(f"d_{target.label}", target.shape, specs[i].dtype)
            stream = crc32(f"{target.name}+{order[target]}".encode())
            builder.emit(
                "accumulate_rounded", outs[i], target, scalars.tick, scalars.seed, outs=[target], stream=stream
            )
    return [replace(op, outs=tuple(outs), accumulate=direct), *emitted]

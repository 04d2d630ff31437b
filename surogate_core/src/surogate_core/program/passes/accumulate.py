"""Gradient accumulation: derives the programs of the first and the following micro-steps.

All ops follow one contract: gradients and sums over micro-steps (`Value.collects`) are accumulated into (`+=`),
everything else is written (`=`). The op that computes an fp32 gradient adds to it directly. Adding to a bf16 gradient
with round-to-nearest would lose small addends. There the op writes its contribution to an activation, and
`accumulate_rounded` adds that with stochastic rounding. An op with the attribute `dtype`, such as a matrix product,
writes its contribution in bf16 like the gradient of the first micro-step: rounding it adds less to the error than that
of the sum, which is larger, and the sum reads half the bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from zlib import crc32

from ..builder import Builder
from ..inputs import Scalars
from ..op import Op, Program
from ..value import Value


def accumulate(
    program: Program, builder: Builder, scalars: Scalars, written: Collection[Value] = ()
) -> tuple[Program, Program]:
    """Return the programs (micro_first, micro_next), or those of another purpose, such as calibrate_first.

    Every micro-step writes the gradients `written`, which another pass adds to their sums.
    """

    def accumulates(value: Value) -> bool:
        return value.role == "grad" or value.collects == "sum"

    first: list[Op] = []
    later: list[Op] = []
    writes: dict[Value, int] = {}
    for op in program.ops:
        targets = [i for i, v in enumerate(op.outs) if accumulates(v)]
        repeated = [i for i in targets if op.outs[i] in writes]
        added = [i for i in targets if i in repeated or op.outs[i] not in written]
        for i in targets:
            writes[op.outs[i]] = writes.get(op.outs[i], 0) + 1
        order = {v: writes[v] - 1 for v in op.outs if v in writes}
        first += _accumulating(op, repeated, builder, scalars, order)
        later += _accumulating(op, added, builder, scalars, order)
    return (
        replace(program, name=f"{program.base_name}_first", ops=tuple(first), first=True),
        replace(program, name=f"{program.base_name}_next", ops=tuple(later)),
    )


def _accumulating(op: Op, indices: list[int], builder: Builder, scalars: Scalars, order: dict[Value, int]) -> list[Op]:
    """Return `op` changed to accumulate into its outputs at `indices`.

    For bf16 outputs, ops follow that add the contribution with stochastic rounding.
    """
    direct = frozenset(i for i in indices if op.outs[i].dtype != "bf16")
    rounded = [i for i in indices if i not in direct]
    if not rounded:
        return [op if op.accumulate == direct else op.changed(accumulate=direct)]
    outs, attrs, definition = list(op.outs), dict(op.attrs), builder.ops[op.kind]
    if len(outs) == 1 and "dtype" in definition.attrs:
        attrs["dtype"] = "bf16"
    specs = definition.infer(op.ins, attrs)
    with builder.record(op.phase, op.block) as emitted:
        for i in rounded:
            target = outs[i]
            outs[i] = builder.activation(f"d_{target.label}", target.shape, specs[i].dtype)
            stream = crc32(f"{target.name}+{order[target]}".encode())
            builder.emit(
                "accumulate_rounded", outs[i], target, scalars.micro_step, scalars.seed, outs=[target], stream=stream
            )
    return [op.changed(outs=tuple(outs), attrs=attrs, accumulate=direct), *emitted]

"""Fuses additions into the products that compute an addend.

`add(a, b)`, where `b` is the result of a product that nothing else reads, becomes one product that adds to `a`
(`OpDef.adding`): `b` is not written, and no pass of its own reads `a` and `b`. References give the same bits.

Where both addends are products, the one with more FLOPs adds to the other: it is bound by arithmetic, so that the
transfer is hidden. LoRA steps of Qwen3 on an H200, 0.6B and 8B: 154.5 and 965 ms; 156.2 and 979 ms the other way round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..op import Op, Program
from ..opdef import OpDef
from ..value import Value


def fuse_adds(program: Program, ops: Mapping[str, OpDef]) -> Program:
    """Replace each `add` and one product that computes an addend by the product's adding kind, at the place of the add.

    The sum must be an activation. The product must be of the same phase and block, and read only activations, params
    and inputs, which no op changes.
    """
    readers = Counter(v for op in program.ops for v in op.ins) + Counter(program.outputs)
    producer: dict[Value, Op] = {}
    result: dict[Op, Op] = {}
    for op in program.ops:
        is_sum = op.kind == "add" and op.outs[0].role == "act"
        fused = _fused(op, producer, readers, ops) if is_sum else None
        if fused is not None:
            product, op = fused
            del result[product]
        result[op] = op
        producer.update(dict.fromkeys(op.outs, op))
    return replace(program, ops=tuple(result))


def _fused(
    add: Op, producer: Mapping[Value, Op], readers: Mapping[Value, int], ops: Mapping[str, OpDef]
) -> tuple[Op, Op] | None:
    """Return the product to remove and the op that replaces it and `add`; None if neither addend allows it."""
    products = [
        (op, base)
        for addend, base in zip(add.ins, reversed(add.ins), strict=True)
        if (op := producer.get(addend)) is not None
        and addend.role == "act"
        and readers[addend] == 1
        and _may_move(op, add, ops)
    ]
    if not products:
        return None
    product, base = max(products, key=lambda item: ops[item[0].kind].flops(item[0]))
    kind = ops[product.kind].adding(product)
    return product, replace(product, kind=kind, ins=(*product.ins, base), outs=add.outs)


def _may_move(product: Op, add: Op, ops: Mapping[str, OpDef]) -> bool:
    return (
        bool(ops[product.kind].adding(product))
        and (product.phase, product.block, product.lane) == (add.phase, add.block, add.lane)
        and not product.accumulate
        and all(v.role in ("act", "param", "input") for v in product.ins)
    )

"""Fuses additions into the products that compute an addend.

`add(a, b)`, where `b` is the result of a product that nothing else reads, becomes one product that adds to `a`
(`Rewrites.add_kind`): `b` is not written, and no pass of its own reads `a` and `b`. If `a` is such a result too, both
become one op (`Rewrites.pair_kind`), the product with more FLOPs first. References give the same bits.
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
    producer: dict[Value, Op] = {}  # of the values that one op alone reads
    result: dict[Op, Op] = {}
    for op in program.ops:
        addends = dict(zip(op.ins, reversed(op.ins), strict=True)) if op.kind == "add" else {}
        products = {producer[v]: base for v, base in addends.items() if v in producer and _fits(producer[v], op, ops)}
        if products:
            product = max(products, key=lambda p: ops[p.kind].flops(p))
            definition, added = ops[product.kind], (products.pop(product),)
            pair = [other for other in products if other.kind == product.kind and definition.rewrites.pair_kind]
            for fused in (product, *pair):
                del result[fused]
            kind = definition.rewrites.pair_kind if pair else definition.rewrites.add_kind(product)
            op = product.changed(kind=kind, ins=(*product.ins, *(pair[0].ins if pair else added)), outs=op.outs)
        result[op] = op
        producer.update((v, op) for v in op.outs if v.role == "act" and readers[v] == 1)
    return replace(program, ops=tuple(result))


def _fits(product: Op, add: Op, ops: Mapping[str, OpDef]) -> bool:
    return (
        bool(ops[product.kind].rewrites.add_kind(product))
        and (product.phase, product.block, product.lane) == (add.phase, add.block, add.lane)
        and all(v.role in ("act", "param", "input") for v in product.ins)
        and add.outs[0].role == "act"
    )

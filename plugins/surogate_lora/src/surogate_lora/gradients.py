"""All gradients of A and B of a block by one `lora_wgrad`, instead of products (`linear_wgrad`) and a `lora_unpack`.

Its kernel reads the operands of a block in one launch, and computes no element of the packed matrices that is always
zero. All operands stay in memory until then, which is the end of the block's backward pass. With many rows that costs
more than launches do: the operands of the MLP would wait for the backward pass of attention, where most memory is held.
So there each stretch of a block between two ops of attention has a `lora_wgrad` of its own, and with dropout, under
which each branch sees another input, each product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from surogate_core.api import Op, Program, Value

OCTET = 8
"""Ranks that the kernel computes at a time, and elements of the 16 bytes that it copies at a time."""

MOST_RANKS = 64
"""Ranks that the kernel computes in one read of a wide operand."""

MOST_STRIPS = 32
"""Strips that the kernel computes in one launch. A block of a dense model has 11, and with 64 ranks 14."""

MANY_ROWS = 16_384
"""Operands of more rows do not wait for attention."""


def fuse_gradients(program: Program, *, apart: bool = False) -> Program:
    """Replace each `lora_unpack` and the products that only it reads by a `lora_wgrad`, where that has a kernel.

    Parts of more than MOST_RANKS ranks are left alone: their wide operands would be read several times. Operands of
    more than MANY_ROWS rows are read before the next op of attention: see the module.

    apart: operands of no product wait for those of another. Products of few rows stay.
    """
    products = {op.outs[0]: op for op in program.ops if op.kind == "linear_wgrad"}
    reads = Counter(v for op in program.ops for v in op.ins)
    position = {op: i for i, op in enumerate(program.ops)}
    stretches = position if apart else _stretches(program)
    fused: dict[Op, list[Op]] = {}
    for op in program.ops:
        if op.kind != "lora_unpack" or not all(v in products and reads[v] == 1 for v in op.ins):
            continue
        whole = replace(op, kind="lora_wgrad", ins=tuple(v for out in op.ins for v in products[out].ins))
        has_many = whole.ins[0].shape[0] > MANY_ROWS
        if apart and not has_many:
            continue
        groups: dict[int, list[int]] = {}
        for i, out in enumerate(op.ins):
            groups.setdefault(stretches[products[out]] if has_many else 0, []).append(i)
        parts = [_of_pairs(whole, group) for group in groups.values()] if has_many else [whole]
        if any(map(refusal, parts)):
            continue
        fused |= {products[v]: [] for v in op.ins} | {op: []}
        for part, group in zip(parts, groups.values(), strict=True):
            last = max((products[op.ins[i]] for i in group), key=position.__getitem__) if has_many else op
            fused[last] = [part]
    return replace(program, ops=tuple(new for op in program.ops for new in fused.get(op, [op])))


def _stretches(program: Program) -> Mapping[Op, int]:
    """Return for each op how many ops of attention come before it: those that read where documents begin."""
    count, found = 0, {}
    for op in program.ops:
        count += any(v.role == "input" and v.name == "cu_seqlens" for v in op.ins)
        found[op] = count
    return found


def _of_pairs(op: Op, pairs: list[int]) -> Op:
    """Return the `lora_wgrad` of some pairs of operands of another."""
    kept = [i for i, at in enumerate(op.attrs["places"]) if at.whole in pairs]
    places = (op.attrs["places"][i] for i in kept)
    attrs = {
        "shapes": tuple(op.attrs["shapes"][i] for i in kept),
        "places": tuple(at._replace(whole=pairs.index(at.whole)) for at in places),
        "dtypes": tuple(op.attrs["dtypes"][i] for i in kept),
    }
    ins = tuple(v for i in pairs for v in op.ins[2 * i : 2 * i + 2])
    return replace(op, ins=ins, outs=tuple(op.outs[i] for i in kept), attrs=dict(op.attrs) | attrs)


def refusal(op: Op) -> str:
    """Return why the kernel cannot compute these gradients, or ""."""
    other = next((v for v in op.ins if v.dtype != "bf16"), None)
    if other is not None:
        return f"operands must be bf16, got {other!r}"
    other = next((v for v in op.outs if v.dtype not in ("fp32", "bf16")), None)
    if other is not None:
        return f"gradients must be fp32 or bf16, got {other!r}"
    sizes = [v.shape[1] for v in op.ins]
    sizes += [n for shape, at in zip(op.attrs["shapes"], op.attrs["places"], strict=True) for n in (*shape, *at[1:3])]
    if any(n % OCTET for n in sizes):
        return f"columns, ranks and places must be multiples of {OCTET}"
    most = max(min(shape) for shape in op.attrs["shapes"])
    if most > MOST_RANKS:
        return f"at most {MOST_RANKS} ranks a matrix, got {most}"
    count = len(strips(op))
    return f"at most {MOST_STRIPS} strips, got {count}" if count > MOST_STRIPS else ""


@dataclass(frozen=True)
class Part:
    """An output of index `out`. Its ranks are columns `rank` to `rank + ranks` of the thin operand.

    ranks_first: it is [ranks, columns], as A, otherwise [columns, ranks], as B.
    """

    out: int
    rank: int
    ranks: int
    ranks_first: bool


@dataclass(frozen=True)
class Strip:
    """Columns `column` to `column + columns` of a wide operand, and the parts that one read of them serves.

    The ranks of the parts, at most MOST_RANKS, are consecutive columns of the thin operand.
    """

    wide: Value
    thin: Value
    column: int
    columns: int
    parts: tuple[Part, ...]

    @property
    def ranks(self) -> int:
        return sum(part.ranks for part in self.parts)


def strips(op: Op) -> list[Strip]:
    """Return the strips of a `lora_wgrad`, in the order of their wide operands. Each part is in one of them."""
    found = []
    for i, (shape, at) in enumerate(zip(op.attrs["shapes"], op.attrs["places"], strict=True)):
        dy, x = op.ins[2 * at.whole : 2 * at.whole + 2]
        (rows, columns), is_a = shape, shape[0] < shape[1]
        if is_a:
            found.append(Strip(x, dy, at.column, columns, (Part(i, at.row, rows, True),)))
        else:
            found.append(Strip(dy, x, at.row, rows, (Part(i, at.column, columns, False),)))
    order = {v: n for n, v in enumerate(op.ins)}
    found.sort(key=lambda s: (order[s.wide], s.column, s.parts[0].rank))
    merged: list[Strip] = []
    for strip in found:
        if merged and _follows(strip, merged[-1]):
            merged[-1] = replace(merged[-1], parts=merged[-1].parts + strip.parts)
        else:
            merged.append(strip)
    return merged


def _follows(strip: Strip, last: Strip) -> bool:
    """Return whether one read serves both: the same columns, consecutive ranks, and not more than MOST_RANKS."""
    same = (strip.wide, strip.thin, strip.column, strip.columns) == (last.wide, last.thin, last.column, last.columns)
    end = last.parts[-1].rank + last.parts[-1].ranks
    return same and strip.parts[0].rank == end and last.ranks + strip.ranks <= MOST_RANKS

"""The products of groups of rows with FP8 operands, such as those of experts.

    fp8_grouped_linear       (a [R, K], b, scale_a, scale_b, ends int32 [G], *added; fast, beside) -> bf16 [R, N]
    fp8_grouped_linear_part  (base bf16 [R, N], *the same; first, fast, beside) -> bf16 [R, N]

b are matrices [N, K] of the groups, one above another, or `beside` each other, as in the transposed copy of a stack.
Added is a bias of each group [G, N], or a further product of two bf16 operands, a2 [R, r] and a stack b2 of [N, r] or,
`beside`, [r, N]: an adapter's branch. Of a part b holds the groups from `first` on, all else is of all groups, and rows
of other groups are those of base (`decoded_experts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import UNFINISHED_LABEL, GroupWise, Op, OpDef, OutSpec, RowWise, Value, need

Ins = Sequence[Value]
Attrs = Mapping[str, Any]

_PART = "_part"


def operands(op: Op) -> Sequence[Value]:
    """Return the inputs of the product: of a part those without its base."""
    return op.ins[1:] if op.kind.endswith(_PART) else op.ins


def second_pair(op: Op) -> Sequence[Value]:
    """Return the operands of the product that a product of groups adds, of an adapter's branch; () without one."""
    found = operands(op)[5:]
    return found if len(found) == 2 else ()


def group_bias(op: Op) -> Value | None:
    """Return the bias of each group that a product of groups adds, if it does."""
    found = operands(op)[5:]
    return found[0] if len(found) == 1 else None


def some_groups(op: Op) -> tuple[int, int]:
    """Return the first group whose matrix b holds, and how many it holds."""
    b, ends = operands(op)[1], operands(op)[4]
    if not op.kind.endswith(_PART):
        return 0, ends.size
    terms, width = operands(op)[0].shape[1], op.outs[0].shape[1]
    return op.attrs["first"], b.shape[1] // terms if op.attrs.get("beside") else b.shape[0] // width


def _matrix(value: Value) -> tuple[int, int]:
    need(len(value.shape) == 2, f"an operand has two dimensions, got {value!r}")
    return value.shape[0], value.shape[1]


def _grouped(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    b, ends = ins[1], ins[4]
    beside, (height, across) = bool(attrs.get("beside")), _matrix(b)
    stacked = across if beside else height
    need(stacked % ends.size == 0, f"{ends.size} groups do not divide b, {list(b.shape)}")
    return _checked(ins, beside, height if beside else height // ends.size, across // ends.size if beside else across)


def _part(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    base, a, b, _, _, ends = ins[:6]
    beside, first = bool(attrs.get("beside")), attrs["first"]
    (height, across), (_, width), (_, terms) = _matrix(b), _matrix(base), _matrix(a)
    one, stacked = (terms, across) if beside else (width, height)
    need(stacked % one == 0 and stacked > 0, f"b, {list(b.shape)}, has no matrices of {width} and {terms}")
    count = stacked // one
    need(0 <= first <= ends.size - count, f"b has groups {first} to {first + count} of {ends.size}")
    (spec,) = _checked(ins[1:], beside, height if beside else width, terms if beside else across)
    need((base.shape, base.dtype) == (spec.shape, spec.dtype), f"base is {base!r}, the product {list(spec.shape)}")
    return [OutSpec(UNFINISHED_LABEL, spec.shape, spec.dtype)]


def _checked(ins: Ins, beside: bool, width: int, found: int) -> list[OutSpec]:
    """Check all but b, of which matrices are [width, found]."""
    a, _, scale_a, scale_b, ends, *added = ins
    (rows, terms), groups = _matrix(a), ends.size
    need(ends.dtype == "int32" and ends.shape == (groups,), f"ends of groups are int32 [groups], got {ends!r}")
    need(terms == found, f"a sums over {terms} elements, b over {found}")
    need(scale_a.shape == (2,) == scale_b.shape, "scales are fp32 [2]")
    if len(added) == 1:
        (bias,) = added
        need(bias.shape == (groups, width), f"bias must have shape [{groups}, {width}], got {list(bias.shape)}")
    elif added:
        a2, b2 = added
        rows2, terms2 = _matrix(a2)
        shape = (groups * terms2, width) if beside else (groups * width, terms2)
        need(rows2 == rows and b2.shape == shape, f"the second product is of {list(a2.shape)} and {list(b2.shape)}")
    return [OutSpec("linear", (rows, width), "bf16")]


def _share(op: Op, whole: int) -> int:
    """Return what a part takes of what all groups take, if each has as many rows."""
    return whole * some_groups(op)[1] // operands(op)[4].size


def _flops(op: Op) -> int:
    terms = sum(v.shape[1] for v in (operands(op)[0], *second_pair(op)[:1]))
    return _share(op, 2 * op.outs[0].size * terms)


def _part_traffic(op: Op) -> int:
    a, b, *_, ends = operands(op)[:5]
    added = operands(op)[5:]
    return b.nbytes + ends.nbytes + _share(op, sum(v.nbytes for v in (a, *added, op.outs[0])))


def _rows(op: Op) -> RowWise:
    second = (5,) if second_pair(op) else ()
    return RowWise(ins=(0, *second), outs=(0,), local=(0,), takes=(0, 2, 4, *second))


def _define(kind: str, infer: Any, attrs: Attrs, **fields: Any) -> OpDef:
    return OpDef(
        kind=kind,
        infer=infer,
        attrs={**attrs, "fast": (bool, False), "beside": (bool, False)},
        reference=f"surogate_recipes_fp8.reference:{kind}",
        flops=_flops,
        math=lambda op: "fp8",
        **fields,
    )


GROUPS: tuple[OpDef, ...] = (
    _define(
        "fp8_grouped_linear",
        _grouped,
        {},
        row_wise=_rows,
        group_wise=lambda op: GroupWise(weight=1, groups=op.ins[4].size, kind=f"{op.kind}{_PART}"),
    ),
    _define(
        f"fp8_grouped_linear{_PART}",
        _part,
        {"first": int},
        traffic=_part_traffic,
        may_overwrite=lambda op: {0: 0},
    ),
)

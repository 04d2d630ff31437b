"""Products of the rows of some experts, in the place of a base: of a run that decodes a few experts at a time.

With the `kind` of a product in front of `_part`, and (base, *its inputs): `w` holds the experts from `first` on, all
other inputs are of all experts. Rows of other experts are those of base.
"""

from __future__ import annotations

from typing import Any

from surogate_core.api import UNFINISHED_LABEL, Op, OpDef, OutSpec, Value, need

from .products import PRODUCTS
from .shapes import Attrs, Ins, define, matrix

_WHOLE = {definition.kind: definition for definition in PRODUCTS}
_KINDS = ("grouped_linear", "grouped_linear_dgrad", "grouped_linear_pair", "grouped_linear_dgrad_pair")


def experts_of(op: Op) -> tuple[int, int]:
    """Return the first expert of a part and how many it has."""
    width = op.ins[1 if "dgrad" in op.kind else 0].shape[1]
    return op.attrs["first"], op.ins[2].shape[0] // width


def _infer(kind: str) -> Any:
    def infer(ins: Ins, attrs: Attrs) -> list[OutSpec]:
        base, a, w, ends, *others = ins
        width = matrix(a if "dgrad" in kind else base, "dy" if "dgrad" in kind else "base")[1]
        rows, columns = matrix(w, "w")
        count, first = rows // width, attrs["first"]
        need(rows % width == 0 and count > 0, f"the {rows} rows of w are no multiple of {width}, those of an expert")
        need(0 <= first <= ends.size - count, f"w has experts {first} to {first + count} of {ends.size}")
        whole = Value("w", (ends.size * width, columns), w.dtype, "act")
        (spec,) = _WHOLE[kind].infer((a, whole, ends, *others), {})
        need((base.shape, base.dtype) == (spec.shape, spec.dtype), f"base is {base!r}, the product {list(spec.shape)}")
        return [OutSpec(UNFINISHED_LABEL, spec.shape, spec.dtype)]

    return infer


def _share(op: Op, whole: int) -> int:
    """Return the part's share of what all experts take, if each has as many rows."""
    return whole * experts_of(op)[1] // op.ins[3].size


def _flops(kind: str) -> Any:
    def flops(op: Op) -> int:
        _, a, w, ends, *others = op.ins
        return _share(op, _WHOLE[kind].flops(op.changed(kind=kind, ins=(a, w, ends, *others))))

    return flops


def _traffic(op: Op) -> int:
    """Count rows and biases of the part, and its weights."""
    _, a, w, ends, *others = op.ins
    return w.nbytes + ends.nbytes + _share(op, a.nbytes + op.outs[0].nbytes + sum(value.nbytes for value in others))


def _part(kind: str) -> OpDef:
    bias: dict[str, Any] = {"optional": {"bias": 4}, "param_kinds": {4: "vector"}} if kind == "grouped_linear" else {}
    return define(
        f"{kind}_part",
        _infer(kind),
        attrs={"first": int},
        may_overwrite=lambda op: {0: 0},
        flops=_flops(kind),
        traffic=_traffic,
        **bias,
    )


PARTS: tuple[OpDef, ...] = tuple(map(_part, _KINDS))

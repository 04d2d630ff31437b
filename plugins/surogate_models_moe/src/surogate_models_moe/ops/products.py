"""Products of rows with the weight of their expert."""

from __future__ import annotations

from typing import Any

from surogate_core.api import (
    IN_OUTPUTS,
    Emitter,
    Gradients,
    GroupWise,
    Op,
    OpDef,
    OutSpec,
    Product,
    Rewrites,
    Value,
    accumulator,
    need,
)

from .shapes import Attrs, Ins, define, expert_bias, indices, matrix, rows

MOST_THIN = 64
"""Most terms of a product whose time is that of what it writes, so that adding to a base is worth a kernel."""


def _weight(w: Value, ends: Value) -> tuple[int, int]:
    """Return the rows and columns of the weight of one expert."""
    rows, columns = matrix(w, "w")
    indices(ends, "ends", ends.size)
    need(rows % ends.size == 0, f"the {rows} rows of w are no multiple of {ends.size} experts")
    return rows // ends.size, columns


def _grouped(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w, ends, *bias = ins
    (rows, k), (n, columns) = matrix(x, "x"), _weight(w, ends)
    need(k == columns, f"x has {k} columns, w has {columns}")
    need(len(bias) < 2, f"there are {len(ins)} inputs, expected x, w, ends and at most a bias")
    for value in bias:
        expert_bias(value, ends.size, n)
    return [OutSpec("linear", (rows, n), x.dtype)]


def _grouped_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    x, w, ends, *bias = op.ins
    (dy,) = grads
    assert dy is not None
    dw = b.apply("grouped_linear_wgrad", dy, x, ends)
    dx = b.apply("grouped_linear_dgrad", dy, w, ends, label=f"d_{x.label}")
    return (dx, dw, None, *(b.apply("grouped_linear_bgrad", dy, ends) for _ in bias))


def _grouped_dgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, w, ends = ins
    (rows, n), (weight_rows, k) = matrix(dy, "dy"), _weight(w, ends)
    need(n == weight_rows, f"dy has {n} columns, the weight of an expert {weight_rows} rows")
    return [OutSpec("d_linear", (rows, k), dy.dtype)]


def _grouped_wgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, x, ends = ins
    (rows, n), (x_rows, k) = matrix(dy, "dy"), matrix(x, "x")
    need(rows == x_rows, f"dy has {rows} rows, x has {x_rows}")
    indices(ends, "ends", ends.size)
    return [OutSpec("d_weight", (ends.size * n, k), attrs.get("dtype", accumulator(dy.dtype)))]


def _grouped_bgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, ends = ins
    _, n = matrix(dy, "dy")
    indices(ends, "ends", ends.size)
    return [OutSpec("d_bias", (ends.size, n), accumulator(dy.dtype))]


def _added(product: Any) -> Any:
    """Return the rule of the shape of a product that adds to its last input."""

    def infer(ins: Ins, attrs: Attrs) -> list[OutSpec]:
        (spec,), base = product(ins[:3], attrs), ins[3]
        need((base.shape, base.dtype) == (spec.shape, spec.dtype), f"base is {base!r}, the product {list(spec.shape)}")
        return [spec]

    return infer


def _adding(op: Op) -> str:
    """With a bias it adds nothing more, as `linear` does."""
    terms = op.ins[0].shape[1]
    return f"{op.kind}_add" if terms <= MOST_THIN and len(op.ins) < 4 else ""


def _paired(product: Any) -> Any:
    """Return the rule of the shape of the sum of two products."""

    def infer(ins: Ins, attrs: Attrs) -> list[OutSpec]:
        x, w, ends, x2, w2 = ins
        (spec,), (other,) = product((x, w, ends), attrs), product((x2, w2, ends), attrs)
        need(spec == other, f"the products are {spec.dtype} {list(spec.shape)} and {other.dtype} {list(other.shape)}")
        return [spec]

    return infer


def _some_experts(op: Op) -> GroupWise:
    return GroupWise(weight=1, groups=op.ins[2].size, kind=f"{op.kind}_part")


def _grouped_add_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return *_grouped_vjp(b, op.changed(ins=op.ins[:3]), grads), grads[0]


def _grouped_flops(op: Op) -> int:
    """2RNK: each row meets the weight of one expert."""
    other = op.ins[1] if op.kind == "grouped_linear_wgrad" else op.outs[0]
    return 2 * op.ins[0].size * other.shape[1]


def _pair_flops(op: Op) -> int:
    return 2 * (op.ins[0].size + op.ins[3].size) * op.outs[0].shape[1]


_PAIR = rows((0, 3), local=(0,), takes=(0, 2, 3))

PRODUCTS: tuple[OpDef, ...] = (
    define(
        "grouped_linear",
        _grouped,
        optional={"bias": 3},
        vjp=_grouped_vjp,
        flops=_grouped_flops,
        product=Product(of="forward", adds="bias"),
        group_ends=2,
        param_kinds={3: "vector"},
        rewrites=Rewrites(add_kind=_adding),
        group_wise=_some_experts,
        row_wise=rows((0,), local=(0,), takes=(0, 2)),
    ),
    define(
        "grouped_linear_add",
        _added(_grouped),
        vjp=_grouped_add_vjp,
        flops=_grouped_flops,
        row_wise=rows((0, 3), local=(0,), takes=(0, 2, 3)),
        may_overwrite=lambda op: {0: 3},
    ),
    define(
        "grouped_linear_dgrad",
        _grouped_dgrad,
        flops=_grouped_flops,
        product=Product(of="dgrad"),
        group_ends=2,
        row_wise=rows((0,), local=(0,), takes=(0, 2)),
        rewrites=Rewrites(add_kind=_adding),
        group_wise=_some_experts,
    ),
    define(
        "grouped_linear_dgrad_add",
        _added(_grouped_dgrad),
        flops=_grouped_flops,
        row_wise=rows((0, 3), local=(0,), takes=(0, 2, 3)),
        may_overwrite=lambda op: {0: 3},
    ),
    define("grouped_linear_pair", _paired(_grouped), flops=_pair_flops, group_wise=_some_experts, row_wise=_PAIR),
    define(
        "grouped_linear_dgrad_pair",
        _paired(_grouped_dgrad),
        flops=_pair_flops,
        group_wise=_some_experts,
        row_wise=_PAIR,
    ),
    define(
        "grouped_linear_wgrad",
        _grouped_wgrad,
        attrs={"dtype": (str | None, IN_OUTPUTS)},
        flops=_grouped_flops,
        product=Product(of="wgrad"),
        group_ends=2,
        row_wise=rows((0, 1), (), sums=(0,), takes=(0, 1, 2)),
    ),
    define(
        "grouped_linear_bgrad",
        _grouped_bgrad,
        flops=lambda op: op.ins[0].size,
        row_wise=rows((0,), (), sums=(0,), takes=(0, 1)),
    ),
)

"""Products with a weight, and those that add to a matrix."""

from __future__ import annotations

from typing import Any

from ..dtypes import accumulator
from ..errors import need
from ..program.op import Op
from ..program.opdef import IN_OUTPUTS, Emitter, Gradients, OpDef, OutSpec, Product, Rewrites
from ..program.value import Value
from .definition import Attrs, Infer, Ins, define, elements, matrix, rows


def _linear(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w = ins[0], ins[1]
    (t, k), (n, wk) = matrix(x, "x"), matrix(w, "w")
    need(k == wk, f"x has {k} columns, w has {wk}")
    need(len(ins) == 2 or ins[2].shape == (n,), f"bias must have shape [{n}]")
    return [OutSpec("linear", (t, n), attrs.get("dtype", x.dtype))]


def _linear_grads(b: Emitter, ins: Ins, dy: Value | None) -> Gradients:
    assert dy is not None
    x, w = ins[0], ins[1]
    dw = b.apply("linear_wgrad", dy, x)
    dx = b.apply("linear_dgrad", dy, w, dtype=x.dtype, label=f"d_{x.label}")
    if len(ins) == 2:
        return dx, dw
    return dx, dw, b.apply("linear_bgrad", dy)


def _linear_add(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w, base = ins
    return _added(_linear([x, w], attrs), base)


def _linear_dgrad_add(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, w, base = ins
    return _added(_linear_dgrad([dy, w], attrs), base)


def _linear_pair(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return _paired(_linear(ins[:2], attrs), _linear(ins[2:], attrs))


def _linear_pair_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return *_linear_grads(b, op.ins[:2], grads[0]), *_linear_grads(b, op.ins[2:], grads[0])


def _linear_dgrad_pair(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return _paired(_linear_dgrad(ins[:2], attrs), _linear_dgrad(ins[2:], attrs))


def _paired(first: list[OutSpec], second: list[OutSpec]) -> list[OutSpec]:
    need(
        first == second,
        f"the products are {first[0].dtype} {list(first[0].shape)} and {second[0].dtype} {list(second[0].shape)}",
    )
    return first


def _added(product: list[OutSpec], base: Value) -> list[OutSpec]:
    """The sum has the dtype of the base, whatever the product alone would have."""
    (spec,) = product
    need(base.shape == spec.shape, f"the product is {list(spec.shape)}, the base {list(base.shape)}")
    return [OutSpec(spec.label, spec.shape, base.dtype)]


def _linear_dgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, w = ins
    (t, n), (wn, k) = matrix(dy, "dy"), matrix(w, "w")
    need(n == wn, f"dy has {n} columns, w has {wn} rows")
    return [OutSpec("d_linear", (t, k), attrs.get("dtype", dy.dtype))]


def _linear_wgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, x = ins
    (t, n), (xt, k) = matrix(dy, "dy"), matrix(x, "x")
    need(t == xt, f"dy has {t} rows, x has {xt}")
    return [OutSpec("d_weight", (n, k), attrs.get("dtype", accumulator(dy.dtype)))]


def _linear_bgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec("d_bias", (matrix(ins[0], "dy")[1],), accumulator(ins[0].dtype))]


def _product_flops(op: Op) -> int:
    """2MNK FLOPs of a forward product, of dgrad, or of a sum of two: K is the summed dimension of their first input."""
    operands = op.ins[::2] if len(op.ins) == 4 else op.ins[:1]
    return 2 * sum(x.size for x in operands) * op.outs[0].shape[1]


def _product(kind: str, infer: Infer, product: Product, **fields: Any) -> OpDef:
    """`dtype` is that of the product. Default: that of the first operand; of wgrad, that of its sums."""
    return define(
        kind, infer, attrs={"dtype": (str | None, IN_OUTPUTS)}, product=product, **{"flops": _product_flops} | fields
    )


PRODUCTS: tuple[OpDef, ...] = (
    _product(
        "linear",
        _linear,
        Product(of="forward", adds="bias"),
        vjp=lambda b, op, grads: _linear_grads(b, op.ins, grads[0]),
        # With a bias it adds nothing more, so that the kernel of the sum adds one thing only.
        rewrites=Rewrites(add_kind=lambda op: "linear_add" if len(op.ins) == 2 else "", pair_kind="linear_pair"),
        row_wise=rows((0,)),
    ),
    _product(
        "linear_add",
        _linear_add,
        Product(of="forward", adds="base"),
        vjp=lambda b, op, grads: (*_linear_grads(b, op.ins[:2], grads[0]), grads[0]),
        may_overwrite=lambda op: {0: 2},
        row_wise=rows((0, 2)),
    ),
    _product(
        "linear_pair",
        _linear_pair,
        Product(of="forward", second="linear"),
        vjp=_linear_pair_vjp,
        row_wise=rows((0, 2)),
    ),
    _product(
        "linear_dgrad",
        _linear_dgrad,
        Product(of="dgrad"),
        rewrites=Rewrites(add_kind=lambda op: "linear_dgrad_add", pair_kind="linear_dgrad_pair"),
        row_wise=rows((0,)),
    ),
    _product(
        "linear_dgrad_add",
        _linear_dgrad_add,
        Product(of="dgrad", adds="base"),
        may_overwrite=lambda op: {0: 2},
        row_wise=rows((0, 2)),
    ),
    _product(
        "linear_dgrad_pair",
        _linear_dgrad_pair,
        Product(of="dgrad", second="linear_dgrad"),
        row_wise=rows((0, 2)),
    ),
    _product(
        "linear_wgrad",
        _linear_wgrad,
        Product(of="wgrad"),
        flops=lambda op: 2 * op.ins[0].size * op.ins[1].shape[1],
        row_wise=rows((0, 1), (), (0,)),
    ),
    define("linear_bgrad", _linear_bgrad, flops=elements(1), row_wise=rows((0,), (), (0,))),
)

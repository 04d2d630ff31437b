"""Ops on whole values: sums, casts, copies."""

from __future__ import annotations

from ..errors import need
from ..program.op import Op
from ..program.opdef import Emitter, Gradients, OpDef, OutSpec
from ..program.value import UNFINISHED_LABEL
from .definition import Attrs, Ins, define, elements, rows


def _add(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    a, b = ins
    need(a.shape == b.shape and a.dtype == b.dtype, f"{a!r} and {b!r} differ")
    return [OutSpec(a.label, a.shape, a.dtype)]


def _cast(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec(ins[0].label, ins[0].shape, attrs["dtype"])]


def _cast_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """Cast the gradient of an activation to the activation's dtype.

    The gradient of a param stays as it is, so that a product's fp32 sum is not narrowed.
    """
    (dy,) = grads
    assert dy is not None
    x = op.ins[0]
    return (dy if x.role == "param" or dy.dtype == x.dtype else b.apply("cast", dy, dtype=x.dtype),)


def _fill(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec("fill", tuple(attrs["shape"]), attrs["dtype"])]


def _unwritten(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec(UNFINISHED_LABEL, tuple(attrs["shape"]), attrs["dtype"])]


def _accumulate_rounded(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    addend, total = ins[0], ins[1]
    need(addend.shape == total.shape, f"{addend!r} cannot be added to {total!r}")
    return [OutSpec("sum", total.shape, total.dtype)]


def _copy(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec(ins[0].label, ins[0].shape, ins[0].dtype)]


def _wait(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    need(len(ins) > 0, "wait needs a value that an op of a side lane writes")
    return []


def _commit(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    pending, state = ins[1], ins[2]
    need(pending.shape == state.shape and pending.dtype == state.dtype, f"{pending!r} is no copy of {state!r}")
    return [OutSpec(state.label, state.shape, state.dtype)]


def _reference_vjp(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    """A gradient computed by autograd has the shape and dtype of its input."""
    return [OutSpec(f"d_{ins[i].label}", ins[i].shape, ins[i].dtype) for i in attrs["wrt"]]


ELEMENTWISE: tuple[OpDef, ...] = (
    define("add", _add, vjp=lambda b, op, grads: (grads[0], grads[0]), flops=elements(1), row_wise=rows((0, 1))),
    define("cast", _cast, attrs={"dtype": str}, vjp=_cast_vjp, row_wise=rows((0,))),
    define("fill", _fill, attrs={"shape": tuple, "dtype": str, "value": float}),
    define("unwritten", _unwritten, attrs={"shape": tuple, "dtype": str}, traffic=lambda op: 0),
    define("accumulate_rounded", _accumulate_rounded, attrs={"stream": int}, flops=elements(1), positioned=True),
    define("copy", _copy, row_wise=rows((0,))),
    define("move", _copy, uses_host=True),
    define("wait", _wait, uses_host=True, traffic=lambda op: 0),
    define("commit", _commit),
    define(
        "reference_vjp",
        _reference_vjp,
        attrs={"reference": str, "of": str, "of_attrs": dict, "n_ins": int, "given": tuple, "wrt": tuple},
    ),
)

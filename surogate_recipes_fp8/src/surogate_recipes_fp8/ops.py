"""The ops of FP8 products: ops that quantize what they compute, products of quantized operands, the delayed scales.
Those of groups of rows are in `group_ops.py`, those of the LM head in `head_ops.py`.

An op that quantizes has the inputs of a standard op. Its outputs are the FP8 copies of the first one, then those of the
standard op, of which the first is there only if something besides products reads it. `reference.py` explains `scaling`,
and the inputs and outputs that depend on it. Attrs:

dtype       format of the copies
transposed  also write the transposed copy
wide        also write the tensor itself, for readers other than FP8 products
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surogate_core.api import (
    Emitter,
    Gradients,
    Op,
    OpDef,
    OutSpec,
    Rewrites,
    RowWise,
    Value,
    accumulator,
    need,
)

from .formats import COLUMNS
from .group_ops import GROUPS
from .head_ops import HEAD

Ins = Sequence[Value]
Attrs = Mapping[str, Any]

SCALE = "scale"
"""Label of the scale that an op computes."""


def _given(scaling: str, count: int) -> bool:
    return count in {"delayed": (2,), "given": (1,), "current": (0, 1), "fallback": (1,)}[scaling]


def _copies(label: str, shape: tuple[int, ...], attrs: Attrs, wide: str = "") -> list[OutSpec]:
    """Specs of the FP8 copies of a matrix, and with `wide` of the matrix itself, which has this dtype."""
    alone = not (attrs.get("transposed") or attrs.get("column_sums"))
    need(len(shape) == 2 or (len(shape) == 1 and alone), f"a matrix is quantized, or a part of it, not {list(shape)}")
    copies = [OutSpec(label, shape, attrs["dtype"])]
    if attrs.get("transposed"):
        copies.append(OutSpec(label, shape[::-1], attrs["dtype"]))
    if wide and attrs.get("wide"):
        copies.append(OutSpec(label, shape, wide))
    return copies


def _scale(own: int, ins: Ins, attrs: Attrs) -> list[OutSpec]:
    """Check the inputs after the op's `own` ones. Return the spec of the scale, if the op computes it."""
    given, scaling = ins[own:], attrs["scaling"]
    need(_given(scaling, len(given)), f"scaling {scaling} with {len(given)} inputs for scale and amax")
    need(all(v.dtype == "fp32" and v.shape == (2,) for v in given), f"scale and amax are fp32 [2], got {given!r}")
    return [OutSpec(SCALE, (2,), "fp32")] if scaling in ("current", "fallback") else []


def _changes(own: Callable[[Attrs], int]) -> Callable[[Ins, Attrs], tuple[int, ...]]:
    """The amax of a quantizer that records is changed: the last input."""

    def changes(ins: Ins, attrs: Attrs) -> tuple[int, ...]:
        scaling = attrs["scaling"]
        records = scaling == "delayed" or (scaling == "current" and len(ins) > own(attrs))
        return (len(ins) - 1,) if records else ()

    return changes


def _again(b: Emitter, kind: str, ins: Ins, op: Op, own: int, kept: frozenset[Value]) -> tuple[Value, ...]:
    """Emit the op once more as `kind`, with `ins` and the scale that it used. Nothing is recorded.

    That is the input after its `own` ones, or its last output. If that is dropped too, it is computed again from the
    same tensor.
    """
    computed = op.attrs["scaling"] == "current"
    if computed and op.outs[-1] not in kept:
        return b.emit(kind, *ins, label=op.outs[0].label, **op.attrs)
    scale = op.outs[-1] if computed else op.ins[own]
    return b.emit(kind, *ins, scale, label=op.outs[0].label, **{**op.attrs, "scaling": "given"})


def _rematerialize(own: int) -> Callable[[Emitter, Op, frozenset[Value]], Gradients]:
    def rematerialize(b: Emitter, op: Op, kept: frozenset[Value]) -> Gradients:
        fresh = _again(b, op.kind, op.ins[:own], op, own, kept)
        return *fresh, *[None] * (len(op.outs) - len(fresh))

    return rematerialize


# --------------------------------------------------------------------------------------------------- ops that quantize


def _quantize(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x = ins[0]
    sums = [OutSpec("d_bias", x.shape[1:], "fp32")] if attrs.get("column_sums") else []
    return [*_copies(x.label, x.shape, attrs), *sums, *_scale(1, ins, attrs)]


def _elementwise(op: Op) -> bool:
    return op.attrs["scaling"] == "given" and not op.attrs.get("transposed") and not op.attrs.get("column_sums")


def _copies_to(op: Op) -> str:
    alone = op.attrs["scaling"] == "current" and len(op.ins) == 1 and not op.attrs.get("column_sums")
    return op.attrs["dtype"] if alone else ""


def _rmsnorm(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w = ins[:2]
    need(w.shape == x.shape[1:], f"w must have shape {list(x.shape[1:])}")
    return [*_copies("norm", x.shape, attrs, x.dtype), OutSpec("rstd", x.shape[:1], "fp32"), *_scale(2, ins, attrs)]


def _add_rmsnorm(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, residual, w = ins[:3]
    need(x.shape == residual.shape and x.dtype == residual.dtype, f"{x!r} cannot be added to {residual!r}")
    need(w.shape == x.shape[1:], f"w must have shape {list(x.shape[1:])}")
    own = [OutSpec("rstd", x.shape[:1], "fp32"), OutSpec("residual", x.shape, x.dtype)]
    return [*_copies("norm", x.shape, attrs, x.dtype), *own, *_scale(3, ins, attrs)]


def _add_rmsnorm_rematerialize(b: Emitter, op: Op, kept: frozenset[Value]) -> Gradients:
    """From the stored residual if there is one, as `add_rmsnorm` does."""
    computed = op.attrs["scaling"] == "current"
    at = len(op.outs) - 1 - computed
    if op.outs[at] not in kept:
        return _rematerialize(3)(b, op, kept)
    own = (op.outs[at], op.ins[2])
    fresh: list[Value | None] = [*_again(b, "fp8_rmsnorm", own, op, 3, kept)]
    fresh.insert(at, None)
    return *fresh, *[None] * (len(op.outs) - len(fresh))


def _swiglu(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    rows, width = ins[0].shape
    need(width % 2 == 0, f"gate_up has {width} columns; the number must be even")
    return [*_copies("swiglu", (rows, width // 2), attrs, ins[0].dtype), *_scale(1, ins, attrs)]


def _swiglu_bwd_own(attrs: Attrs) -> int:
    return 3 if attrs.get("hidden") else 2


def _swiglu_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, gate_up = ins[:2]
    need(2 * dy.size == gate_up.size, f"dy is {list(dy.shape)}, gate_up {list(gate_up.shape)}")
    hidden = [OutSpec("swiglu", dy.shape[::-1], attrs["hidden"])] if attrs.get("hidden") else []
    copies = _copies("d_gate_up", gate_up.shape, attrs, gate_up.dtype)
    return [*copies, *hidden, *_scale(_swiglu_bwd_own(attrs), ins, attrs)]


def _weighted_swiglu(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    """Rows of experts: what the products of groups read, whose dw are in bf16, so no copy is transposed."""
    gate_up, weights, order = ins[:3]
    limit = attrs.get("limit", 0.0)
    need(limit >= 0, f"limit must be positive, or 0 for none, got {limit}")
    (rows, width), total = gate_up.shape, accumulator(gate_up.dtype)
    need(width % 2 == 0, f"gate_up has {width} columns; the number must be even")
    need(order.dtype == "int32" and order.shape == (rows,), f"order is int32 [{rows}], got {order!r}")
    need(weights.size == rows and weights.dtype == total, f"weights are {total} with {rows} elements, got {weights!r}")
    need(not attrs.get("transposed"), "copies of rows of groups are not transposed")
    return [*_copies("swiglu", (rows, width // 2), attrs, gate_up.dtype), *_scale(3, ins, attrs)]


def _weighted_swiglu_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, gate_up, weights = ins[:3]
    _weighted_swiglu(ins[1:], attrs)
    need(2 * dy.size == gate_up.size, f"dy is {list(dy.shape)}, gate_up {list(gate_up.shape)}")
    copies = _copies("d_gate_up", gate_up.shape, attrs, gate_up.dtype)
    return [*copies, OutSpec("d_weights", weights.shape, weights.dtype), *_scale(4, ins, attrs)]


def _norm_bwd_own(attrs: Attrs) -> int:
    return 5 if attrs.get("residual") else 4


def _rmsnorm_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    own = [OutSpec("d_norm", ins[1].shape, ins[1].dtype), OutSpec("d_weight", ins[2].shape, "fp32")]
    return _norm_gradient(ins, attrs, own)


def _rmsnorm_dgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return _norm_gradient(ins, attrs, [OutSpec("d_norm", ins[1].shape, ins[1].dtype)])


def _norm_gradient(ins: Ins, attrs: Attrs, own: list[OutSpec]) -> list[OutSpec]:
    dy, x, w, rstd = ins[:4]
    need(dy.shape == x.shape, f"dy is {list(dy.shape)}, x {list(x.shape)}")
    need(w.shape == x.shape[1:], f"w must have shape {list(x.shape[1:])}")
    need(rstd.shape == x.shape[:1], f"rstd must have shape [{x.shape[0]}]")
    need(not attrs.get("residual") or ins[4].shape == x.shape, f"dresidual must have shape {list(x.shape)}")
    return [*_copies("d_norm", x.shape, attrs), *own, *_scale(_norm_bwd_own(attrs), ins, attrs)]


def _elements(count: int) -> Callable[[Op], int]:
    return lambda op: count * op.ins[0].size


def _rows(
    own: Callable[[Attrs], int], ins: Sequence[int], sums: Sequence[int] = (), local: bool = False
) -> Callable[[Op], RowWise]:
    """Return the `OpDef.row_wise` of an op that quantizes: `ins` of its `own` inputs have rows, the outputs `sums`
    behind its copies have none. Its scale is given, or that of the rows that it gets. local: the rows are those of
    experts.

    Rows of a transposed copy are columns, so each tile has one of its own.
    """

    def row_wise(op: Op) -> RowWise:
        attrs, scaling, count = op.attrs, op.attrs["scaling"], own(op.attrs)
        copies, computed = 1 + bool(attrs.get("transposed")), scaling in ("current", "fallback")
        summed = (copies,) if attrs.get("column_sums") else tuple(copies + i for i in sums)
        hidden = (copies + bool(attrs.get("wide")),) if attrs.get("hidden") else ()
        apart = (*range(1, copies), *hidden, *((len(op.outs) - 1,) if computed else ()))
        rows = tuple(i for i in ins if i < count)
        outs = tuple(i for i in range(len(op.outs)) if i not in (*summed, *apart))
        of_experts = tuple(i for i in outs if op.outs[i].shape[0] == op.ins[0].shape[0]) if local else ()
        return RowWise(
            ins=rows,
            outs=outs,
            sums=summed,
            largest=tuple(_changes(own)(op.ins, attrs)),
            local=(*of_experts, *apart),
            takes=(
                *(rows if local else ()),
                *((count - 1,) if hidden else ()),
                *((count,) if scaling == "given" else ()),
            ),
            together=computed,
        )

    return row_wise


def _quantizing(kind: str, infer: Any, own: Callable[[Attrs], int], attrs: Mapping[str, Any], **fields: Any) -> OpDef:
    return OpDef(
        kind=kind,
        infer=infer,
        attrs={"dtype": str, "scaling": str, "transposed": (bool, False), **attrs},
        reference=f"surogate_recipes_fp8.reference:{kind}",
        changes=_changes(own),
        passes=_measuring,
        **fields,
    )


def _measuring(op: Op) -> int:
    """The bytes of the pass that finds the current scale, before the one that quantizes."""
    return sum(v.nbytes for v in op.ins) if op.attrs["scaling"] == "current" else 0


_WIDE: Mapping[str, Any] = {"wide": (bool, False)}
_WIDE_NORM: Mapping[str, Any] = {**_WIDE, "eps": float}
_GATE: Mapping[str, Any] = {
    **_WIDE,
    "alpha": (float, 1.0),
    "limit": (float, 0.0),
    "offset": (float, 0.0),
    "interleaved": (bool, False),
}
"""Those of the gate of experts. Its form is SwiGLU, or that of gpt-oss: see `fp8_weighted_swiglu` of `reference.py`."""
_NORM_BWD: Mapping[str, Any] = {"residual": (bool, False)}

QUANTIZERS: tuple[OpDef, ...] = (
    _quantizing(
        "fp8_quantize",
        _quantize,
        lambda attrs: 1,
        {"column_sums": (bool, False)},
        rewrites=Rewrites(rematerialize=_rematerialize(1)),
        copies_to=_copies_to,
        elementwise=_elementwise,
        flops=_elements(2),
        row_wise=_rows(lambda attrs: 1, (0,)),
    ),
    _quantizing(
        "fp8_rmsnorm",
        _rmsnorm,
        lambda attrs: 2,
        _WIDE_NORM,
        rewrites=Rewrites(rematerialize=_rematerialize(2)),
        flops=_elements(6),
        row_wise=_rows(lambda attrs: 2, (0,)),
    ),
    _quantizing(
        "fp8_add_rmsnorm",
        _add_rmsnorm,
        lambda attrs: 3,
        _WIDE_NORM,
        rewrites=Rewrites(rematerialize=_add_rmsnorm_rematerialize),
        flops=_elements(7),
        row_wise=_rows(lambda attrs: 3, (0, 1)),
    ),
    *(
        _quantizing(
            f"fp8_{gated}",
            _swiglu,
            lambda attrs: 1,
            _WIDE,
            rewrites=Rewrites(rematerialize=_rematerialize(1)),
            flops=_elements(flops),
            row_wise=_rows(lambda attrs: 1, (0,)),
        )
        for gated, flops in (("swiglu", 4), ("geglu", 10))
    ),
    *(
        _quantizing(
            f"fp8_{gated}_bwd",
            _swiglu_bwd,
            _swiglu_bwd_own,
            {**_WIDE, "hidden": (str, "")},
            flops=_elements(flops),
            row_wise=_rows(_swiglu_bwd_own, (0, 1)),
        )
        for gated, flops in (("swiglu", 10), ("geglu", 24))
    ),
    _quantizing(
        "fp8_weighted_swiglu",
        _weighted_swiglu,
        lambda attrs: 3,
        _GATE,
        rewrites=Rewrites(rematerialize=_rematerialize(3)),
        flops=_elements(3),
        row_wise=_rows(lambda attrs: 3, (0, 1, 2), local=True),
    ),
    _quantizing(
        "fp8_weighted_swiglu_bwd",
        _weighted_swiglu_bwd,
        lambda attrs: 4,
        _GATE,
        may_overwrite=lambda op: {1: 1} if op.attrs.get("wide") else {},
        flops=_elements(11),
        row_wise=_rows(lambda attrs: 4, (0, 1, 2, 3), local=True),
    ),
    _quantizing(
        "fp8_rmsnorm_bwd",
        _rmsnorm_bwd,
        _norm_bwd_own,
        _NORM_BWD,
        flops=_elements(11),
        row_wise=_rows(_norm_bwd_own, (0, 1, 3, 4), sums=(1,)),
    ),
    _quantizing(
        "fp8_rmsnorm_dgrad",
        _rmsnorm_dgrad,
        _norm_bwd_own,
        _NORM_BWD,
        flops=_elements(9),
        row_wise=_rows(_norm_bwd_own, (0, 1, 3, 4)),
    ),
)

# ------------------------------------------------------------------------------------------------------------ products


def _exact_copies(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (w,) = ins
    need(len(w.shape) == 2, f"a weight is a matrix, got {list(w.shape)}")
    shapes = (w.shape, w.shape[::-1]) if attrs["transposed"] else (w.shape,)
    return [*(OutSpec(w.label, shape, "e5m2") for shape in shapes), OutSpec(SCALE, (2,), "fp32")]


def _operand(value: Value, transposed: bool) -> tuple[int, int]:
    need(len(value.shape) == 2, f"an operand has two dimensions, got {value!r}")
    outer, summed = value.shape[::-1] if transposed else value.shape
    return outer, summed


def _linear(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    a, b, scale_a, scale_b = ins[:4]
    (m, k), (n, bk) = _operand(a, bool(attrs.get("trans_a"))), _operand(b, bool(attrs.get("trans_b")))
    need(k == bk, f"a sums over {k} elements, b over {bk}")
    need(scale_a.shape == (2,) == scale_b.shape, "scales are fp32 [2]")
    return [OutSpec("linear", (m, n), attrs["dtype"])]


def _linear_bias(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (out,) = _linear(ins, attrs)
    need(len(ins) == 4 or ins[4].shape == out.shape[1:], f"bias must have shape {list(out.shape[1:])}")
    return [out]


def _linear_add(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (out,) = _linear(ins[:4], attrs)
    base = ins[4]
    need(base.shape == out.shape, f"the product is {list(out.shape)}, the base {list(base.shape)}")
    return [OutSpec(out.label, out.shape, base.dtype)]


def _product_flops(op: Op) -> int:
    summed = op.ins[0].shape[0 if op.attrs.get("trans_a") else 1]
    return 2 * op.outs[0].size * summed


def _fp8(op: Op) -> str:
    return "fp8"


def _traffic(op: Op) -> int:
    """Return the bytes that a product moves while it computes."""
    return sum(v.nbytes for v in op.ins[:2]) + _added_and_written(op) - _passes(op)


def _passes(op: Op) -> int:
    """Return the bytes that a product moves after its loop and that no other tile's loop hides.

    Measured inside of steps on an H200 (2026-11-23): with fast accumulation a product takes as long as its arithmetic,
    whatever it writes and adds to; without, three quarters of these bytes are not hidden.
    """
    return 0 if op.attrs["fast"] else _added_and_written(op) * 3 // 4


def _added_and_written(op: Op) -> int:
    """Return the bytes of what a product moves besides its factors."""
    return sum(v.nbytes for v in (*op.ins[2:], *op.outs, *(op.outs[i] for i in op.accumulate)))


def _product_rows(*added: int) -> Callable[[Op], RowWise | None]:
    def row_wise(op: Op) -> RowWise | None:
        if op.outs[0].role == "grad":
            rows = (0, 1) if op.attrs.get("trans_a") else ()
            return RowWise(ins=rows, sums=(0,), takes=(2, 3) if rows else (0, 1, 2, 3))
        return None if op.attrs.get("trans_a") else RowWise(ins=(0, *added), outs=(0,), takes=(2,))

    return row_wise


def _plain(kind: str, infer: Any, **fields: Any) -> OpDef:
    return OpDef(kind=kind, infer=infer, reference=f"surogate_recipes_fp8.reference:{kind}", **fields)


_PRICE: dict[str, Any] = {
    "attrs": {"dtype": str, "fast": (bool, False), "trans_a": (bool, False), "trans_b": (bool, False)},
    "flops": _product_flops,
    "math": _fp8,
    "traffic": _traffic,
    "passes": _passes,
}

PRODUCTS: tuple[OpDef, ...] = (
    _plain("fp8_linear", _linear_bias, **_PRICE, row_wise=_product_rows()),
    _plain("fp8_linear_add", _linear_add, **_PRICE, may_overwrite=lambda op: {0: 4}, row_wise=_product_rows(4)),
)

# ---------------------------------------------------------------------------------------------------- between the steps


def _same(ins: Ins) -> list[OutSpec]:
    return [OutSpec(v.label, v.shape, v.dtype) for v in ins]


def _transpose(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec(ins[0].label, ins[0].shape[::-1], ins[0].dtype)]


def _inexact(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    codes, scales, amax = ins
    need({codes.dtype, scales.dtype} == {"uint8"} and amax.dtype == "fp32", f"reads uint8, uint8, fp32, got {ins!r}")
    rows, blocks = _operand(scales, False)
    need(codes.shape == (rows, 16 * blocks), f"codes of {blocks} blocks a row are [{rows}, {16 * blocks}]")
    need(len(amax.shape) == 2 and amax.shape[1] == 2, f"an amax of matrices is [matrices, 2], got {amax!r}")
    return [OutSpec("inexact", (), "int32")]


def _amax(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec("amax", (2,), "fp32")]


def _scales(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec(SCALE, (2,), "fp32") for _ in ins]


def _guard(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return _same(ins[:2])


def _update(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    history, *states = ins[1:]
    count = len(attrs["maxima"])
    need(history.shape[1:] == (count,), f"history has {history.shape} entries for {count} quantizers")
    need(len(states) == 2 * count, f"{count} quantizers have as many amax and scales, got {len(states)} values")
    amax, scales = states[:count], states[count:]
    return _same([history, *scales, *amax])


def _count(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    need(ins[1].shape == (2,), f"a scale is fp32 [2], got {ins[1]!r}")
    return [OutSpec("amax", (2,), "fp32"), OutSpec("counts", (3,), "int64")]


def _report(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    n, history = len(attrs["maxima"]), attrs["history"]
    need(len(ins) == 3 * n + history, f"{n} tensors have as many amax, counts and scales, got {len(ins)} values")
    need(len(attrs["sizes"]) == len(attrs["columns"]) == n, f"{n} tensors have as many sizes and columns")
    return [OutSpec("numerics", (n, len(COLUMNS)), "fp32")]


STEPS: tuple[OpDef, ...] = (
    _plain(
        "fp8_quantize_exact",
        _exact_copies,
        attrs={"transposed": bool},
        flops=_elements(2),
        copies_to=lambda op: "e5m2",
    ),
    _plain("fp8_inexact", _inexact, flops=lambda op: op.ins[1].size),
    _plain("fp8_transpose", _transpose),
    _plain("fp8_amax", _amax),
    _plain("fp8_scales", _scales, attrs={"maximum": float}),
    _plain("fp8_guard", _guard),
    _plain("fp8_update", _update, attrs={"maxima": tuple}),
    _plain("fp8_count", _count, attrs={"dtype": str}),
    _plain("fp8_report", _report, attrs={"sizes": tuple, "maxima": tuple, "columns": tuple, "history": bool}),
)

OPS: tuple[OpDef, ...] = (*QUANTIZERS, *PRODUCTS, *GROUPS, *HEAD, *STEPS)

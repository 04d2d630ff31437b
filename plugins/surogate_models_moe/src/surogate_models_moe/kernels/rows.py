"""Rows of tokens on their way to experts and back, and the gate of a shared expert (`csrc/rows.cu`, `gate_rows.cu`)."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target

from .support import WORD, supports


def _width(op: Op) -> int:
    """Columns of a row; of SwiGLU, those of the gate alone."""
    return op.outs[0].shape[1] // (2 if op.kind == "weighted_swiglu_bwd" else 1)


def _supports(op: Op, target: Target) -> Support:
    return supports(op, target, _width(op))


def _in_word(op: Op) -> int:
    """Elements in the 16 bits that the kernel takes for one: two of FP8."""
    return 16 // DTYPES[op.ins[0].dtype].bits


def _gather_supports(op: Op, target: Target) -> Support:
    """Support rows that are whole words of 16 bytes."""
    width, word = _width(op), WORD * _in_word(op)
    if width % word:
        return Support(False, f"widths must be multiples of {word}, got {width}")
    return supports(op, target)


def _bind_gather(op: Op, ctx: BindContext) -> Call:
    """`order` is not read: a thread has a part of a token, which it writes to the token's rows."""
    from .. import _C

    (x, _, place), (y,) = op.ins, op.outs
    tokens, width = x.shape
    return ctx.call(_C.gather_rows, x, place, y, tokens, y.shape[0] // tokens, width // _in_word(op))


def _bind_sum(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (y, _, place), (out,) = op.ins, op.outs
    tokens, width = out.shape
    return ctx.call(_C.sum_rows, y, place, out, tokens, op.attrs["k"], width)


def _bind_swiglu(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(getattr(_C, op.kind), *op.ins, *op.outs, op.ins[0].shape[0], _width(op))


def _bind_gate(op: Op, ctx: BindContext) -> Call:
    """Bind `gate_rows` or its gradient. Both launchers take the pointers in the order of ins and outs."""
    from .. import _C

    return ctx.call(getattr(_C, op.kind), *op.ins, *op.outs, *op.outs[0].shape)


def _bind_weighted_gate(op: Op, ctx: BindContext) -> Call:
    """Bind the gate of a family (`csrc/weighted_gate.cu`)."""
    from .. import _C

    launcher = _C.weighted_gate if op.kind == "weighted_swiglu" else _C.weighted_gate_bwd
    form = (*(float(op.attrs.get(name, default)) for name, default in _FORM), bool(op.attrs.get("interleaved", False)))
    return ctx.call(launcher, *op.ins, *op.outs, op.ins[0].shape[0], _width(op), *form)


GATHER: tuple[KernelDef, ...] = tuple(
    KernelDef(op="gather_rows", dtypes=(dtype, "int32", "int32", dtype), supports=_gather_supports, bind=_bind_gather)
    for dtype in ("bf16", "e4m3", "e5m2")
)

_FORM = (("alpha", 1.0), ("limit", 0.0), ("offset", 0.0))
"""Attributes of a gate that are numbers, in the order of the launcher, and what they are in SwiGLU."""

GATES: tuple[KernelDef, ...] = tuple(
    KernelDef(
        op=kind,
        dtypes=dtypes,
        attrs=("alpha", "limit", "offset", "interleaved"),
        supports=_supports,
        bind=_bind_weighted_gate,
    )
    for kind, dtypes in (
        ("weighted_swiglu", ("bf16", "fp32", "int32", "bf16")),
        ("weighted_swiglu_bwd", ("bf16", "bf16", "fp32", "int32", "bf16", "fp32")),
    )
)

OTHERS: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=dtypes, supports=_supports, bind=bind)
    for kind, dtypes, bind in (
        ("sum_rows", ("bf16", "int32", "int32", "bf16"), _bind_sum),
        ("weighted_swiglu", ("bf16", "fp32", "int32", "bf16"), _bind_swiglu),
        ("weighted_swiglu_bwd", ("bf16", "bf16", "fp32", "int32", "bf16", "fp32"), _bind_swiglu),
        ("gate_rows", ("bf16",) * 3, _bind_gate),
        ("gate_rows_bwd", ("bf16",) * 5, _bind_gate),
    )
)

KERNELS: tuple[KernelDef, ...] = (*GATHER, *OTHERS, *GATES)
"""In order of preference: plain SwiGLU has a kernel of its own."""

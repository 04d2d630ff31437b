"""Compiled quantizers of single tensors, of SwiGLU and GeGLU, and of the gate of the rows of experts."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target, Value

from ..formats import LARGEST
from .quantization import Quantization, extent, measured_bytes, supports, supports_dtypes, supports_format


def partial_sums_bytes(rows: int, columns: int) -> int:
    """Bytes of one fp32 row of sums per 64 rows (quantize.cu)."""
    return 4 * -(-rows // 64) * columns


def _bind_quantize(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    parts = Quantization.of(op, 1)
    (x,) = parts.ins
    sums = bool(op.attrs.get("column_sums"))
    q, q_t, dbias = parts.optional(True, bool(op.attrs.get("transposed")), sums)
    return ctx.call(
        _C.fp8_quantize,
        x,
        q,
        q_t,
        dbias,
        ctx.workspace + measured_bytes(op) if sums else 0,
        partial_sums_bytes(*extent(x)) if sums else 0,
        *extent(x),
        bool(op.accumulate),
        DTYPES[dbias.dtype if isinstance(dbias, Value) else "fp32"].code,
        DTYPES[x.dtype].code,
        parts.format,
        *parts.scale(ctx.workspace),
    )


def _quantize_supports(op: Op, target: Target) -> Support:
    (x, *_), sums = op.ins, bool(op.attrs.get("column_sums"))
    if x.dtype != "bf16" and (x.dtype != "fp32" or sums):
        return Support(False, f"x must be bf16{'' if sums else ' or fp32'}, got {x!r}")
    at = 1 + bool(op.attrs.get("transposed"))
    return supports(op, x, 1, accumulates=at if sums and op.outs[at].dtype == "fp32" else -1)


def _quantize_workspace(op: Op, target: Target) -> int:
    return measured_bytes(op) + (partial_sums_bytes(*extent(op.ins[0])) if op.attrs.get("column_sums") else 0)


def _bind_gated(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    parts = Quantization.of(op, 1)
    q, q_t, out = parts.optional(True, bool(op.attrs.get("transposed")), bool(op.attrs.get("wide")))
    scale = parts.scale(ctx.workspace)
    return ctx.call(getattr(_C, op.kind), *parts.ins, q, q_t, out, *extent(op.outs[0]), parts.format, *scale)


def _gated_supports(op: Op, target: Target) -> Support:
    checks = (supports_dtypes(op, 1, ("bf16",)), supports_format(op, "e4m3"), supports(op, op.outs[0], 1))
    return next((check for check in checks if not check.ok), checks[-1])


def _bind_gated_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    hidden = op.attrs.get("hidden")
    parts = Quantization.of(op, 3 if hidden else 2)
    dout, gate_up = parts.ins[:2]
    q, q_t, dgate_up, hidden_t = parts.optional(
        True, bool(op.attrs.get("transposed")), bool(op.attrs.get("wide")), bool(hidden)
    )
    return ctx.call(
        getattr(_C, op.kind),
        dout,
        gate_up,
        q,
        q_t,
        dgate_up,
        hidden_t,
        parts.ins[2] if hidden else 0,
        DTYPES[hidden].code if hidden else 0,
        *extent(dout),
        parts.format,
        *parts.scale(ctx.workspace),
    )


def _gated_bwd_supports(op: Op, target: Target) -> Support:
    hidden = op.attrs.get("hidden")
    if hidden and hidden != "e4m3":
        return Support(False, f"hidden must be e4m3, got {hidden!r}")
    n_ins = 3 if hidden else 2
    dtypes = supports_dtypes(op, n_ins, ("bf16", "bf16", "fp32")[:n_ins])
    checks = (dtypes, supports_format(op, "e5m2"), supports(op, op.ins[0], n_ins))
    return next((check for check in checks if not check.ok), checks[-1])


_FORM = (("alpha", 1.0), ("limit", 0.0), ("offset", 0.0))
"""Attributes of a gate that are numbers, in the order of the launcher, and what they are in SwiGLU."""


def _weighted(op: Op) -> tuple[bool, Value]:
    """Return whether it is the backward pass, and what has a column for each of SwiGLU's."""
    backward = op.kind == "fp8_weighted_swiglu_bwd"
    return backward, op.ins[0] if backward else op.outs[0]


def _bind_weighted(op: Op, ctx: BindContext) -> Call:
    """The backward pass has a further input, and writes the gradients of the weights last."""
    from .. import _C

    backward, rows = _weighted(op)
    parts = Quantization.of(op, 3 + backward)
    outs = parts.optional(True, bool(op.attrs.get("wide")), *(True,) * backward)
    scale = parts.scale(ctx.workspace)
    form = (*(float(op.attrs.get(name, default)) for name, default in _FORM), bool(op.attrs.get("interleaved")))
    return ctx.call(getattr(_C, op.kind), *parts.ins, *outs, *extent(rows), *form, parts.format, *scale)


def _weighted_supports(op: Op, target: Target) -> Support:
    backward, rows = _weighted(op)
    dtypes = (*("bf16",) * backward, "bf16", "fp32", "int32")
    format = supports_format(op, "e5m2" if backward else "e4m3")
    checks = (supports_dtypes(op, len(dtypes), dtypes), format, supports(op, rows, len(dtypes)))
    return next((check for check in checks if not check.ok), checks[-1])


def _bind_transpose(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(_C.fp8_transpose, *op.ins, *op.outs, *extent(op.ins[0]))


def _bind_amax(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (x,), (amax,) = op.ins, op.outs
    return ctx.call(_C.fp8_amax, x, amax, *extent(x), DTYPES[x.dtype].code)


def _plain_supports(op: Op, target: Target) -> Support:
    """Support a tensor of rows and columns that are multiples of 16, without accumulation."""
    if op.accumulate:
        return Support(False, "cannot accumulate into its outputs")
    if not op.ins[0].shape or any(size % 16 for size in extent(op.ins[0])):
        return Support(False, f"rows and columns must be multiples of 16, got {op.ins[0]!r}")
    return Support(True)


def _measured_workspace(op: Op, target: Target) -> int:
    return measured_bytes(op)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="fp8_quantize",
        dtypes=("*", "..."),
        attrs=("transposed", "column_sums"),
        supports=_quantize_supports,
        bind=_bind_quantize,
        workspace=_quantize_workspace,
    ),
    *(
        KernelDef(
            op=kind,
            dtypes=("*", "..."),
            attrs=("transposed", "wide"),
            supports=_gated_supports,
            bind=_bind_gated,
            workspace=_measured_workspace,
            memory_efficiency=share,
        )
        for kind, share in (("fp8_swiglu", 0.97), ("fp8_geglu", 0.8))
    ),
    *(
        KernelDef(
            op=kind,
            dtypes=("*", "..."),
            attrs=("transposed", "wide", "hidden"),
            supports=_gated_bwd_supports,
            bind=_bind_gated_bwd,
            workspace=_measured_workspace,
            memory_efficiency=share,
        )
        for kind, share in (("fp8_swiglu_bwd", 0.92), ("fp8_geglu_bwd", 0.8))
    ),
    *(
        KernelDef(
            op=kind,
            dtypes=("*", "..."),
            attrs=("wide", "alpha", "limit", "offset", "interleaved"),
            supports=_weighted_supports,
            bind=_bind_weighted,
            workspace=_measured_workspace,
            memory_efficiency=0.85,  # not measured
        )
        for kind in ("fp8_weighted_swiglu", "fp8_weighted_swiglu_bwd")
    ),
    *(
        KernelDef(op="fp8_transpose", dtypes=(dtype, dtype), supports=_plain_supports, bind=_bind_transpose)
        for dtype in LARGEST
    ),
    *(
        KernelDef(op="fp8_amax", dtypes=(dtype, "fp32"), supports=_plain_supports, bind=_bind_amax)
        for dtype in ("bf16", "fp32")
    ),
)

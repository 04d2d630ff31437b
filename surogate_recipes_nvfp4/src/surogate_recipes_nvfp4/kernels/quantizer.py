"""The compiled quantizer, and the compiled ops that measure for it."""

from __future__ import annotations

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target, Value

FORM = 3
"""Values of a form: codes, scales, amax."""

MEASURED_BYTES = 256
"""Workspace: the largest magnitudes of x, and of its transpose after the Hadamard transform."""


def _bind(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (x, *random), outs = op.ins, list(op.outs)
    measured: Value | int = random.pop(0) if op.attrs.get("measured") else ctx.workspace
    forms: list[Value | int] = []
    for written in (op.attrs["rows"], op.attrs["columns"]):
        forms += outs[:FORM] if written else [0] * FORM
        outs = outs[FORM:] if written else outs
    micro_step, seed = random or (0, 0)
    return ctx.call(
        _C.nvfp4_quantize,
        x,
        *forms,
        measured,
        *x.shape,
        *(bool(op.attrs.get(name)) for name in ("square", "hadamard", "four_over_six", "stochastic")),
        micro_step,
        seed,
        int(op.attrs.get("stream", 0)),
        bool(op.attrs.get("measured")),
        int(op.attrs.get("row", 0)),
    )


def _bind_swiglu(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(_C.nvfp4_swiglu, *op.ins, *op.outs, *op.outs[0].shape)


def _bind_swiglu_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(_C.nvfp4_swiglu_bwd, *op.ins, *op.outs, *op.ins[0].shape)


def _supports_swiglu(op: Op, target: Target) -> Support:
    return Support(not op.accumulate, "cannot accumulate into its outputs" if op.accumulate else "")


def _supports(op: Op, target: Target) -> Support:
    if op.accumulate:
        return Support(False, "cannot accumulate into its outputs")
    if op.attrs.get("square") and (op.attrs.get("hadamard") or op.attrs.get("stochastic")):
        return Support(False, "square blocks are neither transformed nor rounded stochastically")
    x = op.ins[0]
    if x.dtype != "bf16" or len(x.shape) != 2 or any(size % 16 for size in x.shape):
        return Support(False, f"needs a bf16 matrix of rows and columns that are multiples of 16, got {x!r}")
    return Support(True)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="nvfp4_quantize",
        dtypes=("*", "..."),
        attrs=("square", "hadamard", "four_over_six", "stochastic", "stream", "measured", "row"),
        supports=_supports,
        bind=_bind,
        workspace=lambda op, target: 0 if op.attrs.get("measured") else MEASURED_BYTES,
    ),
    *(
        KernelDef(op=op, dtypes=dtypes, supports=_supports_swiglu, bind=bind, memory_efficiency=0.9)
        for op, dtypes, bind in (
            ("nvfp4_swiglu", ("bf16", "bf16", "fp32"), _bind_swiglu),
            ("nvfp4_swiglu_bwd", ("bf16", "bf16", "bf16", "fp32"), _bind_swiglu_bwd),
        )
    ),
)

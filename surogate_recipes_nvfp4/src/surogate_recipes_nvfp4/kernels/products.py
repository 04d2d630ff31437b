"""Products of two forms by cuBLASLt.

Backend "emulate" writes both factors in bf16, which holds a code times its scale exactly, and multiplies those: all
products are exact, and sums are fp32. Backend "cublaslt" multiplies in FP4, from SM100. The factor alpha is made of
the largest magnitudes of both matrices, in device memory, so a captured graph follows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surogate_core.api import BindContext, KernelDef, Launch, Op, Support, Target, Value
from surogate_core.api.cublaslt import is_timed, library_bytes, selecting
from surogate_core.dtypes import DTYPES
from surogate_core.errors import ConfigError

FORM = 3
"""Values of a form: codes, scales, amax."""

FACTORS_BYTES = 256
"""Of the workspace, after that of cuBLASLt: alpha and beta. With "emulate", the factors in bf16 follow."""

NO_BIAS = -1
"""Dtype code that the binding takes if there is no bias."""


def _emulates(op: Op) -> bool:
    return bool(op.attrs["backend"] == "emulate")


def _base(op: Op) -> Value | None:
    """Return the input that the product adds to, if there is one."""
    return op.ins[2 * FORM] if op.kind == "nvfp4_linear_add" else None


def _bias(op: Op) -> Value | None:
    return op.ins[2 * FORM] if op.kind == "nvfp4_linear" and len(op.ins) > 2 * FORM else None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def _bf16_bytes(codes: Value) -> int:
    return _aligned(2 * codes.size)


def _workspace(op: Op, target: Target) -> int:
    emulated = _bf16_bytes(op.ins[0]) + _bf16_bytes(op.ins[FORM]) if _emulates(op) else 0
    return library_bytes(target) + FACTORS_BYTES + emulated


def _supports(op: Op, target: Target) -> Support:
    sm, title = target.device.sm or 0, target.device.title
    oldest, name = (80, "emulated products") if _emulates(op) else (100, "FP4 products")
    if sm < oldest:
        return Support(False, f"{name} need a GPU of SM{oldest} or newer, not {title}")
    if op.accumulate and (len(op.ins) > 2 * FORM or op.outs[0].dtype != "fp32"):
        return Support(False, f"accumulates only into fp32 outputs without another addend, got {op.outs[0]!r}")
    if _emulates(op) and (bias := _bias(op)) and bias.dtype != op.outs[0].dtype:
        return Support(False, f"emulated products add a bias to {bias.dtype} outputs only, got {op.outs[0]!r}")
    if not _emulates(op) and op.attrs.get("trans_b"):
        return Support(False, "FP4 products read b along the summed dimension")
    if not _emulates(op) and op.ins[0].shape[1] % 32:
        return Support(False, f"FP4 products sum over a multiple of 32 elements, got {op.ins[0]!r}")
    return Support(True)


def _notice(op: Op, target: Target) -> str:
    """Return what a user should know about the back end of a run."""
    if not _emulates(op):
        return "fp4_backend: cublaslt: not tried on such a GPU yet. Run surogate verify before you train."
    device = target.device
    why = f": {device.title} does not multiply FP4" if (device.sm or 0) < 100 else ""
    return f"fp4_backend: emulate: products of FP4 operands are computed in bf16{why}."


def _bind(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """Time the algorithms on the op's buffers, which overwrites them."""
    from .. import _C

    ctx.notice(_notice(op, ctx.target))

    (a, scale_a, amax_a), (b, scale_b, amax_b) = op.ins[:FORM], op.ins[FORM : 2 * FORM]
    base, bias, out = _base(op), _bias(op), op.outs[0]
    adds = 0 in op.accumulate or base is not None
    factors = ctx.workspace + library_bytes(ctx.target)
    wide_a = factors + FACTORS_BYTES if _emulates(op) else 0
    wide_b = wide_a + _bf16_bytes(a) if _emulates(op) else 0
    # What the product reads: (a, b, scales of a, scales of b).
    read: tuple[Value | int, ...] = (wide_a, wide_b, 0, 0) if _emulates(op) else (a, b, scale_a, scale_b)
    gemm = _select(op, ctx, read, factors)
    prepare = ctx.call(
        _C.nvfp4_dequantize,
        *(a, scale_a, amax_a, wide_a, *a.shape),
        *(b, scale_b, amax_b, wide_b, *b.shape),
        factors,
        float(adds),
    )
    multiply = ctx.call(gemm.run_with_factors, *read[:2], base or 0, out, bias or 0, *read[2:], factors, ctx.workspace)
    return Launch(prepare), Launch(multiply)


def _select(op: Op, ctx: BindContext, read: tuple[Value | int, ...], factors: int) -> Any:
    """Return the `_C.Gemm` of an op."""
    from .. import _C

    def address(value: Value | int) -> int:
        return value if isinstance(value, int) else ctx.pointer(value)

    base, bias, out = _base(op), _bias(op), op.outs[0]
    (m, k), trans_b = op.ins[0].shape, bool(op.attrs.get("trans_b"))
    code = DTYPES["bf16" if _emulates(op) else "e2m1"].code
    timed = (*read[:2], base or 0, out) if is_timed(ctx.target) else (0, 0, 0, 0)
    with selecting(ctx, _C):
        try:
            return _C.Gemm(
                *map(address, timed),
                address(bias or 0),
                *map(address, read[2:]),
                ctx.workspace,
                m=m,
                n=op.ins[FORM].shape[trans_b],
                k=k,
                trans_b=not trans_b,  # of the attribute, the sense is the opposite: without it, B is stored as [n, k]
                dtype_a=code,
                dtype_b=code,
                dtype_d=DTYPES[out.dtype].code,
                dtype_bias=DTYPES[bias.dtype].code if bias else NO_BIAS,
                accumulate=0 in op.accumulate or base is not None,
                library_bytes=library_bytes(ctx.target),
                scale_block=0 if _emulates(op) else 16,
                factors=factors,
                stream=ctx.stream,
            )
        except RuntimeError as error:
            if "no algorithm" not in str(error):
                raise
            raise ConfigError(_refused(op, ctx.target, error)) from error


def _refused(op: Op, target: Target, error: RuntimeError) -> str:
    a, b, out = op.ins[0], op.ins[FORM], op.outs[0]
    return (
        f"cuBLASLt refuses {op.kind} of {list(a.shape)} and {list(b.shape)} to {out.dtype} by the backend "
        f"{op.attrs['backend']!r} on {target.device.title} ({error}). Train with recipe: bf16, or change the batch "
        "size or sequence length if the number of tokens is among these sizes."
    )


def signatures(kind: str) -> Iterator[tuple[str, ...]]:
    forms = ("e2m1", "ue4m3", "fp32") * 2
    if kind == "nvfp4_linear_add":
        yield *forms, "bf16", "bf16"
        return
    for out in ("bf16", "fp32"):
        yield *forms, out
        yield *forms, "bf16", out


KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(
        op=kind,
        dtypes=dtypes,
        attrs=("trans_b",),
        supports=_supports,
        bind=_bind,
        workspace=_workspace,
        notice=_notice,
    )
    for kind in ("nvfp4_linear", "nvfp4_linear_add")
    for dtypes in signatures(kind)
)

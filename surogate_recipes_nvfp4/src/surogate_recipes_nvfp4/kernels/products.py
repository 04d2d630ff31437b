"""Products of two forms by cuBLASLt.

Backend "emulate" writes both factors in bf16, which holds a code times its scale exactly, and multiplies those: all
products are exact, and sums are fp32. Backend "cublaslt" multiplies in FP4, from SM100. The factor alpha is made of
the largest magnitudes of both matrices, in device memory, so a captured graph follows them.

A stored weight has a factor for each of its matrices. So each of them has a product of its own, for some columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from surogate_core.api import DTYPES, BindContext, KernelDef, Launch, Op, Support, Target, Value
from surogate_core.api.compiled import aligned
from surogate_core.api.cublaslt import explaining, is_timed, library_bytes, selecting

from ..formats import ATOM_COLUMNS, ATOM_ROWS, BLOCK, scales_shape

FORM = 3
"""Values of a form: codes, scales, amax."""

FACTORS_BYTES = 16
"""Of alpha and beta of a product. They are in the workspace after that of cuBLASLt. With "emulate" the factors in bf16
follow, otherwise the scales of a stored weight, in the order that tensor cores read."""

NO_BIAS = -1
"""Dtype code that the binding takes if there is no bias."""


def _emulates(op: Op) -> bool:
    return bool(op.attrs["backend"] == "emulate")


def _base(op: Op) -> Value | None:
    """Return the input that the product adds to, if there is one."""
    return op.ins[2 * FORM] if op.kind == "nvfp4_linear_add" else None


def _bias(op: Op) -> Value | None:
    return op.ins[2 * FORM] if op.kind == "nvfp4_linear" and len(op.ins) > 2 * FORM else None


def _stored(op: Op) -> tuple[int, ...]:
    """Return the rows of the matrices of a stored weight, () for a form."""
    return tuple(op.attrs.get("stored", ()))


def _sizes(op: Op) -> tuple[int, int, int]:
    """Return m, n, k."""
    (m, k), n = op.ins[0].shape, op.outs[0].shape[1]
    return m, n, k


@dataclass(frozen=True)
class _Workspace:
    """Offsets of the parts of the workspace after that of cuBLASLt. Those that an op does not need are empty."""

    wide_a: int
    wide_b: int
    ordered: int
    end: int

    @classmethod
    def of(cls, op: Op) -> _Workspace:
        (m, n, k), stored = _sizes(op), _stored(op)
        emulates = _emulates(op)
        wide_a = aligned(FACTORS_BYTES * max(1, len(stored)))
        wide_b = wide_a + emulates * aligned(2 * m * k)
        ordered = wide_b + emulates * aligned(2 * n * k)
        needs_order = bool(stored) and not emulates
        return cls(wide_a, wide_b, ordered, ordered + needs_order * math.prod(scales_shape(n, k)))


def _workspace(op: Op, target: Target) -> int:
    return library_bytes(target) + _Workspace.of(op).end


def _supports(op: Op, target: Target) -> Support:
    sm, title = target.device.sm or 0, target.device.title
    oldest, name = (80, "emulated products") if _emulates(op) else (100, "FP4 products")
    if sm < oldest:
        return Support(False, f"{name} need a GPU of SM{oldest} or newer, not {title}")
    if op.accumulate and (len(op.ins) > 2 * FORM or op.outs[0].dtype != "fp32"):
        return Support(False, f"accumulates only into fp32 outputs without another addend, got {op.outs[0]!r}")
    if _emulates(op) and (bias := _bias(op)) and bias.dtype != op.outs[0].dtype:
        return Support(False, f"emulated products add a bias to {bias.dtype} outputs only, got {op.outs[0]!r}")
    if any(rows % ATOM_ROWS for rows in _stored(op)[:-1]):
        return Support(False, f"all but the last matrix need a multiple of {ATOM_ROWS} rows, got {_stored(op)}")
    if _stored(op) and op.accumulate:
        return Support(False, "a product with a stored weight cannot accumulate")
    if not _emulates(op) and op.attrs.get("trans_b"):
        return Support(False, "FP4 products read b along the summed dimension")
    if not _emulates(op) and op.ins[0].shape[1] % 32:
        return Support(False, f"FP4 products sum over a multiple of 32 elements, got {op.ins[0]!r}")
    return Support(True)


def _notice(op: Op, target: Target) -> str:
    """Return what a user should know about the back end of a run."""
    stored = " Forward products read frozen weights as they are stored; input gradients are products in bf16."
    stored *= bool(_stored(op))
    if not _emulates(op):
        return f"fp4_backend: cublaslt: not tried on such a GPU yet. Run surogate verify before you train.{stored}"
    device = target.device
    why = f": {device.title} does not multiply FP4" if (device.sm or 0) < 100 else ""
    return f"fp4_backend: emulate: products of FP4 operands are computed in bf16{why}.{stored}"


@dataclass(frozen=True)
class _Part:
    """Addresses of a product: of all of the output, or of the columns of a matrix. c, bias and scales may be 0.

    columns  of the part
    stride   of the rows of the output
    """

    a: int
    b: int
    c: int
    d: int
    bias: int
    scale_a: int
    scale_b: int
    factors: int
    columns: int
    stride: int


def _parts(op: Op, ctx: BindContext) -> Iterator[_Part]:
    (_, n, k), at = _sizes(op), _Workspace.of(op)
    (a, scale_a, _), (b, scale_b, _) = op.ins[:FORM], op.ins[FORM : 2 * FORM]
    base, bias, out, stored = _base(op), _bias(op), op.outs[0], _stored(op)
    own, first = ctx.workspace + library_bytes(ctx.target), 0
    for i, columns in enumerate(stored or (n,)):
        element = DTYPES[out.dtype].nbytes(first)
        if _emulates(op):
            left, right, scales = own + at.wide_a, own + at.wide_b + 2 * first * k, (0, 0)
        else:
            atoms = first // ATOM_ROWS * -(-k // (BLOCK * ATOM_COLUMNS)) * ATOM_ROWS * ATOM_COLUMNS
            left, right = ctx.pointer(a), ctx.pointer(b) + first * k // 2
            scales = ctx.pointer(scale_a), own + at.ordered + atoms if stored else ctx.pointer(scale_b)
        yield _Part(
            left,
            right,
            ctx.pointer(base) + element if base else 0,
            ctx.pointer(out) + element,
            ctx.pointer(bias) + DTYPES[bias.dtype].nbytes(first) if bias else 0,
            *scales,
            own + FACTORS_BYTES * i,
            columns,
            n,
        )
        first += columns


def _bind(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """Time the algorithms on the op's buffers, which overwrites them."""
    from .. import _C

    ctx.notice(_notice(op, ctx.target))
    (m, n, k), at, stored = _sizes(op), _Workspace.of(op), _stored(op)
    a, b = op.ins[:FORM], op.ins[FORM : 2 * FORM]
    own, beta = ctx.workspace + library_bytes(ctx.target), float(0 in op.accumulate or _base(op) is not None)
    wide_a, wide_b = (own + at.wide_a, own + at.wide_b) if _emulates(op) else (0, 0)
    if stored:
        ordered = 0 if _emulates(op) else own + at.ordered
        weight = (*b, len(stored), wide_b, ordered, n, k)
        prepare = ctx.call(_C.nvfp4_prepare_stored, *a, wide_a, m, k, *weight, own, beta)
    else:
        prepare = ctx.call(_C.nvfp4_dequantize, *a, wide_a, m, k, *b, wide_b, *b[0].shape, own, beta)
    launches = [Launch(prepare)]
    for part in _parts(op, ctx):
        gemm = _select(op, ctx, part)
        given = (part.a, part.b, part.c, part.d, part.bias, part.scale_a, part.scale_b, part.factors)
        launches.append(Launch(ctx.call(gemm.run_with_factors, *given, ctx.workspace)))
    return tuple(launches)


def _select(op: Op, ctx: BindContext, part: _Part) -> Any:
    """Return the `_C.Gemm` of a part of an op."""
    from .. import _C

    (m, _, k), base, bias, out = _sizes(op), _base(op), _bias(op), op.outs[0]
    code = DTYPES["bf16" if _emulates(op) else "e2m1"].code
    timed = (part.a, part.b, part.c, part.d) if is_timed(ctx.target) else (0, 0, 0, 0)
    with selecting(ctx, _C), explaining(ctx, op, op.ins[0], op.ins[FORM]):
        return _C.Gemm(
            *timed,
            part.bias,
            part.scale_a,
            part.scale_b,
            ctx.workspace,
            m=m,
            n=part.columns,
            k=k,
            trans_b=not op.attrs.get("trans_b"),  # the opposite sense: without the attribute, B is stored as [n, k]
            ldd=part.stride,
            dtype_a=code,
            dtype_b=code,
            dtype_d=DTYPES[out.dtype].code,
            dtype_bias=DTYPES[bias.dtype].code if bias else NO_BIAS,
            accumulate=0 in op.accumulate or base is not None,
            library_bytes=library_bytes(ctx.target),
            scale_block=0 if _emulates(op) else 16,
            factors=part.factors,
            stream=ctx.stream,
        )


def signatures(kind: str) -> Iterator[tuple[str, ...]]:
    form = ("e2m1", "ue4m3", "fp32")
    for weight in (form, ("uint8", "e4m3", "fp32")):
        if kind == "nvfp4_linear_add":
            yield *form, *weight, "bf16", "bf16"
            continue
        for out in ("bf16", "fp32"):
            yield *form, *weight, out
            yield *form, *weight, "bf16", out


KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(
        op=kind,
        dtypes=dtypes,
        attrs=("trans_b", "stored"),
        supports=_supports,
        bind=_bind,
        workspace=_workspace,
        notice=_notice,
    )
    for kind in ("nvfp4_linear", "nvfp4_linear_add")
    for dtypes in signatures(kind)
)

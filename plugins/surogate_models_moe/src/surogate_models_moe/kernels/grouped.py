"""Products of experts: by CUTLASS on an SM90 (`csrc/grouped_gemm.h`), by mma.sync elsewhere (`csrc/grouped_mma.cu`).

Those of narrow weights, which take as long as reading the rows, have a kernel of their own
(`csrc/grouped_narrow.cu`), and so have those that add to a base, which have few terms (`csrc/grouped_thin.cu`). The sum
of a product and such a one is one kernel of CUTLASS, or a launch of each. All read the ends of the groups on the
device, so that a launch does not depend on the routes.
"""

from __future__ import annotations

from dataclasses import replace

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Launch, Op, Support, Target
from surogate_core.api.compiled import groups_bytes

from ..ops import MOST_THIN
from .support import supports

_KINDS = {"grouped_linear": 0, "grouped_linear_dgrad": 1, "grouped_linear_wgrad": 2}
"""Kinds of ops, and their codes in `csrc/grouped_gemm.h`."""


def _sizes(op: Op) -> tuple[int, int, int, int]:
    """Return rows, n, k and the number of experts: a weight is [n, k], of a pair the first one."""
    a, b, ends = op.ins[:3]
    rows, columns = a.shape
    if op.kind == "grouped_linear_wgrad":
        return rows, columns, b.shape[1], ends.size
    return rows, b.shape[0] // ends.size, b.shape[1], ends.size


def _second_terms(op: Op) -> int:
    """Return the terms of the second product of a pair, or 0."""
    return op.ins[3].shape[1] if op.kind.endswith("_pair") else 0


def _result(op: Op) -> tuple[int, int, bool]:
    """Return the codes of the kind of op and of the dtype that it writes, and whether it adds."""
    return _KINDS[op.kind.removesuffix("_pair")], DTYPES[op.outs[0].dtype].code, 0 in op.accumulate


def _portable_supports(op: Op, target: Target) -> Support:
    _, n, k, _ = _sizes(op)
    return supports(op, target, n, k, accumulate=op.outs[0].dtype == "fp32")


def _cutlass_supports(op: Op, target: Target) -> Support:
    if target.device.sm != 90:
        return Support(False, f"is for SM90 alone, not {target.device.title}")
    return _portable_supports(op, target)


def _bind_cutlass(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    others = [ctx.pointer(value) for value in op.ins[3:]] or [0, 0]
    operands = (*(ctx.pointer(value) for value in op.ins[:3]), *others, ctx.pointer(op.outs[0]))
    product = _C.GroupedGemm(*operands, ctx.workspace, *_sizes(op), *_result(op), _second_terms(op))
    return ctx.call(product.run)


def _cutlass_workspace(op: Op, target: Target) -> int:
    return groups_bytes(op.ins[2].size)


def _bind_portable(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(_C.grouped_mma, *op.ins, *op.outs, *_sizes(op), *_result(op))


MOST_NARROW = 32
"""Most columns of a narrow weight. With 64, tiles of 256 columns take little longer than reading the rows."""


def _narrow_supports(op: Op, target: Target) -> Support:
    """Support a result of few columns, or of wgrad one with few rows or columns of an expert."""
    _, n, k, _ = _sizes(op)
    columns = min(n, k) if op.kind == "grouped_linear_wgrad" else op.outs[0].shape[1]
    if columns > MOST_NARROW:
        return Support(False, f"at most {MOST_NARROW} columns, got {columns}")
    return _portable_supports(op, target)


def _bind_narrow(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(_C.grouped_narrow, *op.ins, *op.outs, *_sizes(op), *_result(op))


_DTYPES = tuple(
    (kind, ("bf16", "bf16", "int32", out))
    for kind in _KINDS
    for out in (("fp32", "bf16") if kind == "grouped_linear_wgrad" else ("bf16",))
)

_SHARES = {"grouped_linear": 0.85, "grouped_linear_dgrad": 0.85, "grouped_linear_wgrad": 0.75}
"""Of the rate of dense products, with 1,024 rows an expert; with fewer, reading the weights takes longer.

On an H100, 2026-11-25, `benchmarks/grouped.py`: 476 to 631 TFLOP/s forward, 585 and 588 for dgrad, 457 to 585 for
wgrad; by mma.sync 215 to 313.
"""

CUTLASS: tuple[KernelDef, ...] = tuple(
    KernelDef(
        op=kind,
        dtypes=dtypes,
        arithmetic=("bf16", _SHARES[kind]),
        supports=_cutlass_supports,
        bind=_bind_cutlass,
        workspace=_cutlass_workspace,
    )
    for kind, dtypes in _DTYPES
)

PORTABLE: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=dtypes, arithmetic=("bf16", 0.4), supports=_portable_supports, bind=_bind_portable)
    for kind, dtypes in _DTYPES
)

NARROW: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=dtypes, arithmetic=("bf16", 0.4), supports=_narrow_supports, bind=_bind_narrow)
    for kind, dtypes in _DTYPES
)


def _thin_sizes(op: Op) -> tuple[int, int, int, int]:
    """Return rows, columns of the result, terms and the number of experts."""
    (rows, terms), ends = op.ins[0].shape, op.ins[2]
    return rows, op.outs[0].shape[1], terms, ends.size


def _thin_supports(op: Op, target: Target) -> Support:
    _, width, terms, _ = _thin_sizes(op)
    if terms > MOST_THIN:
        return Support(False, f"at most {MOST_THIN} terms, got {terms}")
    return supports(op, target, width, terms)


def _bind_thin(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    return ctx.call(_C.grouped_thin, *op.ins, *op.outs, *_thin_sizes(op), op.kind == "grouped_linear_dgrad_add")


def _single(op: Op) -> Op:
    """Return the first product of a pair."""
    return replace(op, kind=op.kind.removesuffix("_pair"), ins=op.ins[:3])


def _thin(op: Op) -> Op:
    """Return the second product of a pair, which adds to the first one in its place."""
    _, _, ends, x2, w2 = op.ins
    return replace(op, kind=op.kind.removesuffix("_pair") + "_add", ins=(x2, w2, ends, op.outs[0]))


def _one_kernel_supports(op: Op, target: Target) -> Support:
    support = _cutlass_supports(op, target)
    return supports(op, target, _second_terms(op)) if support.ok else support


def _two_kernels_support(op: Op, target: Target) -> Support:
    support = _portable_supports(op, target)
    return _thin_supports(_thin(op), target) if support.ok else support


def _bind_two_kernels(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    return Launch(_bind_portable(_single(op), ctx)), Launch(_bind_thin(_thin(op), ctx))


def _without_bias(op: Op) -> Op:
    return replace(op, ins=op.ins[:3])


def _bind_bias(op: Op, ctx: BindContext) -> Launch:
    """Add the bias to the product in its place."""
    from .. import _C

    (_, _, ends, bias), (y,) = op.ins, op.outs
    return Launch(ctx.call(_C.grouped_bias, bias, ends, y, *y.shape, ends.size))


_BIASED = ("bf16", "bf16", "int32", "bf16", "bf16")

BIASED_CUTLASS = KernelDef(
    op="grouped_linear",
    dtypes=_BIASED,
    takes=("bias",),
    arithmetic=("bf16", _SHARES["grouped_linear"]),
    supports=lambda op, target: _cutlass_supports(_without_bias(op), target),
    bind=lambda op, ctx: (Launch(_bind_cutlass(_without_bias(op), ctx)), _bind_bias(op, ctx)),
    workspace=_cutlass_workspace,
)
BIASED_PORTABLE = KernelDef(
    op="grouped_linear",
    dtypes=_BIASED,
    takes=("bias",),
    arithmetic=("bf16", 0.4),
    supports=lambda op, target: _portable_supports(_without_bias(op), target),
    bind=lambda op, ctx: (Launch(_bind_portable(_without_bias(op), ctx)), _bind_bias(op, ctx)),
)
"""Products that add a bias: rounded, and rounded again with the bias. An epilogue of the product would save the second
pass over its rows."""

_PAIR = ("bf16", "bf16", "int32", "bf16", "bf16", "bf16")
_PAIRS = ("grouped_linear_pair", "grouped_linear_dgrad_pair")

ONE_KERNEL: tuple[KernelDef, ...] = tuple(
    KernelDef(
        op=kind,
        dtypes=_PAIR,
        arithmetic=("bf16", _SHARES["grouped_linear"]),
        supports=_one_kernel_supports,
        bind=_bind_cutlass,
        workspace=_cutlass_workspace,
    )
    for kind in _PAIRS
)

TWO_KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=_PAIR, arithmetic=("bf16", 0.4), supports=_two_kernels_support, bind=_bind_two_kernels)
    for kind in _PAIRS
)

THIN: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=("bf16", "bf16", "int32", "bf16", "bf16"), supports=_thin_supports, bind=_bind_thin)
    for kind in ("grouped_linear_add", "grouped_linear_dgrad_add")
)

KERNELS: tuple[KernelDef, ...] = (
    *(*NARROW, *CUTLASS, *PORTABLE, BIASED_CUTLASS, BIASED_PORTABLE),
    *(*ONE_KERNEL, *TWO_KERNELS, *THIN),
)
"""In order of preference."""

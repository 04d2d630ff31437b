"""Products of experts: by CUTLASS on an SM90 (`csrc/grouped_gemm.h`), by mma.sync elsewhere (`csrc/grouped_mma.cu`).

Those of narrow weights, which take as long as reading the rows, have a kernel of their own
(`csrc/grouped_narrow.cu`), and so have those that add to a base, which have few terms (`csrc/grouped_thin.cu`). The sum
of a product and such a one is one kernel of CUTLASS, or a launch of each. All read the ends of the groups on the
device, so that a launch does not depend on the routes.
"""

from __future__ import annotations

from dataclasses import replace

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Launch, Op, Support, Target, Value
from surogate_core.api.compiled import groups_bytes

from ..ops import MOST_THIN
from .support import supports

_KINDS = {"grouped_linear": 0, "grouped_linear_dgrad": 1, "grouped_linear_wgrad": 2}
"""Kinds of ops, and their codes in `csrc/grouped_gemm.h`."""

_PART = "_part"


def _operands(op: Op) -> tuple[Value, ...]:
    """Return the inputs of the product: of a part without its base."""
    return op.ins[1:] if op.kind.endswith(_PART) else op.ins


def _sizes(op: Op) -> tuple[int, int, int, int]:
    """Return rows, n, k and the number of experts of the weight: each is [n, k], of a pair those of the first one."""
    a, b, ends = _operands(op)[:3]
    rows, columns = a.shape
    if op.kind == "grouped_linear_wgrad":
        return rows, columns, b.shape[1], ends.size
    n = columns if "dgrad" in op.kind else op.outs[0].shape[1]
    return rows, n, b.shape[1], b.shape[0] // n


def _second_terms(op: Op) -> int:
    """Return the terms of the second product of a pair, or 0."""
    return _operands(op)[3].shape[1] if "_pair" in op.kind else 0


def _result(op: Op) -> tuple[int, int, bool]:
    """Return the codes of the kind of op and of the dtype that it writes, and whether it adds."""
    kind = op.kind.removesuffix(_PART).removesuffix("_pair")
    return _KINDS[kind], DTYPES[op.outs[0].dtype].code, 0 in op.accumulate


def _some(op: Op) -> tuple[int, int]:
    """Return the first expert of a part and the number of all, or (0, 0)."""
    return (op.attrs["first"], _operands(op)[2].size) if op.kind.endswith(_PART) else (0, 0)


def _second(op: Op, ctx: BindContext) -> tuple[int, int]:
    """Return the addresses of the second operands of a pair, its weight from the first expert on; or zeros."""
    if not _second_terms(op):
        return 0, 0
    x, w = _operands(op)[3:]
    begin, of = _some(op)
    return ctx.pointer(x), ctx.pointer(w) + (w.nbytes // of * begin if of else 0)


def _bias(op: Op, ctx: BindContext) -> int:
    """Return the address of the biases of all experts, or 0."""
    others = _operands(op)[3:]
    return ctx.pointer(others[0]) if len(others) == 1 else 0


def _in_place(op: Op) -> Support:
    """A part is written in the place of its base: no kernel copies the rows of other experts."""
    if op.kind.endswith(_PART) and op.in_place != {0: 0}:
        return Support(False, "writes some rows, in the place of a base alone")
    return Support(True)


def _portable_supports(op: Op, target: Target) -> Support:
    _, n, k, _ = _sizes(op)
    support = _in_place(op)
    return supports(op, target, n, k, accumulate=op.outs[0].dtype == "fp32") if support.ok else support


def _cutlass_supports(op: Op, target: Target) -> Support:
    if target.device.sm != 90:
        return Support(False, f"is for SM90 alone, not {target.device.title}")
    return _portable_supports(op, target)


def _bind_cutlass(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    operands = (*map(ctx.pointer, _operands(op)[:3]), *_second(op, ctx), ctx.pointer(op.outs[0]), ctx.workspace)
    product = _C.GroupedGemm(*operands, *_sizes(op), *_result(op), _second_terms(op), _bias(op, ctx), *_some(op))
    return ctx.call(product.run)


def _cutlass_workspace(op: Op, target: Target) -> int:
    return groups_bytes(_sizes(op)[3])


def _bind_portable(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    operands = (*_operands(op)[:3], _bias(op, ctx), *op.outs)
    return ctx.call(_C.grouped_mma, *operands, *_sizes(op), *_result(op), *_some(op))


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

    return ctx.call(_C.grouped_thin, *op.ins, *op.outs, *_thin_sizes(op), op.kind == "grouped_linear_dgrad_add", 0)


def _one_kernel_supports(op: Op, target: Target) -> Support:
    support = _cutlass_supports(op, target)
    return supports(op, target, _second_terms(op)) if support.ok else support


def _two_kernels_support(op: Op, target: Target) -> Support:
    support, terms = _portable_supports(op, target), _second_terms(op)
    if support.ok and terms > MOST_THIN:
        return Support(False, f"at most {MOST_THIN} terms, got {terms}")
    return supports(op, target, terms) if support.ok else support


def _bind_two_kernels(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """The second product is added to the first one in its place."""
    from .. import _C

    (y,), ends, (x2, w2) = op.outs, _operands(op)[2], _second(op, ctx)
    sizes = (*y.shape, _second_terms(op), _sizes(op)[3])
    thin = ctx.call(_C.grouped_thin, x2, w2, ends, y, y, *sizes, "dgrad" in op.kind, _some(op)[0])
    return Launch(_bind_portable(op, ctx)), Launch(thin)


_BIASED = ("bf16", "bf16", "int32", "bf16", "bf16")

BIASED_CUTLASS = KernelDef(
    op="grouped_linear",
    dtypes=_BIASED,
    takes=("bias",),
    arithmetic=("bf16", _SHARES["grouped_linear"]),
    supports=_cutlass_supports,
    bind=_bind_cutlass,
    workspace=_cutlass_workspace,
)
BIASED_PORTABLE = KernelDef(
    op="grouped_linear",
    dtypes=_BIASED,
    takes=("bias",),
    arithmetic=("bf16", 0.4),
    supports=_portable_supports,
    bind=_bind_portable,
)
"""Products that add a bias to the sums in fp32, and round once."""

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


def part_of(definition: KernelDef) -> KernelDef:
    """Return the kernel of a product for the part of some experts: it is the same, on a base of the result's dtype."""
    return replace(definition, op=f"{definition.op}{_PART}", dtypes=("bf16", *definition.dtypes))


PARTS: tuple[KernelDef, ...] = tuple(
    part_of(kernel)
    for kernel in (*CUTLASS, *PORTABLE, BIASED_CUTLASS, BIASED_PORTABLE, *ONE_KERNEL, *TWO_KERNELS)
    if kernel.op != "grouped_linear_wgrad"
)

KERNELS: tuple[KernelDef, ...] = (
    *(*NARROW, *CUTLASS, *PORTABLE, BIASED_CUTLASS, BIASED_PORTABLE),
    *(*ONE_KERNEL, *TWO_KERNELS, *THIN, *PARTS),
)
"""In order of preference."""

"""The compiled `normuon`: for each batch of matrices of equal shape, four element-wise kernels around the products.

Bits do not depend on which params an op has, because neither the element-wise kernels nor the algorithm of a product
depend on the number of matrices in a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import Any

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Launch, Op, Support, Target, Value
from surogate_core.api.cublaslt import is_timed, library_bytes, selecting
from surogate_core.api.param_update import amaxes_of, column_of, copies_of, supports_in_place

from .batches import Batch, Layout, Panel, Shape, batches, iteration, layout, workspace_bytes
from .iterations import METHODS, Iterations
from .scaling import factor

_DTYPES = ("fp32", "bf16")
_NO_COPY = -1


@dataclass(frozen=True)
class Columns:
    """The values of an op, one of each for every param; None where a param has no work copy or amax."""

    grads: tuple[Value, ...]
    masters: tuple[Value, ...]
    momenta: tuple[Value, ...]
    variances: tuple[Value, ...]
    copies: tuple[Value | None, ...]
    amaxes: tuple[Value | None, ...]


def columns(op: Op) -> Columns:
    """Return the values of an op by their meaning."""
    n = op.attrs["n"]
    found = (tuple(values.get(i) for i in range(n)) for values in (copies_of(op), amaxes_of(op)))
    return Columns(*(column_of(op, i) for i in range(4)), *found)


def table(op: Op, batch: Batch, pointer: Callable[[Value], int]) -> list[int]:
    """Return eight words per matrix (`Entry` in normuon.cu)."""
    values = columns(op)
    words: list[int] = []
    for i, row in batch.members:
        first = row * batch.shape.columns
        matrices = (values.grads[i], values.masters[i], values.momenta[i], values.variances[i], values.copies[i])
        offsets = (first, first, first, row, first)
        words += [
            *(_address(value, offset, pointer) for value, offset in zip(matrices, offsets, strict=True)),
            _address(values.amaxes[i], 0, pointer),
            first,
            op.attrs["streams"][i] & 0xFFFFFFFF,
        ]
    return words


def _address(value: Value | None, first: int, pointer: Callable[[Value], int]) -> int:
    return 0 if value is None else pointer(value) + first * DTYPES[value.dtype].bits // 8


Gemms = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]
"""A `_C.Gemm` for each panel of the products of an iteration."""


@dataclass(frozen=True)
class _Scratch:
    """Addresses in the workspace for batches of `count` matrices of `shape`. `library` is that of cuBLASLt."""

    library: int
    at: Layout
    shape: Shape
    count: int

    @classmethod
    def of(cls, ctx: BindContext, shape: Shape, count: int) -> _Scratch:
        begin = ctx.workspace + library_bytes(ctx.target)
        return cls(ctx.workspace, Layout(*(begin + part for part in astuple(layout(shape, count)))), shape, count)

    def operands(self, x: int, y: int) -> tuple[tuple[int, int, int, int], ...]:
        """Return the addresses (a, b, c, d) of each product of an iteration from `x` to `y`; c 0: nothing is added."""
        at = self.at
        last = (at.b, x) if self.shape.is_wide else (x, at.b)
        return (x, x, 0, at.a), (at.a, at.a, at.a, at.b), (*last, x, y)


def _addresses(panel: Panel, operands: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    a, b, c, d = operands
    return a + panel.bytes_a, b, c and c + panel.bytes_d, d + panel.bytes_d


def _gemms(ctx: BindContext, scratch: _Scratch) -> Gemms:
    """Return the products, timed in the workspace."""
    from . import _C

    bf16, timed = DTYPES["bf16"].code, is_timed(ctx.target)

    def bound(panel: Panel, operands: tuple[int, int, int, int]) -> Any:
        return _C.Gemm(
            *(_addresses(panel, operands) if timed else (0, 0, 0, 0)),
            *(0, 0, 0),  # no bias and no scales
            scratch.library,
            **asdict(panel.product),
            dtype_a=bf16,
            dtype_b=bf16,
            dtype_d=bf16,
            accumulate=operands[2] != 0,
            batch=scratch.count,
            library_bytes=library_bytes(ctx.target),
            stream=ctx.stream,
        )

    operands = scratch.operands(scratch.at.x, scratch.at.y)
    with selecting(ctx, _C):
        first, second, third = (
            tuple(bound(panel, addresses) for panel in panels)
            for panels, addresses in zip(iteration(scratch.shape), operands, strict=True)
        )
    return first, second, third


def _orthogonalize(ctx: BindContext, scratch: _Scratch, gemms: Gemms, method: Iterations) -> tuple[list[Call], int]:
    """Return the calls of the products, and the address of their result.

    A = X X^T; B = b A + c A A; Y = a X + B X
    """
    from . import _C

    calls: list[Call] = []
    at, shape = scratch.at, scratch.shape
    x, y = at.x, at.y
    for a, b, c in method.coefficients:
        factors, results = ((1.0, 0.0), (c, b), (1.0, a)), (at.a, at.b, y)
        parts = zip(iteration(shape), gemms, scratch.operands(x, y), factors, results, strict=True)
        for panels, bound, operands, (alpha, beta), result in parts:
            for panel, gemm in zip(panels, bound, strict=True):
                addresses = _addresses(panel, operands)
                calls.append(ctx.call(gemm.run_scaled, *addresses, scratch.library, alpha, beta))
            if len(panels) > 1:
                calls.append(ctx.call(_C.mirror, result, scratch.count, shape.side, shape.side // shape.panels))
        x, y = y, x
    return calls, x


def _update(op: Op, ctx: BindContext, batch: Batch, scratch: _Scratch, gemms: Gemms) -> list[Call]:
    """Return the calls that update the matrices of a batch."""
    from . import _C

    clip_coef, lr, step, seed = op.ins[:4]
    attrs, shape, at, count = op.attrs, scratch.shape, scratch.at, scratch.count
    grad, master, momentum, copy = dtypes(op, batch)
    method = METHODS[attrs["method"]]
    matrices = (ctx.table(table(op, batch, ctx.pointer)), count, shape.rows, shape.columns)
    norms = (at.norms, count * shape.chunks)
    rows = (at.scales, count * shape.rows, at.sums, 2 * count * shape.row_blocks)
    products, o = _orthogonalize(ctx, scratch, gemms, method)
    sizes = (attrs["weight_decay"], attrs["cautious"], *factor(shape.rows, shape.columns, attrs["lr_scale"]))
    return [
        ctx.call(_C.momentum, *matrices, clip_coef, step, seed, at.x, *norms, attrs["momentum"], grad, momentum),
        ctx.call(_C.normalize, *matrices, at.x, *norms, method.safety, method.epsilon),
        *products,
        ctx.call(_C.row_moments, *matrices, clip_coef, o, *rows, attrs["beta2"]),
        ctx.call(_C.update, *matrices, clip_coef, lr, step, seed, o, *rows, *sizes, master, copy),
    ]


def dtypes(op: Op, batch: Batch) -> tuple[int, int, int, int]:
    """Return the codes of the dtypes of gradients, masters, momenta and work copies."""
    values, (i, _) = columns(op), batch.members[0]
    copy = values.copies[i]
    codes = (DTYPES[value.dtype].code for value in (values.grads[i], values.masters[i], values.momenta[i]))
    return (*codes, DTYPES[copy.dtype].code if copy else _NO_COPY)  # type: ignore[return-value]


def _bind(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """Time the products in the workspace. No other buffer is overwritten."""
    from . import _C

    gemms: dict[_Scratch, Gemms] = {}
    calls: list[Call] = []
    amaxes = [ctx.pointer(value) for value in columns(op).amaxes if value is not None]
    if amaxes:
        calls.append(ctx.call(_C.clear, ctx.table(amaxes), len(amaxes)))
    for batch in batches(op):
        scratch = _Scratch.of(ctx, batch.shape, len(batch.members))
        if scratch not in gemms:
            gemms[scratch] = _gemms(ctx, scratch)
        calls += _update(op, ctx, batch, scratch, gemms[scratch])
    return tuple(Launch(call) for call in calls)


def _supports(op: Op, target: Target) -> Support:
    values = columns(op)
    mixed = (*values.grads, *values.masters, *values.momenta, *filter(None, values.copies))
    others = [v for v in mixed if v.dtype not in _DTYPES]
    if others:
        return Support(False, f"gradients, masters, momenta and copies must be fp32 or bf16, got {others[0]!r}")
    if any(v.dtype != "fp32" for v in values.variances):
        return Support(False, "second moments must be fp32")
    return supports_in_place(op)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="normuon",
        dtypes=("fp32", "fp32", "int32", "int64", "*", "..."),
        supports=_supports,
        bind=_bind,
        workspace=lambda op, target: library_bytes(target) + workspace_bytes(op),
        memory_efficiency=0.55,  # 59 ms of element-wise kernels of 8B, measured on an H200
    ),
)

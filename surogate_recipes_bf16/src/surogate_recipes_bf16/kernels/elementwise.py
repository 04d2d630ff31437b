"""Compiled elementwise ops and the embedding, in fp32 and bf16."""

from __future__ import annotations

from itertools import product

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target
from surogate_core.api.compiled import aligned

from .dtypes import FLOATS, supports_accumulate, supports_write


def _bind_add(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (a, b), (out,) = op.ins, op.outs
    return ctx.call(_C.add, a, b, out, a.size, 0 in op.accumulate, DTYPES[a.dtype].code, DTYPES[out.dtype].code)


def _bind_cast(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (x,), (y,) = op.ins, op.outs
    return ctx.call(_C.cast, x, y, x.size, 0 in op.accumulate, DTYPES[x.dtype].code, DTYPES[y.dtype].code)


def _cast_supports(op: Op, target: Target) -> Support:
    """The kernel rounds once, so it cannot round to `dtype` and store the result in another dtype."""
    if op.attrs["dtype"] != op.outs[0].dtype:
        return Support(False, f"cannot store a cast to {op.attrs['dtype']} in {op.outs[0]!r}: the dtypes must be equal")
    return supports_accumulate(op, target)


def _bind_fill(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (out,) = op.outs
    return ctx.call(_C.fill, out, out.size, float(op.attrs["value"]), DTYPES[out.dtype].code)


def _bind_copy(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (x,), (y,) = op.ins, op.outs
    return ctx.call(_C.copy, x, y, x.nbytes)


def _bind_commit(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    coef, pending, _ = op.ins
    (out,) = op.outs
    return ctx.call(_C.commit, coef, pending, out, pending.nbytes)


def _commit_supports(op: Op, target: Target) -> Support:
    """A skipped step leaves the output as it is, which must therefore be the state itself."""
    if op.outs[0] is not op.ins[2]:
        return Support(False, f"writes the state that it reads in place, not {op.ins[2]!r} into {op.outs[0]!r}")
    return supports_write(op, target)


def _bind_swiglu(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (gate_up,), (out,) = op.ins, op.outs
    return ctx.call(_C.swiglu, gate_up, out, *out.shape, DTYPES[out.dtype].code)


def _bind_swiglu_bwd(op: Op, ctx: BindContext) -> Call:
    """Bind `swiglu_bwd` or `swiglu_bwd_recompute`."""
    from .. import _C

    dout, gate_up = op.ins
    dgate_up, *out = op.outs
    hidden = out[0] if out else 0
    return ctx.call(_C.swiglu_bwd, dout, gate_up, dgate_up, hidden, *dout.shape, DTYPES[dout.dtype].code)


def _bind_embedding(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (tokens, w), (out,) = op.ins, op.outs
    return ctx.call(_C.embedding, tokens, w, out, tokens.size, *w.shape, DTYPES[w.dtype].code)


def _bind_embedding_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (dout, tokens), (dw,) = op.ins, op.outs
    return ctx.call(
        _C.embedding_bwd,
        dout,
        tokens,
        dw,
        ctx.workspace,
        embedding_bwd_workspace(tokens.size),
        tokens.size,
        *dw.shape,
        0 in op.accumulate,
        DTYPES[dout.dtype].code,
        DTYPES[dw.dtype].code,
    )


def embedding_bwd_workspace(n_tokens: int) -> int:
    """Bytes of keys and positions before and after the sort, plus an upper bound for the sort (embedding_bwd.cu)."""
    return 4 * aligned(4 * n_tokens) + 9 * n_tokens + 16384


KERNELS: tuple[KernelDef, ...] = (
    *(
        KernelDef(op="add", dtypes=(dtype, dtype, out), supports=supports_accumulate, bind=_bind_add)
        for dtype, out in product(FLOATS, FLOATS)
    ),
    *(
        KernelDef(op="cast", dtypes=(x, y), supports=_cast_supports, bind=_bind_cast)
        for x, y in product(FLOATS, FLOATS)
    ),
    *(KernelDef(op="fill", dtypes=(dtype,), supports=supports_write, bind=_bind_fill) for dtype in FLOATS),
    KernelDef(op="unwritten", dtypes=("*",), supports=supports_write, bind=lambda op, ctx: ()),
    KernelDef(op="copy", dtypes=("*", "*"), supports=supports_write, bind=_bind_copy),
    KernelDef(op="commit", dtypes=("fp32", "*", "*", "*"), supports=_commit_supports, bind=_bind_commit),
    *(
        KernelDef(op=kind, dtypes=(dtype,) * values, supports=supports_write, bind=bind, memory_efficiency=share)
        for kind, values, bind, share in (
            ("swiglu", 2, _bind_swiglu, 0.97),
            ("swiglu_bwd", 3, _bind_swiglu_bwd, 0.97),
            ("swiglu_bwd_recompute", 4, _bind_swiglu_bwd, 0.94),
        )
        for dtype in FLOATS
    ),
    *(
        KernelDef(op="embedding", dtypes=("int32", dtype, dtype), supports=supports_write, bind=_bind_embedding)
        for dtype in FLOATS
    ),
    *(
        KernelDef(
            op="embedding_bwd",
            dtypes=(dtype, "int32", dw),
            supports=supports_accumulate,
            bind=_bind_embedding_bwd,
            workspace=lambda op, target: embedding_bwd_workspace(op.ins[1].size),
        )
        for dtype, dw in product(FLOATS, FLOATS)
    ),
)

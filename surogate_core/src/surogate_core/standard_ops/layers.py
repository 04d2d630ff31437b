"""The ops of a decoder's layers: embedding, norms, attention, SwiGLU, LM head with cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

from ..dtypes import accumulator
from ..errors import need
from ..program.op import Op
from ..program.opdef import IN_OUTPUTS, Emitter, Gradients, OpDef, OutSpec, Rewrites, RowWise, first_output
from ..program.value import Value
from .definition import Attrs, Infer, Ins, define, elements, matrix, recomputed_by, rows

# ------------------------------------------------------------------------------------------------------------ embedding


def _embedding(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    tokens, w = ins
    need(tokens.dtype == "int32", "tokens must be int32")
    return [OutSpec("embedding", (*tokens.shape, matrix(w, "w")[1]), w.dtype)]


def _embedding_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    tokens, w = op.ins
    assert dy is not None
    return None, b.apply("embedding_bwd", dy, tokens, vocab_size=w.shape[0])


def _embedding_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, _ = ins
    return [OutSpec("d_embedding", (attrs["vocab_size"], dy.shape[1]), attrs.get("dtype", accumulator(dy.dtype)))]


# ---------------------------------------------------------------------------------------------------------------- norms


def _norm_specs(x: Value, w: Value) -> list[OutSpec]:
    t, c = matrix(x, "x")
    need(w.shape == (c,), f"w must have shape [{c}]")
    return [OutSpec("norm", (t, c), x.dtype), OutSpec("rstd", (t,), accumulator(x.dtype))]


def _rmsnorm_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    x, w = op.ins
    dnorm = grads[0]
    need(grads[1] is None, "the loss reads rstd, which has no backward rule")
    if dnorm is None:
        return None, None
    dx, dw = b.emit("rmsnorm_bwd", dnorm, x, w, op.outs[1], label=f"d_{x.label}", **_offset(op))
    return dx, dw


def _offset(op: Op) -> Attrs:
    return {name: value for name, value in op.attrs.items() if name == "offset"}


def _add_rmsnorm(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, residual, w = ins
    need(x.shape == residual.shape and x.dtype == residual.dtype, f"{x!r} cannot be added to {residual!r}")
    return [*_norm_specs(residual, w), OutSpec("residual", residual.shape, residual.dtype)]


def _add_rmsnorm_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """x and residual receive the same gradient, because the gradient of a sum is passed to both addends unchanged."""
    dnorm, drstd, dresidual = grads
    need(drstd is None, "the loss reads rstd, which has no backward rule")
    _, rstd, residual = op.outs
    if dnorm is None:
        return dresidual, dresidual, None
    rest = () if dresidual is None else (dresidual,)
    dx, dw = b.emit("rmsnorm_bwd", dnorm, residual, op.ins[2], rstd, *rest, label="d_residual", **_offset(op))
    return dx, dx, dw


def _add_rmsnorm_rematerialize(b: Emitter, op: Op, kept: frozenset[Value]) -> Gradients:
    """Recompute the norm from the stored residual if there is one, so that x need not be kept.

    This is bit-identical, because the norm is defined on the rounded residual.
    """
    norm, _, residual = op.outs
    if residual not in kept:
        return b.emit("add_rmsnorm", *op.ins, label=norm.label, **op.attrs)
    fresh_norm, fresh_rstd = b.emit("rmsnorm", residual, op.ins[2], label=norm.label, **op.attrs)
    return fresh_norm, fresh_rstd, None


def _rmsnorm_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, x, w, rstd = ins[:4]
    need(dy.shape == x.shape, f"dy is {list(dy.shape)}, x {list(x.shape)}")
    need(rstd.shape == x.shape[:1], f"rstd must have shape [{x.shape[0]}]")
    need(len(ins) == 4 or ins[4].shape == x.shape, f"dresidual must have shape {list(x.shape)}")
    return [OutSpec("d_norm", x.shape, x.dtype), OutSpec("d_weight", w.shape, accumulator(x.dtype))]


def _rmsnorm_dgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return _rmsnorm_bwd(ins, attrs)[:1]


def _rows_of_norm(outs: tuple[int, ...], sums: tuple[int, ...] = ()) -> Callable[[Op], RowWise]:
    """dy, x, rstd and, if there is one, dresidual have rows."""
    return lambda op: RowWise(ins=(0, 1, *range(3, len(op.ins))), outs=outs, sums=sums)


def _with_norm(infer: Infer) -> Infer:
    return lambda ins, attrs: [*infer(ins, attrs), OutSpec("norm", ins[1].shape, ins[1].dtype)]


# ------------------------------------------------------------------------------------------------------------ attention


def _attention(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    qkv, cu_seqlens = ins
    heads, groups, size = attrs["n_heads"], attrs["n_kv_heads"], attrs["head_dim"]
    t, width = matrix(qkv, "qkv")
    need(heads % groups == 0, f"{heads} query heads cannot share {groups} key/value heads evenly")
    need(width == (heads + 2 * groups) * size, f"qkv has {width} columns, heads need {(heads + 2 * groups) * size}")
    need(cu_seqlens.dtype == "int32", "cu_seqlens must be int32")
    for name in ("window", "softcap"):
        need(attrs.get(name, 0) >= 0, f"{name} must be positive, or 0 for none, got {attrs.get(name)}")
    scale = attrs.get("scale")
    need(scale is None or scale > 0, f"scale must be positive, got {scale}")
    return [OutSpec("attention", (t, heads * size), qkv.dtype), OutSpec("lse", (heads, t), accumulator(qkv.dtype))]


def _attention_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    qkv, cu_seqlens = op.ins
    out, lse = op.outs
    dout, dlse = grads
    if dout is None and dlse is None:
        return None, None
    if dout is None:
        dout = b.apply("fill", label="d_attention", shape=out.shape, dtype=out.dtype, value=0.0)
    more = () if dlse is None else (dlse,)
    return b.apply("attention_bwd", dout, qkv, out, lse, cu_seqlens, *more, label="d_qkv", **op.attrs), None


def _attention_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dout, qkv, out, lse, _, *dlse = ins
    chunks = attrs.get("chunks", 1)
    need(dout.shape == out.shape, f"dout is {list(dout.shape)}, out {list(out.shape)}")
    need(len(dlse) <= 1, f"{len(ins)} inputs, the last may be dlse, the sixth")
    need(all(d.shape == lse.shape for d in dlse), f"dlse must have the shape of lse, {list(lse.shape)}")
    need(chunks > 0 and qkv.shape[0] % chunks == 0, f"{qkv.shape[0]} rows cannot be divided into {chunks} chunks")
    return [OutSpec("d_qkv", qkv.shape, qkv.dtype)]


def _attention_flops(op: Op) -> int:
    """FLOPs for documents of full length: two products forward, five backward; the causal mask halves each of them.

    Of a document of L tokens, a window of W leaves W L - W^2 / 2 pairs of L^2 / 2.
    """
    tokens = op.outs[0].shape[0]
    products = 2 if op.kind == "attention" else 5
    seq_len, width = int(op.attrs["seq_len"]), int(op.attrs["n_heads"]) * int(op.attrs["head_dim"])
    window = min(int(op.attrs.get("window", 0)) or seq_len, seq_len)
    return products * tokens * width * window * (2 * seq_len - window) // seq_len


# --------------------------------------------------------------------------------------------------------------- swiglu


def _swiglu(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    t, width = matrix(ins[0], "gate_up")
    need(width % 2 == 0, f"gate_up has {width} columns; the number must be even")
    return [OutSpec("swiglu", (t, width // 2), ins[0].dtype)]


def _swiglu_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    return (b.apply("swiglu_bwd", dy, op.ins[0], label=f"d_{op.ins[0].label}"),)


def _swiglu_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, gate_up = ins
    need(2 * dy.size == gate_up.size, f"dy is {list(dy.shape)}, gate_up {list(gate_up.shape)}")
    return [OutSpec("d_gate_up", gate_up.shape, gate_up.dtype)]


def _swiglu_bwd_recompute(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [*_swiglu_bwd(ins, attrs), *_swiglu(ins[1:], attrs)]


# -------------------------------------------------------------------------------------------- LM head and cross-entropy


def _lm_head_ce(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w, targets, scale = ins
    (t, c), (_, wc) = matrix(x, "x"), matrix(w, "w")
    need(c == wc, f"x has {c} columns, w has {wc}")
    need(targets.shape == (t,) and targets.dtype == "int32", f"targets must be int32 [{t}]")
    need(scale.shape == (), "loss_scale must be a scalar")
    need(attrs.get("softcap", 0) >= 0, f"softcap must be positive, or 0 for none, got {attrs.get('softcap')}")
    need(t % attrs["chunks"] == 0, f"{t} tokens cannot be split into {attrs['chunks']} equal chunks")
    return [OutSpec("loss", (), accumulator(x.dtype))]


def _lm_head_ce_grads(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w = ins[0], ins[1]
    grads = (OutSpec("d_norm", x.shape, x.dtype), OutSpec("d_weight", w.shape, accumulator(x.dtype)))
    need(attrs["wrt"] in ((0,), (1,), (0, 1)), f"wrt must name x (0), w (1) or both in this order, not {attrs['wrt']}")
    return [*_lm_head_ce(ins, attrs), *(grads[i] for i in attrs["wrt"])]


def _lm_head_flops(op: Op) -> int:
    """FLOPs of one product for the logits and one for each gradient."""
    return 2 * len(op.outs) * op.ins[0].size * op.ins[1].shape[0]


def _lm_head_passes(op: Op) -> int:
    """Return the bytes of the cross-entropy between the products: it reads the logits and writes their gradient."""
    x, w = op.ins[0], op.ins[1]
    passes = 2 if op.kind == "lm_head_ce_grads" else 1
    return passes * x.shape[0] * w.shape[0] * (x.nbytes // x.size)


def _lm_head_workspace(op: Op) -> int:
    """Bytes of the logits of one chunk. Their gradient overwrites them."""
    x, w = op.ins[0], op.ins[1]
    return x.shape[0] // int(op.attrs["chunks"]) * w.shape[0] * (x.nbytes // x.size)


_ATTENTION_REFERENCE = "surogate_core.reference.attention"
_OFFSET: Attrs = {"offset": (float, 0.0)}
_NORM: Attrs = {"eps": float, **_OFFSET}
_HEADS: Attrs = {
    **{"n_heads": int, "n_kv_heads": int, "head_dim": int, "seq_len": int},
    **{"window": (int, 0), "scale": (float | None, None), "softcap": (float, 0.0)},
}
_HEAD: Attrs = {"chunks": int, "softcap": (float, 0.0)}

LAYERS: tuple[OpDef, ...] = (
    define(
        "embedding",
        _embedding,
        vjp=_embedding_vjp,
        traffic=lambda op: 2 * op.outs[0].nbytes,
        zero_copy=0.8,  # of the rows that it reads; not measured
        row_wise=rows((0,)),
        param_kinds={1: "embedding"},
    ),
    define("embedding_bwd", _embedding_bwd, attrs={"vocab_size": int, "dtype": (str | None, IN_OUTPUTS)}),
    define(
        "rmsnorm",
        lambda ins, attrs: _norm_specs(*ins),
        attrs=_NORM,
        vjp=_rmsnorm_vjp,
        flops=elements(4),
        row_wise=rows((0,), (0, 1)),
    ),
    define(
        "add_rmsnorm",
        _add_rmsnorm,
        attrs=_NORM,
        vjp=_add_rmsnorm_vjp,
        rewrites=Rewrites(rematerialize=_add_rmsnorm_rematerialize),
        flops=elements(5),
        row_wise=rows((0, 1), (0, 1, 2)),
    ),
    define(
        "rmsnorm_bwd",
        _rmsnorm_bwd,
        attrs=_OFFSET,
        rewrites=Rewrites(recompute_kind=recomputed_by("rmsnorm", slice(1, 3)), narrowed=first_output("rmsnorm_dgrad")),
        flops=elements(9),
        row_wise=_rows_of_norm((0,), (1,)),
    ),
    define(
        "rmsnorm_bwd_recompute",
        _with_norm(_rmsnorm_bwd),
        attrs=_OFFSET,
        flops=elements(10),
        row_wise=_rows_of_norm((0, 2), (1,)),
    ),
    define(
        "rmsnorm_dgrad",
        _rmsnorm_dgrad,
        attrs=_OFFSET,
        rewrites=Rewrites(recompute_kind=recomputed_by("rmsnorm", slice(1, 3))),
        may_overwrite=lambda op: {0: 0},
        flops=elements(7),
        row_wise=_rows_of_norm((0,)),
    ),
    define(
        "rmsnorm_dgrad_recompute",
        _with_norm(_rmsnorm_dgrad),
        attrs=_OFFSET,
        may_overwrite=lambda op: {0: 0, 1: 1},
        flops=elements(8),
        row_wise=_rows_of_norm((0, 1)),
    ),
    define(
        "attention",
        _attention,
        module=_ATTENTION_REFERENCE,
        attrs=_HEADS,
        vjp=_attention_vjp,
        flops=_attention_flops,
        attention="forward",
    ),
    define(
        "attention_bwd",
        _attention_bwd,
        module=_ATTENTION_REFERENCE,
        attrs={**_HEADS, "own": (bool, True), "chunks": (int, 1)},
        optional={"dlse": 5},
        attention="backward",
        takes_chunks=True,
        flops=_attention_flops,
    ),
    define("swiglu", _swiglu, vjp=_swiglu_vjp, flops=elements(3), row_wise=rows((0,))),
    define(
        "swiglu_bwd",
        _swiglu_bwd,
        rewrites=Rewrites(recompute_kind=recomputed_by("swiglu", slice(1, 2))),
        may_overwrite=lambda op: {0: 1},
        flops=elements(6),
        row_wise=rows((0, 1)),
    ),
    define(
        "swiglu_bwd_recompute",
        _swiglu_bwd_recompute,
        may_overwrite=lambda op: {0: 1, 1: 0},
        flops=elements(7),
        row_wise=rows((0, 1), (0, 1)),
    ),
    define(
        "lm_head_ce",
        _lm_head_ce,
        attrs=_HEAD,
        loss_with_grads="lm_head_ce_grads",
        loss_grad_ins=(0, 1),
        param_kinds={1: "head"},
        flops=_lm_head_flops,
        passes=_lm_head_passes,
        workspace=_lm_head_workspace,
    ),
    define(
        "lm_head_ce_grads",
        _lm_head_ce_grads,
        attrs={**_HEAD, "wrt": tuple},
        param_kinds={1: "head"},
        flops=_lm_head_flops,
        passes=_lm_head_passes,
        workspace=_lm_head_workspace,
    ),
)

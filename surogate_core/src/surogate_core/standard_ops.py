"""The standard ops: shape rules, backward rules and FLOPs of the ops of decoder models.

They are registered through the same hooks as a plugin's ops. The torch reference of the same name in `reference/ops.py`
defines what each op computes. Dimensions: T tokens, C model width, H query heads, G key/value heads, D head size,
F feed-forward width, V vocabulary size, N and K rows and columns of a weight.

    embedding      (tokens [T], w [V, C])                      -> x [T, C]
    linear         (x [T, K], w [N, K], bias [N]?; dtype)      -> y [T, N]
    linear_add     (x [T, K], w [N, K], base [T, N])           -> base + linear(x, w), which may take the place of base
    rmsnorm        (x [T, C], w [C]; eps)                      -> norm [T, C], rstd [T]
    add_rmsnorm    (x [T, C], residual [T, C], w [C]; eps)     -> norm [T, C], rstd [T], residual [T, C]
    attention      (qkv [T, (H+2G)D], cu_seqlens; n_heads, n_kv_heads, head_dim, seq_len) -> out [T, HD], lse [H, T]
    swiglu         (gate_up [T, 2F], halves [gate; up])        -> [T, F]
    lm_head_ce     (x [T, C], w [V, C], targets [T], loss_scale []; chunks) -> loss []
    all_reduce     (values; world_size)                        -> the values, summed over the workers of a run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ProgramError
from .program.op import Op
from .program.opdef import Emitter, Gradients, OpDef, OutSpec
from .program.value import Value, accumulator

_REFERENCE = "surogate_core.reference.ops"
Attrs = Mapping[str, Any]
Ins = Sequence[Value]


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramError(message)


def _matrix(value: Value, name: str) -> tuple[int, int]:
    _need(len(value.shape) == 2, f"{name} must have two dimensions")
    return value.shape[0], value.shape[1]


# --------------------------------------------------------------------------------------------------------- embedding


def _embedding(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    tokens, w = ins
    _need(tokens.dtype == "int32", "tokens must be int32")
    return [OutSpec("embedding", (*tokens.shape, _matrix(w, "w")[1]), w.dtype)]


def _embedding_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    tokens, w = op.ins
    assert dy is not None
    return None, b.apply("embedding_bwd", dy, tokens, vocab_size=w.shape[0])


def _embedding_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, _ = ins
    return [OutSpec("d_embedding", (attrs["vocab_size"], dy.shape[1]), accumulator(dy.dtype))]


# ------------------------------------------------------------------------------------------------------------ linear


def _linear(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w = ins[0], ins[1]
    (t, k), (n, wk) = _matrix(x, "x"), _matrix(w, "w")
    _need(k == wk, f"x has {k} columns, w has {wk}")
    _need(len(ins) == 2 or ins[2].shape == (n,), f"bias must have shape [{n}]")
    return [OutSpec("linear", (t, n), attrs.get("dtype", x.dtype))]


def _linear_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return _linear_grads(b, op.ins, grads[0])


def _linear_grads(b: Emitter, ins: Ins, dy: Value | None) -> Gradients:
    assert dy is not None
    x, w = ins[0], ins[1]
    dw = b.apply("linear_wgrad", dy, x)
    dx = b.apply("linear_dgrad", dy, w, dtype=x.dtype, label=f"d_{x.label}")
    if len(ins) == 2:
        return dx, dw
    return dx, dw, b.apply("linear_bgrad", dy)


def _linear_adding(op: Op) -> str:
    """None with a bias, so that the kernel of the sum adds one thing only."""
    return "linear_add" if len(op.ins) == 2 else ""


def _linear_add(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w, base = ins
    return _added(_linear([x, w], attrs), base)


def _linear_add_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return *_linear_grads(b, op.ins[:2], grads[0]), grads[0]


def _linear_dgrad_add(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, w, base = ins
    return _added(_linear_dgrad([dy, w], attrs), base)


def _added(product: list[OutSpec], base: Value) -> list[OutSpec]:
    """The sum has the dtype of the base, whatever the product alone would have."""
    (spec,) = product
    _need(base.shape == spec.shape, f"the product is {list(spec.shape)}, the base {list(base.shape)}")
    return [OutSpec(spec.label, spec.shape, base.dtype)]


def _linear_dgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, w = ins
    (t, n), (wn, k) = _matrix(dy, "dy"), _matrix(w, "w")
    _need(n == wn, f"dy has {n} columns, w has {wn} rows")
    return [OutSpec("d_linear", (t, k), attrs.get("dtype", dy.dtype))]


def _linear_wgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, x = ins
    (t, n), (xt, k) = _matrix(dy, "dy"), _matrix(x, "x")
    _need(t == xt, f"dy has {t} rows, x has {xt}")
    return [OutSpec("d_weight", (n, k), accumulator(dy.dtype))]


def _linear_bgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec("d_bias", (_matrix(ins[0], "dy")[1],), accumulator(ins[0].dtype))]


def _product_flops(op: Op) -> int:
    """2MNK FLOPs of a matrix product (forward, dgrad or wgrad)."""
    a, b = op.ins[0], op.ins[1]
    if op.kind == "linear_wgrad":
        return 2 * a.size * b.shape[1]
    return 2 * a.size * (b.shape[0] if op.kind in ("linear", "linear_add") else b.shape[1])


# ------------------------------------------------------------------------------------------------------------- norms


def _norm_specs(x: Value, w: Value) -> list[OutSpec]:
    t, c = _matrix(x, "x")
    _need(w.shape == (c,), f"w must have shape [{c}]")
    return [OutSpec("norm", (t, c), x.dtype), OutSpec("rstd", (t,), accumulator(x.dtype))]


def _rmsnorm(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return _norm_specs(ins[0], ins[1])


def _rmsnorm_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    x, w = op.ins
    dnorm = grads[0]
    _need(grads[1] is None, "the loss reads rstd, which has no backward rule")
    if dnorm is None:
        return None, None
    dx, dw = b.emit("rmsnorm_bwd", dnorm, x, w, op.outs[1], label=f"d_{x.label}")
    return dx, dw


def _add_rmsnorm(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, residual, w = ins
    _need(x.shape == residual.shape and x.dtype == residual.dtype, f"{x!r} cannot be added to {residual!r}")
    return [*_norm_specs(residual, w), OutSpec("residual", residual.shape, residual.dtype)]


def _add_rmsnorm_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """x and residual receive the same gradient, because the gradient of a sum is passed to both addends unchanged."""
    dnorm, drstd, dresidual = grads
    _need(drstd is None, "the loss reads rstd, which has no backward rule")
    _, rstd, residual = op.outs
    if dnorm is None:
        return dresidual, dresidual, None
    rest = () if dresidual is None else (dresidual,)
    dx, dw = b.emit("rmsnorm_bwd", dnorm, residual, op.ins[2], rstd, *rest, label="d_residual")
    return dx, dx, dw


def _add_rmsnorm_rematerialise(b: Emitter, op: Op, kept: frozenset[Value]) -> Gradients:
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
    _need(dy.shape == x.shape, f"dy is {list(dy.shape)}, x {list(x.shape)}")
    _need(rstd.shape == x.shape[:1], f"rstd must have shape [{x.shape[0]}]")
    _need(len(ins) == 4 or ins[4].shape == x.shape, f"dresidual must have shape {list(x.shape)}")
    return [OutSpec("d_norm", x.shape, x.dtype), OutSpec("d_weight", w.shape, accumulator(x.dtype))]


# --------------------------------------------------------------------------------------------------------- attention


def _attention(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    qkv, cu_seqlens = ins
    heads, groups, size = attrs["n_heads"], attrs["n_kv_heads"], attrs["head_dim"]
    t, width = _matrix(qkv, "qkv")
    _need(heads % groups == 0, f"{heads} query heads cannot share {groups} key/value heads evenly")
    _need(width == (heads + 2 * groups) * size, f"qkv has {width} columns, heads need {(heads + 2 * groups) * size}")
    _need(cu_seqlens.dtype == "int32", "cu_seqlens must be int32")
    return [OutSpec("attention", (t, heads * size), qkv.dtype), OutSpec("lse", (heads, t), accumulator(qkv.dtype))]


def _attention_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    qkv, cu_seqlens = op.ins
    out, lse = op.outs
    dout = grads[0]
    _need(grads[1] is None, "the loss reads lse, which has no backward rule")
    if dout is None:
        return None, None
    return b.apply("attention_bwd", dout, qkv, out, lse, cu_seqlens, label="d_qkv", **op.attrs), None


def _attention_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dout, qkv, out = ins[:3]
    _need(dout.shape == out.shape, f"dout is {list(dout.shape)}, out {list(out.shape)}")
    return [OutSpec("d_qkv", qkv.shape, qkv.dtype)]


def _attention_flops(op: Op) -> int:
    """FLOPs for documents of full length: two products forward, five backward; the causal mask halves each of them."""
    tokens = op.outs[0].shape[0]
    products = 2 if op.kind == "attention" else 5
    seq_len, width = int(op.attrs["seq_len"]), int(op.attrs["n_heads"]) * int(op.attrs["head_dim"])
    return products * tokens * seq_len * width


# ------------------------------------------------------------------------------------------------------------ swiglu


def _swiglu(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    t, width = _matrix(ins[0], "gate_up")
    _need(width % 2 == 0, f"gate_up has {width} columns; the number must be even")
    return [OutSpec("swiglu", (t, width // 2), ins[0].dtype)]


def _swiglu_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    return (b.apply("swiglu_bwd", dy, op.ins[0], label=f"d_{op.ins[0].label}"),)


def _swiglu_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, gate_up = ins
    _need(2 * dy.size == gate_up.size, f"dy is {list(dy.shape)}, gate_up {list(gate_up.shape)}")
    return [OutSpec("d_gate_up", gate_up.shape, gate_up.dtype)]


# ----------------------------------------------------------------------------------------- LM head and cross-entropy


def _lm_head_ce(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w, targets, scale = ins
    (t, c), (_, wc) = _matrix(x, "x"), _matrix(w, "w")
    _need(c == wc, f"x has {c} columns, w has {wc}")
    _need(targets.shape == (t,) and targets.dtype == "int32", f"targets must be int32 [{t}]")
    _need(scale.shape == (), "loss_scale must be a scalar")
    _need(t % attrs["chunks"] == 0, f"{t} tokens cannot be split into {attrs['chunks']} equal chunks")
    return [OutSpec("loss", (), accumulator(x.dtype))]


def _lm_head_ce_grads(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w = ins[0], ins[1]
    grads = (OutSpec("d_norm", x.shape, x.dtype), OutSpec("d_weight", w.shape, accumulator(x.dtype)))
    _need(attrs["wrt"] in ((0,), (1,), (0, 1)), f"wrt must name x (0), w (1) or both in this order, not {attrs['wrt']}")
    return [*_lm_head_ce(ins, attrs), *(grads[i] for i in attrs["wrt"])]


def _lm_head_flops(op: Op) -> int:
    """FLOPs of one product for the logits and one for each gradient."""
    return 2 * len(op.outs) * op.ins[0].size * op.ins[1].shape[0]


def _lm_head_workspace(op: Op) -> int:
    """Bytes of the logits of one chunk. Their gradient overwrites them."""
    x, w = op.ins[0], op.ins[1]
    return x.shape[0] // int(op.attrs["chunks"]) * w.shape[0] * (x.nbytes // x.size)


# ------------------------------------------------------------------------------------------------------------ others


def _add(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    a, b = ins
    _need(a.shape == b.shape and a.dtype == b.dtype, f"{a!r} and {b!r} differ")
    return [OutSpec(a.label, a.shape, a.dtype)]


def _add_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return grads[0], grads[0]


def _cast(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec(ins[0].label, ins[0].shape, attrs["dtype"])]


def _cast_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """Cast the gradient of an activation to the activation's dtype.

    The gradient of a param stays as it is, so that a product's fp32 sum is not narrowed.
    """
    (dy,) = grads
    assert dy is not None
    x = op.ins[0]
    return (dy if x.role == "param" or dy.dtype == x.dtype else b.apply("cast", dy, dtype=x.dtype),)


def _fill(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec("fill", tuple(attrs["shape"]), attrs["dtype"])]


def _global_norm(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec("grad_norm", (), "fp32"), OutSpec("clip_coef", (), "fp32")]


def _accumulate_rounded(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    addend, total = ins[0], ins[1]
    _need(addend.shape == total.shape, f"{addend!r} cannot be added to {total!r}")
    return [OutSpec("sum", total.shape, total.dtype)]


def _copy(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec(ins[0].label, ins[0].shape, ins[0].dtype)]


def _commit(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    pending, state = ins[1], ins[2]
    _need(pending.shape == state.shape and pending.dtype == state.dtype, f"{pending!r} is no copy of {state!r}")
    return [OutSpec(state.label, state.shape, state.dtype)]


def _all_reduce(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    _need(len(ins) > 0 and attrs["world_size"] > 0, "all_reduce needs at least one value and one worker")
    return [OutSpec(v.label, v.shape, v.dtype) for v in ins]


def _ring_bytes(op: Op) -> int:
    """Bytes that a worker sends in a ring all-reduce.

    Each value is split into n parts: n - 1 transfers of a part for the reduce-scatter and n - 1 for the all-gather.
    """
    n = int(op.attrs["world_size"])
    return 2 * (n - 1) * sum(v.nbytes for v in op.ins) // n


def _reference_vjp(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    """A gradient computed by autograd has the shape and dtype of its input."""
    return [OutSpec(f"d_{ins[i].label}", ins[i].shape, ins[i].dtype) for i in attrs["wrt"]]


def _elements(per_element: int) -> Any:
    return lambda op: per_element * max(v.size for v in (*op.ins, *op.outs))


def _op(kind: str, infer: Any, **fields: Any) -> OpDef:
    return OpDef(kind=kind, infer=infer, reference=f"{_REFERENCE}:{kind}", **fields)


OPS: tuple[OpDef, ...] = (
    _op("embedding", _embedding, vjp=_embedding_vjp, traffic=lambda op: 2 * op.outs[0].nbytes),
    _op("embedding_bwd", _embedding_bwd),
    _op("linear", _linear, vjp=_linear_vjp, flops=_product_flops, adding=_linear_adding),
    _op("linear_add", _linear_add, vjp=_linear_add_vjp, flops=_product_flops, may_overwrite={0: 2}),
    _op("linear_dgrad", _linear_dgrad, flops=_product_flops, adding=lambda op: "linear_dgrad_add"),
    _op("linear_dgrad_add", _linear_dgrad_add, flops=_product_flops, may_overwrite={0: 2}),
    _op("linear_wgrad", _linear_wgrad, flops=_product_flops),
    _op("linear_bgrad", _linear_bgrad, flops=_elements(1)),
    _op("rmsnorm", _rmsnorm, vjp=_rmsnorm_vjp, flops=_elements(4)),
    _op(
        "add_rmsnorm",
        _add_rmsnorm,
        vjp=_add_rmsnorm_vjp,
        rematerialise=_add_rmsnorm_rematerialise,
        flops=_elements(5),
    ),
    _op("rmsnorm_bwd", _rmsnorm_bwd, flops=_elements(9)),
    _op("attention", _attention, vjp=_attention_vjp, flops=_attention_flops),
    _op("attention_bwd", _attention_bwd, flops=_attention_flops),
    _op("swiglu", _swiglu, vjp=_swiglu_vjp, flops=_elements(3)),
    _op("swiglu_bwd", _swiglu_bwd, flops=_elements(6)),
    _op(
        "lm_head_ce",
        _lm_head_ce,
        loss_with_grads="lm_head_ce_grads",
        loss_grad_ins=(0, 1),
        flops=_lm_head_flops,
        workspace=_lm_head_workspace,
    ),
    _op("lm_head_ce_grads", _lm_head_ce_grads, flops=_lm_head_flops, workspace=_lm_head_workspace),
    _op("add", _add, vjp=_add_vjp, flops=_elements(1)),
    _op("cast", _cast, vjp=_cast_vjp),
    _op("fill", _fill),
    _op("global_norm", _global_norm, flops=lambda op: 2 * sum(v.size for v in op.ins)),
    _op("accumulate_rounded", _accumulate_rounded, flops=_elements(1)),
    _op("copy", _copy),
    _op("commit", _commit),
    _op("all_reduce", _all_reduce, link=_ring_bytes),
    _op("reference_vjp", _reference_vjp),
)

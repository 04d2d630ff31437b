"""Ops of these models, on the packed rows of a micro-batch.

    causal_conv       (x [T, C], w [C, 1, W], positions int32 [T]; silu) -> [T, C]
    gated_delta_rule  (qkv [T, 2 HK DK + HV DV], ba [T, 2 HV], a_log [HV], dt_bias [HV], positions int32 [T];
                       n_k_heads HK, n_v_heads HV, k_dim DK, v_dim DV)
                                     -> out [T, HV DV], states [T / 64, HV, DV, DK]
    gated_rmsnorm     (x [T, H D], gate [T, H D], w [D]; eps) -> y [T, H D], rstd [T, H]
    split_gate        (x [T, 2 H D + R]; n_heads H, head_dim D) -> qkv [T, H D + R], gate [T, H D]
    split_key_heads   (qkvz [T, 2 HK DK + 2 HV DV], ba [T, 2 HV]; as gated_delta_rule)
                                     -> qkv [T, 2 HK DK + HV DV], z [T, HV DV], ba [T, 2 HV]
    sigmoid_gate      (x [T, N], gate [T, N]) -> [T, N]

Documents are told apart by `positions` alone, which restart at 0 in each: no output depends on how many there are, and
all shapes are known before a run.

`causal_conv` is a convolution of each column with the W last tokens of the document, without SiLU if `silu` is false.
The last weight is that of the token itself. Taps in front of the document count 0: a token at position p has p + 1.

`gated_delta_rule` has a state S [DK, DV] for each value head, 0 in front of every document. Of each token
S = exp(g) S, then S = S + k (beta (v - S^T k))^T, then out = S^T q. Columns of qkv are [q; k; v], those of ba [b; a].
q and k are divided by their L2 norms (eps 1e-6), q also by sqrt(DK); beta = sigmoid(b), and
g = -exp(a_log) softplus(a + dt_bias). HV / HK consecutive value heads share a key head. It is computed by chunks of 64
tokens at multiples of 64, whatever the documents are (`reference.py`). `states` has the transpose of S in front of each
chunk; the last chunk may be shorter. They have the dtype of qkv and are for the backward op, which computes everything
else again.
`gated_delta_out` and `gated_delta_states` are the op with one of the two outputs.

`gated_rmsnorm` is x rstd w silu(gate) of each head. `split_gate` divides the outputs of a projection whose rows are,
of each query head, those of the query and then those of its gate, before R others; `join_gate` is its inverse.

`split_key_heads` sorts the outputs of the projections of Qwen3-Next. Their rows are, of each key head, [q; k; values;
gates] and [b; a] of its HV / HK value heads; sorted, they are [q; k; v], z and [b; a] of all heads. `join_key_heads` is
its inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surogate_core.api import (
    Emitter,
    Gradients,
    Op,
    OpDef,
    OutSpec,
    Rewrites,
    RowWise,
    Value,
    accumulator,
    need,
)

Ins = Sequence[Value]
Attrs = Mapping[str, Any]

CHUNK = 64
"""Tokens of a chunk of the gated delta rule."""
WIDTHS = range(3, 8)
"""Widths of `causal_conv`."""


def _columns(value: Value, name: str) -> int:
    need(len(value.shape) == 2, f"{name} must have two dimensions, not {value!r}")
    return value.shape[1]


def _same(*named: tuple[str, Value]) -> None:
    """Raise ProgramError unless all have the shape of the first, a matrix."""
    (first, x), *others = named
    _columns(x, first)
    for name, y in others:
        need(y.shape == x.shape, f"{name} must have the shape of {first}, {list(x.shape)}, not {list(y.shape)}")


def _positions(value: Value, tokens: int) -> None:
    need(value.dtype == "int32" and value.shape == (tokens,), f"positions must be int32 [{tokens}], not {value!r}")


def _given(grads: Gradients, op: Op, b: Emitter) -> Value:
    """Return the gradient of the first output. Raises ProgramError if the loss reads another."""
    for gradient, out in zip(grads[1:], op.outs[1:], strict=True):
        need(gradient is None, f"the loss reads {out.label} of {op.kind}, which has no backward rule")
    assert grads[0] is not None
    return grads[0]


def _without(kind: str, index: int) -> Callable[[Op, Sequence[bool]], Op]:
    """Return the rule that an op becomes `kind`, which lacks output `index`, the last, if nothing reads that."""
    return lambda op, read: op if read[index] else op.changed(kind=kind, outs=op.outs[:index])


# ---------------------------------------------------------------------------------------------------------- convolution


def _conv(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w, positions = ins
    columns = _columns(x, "x")
    need(len(w.shape) == 3 and w.shape[:2] == (columns, 1), f"w must be [{columns}, 1, W], not {w!r}")
    need(w.shape[2] in WIDTHS, f"w must have {WIDTHS[0]} to {WIDTHS[-1]} taps, not {w.shape[2]}")
    _positions(positions, x.shape[0])
    return [OutSpec("conv", x.shape, x.dtype)]


def _conv_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    dx, dw = b.emit("causal_conv_bwd", _given(grads, op, b), *op.ins, **op.attrs)
    return dx, dw, None


def _conv_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, x, w, positions = ins
    _conv((x, w, positions), attrs)
    _same(("x", x), ("dy", dy))
    return [OutSpec("d_qkv", x.shape, x.dtype), OutSpec("d_conv", w.shape, accumulator(x.dtype))]


def _conv_dgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return _conv_bwd(ins, attrs)[:1]


def _conv_flops(products: int, silu: int) -> Callable[[Op], int]:
    """Return the FLOPs of `products` convolutions, and of SiLU or its gradient of each element."""

    def flops(op: Op) -> int:
        x, w, _ = op.ins[-3:]
        return x.size * (2 * products * w.shape[2] + (silu if op.attrs.get("silu", True) else 0))

    return flops


# ----------------------------------------------------------------------------------------------------- gated delta rule

_HEADS: Attrs = {"n_k_heads": int, "n_v_heads": int, "k_dim": int, "v_dim": int}


def _delta_columns(attrs: Attrs) -> int:
    """Return the number of columns of [q; k; v]. Raises ProgramError if there cannot be such heads."""
    key_heads, heads, k_dim, v_dim = (int(attrs[name]) for name in _HEADS)
    need(min(key_heads, heads, k_dim, v_dim) > 0, f"numbers and sizes of heads must be positive, got {dict(attrs)}")
    need(heads % key_heads == 0, f"{heads} value heads cannot share {key_heads} key heads evenly")
    return 2 * key_heads * k_dim + heads * v_dim


def _delta(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    qkv, ba, a_log, dt_bias, positions = ins
    columns, tokens, width = _columns(qkv, "qkv"), qkv.shape[0], _delta_columns(attrs)
    _, heads, k_dim, v_dim = (int(attrs[name]) for name in _HEADS)
    need(columns == width, f"qkv has {columns} columns, heads need {width}")
    need(ba.shape == (tokens, 2 * heads), f"ba must have shape [{tokens}, {2 * heads}], not {list(ba.shape)}")
    for name, value in (("a_log", a_log), ("dt_bias", dt_bias)):
        need(value.shape == (heads,), f"{name} must have shape [{heads}], not {list(value.shape)}")
    _positions(positions, tokens)
    return [
        OutSpec("delta_out", (tokens, heads * v_dim), qkv.dtype),
        OutSpec("delta_states", (-(-tokens // CHUNK), heads, v_dim, k_dim), qkv.dtype),
    ]


def _delta_out(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return _delta(ins, attrs)[:1]


def _delta_states(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return _delta(ins, attrs)[1:]


def _delta_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    gradients = b.emit("gated_delta_rule_bwd", _given(grads, op, b), *op.ins, op.outs[1], **op.attrs)
    return *gradients, None


def _delta_again(b: Emitter, op: Op, kept: frozenset[Value]) -> Gradients:
    """Compute only the output that is dropped, if that is one of two."""
    out, states = op.outs
    if out in kept:
        return None, b.apply("gated_delta_states", *op.ins, **op.attrs)
    if states in kept:
        return b.apply("gated_delta_out", *op.ins, **op.attrs), None
    return b.emit("gated_delta_rule", *op.ins, **op.attrs)


def _delta_narrowed(op: Op, read: Sequence[bool]) -> Op:
    if all(read):
        return op
    kind, outs = ("gated_delta_out", op.outs[:1]) if read[0] else ("gated_delta_states", op.outs[1:])
    return op.changed(kind=kind, outs=outs)


def _delta_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dout, *forward, states = ins
    out, expected = _delta(forward, attrs)
    qkv, ba, a_log, dt_bias, _ = forward
    need(dout.shape == out.shape, f"dout must have shape {list(out.shape)}, not {list(dout.shape)}")
    need(states.shape == expected.shape, f"states must have shape {list(expected.shape)}, not {list(states.shape)}")
    total = accumulator(qkv.dtype)
    return [
        OutSpec("d_conv_out", qkv.shape, qkv.dtype),
        OutSpec("d_ba", ba.shape, ba.dtype),
        OutSpec("d_a_log", a_log.shape, total),
        OutSpec("d_dt_bias", dt_bias.shape, total),
    ]


def _sizes(op: Op) -> tuple[int, int, int, int]:
    key_heads, heads, k_dim, v_dim = (int(op.attrs[name]) for name in _HEADS)
    return key_heads, heads, k_dim, v_dim


def _delta_flops(op: Op) -> int:
    """FLOPs by chunks: three products with the states, two of chunk matrices with values, the inverse of one of them,
    and of each key head both chunk matrices. The states alone need neither the queries' product nor their matrix.
    """
    key_heads, heads, k_dim, v_dim = _sizes(op)
    out = op.kind != "gated_delta_states"
    value_head = (3 if out else 2) * 2 * k_dim * v_dim + (2 if out else 1) * 2 * CHUNK * v_dim + 2 * CHUNK * CHUNK // 3
    key_head = (2 if out else 1) * 2 * CHUNK * k_dim
    return op.ins[0].shape[0] * (heads * value_head + key_heads * key_head)


def _delta_bwd_flops(op: Op) -> int:
    """FLOPs by chunks: six products with states and their gradients, eight of chunk matrices, and what is computed
    again: both chunk matrices of each key head, the inverse, and the values that enter the states.
    """
    key_heads, heads, k_dim, v_dim = _sizes(op)
    gradients = 6 * 2 * k_dim * v_dim + 4 * 2 * CHUNK * (k_dim + v_dim)
    again = 2 * k_dim * v_dim + 2 * CHUNK * v_dim + 2 * CHUNK * CHUNK // 3
    return op.ins[0].shape[0] * (heads * (gradients + again) + key_heads * 4 * CHUNK * k_dim)


def _delta_traffic(op: Op) -> int:
    """Bytes of inputs and outputs, and of what a kernel that is parallel over chunks leaves to the scan over them: the
    chunk matrices, decays and betas, written and read, and queries and keys, which both read.
    """
    qkv = op.ins[0]
    key_heads, heads, k_dim, _ = _sizes(op)
    size = qkv.nbytes // qkv.size
    matrices = 1 if op.kind == "gated_delta_states" else 2
    between = 2 * heads * (matrices * CHUNK * size + 2 * 4) + matrices * key_heads * k_dim * size
    return sum(value.nbytes for value in (*op.ins, *op.outs)) + qkv.shape[0] * between


def _delta_bwd_traffic(op: Op) -> int:
    """Bytes of inputs and outputs, and of the inverse, decays and betas, which are written and read once."""
    qkv = op.ins[1]
    between = 2 * _sizes(op)[1] * (CHUNK * (qkv.nbytes // qkv.size) + 2 * 4)
    return sum(value.nbytes for value in (*op.ins, *op.outs)) + qkv.shape[0] * between


# ---------------------------------------------------------------------------------------------------------------- gates


def _norm(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, gate, w = ins
    _same(("x", x), ("gate", gate))
    need(len(w.shape) == 1 and x.shape[1] % w.shape[0] == 0, f"w must be [D] of heads of D in {x!r}, not {w!r}")
    heads = x.shape[1] // w.shape[0]
    return [OutSpec("norm", x.shape, x.dtype), OutSpec("rstd", (x.shape[0], heads), accumulator(x.dtype))]


def _norm_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return b.emit("gated_rmsnorm_bwd", _given(grads, op, b), *op.ins, op.outs[1])


def _norm_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, x, gate, w, rstd = ins
    _, expected = _norm((x, gate, w), attrs)
    _same(("x", x), ("dy", dy))
    need(rstd.shape == expected.shape, f"rstd must have shape {list(expected.shape)}, not {list(rstd.shape)}")
    return [
        OutSpec("d_delta_out", x.shape, x.dtype),
        OutSpec("d_gate", gate.shape, gate.dtype),
        OutSpec("d_weight", w.shape, accumulator(x.dtype)),
    ]


def _norm_dgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return _norm_bwd(ins, attrs)[:2]


def _split(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (x,) = ins
    columns, width = _columns(x, "x"), attrs["n_heads"] * attrs["head_dim"]
    need(0 < 2 * width <= columns, f"x has {columns} columns, queries and gates need {2 * width}")
    return [
        OutSpec("qkv", (x.shape[0], columns - width), x.dtype),
        OutSpec("qkv", (x.shape[0], width), x.dtype),
    ]


def _split_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    if grads == (None, None):
        return (None,)
    return (b.apply("join_gate", *_filled(b, op, grads), **op.attrs),)


def _join(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    qkv, gate = ins
    columns, width = _columns(qkv, "qkv"), attrs["n_heads"] * attrs["head_dim"]
    need(gate.shape == (qkv.shape[0], width), f"gate must be [{qkv.shape[0]}, {width}], not {gate!r}")
    need(0 < width <= columns, f"qkv has {columns} columns, queries need {width}")
    return [OutSpec("d_qkv", (qkv.shape[0], columns + width), qkv.dtype)]


def _key_heads(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    qkvz, ba = ins
    tokens, heads = qkvz.shape[0], int(attrs["n_v_heads"])
    width = _delta_columns(attrs)
    values, columns = heads * int(attrs["v_dim"]), _columns(qkvz, "qkvz")
    need(columns == width + values, f"qkvz has {columns} columns, heads need {width + values}")
    need(ba.shape == (tokens, 2 * heads), f"ba must have shape [{tokens}, {2 * heads}], not {list(ba.shape)}")
    return [
        OutSpec("qkv", (tokens, width), qkvz.dtype),
        OutSpec("qkv", (tokens, values), qkvz.dtype),
        OutSpec("qkv", ba.shape, ba.dtype),
    ]


def _key_heads_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    if grads == (None, None, None):
        return None, None
    return b.emit("join_key_heads", *_filled(b, op, grads), **op.attrs)


def _join_key_heads(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    qkv, z, ba = ins
    tokens, heads = qkv.shape[0], int(attrs["n_v_heads"])
    width, values = _delta_columns(attrs), heads * int(attrs["v_dim"])
    for name, value, columns in (("qkv", qkv, width), ("z", z, values), ("ba", ba, 2 * heads)):
        need(value.shape == (tokens, columns), f"{name} must be [{tokens}, {columns}], not {list(value.shape)}")
    return [OutSpec("d_qkvz", (tokens, width + values), qkv.dtype), OutSpec("d_ba", ba.shape, ba.dtype)]


def _filled(b: Emitter, op: Op, grads: Gradients) -> list[Value]:
    """Return the gradients of all outputs: zeros of those that the loss does not read."""
    return [
        b.apply("fill", label=f"d_{out.label}", shape=out.shape, dtype=out.dtype, value=0.0) if given is None else given
        for given, out in zip(grads, op.outs, strict=True)
    ]


def _gate(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, gate = ins
    _same(("x", x), ("gate", gate))
    return [OutSpec("attention", x.shape, x.dtype)]


def _gate_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return b.emit("sigmoid_gate_bwd", _given(grads, op, b), *op.ins)


def _gate_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dy, x, gate = ins
    _same(("x", x), ("gate", gate), ("dy", dy))
    return [OutSpec("d_attention", x.shape, x.dtype), OutSpec("d_gate", gate.shape, gate.dtype)]


def _every_row(op: Op) -> RowWise:
    return RowWise(ins=tuple(range(len(op.ins))), outs=tuple(range(len(op.outs))))


def _op(kind: str, infer: Callable[[Ins, Attrs], list[OutSpec]], **fields: Any) -> OpDef:
    return OpDef(kind=kind, infer=infer, reference=f"surogate_models_hybrid.reference:{kind}", **fields)


_SILU: Attrs = {"silu": (bool, True)}
_QUERIES: Attrs = {"n_heads": int, "head_dim": int}

OPS: tuple[OpDef, ...] = (
    _op("causal_conv", _conv, attrs=_SILU, vjp=_conv_vjp, flops=_conv_flops(1, 4)),
    _op(
        "causal_conv_bwd",
        _conv_bwd,
        attrs=_SILU,
        rewrites=Rewrites(narrowed=_without("causal_conv_dgrad", 1)),
        flops=_conv_flops(3, 8),
    ),
    _op("causal_conv_dgrad", _conv_dgrad, attrs=_SILU, flops=_conv_flops(2, 8)),
    _op(
        "gated_delta_rule",
        _delta,
        attrs=_HEADS,
        vjp=_delta_vjp,
        rewrites=Rewrites(rematerialize=_delta_again, narrowed=_delta_narrowed),
        flops=_delta_flops,
        traffic=_delta_traffic,
    ),
    _op("gated_delta_out", _delta_out, attrs=_HEADS, flops=_delta_flops, traffic=_delta_traffic),
    _op("gated_delta_states", _delta_states, attrs=_HEADS, flops=_delta_flops, traffic=_delta_traffic),
    _op("gated_delta_rule_bwd", _delta_bwd, attrs=_HEADS, flops=_delta_bwd_flops, traffic=_delta_bwd_traffic),
    _op(
        "gated_rmsnorm",
        _norm,
        attrs={"eps": float},
        vjp=_norm_vjp,
        may_overwrite=lambda op: {0: 0},
        flops=lambda op: 9 * op.ins[0].size,
        row_wise=lambda op: RowWise(ins=(0, 1), outs=(0, 1)),
    ),
    _op(
        "gated_rmsnorm_bwd",
        _norm_bwd,
        rewrites=Rewrites(narrowed=_without("gated_rmsnorm_dgrad", 2)),
        may_overwrite=lambda op: {0: 0, 1: 2},
        flops=lambda op: 20 * op.ins[0].size,
        row_wise=lambda op: RowWise(ins=(0, 1, 2, 4), outs=(0, 1), sums=(2,)),
    ),
    _op(
        "gated_rmsnorm_dgrad",
        _norm_dgrad,
        may_overwrite=lambda op: {0: 0, 1: 2},
        flops=lambda op: 18 * op.ins[0].size,
        row_wise=lambda op: RowWise(ins=(0, 1, 2, 4), outs=(0, 1)),
    ),
    _op("split_gate", _split, attrs=_QUERIES, vjp=_split_vjp, row_wise=_every_row),
    _op("join_gate", _join, attrs=_QUERIES, row_wise=_every_row),
    _op("split_key_heads", _key_heads, attrs=_HEADS, vjp=_key_heads_vjp, row_wise=_every_row),
    _op("join_key_heads", _join_key_heads, attrs=_HEADS, row_wise=_every_row),
    _op(
        "sigmoid_gate",
        _gate,
        vjp=_gate_vjp,
        may_overwrite=lambda op: {0: 0},
        flops=lambda op: 5 * op.ins[0].size,
        row_wise=_every_row,
    ),
    _op(
        "sigmoid_gate_bwd",
        _gate_bwd,
        may_overwrite=lambda op: {0: 0, 1: 2},
        flops=lambda op: 9 * op.ins[0].size,
        row_wise=_every_row,
    ),
)

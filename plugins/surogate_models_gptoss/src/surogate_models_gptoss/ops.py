"""The ops of attention sinks, on the packed rows of a micro-batch.

    add_sinks       (qkv [T, (H + 2 G) D], cu_seqlens, out [T, H D], lse fp32 [H, T], sinks [H]; of `attention`)
                                                        -> out' [T, H D], lse' fp32 [H, T]
    sinks_gradient  (dout' [T, H D], out' [T, H D], lse' [H, T], sinks [H]) -> fp32 [H]

A sink is one more score in the softmax of each token of a head, with a value of zero. `add_sinks` follows `attention`,
whose `out` and `lse` it takes, as an epilogue:

    out' = out sigmoid(lse - sink),    lse' = log(exp(lse) + exp(sink))

With these in place of its own, the backward pass of attention gives the gradient of qkv. So the rule of `add_sinks`
emits it, and gives `out` and `lse` no gradient: that of qkv is whole. The gradient of a sink is
-sum(exp(sink - lse') dout' . out') over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, Value, accumulator, need

Ins = Sequence[Value]
Attrs = Mapping[str, Any]


def _of_heads(out: Value, lse: Value, sinks: Value) -> None:
    """Raise ProgramError unless out, lse and sinks are of the same tokens and heads."""
    need(
        len(out.shape) == 2 and len(sinks.shape) == 1,
        f"out must be a matrix and sinks a vector, not {out!r}, {sinks!r}",
    )
    tokens, heads = out.shape[0], sinks.shape[0]
    need(out.shape[1] % heads == 0, f"out {out!r} has no {heads} heads of equal width, one for each of sinks")
    wanted = (heads, tokens), accumulator(out.dtype)
    need((lse.shape, lse.dtype) == wanted, f"lse must be {wanted[1]} {list(wanted[0])}, not {lse!r}")


def _add(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    qkv, _, out, lse, sinks = ins
    heads, width = attrs["n_heads"], attrs["head_dim"]
    _of_heads(out, lse, sinks)
    columns = (heads + 2 * attrs["n_kv_heads"]) * width
    need(qkv.shape == (out.shape[0], columns), f"qkv must be {[out.shape[0], columns]}, not {qkv!r}")
    need(out.shape[1] == heads * width and sinks.shape == (heads,), f"sinks must be {[heads]}, not {sinks!r}")
    return [OutSpec("attention", out.shape, out.dtype), OutSpec("lse", lse.shape, lse.dtype)]


def _gradient(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    dout, out, lse, sinks = ins
    _of_heads(out, lse, sinks)
    need((dout.shape, dout.dtype) == (out.shape, out.dtype), f"dout must be as out {out!r}, not {dout!r}")
    return [OutSpec("d_sinks", sinks.shape, accumulator(dout.dtype))]


def _vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (qkv, cu_seqlens, _, _, sinks), (out, lse), (dout, dlse) = op.ins, op.outs, grads
    need(dlse is None, f"the loss reads {lse.label} of {op.kind}, which has no backward rule")
    assert dout is not None
    dqkv = b.apply("attention_bwd", dout, qkv, out, lse, cu_seqlens, label="d_qkv", own=False, **op.attrs)
    return dqkv, None, None, None, b.apply("sinks_gradient", dout, out, lse, sinks)


_REFERENCES = "surogate_models_gptoss.reference"
_ATTENTION = {"n_heads": int, "n_kv_heads": int, "head_dim": int, "seq_len": int, "window": (int, 0)}

OPS = (
    OpDef(
        kind="add_sinks",
        infer=_add,
        reference=f"{_REFERENCES}:add_sinks",
        attrs=_ATTENTION,
        vjp=_vjp,
        flops=lambda op: op.outs[0].size + 8 * op.outs[1].size,
        traffic=lambda op: sum(value.nbytes for value in (*op.ins[2:], *op.outs)),
        may_overwrite=lambda op: {0: 2},
        param_kinds={4: "vector"},
        math=lambda op: "fp32",
    ),
    OpDef(
        kind="sinks_gradient",
        infer=_gradient,
        reference=f"{_REFERENCES}:sinks_gradient",
        flops=lambda op: 2 * op.ins[0].size + 3 * op.ins[2].size,
        math=lambda op: "fp32",
    ),
)

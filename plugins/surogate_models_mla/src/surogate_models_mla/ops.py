"""Ops of multi-head latent attention. H heads; a query or key has R elements with RoPE and N without, a value V.

    latent_split       (x [T, C + R]; rank C) -> [T, C], [T, R]
    latent_split_bwd   (d_latent, d_rotated) -> [T, C + R]
    latent_qkv         (q [T, H (N + R)], kv [T, H (N + V)], rotated [T, R]; n_heads, nope N, interleaved)
                       -> [T, 3 H (N + R)]
    latent_qkv_bwd     (dqkv; n_heads, nope, v_dim, rotary, interleaved) -> d_q, d_kv, d_rotated
    latent_values      (y [T, H D]; n_heads, v_dim V) -> [T, H V]
    latent_values_bwd  (dy [T, H V]; n_heads, head_dim D) -> [T, H D]

`latent_qkv` makes what `rope` and `attention` take. Checkpoints have the N elements of a head in front of its R, and
with `interleaved` the two of a pair side by side. Here the R come first, in the half layout, because `rope` rotates the
first elements of a head. All heads have the rotated key of the token. A value has zeros behind its V elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, RowWise, Value, need

Ins = Sequence[Value]
Attrs = Mapping[str, Any]


def _rows(*values: Value) -> int:
    first = values[0]
    for value in values:
        need(
            len(value.shape) == 2 and value.shape[0] == first.shape[0], f"{value!r} is no matrix with rows as {first!r}"
        )
        need(value.dtype == first.dtype, f"{value!r} and {first!r} differ in dtype")
    return first.shape[0]


def _given(b: Emitter, op: Op, grads: Gradients) -> list[Value]:
    return [
        b.apply("fill", shape=out.shape, dtype=out.dtype, value=0.0) if grad is None else grad
        for out, grad in zip(op.outs, grads, strict=True)
    ]


# --------------------------------------------------------------------------------------------------------------- split


def _split(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (x,) = ins
    tokens, rank = _rows(x), attrs["rank"]
    need(0 < rank < x.shape[1], f"rank must be from 1 to {x.shape[1] - 1}, got {rank}")
    return [OutSpec("qkv", (tokens, rank), x.dtype), OutSpec("qkv", (tokens, x.shape[1] - rank), x.dtype)]


def _split_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    return b.emit("latent_split_bwd", *_given(b, op, grads))


def _split_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    latent, rotated = ins
    return [OutSpec("d_qkv", (_rows(*ins), latent.shape[1] + rotated.shape[1]), latent.dtype)]


# ----------------------------------------------------------------------------------------------------------------- qkv


def sizes_of(op: Op) -> tuple[int, int, int, int, int]:
    """Return T, H, N, R and V of `latent_qkv` or of its backward op."""
    heads, nope = op.attrs["n_heads"], op.attrs["nope"]
    q, kv, rotated = op.ins if op.kind == "latent_qkv" else op.outs
    return q.shape[0], heads, nope, rotated.shape[1], kv.shape[1] // heads - nope


def _qkv(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    q, kv, rotated = ins
    tokens, heads, nope, rotary = _rows(*ins), attrs["n_heads"], attrs["nope"], rotated.shape[1]
    need(rotary % 2 == 0, f"RoPE rotates pairs, got {rotated!r}")
    need(q.shape[1] == heads * (nope + rotary), f"{q!r} must have {heads} heads of {nope} + {rotary} elements")
    v_dim, rest = divmod(kv.shape[1] - heads * nope, heads)
    need(
        not rest and 0 < v_dim <= nope + rotary,
        f"{kv!r} must have {heads} keys of {nope} elements, and values no wider",
    )
    return [OutSpec("rope", (tokens, 3 * q.shape[1]), q.dtype)]


def _qkv_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dqkv,) = grads
    assert dqkv is not None
    _, _, _, rotary, v_dim = sizes_of(op)
    return b.emit("latent_qkv_bwd", dqkv, rotary=rotary, v_dim=v_dim, **op.attrs)


def _qkv_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (dqkv,) = ins
    heads, nope, rotary, v_dim = (attrs[name] for name in ("n_heads", "nope", "rotary", "v_dim"))
    need(dqkv.shape[1] == 3 * heads * (nope + rotary), f"{dqkv!r} must have 3 x {heads} heads of {nope} + {rotary}")
    widths = {"d_q": heads * (nope + rotary), "d_kv": heads * (nope + v_dim), "d_rotated": rotary}
    return [OutSpec(label, (_rows(dqkv), width), dqkv.dtype) for label, width in widths.items()]


# -------------------------------------------------------------------------------------------------------------- values


def _values(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (y,) = ins
    heads, v_dim = attrs["n_heads"], attrs["v_dim"]
    need(y.shape[1] % heads == 0 and v_dim <= y.shape[1] // heads, f"{y!r} has no {heads} heads of {v_dim} or more")
    return [OutSpec("attention", (_rows(y), heads * v_dim), y.dtype)]


def _values_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    heads = op.attrs["n_heads"]
    return (b.apply("latent_values_bwd", dy, n_heads=heads, head_dim=op.ins[0].shape[1] // heads),)


def _values_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (dy,) = ins
    heads, head_dim = attrs["n_heads"], attrs["head_dim"]
    need(dy.shape[1] % heads == 0 and dy.shape[1] // heads <= head_dim, f"{dy!r} has no {heads} heads up to {head_dim}")
    return [OutSpec("d_attention", (_rows(dy), heads * head_dim), dy.dtype)]


def _every_row(op: Op) -> RowWise:
    return RowWise(ins=tuple(range(len(op.ins))), outs=tuple(range(len(op.outs))))


def _op(kind: str, infer: Any, **fields: Any) -> OpDef:
    return OpDef(
        kind=kind, infer=infer, reference=f"surogate_models_mla.reference:{kind}", row_wise=_every_row, **fields
    )


_HEADS: Attrs = {"n_heads": int, "nope": int, "interleaved": bool}
OPS: tuple[OpDef, ...] = (
    _op("latent_split", _split, attrs={"rank": int}, vjp=_split_vjp),
    _op("latent_split_bwd", _split_bwd),
    _op("latent_qkv", _qkv, attrs=_HEADS, vjp=_qkv_vjp),
    _op("latent_qkv_bwd", _qkv_bwd, attrs={**_HEADS, "rotary": int, "v_dim": int}),
    _op("latent_values", _values, attrs={"n_heads": int, "v_dim": int}, vjp=_values_vjp),
    _op("latent_values_bwd", _values_bwd, attrs={"n_heads": int, "head_dim": int}),
)

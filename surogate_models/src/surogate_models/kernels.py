"""Compiled kernels of the ops in `ops.py`."""

from __future__ import annotations

from collections.abc import Callable

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Launch, Op, Support, Target, Value

MAX_HEAD_DIM = 256
_TOKENS_PER_BLOCK = 4
_CHUNK_ELEMENTS = 2048
"""Elements of a token that a thread block processes, in whole heads."""
_MOST_BLOCKS = 512
"""Maximum number of thread blocks per chunk that compute partial sums of the norm gradients.

It fills any GPU. It is a constant, so that the order of the sums does not depend on the GPU.
"""


def _sizes(op: Op) -> tuple[int, ...]:
    """Return (tokens, n_heads, n_kv_heads, head_dim)."""
    return op.ins[-1].shape[0], *(int(op.attrs[key]) for key in ("n_heads", "n_kv_heads", "head_dim"))


def _attention_factor(op: Op) -> float:
    return float(op.attrs.get("attention_factor", 1.0))


def _rotary_dim(op: Op) -> int:
    """Return R, the number of elements of a head that are rotated."""
    return int(op.attrs.get("rotary_dim", 0) or op.attrs["head_dim"])


def _query_scaling(op: Op) -> tuple[float, int]:
    """Return (beta, length), or (0, 1): a factor of 1."""
    scaling = op.attrs.get("query_scaling")
    return (float(scaling.beta), int(scaling.length)) if scaling else (0.0, 1)


def _norm(op: Op) -> tuple[float, float]:
    """Return (eps, offset)."""
    return float(op.attrs["eps"]), float(op.attrs.get("offset", 0.0))


def _frequencies(op: Op, ctx: BindContext) -> int:
    """Return the device address of the inverse frequencies, fp32 [R/2]. The reference computes them."""
    import torch

    from .reference import inverse_frequencies

    rotary_dim = _rotary_dim(op)
    padded = torch.zeros(-(-rotary_dim // 4) * 2)  # padded to whole int64 words
    padded[: rotary_dim // 2] = inverse_frequencies(rotary_dim, op.attrs["theta"], op.attrs.get("scaling"))
    return ctx.table(padded.view(torch.int64).tolist())


def _bind_rope(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return _bind_rotation(_C.rope, op, ctx)


def _bind_rope_bwd(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return _bind_rotation(_C.rope_bwd, op, ctx)


def _bind_rotation(launch: Callable[..., None], op: Op, ctx: BindContext) -> Call:
    (out,) = op.outs
    sizes = (*_sizes(op), _rotary_dim(op))
    factors = (_attention_factor(op), *_query_scaling(op))
    return ctx.call(launch, *op.ins, _frequencies(op, ctx), out, *sizes, *factors, DTYPES[out.dtype].code)


def _bind_qk_norm_rope(op: Op, ctx: BindContext) -> Call:
    """Bind `qk_norm_rope` or `qk_norm_rope_dgrad`. Both launchers take the pointers in the order of ins and outs."""
    from . import _C

    return ctx.call(
        getattr(_C, op.kind),
        *op.ins,
        _frequencies(op, ctx),
        op.outs[0],
        *_sizes(op),
        _rotary_dim(op),
        *_norm(op),
        _attention_factor(op),
        DTYPES[op.outs[0].dtype].code,
    )


def _bind_qk_norm_rope_bwd(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(
        _C.qk_norm_rope_bwd,
        *op.ins,
        _frequencies(op, ctx),
        *op.outs,
        ctx.workspace,
        _partial_blocks(op),
        *_sizes(op),
        _rotary_dim(op),
        *_norm(op),
        _attention_factor(op),
        1 in op.accumulate,
        2 in op.accumulate,
        *(DTYPES[out.dtype].code for out in op.outs),
    )


def _partial_blocks(op: Op) -> int:
    """Return the number of thread blocks per chunk of heads in the backward kernel."""
    return min(_MOST_BLOCKS, -(-op.ins[-1].shape[0] // _TOKENS_PER_BLOCK))


def _workspace(op: Op, target: Target) -> int:
    """Bytes of the fp32 partial sums of d_q_norm and d_k_norm, one per thread block of each chunk (rope_heads.cuh)."""
    _, n_heads, n_kv_heads, head_dim = _sizes(op)
    chunk = max(1, _CHUNK_ELEMENTS // head_dim)
    chunks = -(-n_heads // chunk) + -(-n_kv_heads // chunk)
    return 4 * chunks * _partial_blocks(op) * head_dim


def _bind_columns(op: Op, ctx: BindContext) -> tuple[Launch, ...]:
    """Bind `join_qkv` or `split_qkv`: a copy for each of q, k and v."""
    from . import _C

    def row_bytes(value: Value) -> int:
        return value.nbytes // value.shape[0]

    joins = op.kind == "join_qkv"
    launches, at = [], 0
    for part in op.ins if joins else op.outs:
        x, y = (part, op.outs[0]) if joins else (op.ins[0], part)
        width = row_bytes(part)
        places = (0, at) if joins else (at, 0)
        call = ctx.call(_C.move_columns, x, y, part.shape[0], width, row_bytes(x), row_bytes(y), *places)
        launches.append(Launch(call))
        at += width
    return tuple(launches)


def _supports_columns(op: Op, target: Target) -> Support:
    if op.accumulate:
        return Support(False, f"cannot accumulate into {op.outs[0]!r}")
    return Support(True)


def _supports(op: Op, target: Target) -> Support:
    if op.attrs["head_dim"] > MAX_HEAD_DIM:
        return Support(False, f"head_dim must be at most {MAX_HEAD_DIM}, got {op.attrs['head_dim']}")
    return Support(True)


def _supports_rope(op: Op, target: Target) -> Support:
    if op.accumulate:
        return Support(False, f"cannot accumulate into {op.outs[0]!r}")
    return _supports(op, target)


def _supports_bwd(op: Op, target: Target) -> Support:
    for i, out in enumerate(op.outs[1:], start=1):
        if out.dtype not in ("fp32", "bf16"):
            return Support(False, f"norm gradients must be fp32 or bf16, got {out!r}")
        if out.dtype == "bf16" and i in op.accumulate:
            return Support(False, f"accumulates only into fp32 gradients, got {out!r}")
    if 0 in op.accumulate:
        return Support(False, "cannot accumulate into d_qkv")
    return _supports(op, target)


_ROTATION = ("scaling", "attention_factor")
_NORM = (*_ROTATION, "rotary_dim", "offset")
_ALONE = (*_ROTATION, "rotary_dim", "query_scaling")
"""Attributes of RoPE without a norm."""

_ROPE = tuple(
    kernel
    for dtype in ("bf16", "fp32")
    for kernel in (
        *(
            KernelDef(op=op, dtypes=(dtype, "int32", dtype), attrs=_ALONE, supports=_supports_rope, bind=bind)
            for op, bind in (("rope", _bind_rope), ("rope_bwd", _bind_rope_bwd))
        ),
        KernelDef(
            op="qk_norm_rope",
            dtypes=(dtype, dtype, dtype, "int32", dtype),
            attrs=_NORM,
            supports=_supports,
            bind=_bind_qk_norm_rope,
        ),
        KernelDef(
            op="qk_norm_rope_dgrad",
            dtypes=(dtype, dtype, dtype, dtype, "int32", dtype),
            attrs=_NORM,
            supports=_supports_rope,
            bind=_bind_qk_norm_rope,
        ),
        KernelDef(
            op="qk_norm_rope_bwd",
            dtypes=(dtype, dtype, dtype, dtype, "int32", dtype, "*", "*"),
            attrs=_NORM,
            supports=_supports_bwd,
            bind=_bind_qk_norm_rope_bwd,
            workspace=_workspace,
        ),
    )
)
KERNELS: tuple[KernelDef, ...] = (
    *_ROPE,
    KernelDef(op="join_qkv", dtypes=("*",) * 4, supports=_supports_columns, bind=_bind_columns),
    KernelDef(op="split_qkv", dtypes=("*",) * 4, supports=_supports_columns, bind=_bind_columns),
)

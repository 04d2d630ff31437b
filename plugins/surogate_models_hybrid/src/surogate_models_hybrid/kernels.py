"""Compiled kernels of the ops in `ops.py`, in bf16 (`csrc/`). Sums over tokens are in a fixed order.

Workspaces are counted here, because a plan needs them without the compiled module: see `Division` in
`csrc/delta_tile.cuh`, `causal_conv_bwd_workspace` and `gated_rmsnorm_bwd_workspace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target, Value

from .ops import CHUNK, WIDTHS

WORD = 8
"""bf16 elements in 16 bytes, which a thread moves at once."""
DELTA_DIM = 128
"""Size of the heads of the gated delta rule."""
NORM_DIMS = (64, 128, 256)

_CONV_RUN, _NORM_BLOCKS = 128, 1024
"""Tokens, and blocks, of which a thread block of a backward pass sums the gradient of weights."""
SHARED_MEMORY = 0
"""Bytes of shared memory that a block of the backward pass of the delta rule takes; 0: as many as the device has.

It computes slices of the values: 64 of them with 227 KiB, 32 with 163 or 99.
"""


def _supports(op: Op, *widths: int, adds_to: tuple[int, ...] = ()) -> Support:
    """Support `widths` that are whole words, and fp32 outputs that are added to at the indices `adds_to`."""
    if others := [i for i in sorted(op.accumulate) if i not in adds_to or op.outs[i].dtype != "fp32"]:
        return Support(False, f"cannot accumulate into {op.outs[others[0]]!r}")
    odd = next((width for width in widths if width % WORD), None)
    return Support(True) if odd is None else Support(False, f"widths must be multiples of {WORD}, got {odd}")


def _code(dw: Sequence[Value]) -> int:
    """Return the code of the dtype of the gradient of a weight. Without one it has no effect."""
    return DTYPES[dw[0].dtype if dw else "fp32"].code


# ---------------------------------------------------------------------------------------------------------- convolution


def _conv_sizes(op: Op) -> tuple[int, int, int, bool]:
    """Return tokens, columns, taps and whether SiLU follows."""
    x, w, _ = op.ins[-3:]
    return *x.shape, w.shape[2], bool(op.attrs.get("silu", True))  # type: ignore[return-value]


def _conv_supports(op: Op, target: Target) -> Support:
    _, columns, taps, _ = _conv_sizes(op)
    if taps not in WIDTHS:
        return Support(False, f"{WIDTHS[0]} to {WIDTHS[-1]} taps, got {taps}")
    return _supports(op, columns, adds_to=(1,) if op.kind == "causal_conv_bwd" else ())


def _bind_conv(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(_C.causal_conv, *op.ins, *op.outs, *_conv_sizes(op))


def _bind_conv_bwd(op: Op, ctx: BindContext) -> Call:
    from . import _C

    dx, *dw = op.outs
    outs = (dx, dw[0] if dw else 0, ctx.workspace)
    return ctx.call(_C.causal_conv_bwd, *op.ins, *outs, *_conv_sizes(op), 1 in op.accumulate, _code(dw))


def _conv_workspace(op: Op, target: Target) -> int:
    """fp32 shares of dw."""
    tokens, columns, taps, _ = _conv_sizes(op)
    return -(-tokens // _CONV_RUN) * columns * taps * 4


# ----------------------------------------------------------------------------------------------------- gated delta rule


def _delta_sizes(op: Op) -> tuple[int, int, int]:
    """Return tokens, key heads and value heads."""
    return op.outs[0].shape[0] if op.kind == "gated_delta_rule_bwd" else op.ins[0].shape[0], *(
        int(op.attrs[name]) for name in ("n_k_heads", "n_v_heads")
    )  # type: ignore[return-value]


def _delta_supports(op: Op, target: Target) -> Support:
    tokens, _, _ = _delta_sizes(op)
    if tokens % CHUNK:
        return Support(False, f"the tokens of a micro-step must be a multiple of {CHUNK}, got {tokens}")
    if sizes := [op.attrs[name] for name in ("k_dim", "v_dim") if op.attrs[name] != DELTA_DIM]:
        return Support(False, f"heads must have {DELTA_DIM} elements, got {sizes[0]}")
    if op.kind == "gated_delta_rule_bwd":
        return _supports(op, adds_to=(2, 3))
    return _supports(op)


def _bind_delta(op: Op, ctx: BindContext) -> Call:
    """Bind `gated_delta_rule`, or one of the ops that compute one of its outputs."""
    from . import _C

    out = 0 if op.kind == "gated_delta_states" else op.outs[0]
    states = 0 if op.kind == "gated_delta_out" else op.outs[-1]
    return ctx.call(_C.gated_delta_rule, *op.ins, out, states, ctx.workspace, *_delta_sizes(op))


def _bind_delta_bwd(op: Op, ctx: BindContext) -> Call:
    from . import _C

    sums = (2 in op.accumulate, 3 in op.accumulate, *(DTYPES[out.dtype].code for out in op.outs[2:]))
    return ctx.call(_C.gated_delta_rule_bwd, *op.ins, *op.outs, ctx.workspace, *_delta_sizes(op), *sums, SHARED_MEMORY)


def _rounded(*sizes: int) -> int:
    """Return the bytes of arrays that begin at multiples of 256 bytes."""
    return sum(-(-size // 256) * 256 for size in sizes)


def _delta_workspace(op: Op, target: Target) -> int:
    """Normed queries and keys, two matrices of each chunk, four numbers of each token and head, the list of pieces."""
    tokens, key_heads, heads = _delta_sizes(op)
    keys, matrices, numbers = 2 * tokens * key_heads * DELTA_DIM, 2 * tokens * heads * CHUNK, 4 * tokens * heads
    return _rounded(keys, keys, matrices, matrices, *(numbers,) * 4, 4 * (tokens // CHUNK + 1))


def _delta_bwd_workspace(op: Op, target: Target) -> int:
    """Also dR, the gradient of the state behind each chunk, and the shares of chunks in da_log and ddt_bias."""
    tokens, _, heads = _delta_sizes(op)
    rest, states = 2 * tokens * heads * DELTA_DIM, 2 * tokens // CHUNK * heads * DELTA_DIM**2
    return _delta_workspace(op, target) + _rounded(rest, states, 8 * tokens // CHUNK * heads)


# ---------------------------------------------------------------------------------------------------------------- gates


def _norm_sizes(op: Op) -> tuple[int, int, int]:
    """Return tokens, heads and elements of a head."""
    x, w = (op.ins[0], op.ins[2]) if op.kind == "gated_rmsnorm" else (op.ins[1], op.ins[3])
    return x.shape[0], x.shape[1] // w.shape[0], w.shape[0]


def _norm_supports(op: Op, target: Target) -> Support:
    dim = _norm_sizes(op)[2]
    if dim not in NORM_DIMS:
        return Support(False, f"heads must have {', '.join(map(str, NORM_DIMS))} elements, got {dim}")
    return _supports(op, adds_to=(2,) if op.kind == "gated_rmsnorm_bwd" else ())


def _bind_norm(op: Op, ctx: BindContext) -> Call:
    from . import _C

    return ctx.call(_C.gated_rmsnorm, *op.ins, *op.outs, *_norm_sizes(op), float(op.attrs["eps"]))


def _bind_norm_bwd(op: Op, ctx: BindContext) -> Call:
    from . import _C

    dx, d_gate, *dw = op.outs
    outs = (dx, d_gate, dw[0] if dw else 0, ctx.workspace)
    return ctx.call(_C.gated_rmsnorm_bwd, *op.ins, *outs, *_norm_sizes(op), 2 in op.accumulate, _code(dw))


def _norm_workspace(op: Op, target: Target) -> int:
    """fp32 shares of dw."""
    return _NORM_BLOCKS * _norm_sizes(op)[2] * 4


def _split_sizes(op: Op) -> tuple[int, int, int, int]:
    """Return tokens, heads with a gate, elements of a head, and the other columns."""
    whole = op.ins[0] if op.kind == "split_gate" else op.outs[0]
    heads, dim = int(op.attrs["n_heads"]), int(op.attrs["head_dim"])
    return whole.shape[0], heads, dim, whole.shape[1] - 2 * heads * dim


def _split_supports(op: Op, target: Target) -> Support:
    return _supports(op, *_split_sizes(op)[2:])


def _bind_split(op: Op, ctx: BindContext) -> Call:
    """Bind `split_gate` or `join_gate`. Both launchers take the pointers in the order of ins and outs."""
    from . import _C

    return ctx.call(getattr(_C, op.kind), *op.ins, *op.outs, *_split_sizes(op))


def _key_heads_supports(op: Op, target: Target) -> Support:
    return _supports(op, op.attrs["k_dim"], op.attrs["v_dim"])


def _bind_key_heads(op: Op, ctx: BindContext) -> Call:
    """Bind `split_key_heads` or `join_key_heads`. Both launchers take the pointers in the order of ins and outs."""
    from . import _C

    sizes = (op.attrs[name] for name in ("n_k_heads", "n_v_heads", "k_dim", "v_dim"))
    return ctx.call(getattr(_C, op.kind), *op.ins, *op.outs, op.ins[0].shape[0], *sizes)


def _gate_supports(op: Op, target: Target) -> Support:
    return _supports(op, op.ins[0].size)


def _bind_gate(op: Op, ctx: BindContext) -> Call:
    """Bind `sigmoid_gate` or its gradient. Both launchers take the pointers in the order of ins and outs."""
    from . import _C

    return ctx.call(getattr(_C, op.kind), *op.ins, *op.outs, op.ins[0].size)


# ---------------------------------------------------------------------------------------------------------------- table

_CONV = ("bf16", "bf16", "int32")
_DELTA = ("bf16", "bf16", "fp32", "fp32", "int32")
_GRADIENTS = ("fp32", "bf16")
"""Dtypes of gradients of params: `param_grad_dtype`."""

_SHARES = {"gated_delta_rule": 0.36, "gated_delta_out": 0.38, "gated_delta_states": 0.27, "gated_delta_rule_bwd": 0.34}
"""Of the rate of mma.sync.

On an H200, 2026-11-30, 8,192 tokens as four documents, 16 key and 32 value heads of 128: 267, 250, 215 and 773 us. As
one document, whose chunks are a chain: 462, 434, 334 and 967.
"""

KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="causal_conv",
        dtypes=(*_CONV, "bf16"),
        attrs=("silu",),
        memory_efficiency=0.62,  # on an H200, 2026-11-30, 8,192 tokens of 8,192 columns: 90 us
        supports=_conv_supports,
        bind=_bind_conv,
    ),
    *(
        KernelDef(
            op="causal_conv_bwd",
            dtypes=("bf16", *_CONV, "bf16", gradient),
            attrs=("silu",),
            memory_efficiency=0.51,  # 163 us
            supports=_conv_supports,
            bind=_bind_conv_bwd,
            workspace=_conv_workspace,
        )
        for gradient in _GRADIENTS
    ),
    KernelDef(
        op="causal_conv_dgrad",
        dtypes=("bf16", *_CONV, "bf16"),
        attrs=("silu",),
        memory_efficiency=0.71,  # 118 us
        supports=_conv_supports,
        bind=_bind_conv_bwd,
    ),
    *(
        KernelDef(
            op=kind,
            dtypes=(*_DELTA, *outs),
            arithmetic=("mma.sync", _SHARES[kind]),
            supports=_delta_supports,
            bind=_bind_delta,
            workspace=_delta_workspace,
        )
        for kind, outs in (
            ("gated_delta_rule", ("bf16", "bf16")),
            ("gated_delta_out", ("bf16",)),
            ("gated_delta_states", ("bf16",)),
        )
    ),
    *(
        KernelDef(
            op="gated_delta_rule_bwd",
            dtypes=("bf16", *_DELTA, "bf16", "bf16", "bf16", *gradients),
            arithmetic=("mma.sync", _SHARES["gated_delta_rule_bwd"]),
            supports=_delta_supports,
            bind=_bind_delta_bwd,
            workspace=_delta_bwd_workspace,
        )
        for gradients in product(_GRADIENTS, repeat=2)  # of a_log and dt_bias, of which an adapter may train one
    ),
    KernelDef(
        op="gated_rmsnorm", dtypes=("bf16", "bf16", "bf16", "bf16", "fp32"), supports=_norm_supports, bind=_bind_norm
    ),
    *(
        KernelDef(
            op="gated_rmsnorm_bwd",
            dtypes=("bf16", "bf16", "bf16", "bf16", "fp32", "bf16", "bf16", gradient),
            supports=_norm_supports,
            bind=_bind_norm_bwd,
            workspace=_norm_workspace,
        )
        for gradient in _GRADIENTS
    ),
    KernelDef(
        op="gated_rmsnorm_dgrad",
        dtypes=("bf16", "bf16", "bf16", "bf16", "fp32", "bf16", "bf16"),
        supports=_norm_supports,
        bind=_bind_norm_bwd,
    ),
    KernelDef(op="split_gate", dtypes=("bf16",) * 3, supports=_split_supports, bind=_bind_split),
    KernelDef(op="join_gate", dtypes=("bf16",) * 3, supports=_split_supports, bind=_bind_split),
    *(
        KernelDef(op=kind, dtypes=("bf16",) * 5, supports=_key_heads_supports, bind=_bind_key_heads)
        for kind in ("split_key_heads", "join_key_heads")
    ),
    KernelDef(op="sigmoid_gate", dtypes=("bf16",) * 3, supports=_gate_supports, bind=_bind_gate),
    KernelDef(op="sigmoid_gate_bwd", dtypes=("bf16",) * 5, supports=_gate_supports, bind=_bind_gate),
)

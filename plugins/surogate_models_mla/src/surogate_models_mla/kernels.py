"""The compiled ops of latent attention, in bf16: `KernelDef`s for csrc/."""

from __future__ import annotations

from surogate_core.api import BindContext, Call, KernelDef, Op, Support, Target

from .ops import sizes_of

_WIDTH = 8
"""Elements that a thread moves."""


def _multiples(op: Op) -> dict[str, tuple[int, int]]:
    """Return {what: (its size, what it must be a multiple of)}."""
    if op.kind in ("latent_qkv", "latent_qkv_bwd"):
        _, _, nope, rotary, v_dim = sizes_of(op)
        sizes = {"without RoPE": (nope, _WIDTH), "with RoPE": (rotary, 2 * _WIDTH), "of a value": (v_dim, _WIDTH)}
        return {f"elements {what}": size for what, size in sizes.items()}
    if op.kind in ("latent_split", "latent_split_bwd"):
        parts = op.outs if op.kind == "latent_split" else op.ins
        return {f"columns of {part!r}": (part.shape[1], _WIDTH) for part in parts}
    heads = op.attrs["n_heads"]
    return {f"elements of a head of {x!r}": (x.shape[1] // heads, _WIDTH) for x in (*op.ins, *op.outs)}


def _supports(op: Op, target: Target) -> Support:
    if op.accumulate:
        return Support(False, "cannot accumulate into its outputs")
    for what, (size, multiple) in _multiples(op).items():
        if size % multiple:
            return Support(False, f"{what} must be a multiple of {multiple}, got {size}")
    return Support(True)


def _bind_split(op: Op, ctx: BindContext) -> Call:
    """Both launchers take the pointers in the order of ins and outs."""
    from . import _C

    latent, rotated = op.outs if op.kind == "latent_split" else op.ins
    return ctx.call(getattr(_C, op.kind), *op.ins, *op.outs, *latent.shape, rotated.shape[1])


def _bind_qkv(op: Op, ctx: BindContext) -> Call:
    """Both launchers take the pointers in the order of ins and outs."""
    from . import _C

    return ctx.call(getattr(_C, op.kind), *op.ins, *op.outs, *sizes_of(op), op.attrs["interleaved"])


def _bind_values(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (y,), (out,), heads = op.ins, op.outs, op.attrs["n_heads"]
    return ctx.call(_C.latent_values, y, out, y.shape[0], heads, y.shape[1] // heads, out.shape[1] // heads)


KERNELS: tuple[KernelDef, ...] = tuple(
    KernelDef(op=kind, dtypes=("bf16",) * values, supports=_supports, bind=bind)
    for kind, values, bind in (
        ("latent_split", 3, _bind_split),
        ("latent_split_bwd", 3, _bind_split),
        ("latent_qkv", 4, _bind_qkv),
        ("latent_qkv_bwd", 4, _bind_qkv),
        ("latent_values", 2, _bind_values),
        ("latent_values_bwd", 2, _bind_values),
    )
)

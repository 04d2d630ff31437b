"""Routes of tokens to experts, the order of rows, figures.

In `csrc/`: `routes.cu`, `sigmoid_routes.cu`, `expert_order.cu`, `router_load.cu`.
"""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target

from ..ops.routes import SIGMOID
from .support import supports

MOST_EXPERTS, MOST_CHOSEN = 512, 16
"""A lane of a warp has up to sixteen experts, and the lanes of half a warp an expert of the token each."""

MOST_GROUPS = 32
"""A lane of a warp judges a group of experts."""

_EXPERTS = {"route_bwd": 2, "expert_order": 0, "router_load": 1}
"""The input that has the experts of each token."""

MOST_BLOCKS = 256
"""Blocks of `expert_order`, each with counts of its own."""

MOST_COUNTING = 128
"""Blocks of `router_load`, the same."""


def _supports(op: Op, target: Target) -> Support:
    experts = op.attrs["n_experts"] if op.kind == "expert_order" else op.ins[op.kind == "route_bwd"].shape[1]
    if experts > MOST_EXPERTS:
        return Support(False, f"at most {MOST_EXPERTS} experts, got {experts}")
    k = (op.outs[1] if op.kind == "route" else op.ins[_EXPERTS[op.kind]]).shape[1]
    if k > MOST_CHOSEN:
        return Support(False, f"at most {MOST_CHOSEN} experts a token, got {k}")
    return supports(op, target, accumulate=op.kind == "router_load")


def _sigmoid_supports(op: Op, target: Target) -> Support:
    if op.attrs.get("scoring") != SIGMOID:
        return Support(False, f"only scoring={SIGMOID!r}")
    if (groups := op.attrs.get("groups", 1)) > MOST_GROUPS:
        return Support(False, f"at most {MOST_GROUPS} groups of experts, got {groups}")
    return _supports(op, target)


def _bind_route(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (logits,) = op.ins
    sizes = (*logits.shape, op.attrs["k"])
    return ctx.call(_C.route, logits, *op.outs, *sizes, op.attrs["normalize"], DTYPES[logits.dtype].code)


def _bind_route_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    _, logits, experts = op.ins
    sizes = (*logits.shape, experts.shape[1])
    return ctx.call(_C.route_bwd, *op.ins, *op.outs, *sizes, op.attrs["normalize"], DTYPES[logits.dtype].code)


def _weighing(op: Op) -> tuple[bool, float, float]:
    """Return the attributes that decide the weights of chosen experts."""
    return op.attrs["normalize"], float(op.attrs.get("epsilon", 0.0)), float(op.attrs.get("scale", 1.0))


def _bind_sigmoid_route(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    logits, *bias = op.ins
    groups = (op.attrs.get("groups", 1), op.attrs.get("chosen_groups", 1))
    sizes = (*logits.shape, op.attrs["k"], *groups, *_weighing(op), DTYPES[logits.dtype].code)
    return ctx.call(_C.sigmoid_route, logits, bias[0] if bias else 0, *op.outs, *sizes)


def _bind_sigmoid_route_bwd(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    _, logits, experts = op.ins
    sizes = (*logits.shape, experts.shape[1], *_weighing(op), DTYPES[logits.dtype].code)
    return ctx.call(_C.sigmoid_route_bwd, *op.ins, *op.outs, *sizes)


def _bind_order(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    (experts,) = op.ins
    return ctx.call(_C.expert_order, experts, *op.outs, ctx.workspace, experts.size, op.attrs["n_experts"])


def _bind_load(op: Op, ctx: BindContext) -> Call:
    from .. import _C

    logits, experts, targets, *before = op.ins
    sizes = (*logits.shape, experts.shape[1], op.attrs["layer"], op.attrs["layers"])
    pointers = (logits, experts, targets, before[0] if before else 0, *op.outs, ctx.workspace)
    return ctx.call(_C.router_load, *pointers, *sizes, bool(op.accumulate), DTYPES[logits.dtype].code)


def _load_workspace(op: Op, target: Target) -> int:
    """fp32 counts of each expert and a sum in each block."""
    return 4 * MOST_COUNTING * op.outs[0].shape[1]


def _order_workspace(op: Op, target: Target) -> int:
    """int32 counts of each expert in each block."""
    return 4 * MOST_BLOCKS * op.attrs["n_experts"]


KERNELS: tuple[KernelDef, ...] = (
    *(
        KernelDef(op="route", dtypes=(dtype, "fp32", "int32"), supports=_supports, bind=_bind_route)
        for dtype in ("fp32", "bf16")
    ),
    *(
        KernelDef(op="route_bwd", dtypes=("fp32", dtype, "int32", dtype), supports=_supports, bind=_bind_route_bwd)
        for dtype in ("fp32", "bf16")
    ),
    *(
        KernelDef(
            op="route",
            dtypes=(dtype, *bias, "fp32", "int32"),
            attrs=("scoring", "scale", "epsilon", "groups", "chosen_groups"),
            takes=("bias",),
            supports=_sigmoid_supports,
            bind=_bind_sigmoid_route,
        )
        for dtype in ("fp32", "bf16")
        for bias in ((), ("fp32",))
    ),
    *(
        KernelDef(
            op="route_bwd",
            dtypes=("fp32", dtype, "int32", dtype),
            attrs=("scoring", "scale", "epsilon"),
            supports=_sigmoid_supports,
            bind=_bind_sigmoid_route_bwd,
        )
        for dtype in ("fp32", "bf16")
    ),
    KernelDef(
        op="expert_order", dtypes=("int32",) * 4, supports=_supports, bind=_bind_order, workspace=_order_workspace
    ),
    *(
        KernelDef(
            op="router_load",
            dtypes=(dtype, "int32", "int32", *before, "fp32"),
            supports=_supports,
            bind=_bind_load,
            workspace=_load_workspace,
        )
        for dtype in ("fp32", "bf16")
        for before in ((), ("fp32",))
    ),
)

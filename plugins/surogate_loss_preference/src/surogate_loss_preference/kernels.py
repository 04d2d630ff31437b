"""Compiled kernels of the ops of documents, of pairs and of KTO, in fp32; scores also of bf16."""

from __future__ import annotations

from surogate_core.api import DTYPES, BindContext, Call, KernelDef, Op, Support, Target

_OPTIONAL = ("smoothing", "gamma", "center", "nll")

FORMS = ("sigmoid", "hinge", "ipo", "simpo", "orpo")
"""Forms of `pair_loss` by their numbers in pair_loss.cu."""


def _bind_sums(op: Op, ctx: BindContext) -> Call:
    from . import _C

    values, targets, groups = op.ins
    return ctx.call(_C.document_sums, values, targets, groups, *op.outs, values.size, groups.size // 2)


def _bind_sums_bwd(op: Op, ctx: BindContext) -> Call:
    from . import _C

    (d_sums, targets, groups), (d_values,) = op.ins, op.outs
    return ctx.call(_C.document_sums_bwd, d_sums, groups, d_values, targets.size, groups.size // 2)


def _bind_scores(op: Op, ctx: BindContext) -> Call:
    """Bind `document_scores` or a gradient of it. All launchers take the pointers in the order of ins and outs."""
    from . import _C

    gives, x = op.kind == "document_scores_dgrad", op.ins[1 if op.kind == "document_scores_wgrad" else 0]
    tokens, width = op.outs[0].shape if gives else x.shape
    dtypes = (op.ins[1], op.outs[0]) if gives else (x, op.outs[0] if x is op.ins[1] else op.ins[1])
    codes = [DTYPES[value.dtype].code for value in dtypes]
    sizes = (tokens, width, op.ins[3].size // 2, op.attrs["padding"])
    adds = [0 in op.accumulate] if op.kind == "document_scores_wgrad" else []
    return ctx.call(getattr(_C, op.kind), *op.ins, *op.outs, *sizes, *codes, *adds)


def _bind_pairs(op: Op, ctx: BindContext) -> Call:
    """Bind `pair_loss` or `pair_loss_bwd`."""
    from . import _C

    backward = op.kind == "pair_loss_bwd"
    needed = 4 if backward else 3
    attrs, others = op.attrs, op.ins[needed:]
    margin = others[-1] if attrs.get("margined", False) else 0
    reference = others[0] if len(others) > bool(margin) else 0
    options = FORMS.index(attrs["form"]), attrs["beta"], *(attrs.get(name, 0.0) for name in _OPTIONAL)
    given = (*op.ins[:needed], reference, margin, *op.outs, op.ins[needed - 2].shape[0], *options)
    if backward:
        return ctx.call(_C.pair_loss_bwd, *given)
    return ctx.call(_C.pair_loss, *given, sum(1 << i for i in op.accumulate))


def _bind_answers(op: Op, ctx: BindContext) -> Call:
    """Bind `kto_loss` or `kto_loss_bwd`. Both launchers take the pointers in the order of ins and outs."""
    from . import _C

    sums = op.ins[1 if op.kind == "kto_loss_bwd" else 0]
    weights = (op.attrs[name] for name in ("beta", "desirable_weight", "undesirable_weight"))
    given = (*op.ins, *op.outs, sums.shape[0], *weights)
    if op.kind == "kto_loss_bwd":
        return ctx.call(_C.kto_loss_bwd, *given)
    return ctx.call(_C.kto_loss, *given, sum(1 << i for i in op.accumulate))


def _supports(op: Op, target: Target) -> Support:
    adds = op.kind in ("pair_loss", "kto_loss") or (op.kind == "document_scores_wgrad" and op.outs[0].dtype == "fp32")
    if op.accumulate and not adds:
        return Support(False, f"cannot accumulate into {op.outs[0]!r}")
    if op.attrs.get("form", FORMS[0]) not in FORMS:
        return Support(False, f"computes the forms {', '.join(FORMS)}, not {op.attrs['form']}")
    return Support(True)


KERNELS: tuple[KernelDef, ...] = (
    KernelDef(
        op="document_sums",
        dtypes=("fp32", "int32", "int32", "fp32", "fp32"),
        supports=_supports,
        bind=_bind_sums,
    ),
    KernelDef(
        op="document_sums_bwd",
        dtypes=("fp32", "int32", "int32", "fp32"),
        supports=_supports,
        bind=_bind_sums_bwd,
    ),
    *(
        KernelDef(
            op=kind, dtypes=("fp32",) * values, attrs=(*_OPTIONAL, "margined"), supports=_supports, bind=_bind_pairs
        )
        for kind, least in (("pair_loss", 9), ("pair_loss_bwd", 5))
        for values in (least, least + 1, least + 2)  # with a reference, with margins
    ),
    *(
        KernelDef(op=f"document_scores{which}", dtypes=dtypes, supports=_supports, bind=_bind_scores)
        for a in ("fp32", "bf16")
        for b in ("fp32", "bf16")
        for which, dtypes in (
            ("", (a, b, "int32", "int32", "fp32", "fp32")),
            ("_dgrad", ("fp32", a, "int32", "int32", b)),
            ("_wgrad", ("fp32", a, "int32", "int32", b)),
        )
    ),
    KernelDef(op="kto_loss", dtypes=("fp32",) * 12, supports=_supports, bind=_bind_answers),
    KernelDef(op="kto_loss_bwd", dtypes=("fp32",) * 8, supports=_supports, bind=_bind_answers),
)

"""Ops of pairs: log-probabilities or scores of documents, and the losses of their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import (
    DTYPES,
    IN_OUTPUTS,
    Emitter,
    Gradients,
    Op,
    OpDef,
    OutSpec,
    ProgramError,
    Value,
    accumulator,
)

Ins = Sequence[Value]
Attrs = Mapping[str, Any]

_REFERENCE = "surogate_loss_preference.reference"


def _document_sums(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    values, targets, groups = ins[:3]
    if values.shape != targets.shape or len(values.shape) != 1 or targets.dtype != "int32":
        raise ProgramError(f"values and targets must be [T], not {values!r} and {targets!r}")
    if len(groups.shape) != 3 or groups.shape[2] != 2 or groups.dtype != "int32":
        raise ProgramError(f"groups must be int32 [G, n, 2], not {groups!r}")
    return [OutSpec(label, groups.shape[:2], values.dtype) for label in ("document_sums", "document_labels")]


def _document_sums_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """The number of labels does not depend on the values."""
    d_sums, _ = grads
    _, targets, groups = op.ins
    return (None if d_sums is None else b.apply("document_sums_bwd", d_sums, targets, groups)), None, None


def _document_sums_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    d_sums, targets, groups = ins
    if d_sums.shape != groups.shape[:2]:
        raise ProgramError(f"d_sums must be {list(groups.shape[:2])}, not {d_sums!r}")
    return [OutSpec("d_log_probs", targets.shape, d_sums.dtype)]


def _document_scores(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, weight, tokens, groups = ins
    if len(x.shape) != 2 or weight.shape != (1, x.shape[1]) or tokens.shape != x.shape[:1]:
        raise ProgramError(f"x must be [T, C], weight [1, C], tokens [T], not {x!r}, {weight!r} and {tokens!r}")
    if len(groups.shape) != 3 or groups.shape[2] != 2 or {tokens.dtype, groups.dtype} != {"int32"}:
        raise ProgramError(f"tokens and groups must be int32, groups [G, n, 2], not {tokens!r} and {groups!r}")
    return [OutSpec(label, groups.shape[:2], accumulator(x.dtype)) for label in ("document_scores", "documents_used")]


def _document_scores_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    d_scores, _ = grads
    if d_scores is None:
        return None, None, None, None
    x, weight, tokens, groups = op.ins
    dx = b.apply("document_scores_dgrad", d_scores, weight, tokens, groups, dtype=x.dtype, **op.attrs)
    dw = b.apply("document_scores_wgrad", d_scores, x, tokens, groups, **op.attrs)
    return dx, dw, None, None


def _document_scores_dgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    d_scores, weight, tokens, groups = ins
    _check_scores(d_scores, groups)
    return [OutSpec("d_norm", (tokens.size, weight.size), attrs.get("dtype") or weight.dtype)]


def _document_scores_wgrad(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    d_scores, x, _, groups = ins
    _check_scores(d_scores, groups)
    return [OutSpec("d_weight", (1, x.shape[1]), accumulator(x.dtype))]


def _check_scores(d_scores: Value, groups: Value) -> None:
    if d_scores.shape != groups.shape[:2]:
        raise ProgramError(f"d_scores must be {list(groups.shape[:2])}, not {d_scores!r}")


def _pair_loss(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    sums, counts, _, *others = ins
    for value in (counts, *others):
        if value.shape != sums.shape or len(sums.shape) != 2 or sums.shape[1] != 2:
            raise ProgramError(f"sums, labels, reference and margins must be [G, 2], not {sums!r} and {value!r}")
    if not attrs.get("margined", False) <= len(others) <= 1 + attrs.get("margined", False):
        raise ProgramError(f"margined: {attrs.get('margined', False)} does not fit {len(others)} further inputs")
    scalars = [OutSpec(label, (), sums.dtype) for label in ("loss", "chosen", "rejected", "margin", "accuracy")]
    return [*scalars, OutSpec("pair_figures", (5,), sums.dtype)]


def _pair_loss_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """The gradient of the loss. The other outputs are for reports."""
    d_loss, *others = grads
    if d_loss is None or any(other is not None for other in others):
        raise ProgramError("rewards, margins and accuracies are for reports; only the loss has a gradient")
    d_sums = b.apply("pair_loss_bwd", d_loss, *op.ins, **op.attrs)
    return (d_sums, *(None for _ in op.ins[1:]))


def _pair_loss_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec("d_sums", ins[1].shape, ins[1].dtype)]


_LOSS: Mapping[str, Any] = {
    "form": str,
    "beta": float,
    **dict.fromkeys(("smoothing", "gamma", "center", "nll"), (float, 0.0)),
    "margined": (bool, False),
}


def _rows(op: Op) -> int:
    """Elements of the rows of x that the op reads: one of each document."""
    groups = op.ins[-1]
    return groups.size // 2 * (op.outs[0].shape[1] if op.kind == "document_scores_dgrad" else op.ins[1].shape[1])


def _scores_traffic(op: Op) -> int:
    """Bytes of these rows and of all other values. A document's end is read, not all of its tokens."""
    x = op.ins[{"document_scores": 0, "document_scores_wgrad": 1}[op.kind]]
    others = [*(value for value in op.ins if value is not x and value is not op.ins[-2]), *op.outs]
    return DTYPES[x.dtype].nbytes(_rows(op)) + sum(DTYPES[value.dtype].nbytes(value.size) for value in others)


_SCORES: Mapping[str, Any] = {"attrs": {"padding": int}, "flops": lambda op: 2 * _rows(op)}

OPS: tuple[OpDef, ...] = (
    OpDef(
        kind="document_scores",
        infer=_document_scores,
        reference=f"{_REFERENCE}:document_scores",
        vjp=_document_scores_vjp,
        param_kinds={1: "head"},
        traffic=_scores_traffic,
        **_SCORES,
    ),
    OpDef(
        kind="document_scores_dgrad",
        infer=_document_scores_dgrad,
        reference=f"{_REFERENCE}:document_scores_dgrad",
        **{**_SCORES, "attrs": {"padding": int, "dtype": (str | None, IN_OUTPUTS)}},
    ),
    OpDef(
        kind="document_scores_wgrad",
        infer=_document_scores_wgrad,
        reference=f"{_REFERENCE}:document_scores_wgrad",
        traffic=_scores_traffic,
        **_SCORES,
    ),
    OpDef(
        kind="document_sums",
        infer=_document_sums,
        reference=f"{_REFERENCE}:document_sums",
        vjp=_document_sums_vjp,
    ),
    OpDef(kind="document_sums_bwd", infer=_document_sums_bwd, reference=f"{_REFERENCE}:document_sums_bwd"),
    OpDef(
        kind="pair_loss",
        infer=_pair_loss,
        reference=f"{_REFERENCE}:pair_loss",
        attrs=_LOSS,
        vjp=_pair_loss_vjp,
    ),
    OpDef(kind="pair_loss_bwd", infer=_pair_loss_bwd, reference=f"{_REFERENCE}:pair_loss_bwd", attrs=_LOSS),
)

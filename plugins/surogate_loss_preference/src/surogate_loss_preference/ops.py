"""Ops of pairs: log-probabilities of documents, and the losses of their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, ProgramError, Value

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


def _pair_loss(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    sums, counts, _, *reference = ins
    for value in (counts, *reference):
        if value.shape != sums.shape or len(sums.shape) != 2 or sums.shape[1] != 2:
            raise ProgramError(f"sums, labels and reference must be [G, 2], not {sums!r} and {value!r}")
    return [OutSpec(label, (), sums.dtype) for label in ("loss", "chosen", "rejected", "margin", "accuracy")]


def _pair_loss_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """The gradient of the loss. The other outputs are for reports."""
    d_loss, *others = grads
    if d_loss is None or any(other is not None for other in others):
        raise ProgramError("rewards, margins and accuracies are for reports; only the loss has a gradient")
    d_sums = b.apply("pair_loss_bwd", d_loss, *op.ins, **op.attrs)
    return (d_sums, *(None for _ in op.ins[1:]))


def _pair_loss_bwd(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec("d_sums", ins[1].shape, ins[1].dtype)]


_LOSS: Mapping[str, Any] = {"form": str, "beta": float, "smoothing": (float, 0.0), "gamma": (float, 0.0)}

OPS: tuple[OpDef, ...] = (
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

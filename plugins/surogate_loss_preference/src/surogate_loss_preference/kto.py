"""The loss `kto`: answers that are alone, each with a label, and the dataset type of such answers.

An answer is compared with its own reference and with how far the policy has moved in general: the mean over mismatched
answers of the difference of log-probabilities of policy and reference. That mean is over the whole optimizer step, on
all ranks. Its answers are those of each packed row, moved on by one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import (
    Column,
    ConfigError,
    DatasetFormatDef,
    Document,
    Emitter,
    Encoded,
    Gradients,
    Loss,
    LossContext,
    LossDef,
    Metric,
    Op,
    OpDef,
    OutSpec,
    Prepass,
    ProgramError,
    Value,
)

from .answers import MENDED, VERSION, AnswerOptions, encode_answers, named
from .losses import HEADLINES, document_sums, loss_of_groups

DESIRABLE = Column("desirable", "document")
"""1 for an answer to imitate, 0 for one to avoid."""

_FIGURES = ("log_ratio", "kl", "signed_reward", "rewards/accuracies")
_BY_LABEL = {"rewards": 1, "logps": 2}
"""Columns of the output `by_label` of `kto_loss`, whose first one counts answers."""


class KtoOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kto_beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference.")
    kto_desirable_weight: float = Field(1.0, ge=0, description="Weight of the losses of desirable answers.")
    kto_undesirable_weight: float = Field(1.0, ge=0, description="Weight of the losses of the others.")


def mismatched(documents: Sequence[Document]) -> Sequence[Document]:
    """Return the prompt of each document with the answer of the one before. A document that is alone has no other."""
    import numpy as np  # a plan needs neither data nor numpy

    if len(documents) < 2:
        return ()
    parts = []
    for tokens, targets in documents:
        prompt = int(np.argmax(targets >= 0)) + 1  # the label of its last token is the first of the answer
        parts.append((tokens[:prompt], targets[: prompt - 1], tokens[prompt:], targets[prompt - 1 :]))
    moved = [parts[-1], *parts[:-1]]
    return [
        (np.concatenate([prompt, answer]), np.concatenate([before, labels]))
        for (prompt, before, _, _), (_, _, answer, labels) in zip(parts, moved, strict=True)
    ]


def _build(context: LossContext) -> Loss:
    o: KtoOptions = context.options
    batch, reference = context.batch, context.reference
    assert reference is not None and batch.group_scale is not None, "the loss asks for both"
    sums, labels = document_sums(context, context.head)
    others = document_sums(context, reference)[0]
    values = context.builder.emit(
        "kto_loss",
        sums,
        labels,
        batch.group_scale,
        others,
        batch.columns[DESIRABLE.name],
        batch.means["log_ratio"],
        beta=o.kto_beta,
        desirable_weight=o.kto_desirable_weight,
        undesirable_weight=o.kto_undesirable_weight,
    )
    loss = loss_of_groups(values, _FIGURES)
    ratios: dict[str, Callable[[Any], float | None]] = {
        **{
            f"{name}/{of}": partial(_of_label, row=row, column=column)
            for name, column in _BY_LABEL.items()
            for row, of in enumerate(("chosen", "rejected"))
        },
        "rewards/margins": _margin,
    }
    return replace(
        loss,
        metrics=[
            *loss.metrics,
            *(Metric(name, values[-1], "group", of=of, headline=name in HEADLINES) for name, of in ratios.items()),
        ],
    )


def _of_label(sums: Any, row: int, column: int) -> float | None:
    """Return a mean over the answers of one label; None if the step has none."""
    return float(sums[row][column] / sums[row][0]) if sums[row][0] > 0 else None


def _margin(sums: Any) -> float | None:
    """Return how much larger the mean reward of desirable answers is than that of the others."""
    chosen, rejected = (_of_label(sums, row, _BY_LABEL["rewards"]) for row in (0, 1))
    return None if chosen is None or rejected is None else chosen - rejected


KTO = LossDef(
    name="kto",
    summary="answers that are alone, each desirable or not, against the model without its adapter",
    options=KtoOptions,
    build=_build,
    columns=lambda options: [DESIRABLE],
    group_size=1,
    reference=lambda options: True,
    prepass=Prepass(means=("log_ratio",), documents=mismatched),
)


def _kto_loss(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    sums, counts, _, reference, desirable, _ = ins
    for value in (counts, reference, desirable):
        if value.shape != sums.shape or len(sums.shape) != 2 or sums.shape[1] != 1:
            raise ProgramError(f"sums, labels, reference and desirable must be [G, 1], not {sums!r} and {value!r}")
    return [*(OutSpec(label, (), sums.dtype) for label in ("loss", *_FIGURES)), OutSpec("by_label", (2, 3), sums.dtype)]


def _kto_loss_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """Only the loss has a gradient, and only of `sums`: the others are for reports, and nothing else is trained."""
    d_loss, *others = grads
    if d_loss is None or any(other is not None for other in others):
        raise ProgramError("figures of kto_loss are for reports; only the loss has a gradient")
    return (b.apply("kto_loss_bwd", d_loss, *op.ins, **op.attrs), *(None for _ in op.ins[1:]))


_ATTRS: Mapping[str, Any] = {"beta": float, "desirable_weight": float, "undesirable_weight": float}

KTO_OPS = (
    OpDef(
        kind="kto_loss",
        infer=_kto_loss,
        reference="surogate_loss_preference.reference:kto_loss",
        vjp=_kto_loss_vjp,
        attrs=_ATTRS,
    ),
    OpDef(
        kind="kto_loss_bwd",
        infer=lambda ins, attrs: [OutSpec("d_sums", ins[1].shape, ins[1].dtype)],
        reference="surogate_loss_preference.reference:kto_loss_bwd",
        attrs=_ATTRS,
    ),
)


# ------------------------------------------------------------------------------------------------------- dataset type


class LabelledOptions(AnswerOptions):
    prompt_field: str | None = Field(
        "prompt", description="Column with the prompt: text or messages. null: the answer begins with its messages."
    )
    completion_field: str = Field("completion", description="Column with the answer: text, a message or messages.")
    label_field: str = Field("label", description="Column that says whether the answer is desirable: true or false.")


def _encode(row: Mapping[str, Any], tokenizer: Any, options: LabelledOptions) -> Sequence[Encoded]:
    label = row[options.label_field]
    if label not in (True, False, "true", "false", "True", "False"):
        raise ConfigError(f"column {options.label_field!r} must be true or false (got {label!r:.60})")
    desirable = float(label in (True, "true", "True"))
    (document,) = encode_answers(row, tokenizer, options, (options.completion_field,))
    if document.left_out:
        return [document]
    columns = {DESIRABLE.name: desirable}
    return [Encoded(document.tokens, document.trained, omissions=document.omissions, columns=columns)]


LABELLED = DatasetFormatDef(
    name="labelled",
    summary="a prompt with one answer, and whether it is desirable, for loss: kto",
    options=LabelledOptions,
    matches=lambda columns: False,  # fine-tuning on such columns is as likely
    fields=lambda options: named(options, "prompt", "input", "completion", "label", "system", "tools"),
    optional=lambda options: named(options, "input", "system", "tools"),
    encode=_encode,
    truncation="delete",
    columns=(DESIRABLE,),
    version=VERSION,
    mended=MENDED,
)

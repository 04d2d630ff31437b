"""The losses `dpo`, `orpo` and `simpo`. Everything is a mean over the pairs of the step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Column, Head, Loss, LossContext, LossDef, Metric, Value

REFERENCE = Column("reference_log_prob", "document")
"""The column with the log-probability of each document in a cached reference."""

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
LOG_PROBS = ("logps/chosen", "logps/rejected")
ODDS = ("nll_loss", "log_odds_ratio", "log_odds_chosen")
"""Metrics of pairs, by their names in TRL, in the order of the outputs of `pair_loss`."""

HEADLINES = ("rewards/margins", "rewards/accuracies", "margin", "accuracy")


class DpoOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    dpo_beta: float = Field(0.1, gt=0, description="How strongly the policy is held to the reference.")
    dpo_loss: Literal["sigmoid", "hinge", "ipo"] = Field(
        "sigmoid", description="sigmoid: DPO; hinge: SLiC; ipo: squared, of mean log-probabilities."
    )
    dpo_label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="sigmoid: probability that a pair is labelled the wrong way round (cDPO)."
    )
    rpo_alpha: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Weight of the mean cross-entropy of the chosen answer, which is added (RPO, Pang et al. 2024); "
        "null: without it.",
    )


class OrpoOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    orpo_beta: float = Field(0.1, gt=0, description="Weight of the odds ratio beside the cross-entropy of the chosen.")


class SimpoOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    simpo_beta: float = Field(2.0, gt=0, description="Factor of the mean log-probabilities.")
    simpo_gamma: float = Field(1.0, ge=0, description="Target of the margin between the two rewards.")


def _pairs(context: LossContext, further: Sequence[str] = (), **attrs: Any) -> Loss:
    """Return the loss of a form, with the metrics of all forms and, of those after them, the first of `further`."""
    cached = context.batch.columns.get(REFERENCE.name)
    reference = [] if cached is None else [cached]
    reference += [] if context.reference is None else document_sums(context, context.reference)[:1]
    sums, labels = document_sums(context, context.head)
    scale = context.batch.group_scale
    assert scale is not None, "groups have a scale"
    values = context.builder.emit("pair_loss", sums, labels, scale, *reference, **attrs)
    return loss_of_groups(values, REWARDS, (*LOG_PROBS, *further), cached_reference=sums)


def loss_of_groups(
    values: Sequence[Value], names: Sequence[str], together: Sequence[str] = (), cached_reference: Value | None = None
) -> Loss:
    """Return the loss of an op that sums over groups of documents, and what it reports.

    values  of the op: the loss, a figure for each of `names`, and one that holds those of `together` and perhaps more
    """
    loss, *figures, more = values
    reported = [
        Metric(name, value, "group", headline=name in HEADLINES) for name, value in zip(names, figures, strict=True)
    ]
    reported += [Metric(name, more, "group", of=partial(_element, at=at)) for at, name in enumerate(together)]
    return Loss([Metric("loss", loss, "group")], metrics=reported, cached_reference=cached_reference)


def _element(values: Any, at: int) -> float:
    return float(values[at])


def document_sums(context: LossContext, head: Head) -> tuple[Value, ...]:
    """Return [G, n] of the documents of each group: sums of the log-probabilities of labels, and numbers of labels."""
    b, batch = context.builder, context.batch
    assert batch.groups is not None, "the losses ask for groups"
    log_probs = b.apply("lm_head_tokens", head.x, head.weight, batch.targets, chunks=batch.lmhead_chunks, **head.attrs)
    return b.emit("document_sums", log_probs, batch.targets, batch.groups)


def _dpo(context: LossContext) -> Loss:
    o: DpoOptions = context.options
    attrs: dict[str, Any] = {"form": o.dpo_loss, "beta": o.dpo_beta, "smoothing": o.dpo_label_smoothing}
    return _pairs(context, **attrs) if o.rpo_alpha is None else _pairs(context, ODDS[:1], **attrs, nll=o.rpo_alpha)


def _orpo(context: LossContext) -> Loss:
    return _pairs(context, ODDS, form="orpo", beta=context.options.orpo_beta)


def _simpo(context: LossContext) -> Loss:
    return _pairs(context, form="simpo", beta=context.options.simpo_beta, gamma=context.options.simpo_gamma)


LOSSES: tuple[LossDef, ...] = (
    LossDef(
        name="dpo",
        summary="direct preference optimization, with the model without its adapter as the reference",
        options=DpoOptions,
        build=_dpo,
        group_size=2,
        reference=lambda options: True,
        cached_reference=REFERENCE,
    ),
    LossDef(
        name="orpo",
        summary="cross-entropy of chosen answers and odds ratio of pairs, without a reference",
        options=OrpoOptions,
        build=_orpo,
        group_size=2,
    ),
    LossDef(
        name="simpo",
        summary="difference of mean log-probabilities of pairs, without a reference",
        options=SimpoOptions,
        build=_simpo,
        group_size=2,
    ),
)
